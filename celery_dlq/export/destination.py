"""The folder of an export: on this machine, or on any file system that Arrow supports.

Readers see a whole file or none:

- File systems with a rename: a file is written to ``_celery_dlq/drafts``, which readers ignore,
  synced, and renamed.
- Object stores (S3, Google Cloud Storage) have no rename, but an object is visible only after its
  upload. A file is written to a local temporary file, then uploaded in one write.

Either way, writing the same name again replaces the file atomically.
"""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from uuid import uuid4

from celery_dlq.errors import ExportError
from celery_dlq.export.arrow import pa, pafs
from celery_dlq.export.wholefile import sync

NOTES = "_celery_dlq"
"""Folder of checkpoints and drafts: readers ignore names that begin with an underscore."""

_TEMPORARY = f"{NOTES}/drafts"
_LETTERS = re.compile(r"dlq=[^/]+/day=[^/]+/letters-[^/]+\.parquet")
_LOCAL = pafs.LocalFileSystem()
_DRAFT_SECONDS = 24 * 3600
_UPLOADS = frozenset(
    {"s3", "gcs", "fsspec+s3", "fsspec+s3a", "fsspec+gs", "fsspec+gcs", "fsspec+memory"}
)


class Destination:
    """A folder that letters are exported to."""

    def __init__(self, place: str | Path, filesystem: Any | None = None) -> None:
        self.name = shown(place)
        self._fs, self._root = _resolved(place, filesystem)
        is_local = isinstance(self._fs, pafs.LocalFileSystem)
        self._local = Path(self._root) if is_local else None
        self._uploads = _filesystem_kind(self._fs) in _UPLOADS

    @property
    def shared(self) -> str | None:
        """The folder's name on every machine that reaches it; ``None`` for a local folder."""
        return None if self._local is not None else self._root

    @property
    def root(self) -> str:
        """The folder's path on its file system."""
        return self._root

    def open(self) -> None:
        """Make the folder, and remove the drafts of a killed export."""
        self._fs.create_dir(self._path_of(_TEMPORARY), recursive=True)
        # On a shared file system, a young one may be written by another machine at this moment.
        before = float("inf") if self._local is not None else time.time() - _DRAFT_SECONDS
        for info in self._fs.get_file_info(self._selector(_TEMPORARY)):
            if info.is_file and (info.mtime_ns or 0) < before * 1e9:
                self._fs.delete_file(info.path)

    def foreign(self) -> list[str]:
        """Names in the folder that no export made and that readers may fail on."""
        names = (info.base_name for info in self._fs.get_file_info(self._selector("")))
        return sorted(n for n in names if not n.startswith((".", "_", "dlq=")))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder on this machine: two exports could write a letter twice.

        `celery_dlq.export.checkpoint` keeps other machines out.
        """
        self._check_ours()
        with self._lock_file().open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ExportError(
                    f"another export is writing to {self.name}; wait for its end, or choose "
                    f"another folder"
                ) from None
            yield

    def draft(self) -> Draft:
        """A new file, which readers do not see before `put_in_place`."""
        if self._uploads:
            handle, path = tempfile.mkstemp(prefix="celery_dlq-export-", suffix=".tmp")
            os.close(handle)
            return Draft(_LOCAL, path)
        return Draft(self._fs, self._path_of(f"{_TEMPORARY}/{uuid4().hex}.tmp"))

    def put_in_place(self, draft: Draft, name: str) -> int:
        """Put a finished draft in its place, durably; return its size in bytes."""
        target = self._path_of(name)
        if self._uploads:
            size = self.upload(Path(draft.path), target)
        else:
            size = int(self._fs.get_file_info(draft.path).size)
            self._fs.create_dir(os.path.dirname(target), recursive=True)  # noqa: PTH120 - it may not be a local path
            self.rename(draft.path, target)
        draft.discard()
        return size

    def save(self, name: str, text: bytes) -> None:
        """Write a small file, durably; readers see the old one or the new one."""
        draft = self.draft()
        try:
            with draft.opened() as sink:
                sink.write(text)
            self.put_in_place(draft, name)
        finally:
            draft.discard()

    def load(self, name: str) -> bytes | None:
        """Read a small file; ``None`` if there is none."""
        try:
            with self._fs.open_input_stream(self._path_of(name)) as source:
                return bytes(source.read())
        except FileNotFoundError:
            return None

    def source(self, name: str) -> Any:
        """Open a file for random access."""
        return self._fs.open_input_file(self._path_of(name))

    def files(self, folder: str) -> list[str]:
        """All files below a folder, relative to the destination."""
        below = self._selector(folder, recursive=True)
        cut = len(self._root.rstrip("/")) + 1 if self._root else 0
        return sorted(info.path[cut:] for info in self._fs.get_file_info(below) if info.is_file)

    def folders(self, beginning: str) -> list[str]:
        """The names of the folders at the top that begin with a text."""
        found = self._fs.get_file_info(self._selector(""))
        return sorted(one.base_name for one in found if one.base_name.startswith(beginning))

    def copy_letters(self, folder: Path, has: Callable[[str], bool] | None = None) -> int:
        """Copy the files of letters, and nothing else, to a local folder; return their number.

        ``has`` is true for the folders ``dlq=…`` and ``day=…`` to copy, without which all are.
        """
        try:
            days = [""] if has is None else self._day_folders(has)
            found = (name for day in days for name in self.files(day))
            names = [name for name in found if _LETTERS.fullmatch(name)]
            for name in names:
                target = folder / name
                target.parent.mkdir(parents=True, exist_ok=True)
                pafs.copy_files(
                    self._path_of(name), str(target), self._fs, destination_filesystem=_LOCAL
                )
        except (OSError, pa.ArrowException) as exc:
            reason = str(exc).strip().partition("\n")[0]
            raise ExportError(
                f"expected {self.name} to be a folder that can be read, got: {reason}"
            ) from None
        return len(names)

    def _day_folders(self, has: Callable[[str], bool]) -> list[str]:
        """The folders of queues and days that are wanted; of the others nothing is listed."""
        folders = [""]
        for level in ("dlq=", "day="):
            folders = [
                f"{folder}/{info.base_name}".lstrip("/")
                for folder in folders
                for info in self._fs.get_file_info(self._selector(folder))
                if info.base_name.startswith(level) and has(info.base_name)
            ]
        return folders

    def _check_ours(self) -> None:
        found = self._fs.get_file_info(self._root)
        if found.type == pafs.FileType.File:
            raise NotADirectoryError(20, "it is a file", self.name)
        names = sorted(info.base_name for info in self._fs.get_file_info(self._selector("")))
        if names and NOTES not in names:
            raise ExportError(
                f"expected {self.name} to be empty or made by an export, got a folder with "
                f"{', '.join(names[:3])}{' and more' if len(names) > 3 else ''} "  # noqa: PLR2004 - names shown
                f"and no {NOTES}; export to a new folder"
            )

    def rename(self, path: str, target: str) -> None:
        """Publish a file of the same file system, in one step."""
        if self._local is not None:
            sync(path)
            os.replace(path, target)  # noqa: PTH105 - tests patch this call
            sync(os.path.dirname(target))  # noqa: PTH120 - the same
            return
        try:
            self._fs.move(path, target)
        except OSError:  # HDFS does not replace the file of a killed export
            if not self._fs.get_file_info(target).is_file:
                raise
            self._fs.delete_file(target)
            self._fs.move(path, target)

    def upload(self, path: Path, target: str) -> int:
        """Publish a local file, in one write; return its size."""
        # One write of the whole file: closing the stream after a part would publish that part.
        size = path.stat().st_size
        with pa.memory_map(str(path)) as source:
            content = source.read_buffer()
            with self._fs.open_output_stream(target) as sink:
                sink.write(content)
        there = self._fs.get_file_info(target).size
        if there != size:
            self._fs.delete_file(target)
            raise ExportError(
                f"an upload of {size:,} bytes to {self.name} arrived with {there}; run the export "
                f"again"
            )
        return size

    def _lock_file(self) -> Path:
        if self._local is not None:
            notes = self._local / NOTES
            notes.mkdir(parents=True, exist_ok=True)
            return notes / "lock"
        digest = sha256(f"{_filesystem_kind(self._fs)} {self._root}".encode()).hexdigest()[:16]
        return Path(tempfile.gettempdir()) / f"celery_dlq-export-{os.getuid()}-{digest}.lock"

    def _selector(self, folder: str, *, recursive: bool = False) -> Any:
        return pafs.FileSelector(self._path_of(folder), allow_not_found=True, recursive=recursive)

    def _path_of(self, name: str) -> str:
        return "/".join(part for part in (self._root.rstrip("/"), name) if part) or "/"


class Draft:
    """A file that is being written."""

    def __init__(self, filesystem: Any, path: str) -> None:
        self._fs = filesystem
        self.path = path

    def opened(self) -> Any:
        """Open it for writing."""
        return self._fs.open_output_stream(self.path)

    def discard(self) -> None:
        """Remove it if it is still there; never raises `OSError`."""
        with suppress(OSError):
            self._fs.delete_file(self.path)


def shown(place: str | Path) -> str:
    """The destination without the credentials of a URL, fit for printing."""
    text = str(place)
    if "://" not in text:
        return text
    return re.sub(r"(?<=://)[^/?]*@", "", text).partition("?")[0]


def _resolved(place: str | Path, filesystem: Any | None) -> tuple[Any, str]:
    if filesystem is not None:
        handler = filesystem if isinstance(filesystem, pafs.FileSystem) else _adapted(filesystem)
        return handler, str(place).rstrip("/")
    if not str(place):  # an unset shell variable must not mean the working directory
        raise ExportError("expected a folder or a URL to export to, got an empty name")
    if isinstance(place, Path) or not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", place):
        return pafs.LocalFileSystem(), os.path.abspath(place)  # noqa: PTH100 - does not resolve links
    try:
        return _from_url(place)
    except (pa.ArrowException, OSError, ValueError, ImportError) as exc:
        lines = str(exc).replace(place, shown(place)).splitlines() or [type(exc).__name__]
        raise ExportError(
            f"expected {shown(place)} to be a URL that pyarrow or fsspec supports, got: {lines[0]}"
        ) from None  # the cause could show the credentials


def _from_url(url: str) -> tuple[Any, str]:
    try:
        filesystem, path = pafs.FileSystem.from_uri(url)
    except pa.ArrowInvalid:
        from fsspec.core import url_to_fs  # type: ignore[import-untyped, unused-ignore] # noqa: PLC0415 - only these URLs need it

        filesystem, path = url_to_fs(url)
        filesystem = _adapted(filesystem)
    return filesystem, path.rstrip("/")


def _adapted(filesystem: Any) -> Any:
    return pafs.PyFileSystem(pafs.FSSpecHandler(filesystem))


def _filesystem_kind(filesystem: Any) -> str:
    if isinstance(filesystem, pafs.SubTreeFileSystem):
        return _filesystem_kind(filesystem.base_fs)
    handler = getattr(filesystem, "handler", None)
    if isinstance(handler, pafs.FSSpecHandler):
        protocol = handler.fs.protocol
        return f"fsspec+{protocol if isinstance(protocol, str) else protocol[0]}"
    return str(filesystem.type_name)
