"""The spool: letters on disk, while the store is down or has no room.

One file per letter, written atomically. All workers of a host that use the same store share a
folder; storing is idempotent, so two workers may store the same file.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import tempfile
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from celery_dlq.errors import CorruptLetter, StoreUnavailable
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, to_micros
from celery_dlq.store.worker_records import MessageKey

logger = get_logger("celery_dlq.worker")

MAX_FILES = 100_000
FREE_SHARE = 0.05
"""Share of the disk that the spool leaves free: a full disk would hurt more than one worker."""

_ADDS_PER_COUNT = 1_000  # counting reads the whole folder
_FLUSH_SECONDS = 0.25  # a quarter of the time between two ticks: the tasks wait
LOOK_SECONDS = 30.0

Save = Callable[[DeadLetter, MessageKey], object]


class Spool:
    """The spool of one store on this host."""

    def __init__(self, parent: str | None, store: str) -> None:
        place = Path(parent or Path(tempfile.gettempdir()) / f"celery-dlq-{os.getuid()}")
        self.folder = place / hashlib.sha256(store.encode()).hexdigest()[:12]
        self._looked_at = -LOOK_SECONDS
        self._may_hold = True
        self._adds_left = 0
        self._found: deque[str] = deque()
        self._failed: set[str] = set()  # by an error of ours; tried again after a while
        self._failed_at = 0.0

    def write_letter(self, letter: DeadLetter, key: MessageKey) -> None:
        """Write a letter durably."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._check_bounds()
        fields = {n: base64.b64encode(v).decode("ascii") for n, v in letter.to_fields().items()}
        text = json.dumps({"key": asdict(key), "fields": fields})
        # The time first: files are stored in the order of their names.
        name = f"{to_micros(letter.dead_lettered_at):020d}-{letter.id}.json"
        handle, temporary = tempfile.mkstemp(dir=self.folder, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            Path(temporary).replace(self.folder / name)
        except OSError:
            with suppress(OSError):
                Path(temporary).unlink()
            raise
        _sync_folder(self.folder)
        self._may_hold = True

    def unusable(self) -> str | None:
        """The folder, and why no letter could wait there; ``None`` if one could."""
        made = self.folder.absolute()
        while not os.path.lexists(made):
            made = made.parent
        try:
            tempfile.TemporaryFile(dir=made).close()
        except OSError as exc:
            return f"{self.folder}: {exc.strerror}"
        return None

    def store_waiting(self, save: Save) -> int:
        """Store waiting letters, oldest first, and remove their files; never raises."""
        now = time.monotonic()
        if not self._may_hold and now - self._looked_at < LOOK_SECONDS:
            return 0
        self._looked_at, stored = now, 0
        try:
            if now - self._failed_at >= LOOK_SECONDS:
                self._failed.clear()
            if not self._found:
                self._found.extend(sorted(set(self._file_names()) - self._failed))
            self._may_hold = bool(self._found or self._failed)
            while self._found and time.monotonic() - now < _FLUSH_SECONDS:
                stored += self._flush_one(self.folder / self._found[0], save)
                self._found.popleft()
        except (StoreUnavailable, OSError) as exc:
            logger.debug("The spool %s is not emptied yet: %s", self.folder, exc)
        return stored

    def __len__(self) -> int:
        """The number of letters that wait."""
        return len(self._file_names())

    def _file_names(self) -> list[str]:
        return [path.name for path in self.folder.glob("*.json")]

    def _check_bounds(self) -> None:
        if self._adds_left <= 0:
            self._adds_left = min(_ADDS_PER_COUNT, MAX_FILES - len(self))
        if self._adds_left <= 0:
            raise OSError(f"{MAX_FILES} letters wait in {self.folder}")
        self._adds_left -= 1
        disk = os.statvfs(self.folder)
        if disk.f_bavail < FREE_SHARE * disk.f_blocks:
            raise OSError(errno.ENOSPC, f"the disk is {1 - FREE_SHARE:.0%} full", str(self.folder))

    def _flush_one(self, path: Path, save: Save) -> int:
        try:
            content = json.loads(path.read_text("utf-8"))
            fields = {n: base64.b64decode(v) for n, v in content["fields"].items()}
            letter, key = DeadLetter.from_fields(fields), MessageKey(**content["key"])
        except FileNotFoundError:
            return 0  # another worker was first
        except (ValueError, KeyError, TypeError, CorruptLetter, PermissionError) as exc:
            # Kept for an operator to look at; the letters behind it must not wait.
            logger.error("%s is no letter for us, renamed to .broken: %r", path, exc)  # noqa: TRY400
            path.replace(path.with_suffix(".broken"))
            return 0
        try:
            save(letter, key)
        except (StoreUnavailable, OSError):
            raise
        except Exception:
            # An error of ours: it may recur, and the letters behind it must not wait.
            if not self._failed:
                logger.critical("%s cannot be stored yet", path, exc_info=True)
            self._failed.add(path.name)
            self._failed_at = time.monotonic()
            return 0
        with suppress(FileNotFoundError):
            path.unlink()
        return 1


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as far as its file system can."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
