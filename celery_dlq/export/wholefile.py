"""Local files that are replaced atomically."""

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

    The temporary name is hidden, because Spark would read ``x.parquet.tmp``, and ends in ``.tmp``,
    because DuckDB's ``*.parquet`` would match it otherwise.
    """
    temporary = path.with_name(f".{path.name}.{uuid4().hex}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        sync(temporary)
        temporary.replace(path)
        sync(path.parent)
    finally:
        with suppress(FileNotFoundError):
            temporary.unlink()


def save(target: Path, content: bytes) -> Path:
    """Replace a regular file atomically; write directly to a device or pipe."""
    try:
        if target.exists() and not target.is_file():  # such as /dev/stdout
            target.write_bytes(content)
        else:
            with replacing(target.resolve()) as temporary:
                temporary.write_bytes(content)
    except OSError as exc:
        raise ExportError(
            f"expected {target} to be a file that can be written, got: {exc.strerror or exc}"
        ) from exc
    return target


def sync(path: str | Path) -> None:
    """Have a file, or the names in a folder, on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
