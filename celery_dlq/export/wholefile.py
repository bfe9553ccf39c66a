"""Local files that readers see whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

from celery_dlq.errors import ExportError


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Write a file so that readers see all of it or none, also after a power cut.

    The temporary name is hidden and ends in ``.tmp``: Spark reads ``x.parquet.tmp``, and
    DuckDB's ``*.parquet`` would match a name that only begins oddly.

    Args:
        path: The file; its folder is made if it is not there.

    Returns:
        Where to write meanwhile.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        _sync(temporary)
        temporary.replace(path)
        _sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def save(target: Path, content: bytes) -> Path:
    """Write a file as `replacing` does, if it is one: a device or pipe is only written to.

    Raises:
        ExportError: It cannot be written; what was there before still is.
    """
    try:
        if target.exists() and not target.is_file():  # such as /dev/stdout: nothing to replace
            target.write_bytes(content)
        else:
            with replacing(target.resolve()) as temporary:
                temporary.write_bytes(content)
    except OSError as exc:
        raise ExportError(
            f"expected {target} to be a file that can be written, got: {exc.strerror or exc}"
        ) from exc
    return target


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
