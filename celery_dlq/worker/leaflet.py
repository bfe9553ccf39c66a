"""A few lines that a worker's main process writes and its pool processes read."""

from __future__ import annotations

import mmap
import struct

from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.worker")

_ROOM = 64 * 1024
_HEAD = struct.Struct("<QQ")  # revision, odd while it is written; length of the text


class Leaflet:
    """Memory that forked processes share with the one that made it.

    Made before the pool starts. A pool that does not fork has a leaflet of its own, which
    stays as it was; one of threads is in the same process.
    """

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, _ROOM)
        self._revision = 0

    def write(self, text: bytes) -> None:
        """Put up another text; only the main process does."""
        if len(text) > _ROOM - _HEAD.size:
            logger.warning("%d bytes of overrides do not reach the pool processes", len(text))
            return
        self._head(self._revision + 1, 0)
        self._shared[_HEAD.size : _HEAD.size + len(text)] = text
        self._head(self._revision + 2, len(text))
        self._revision += 2

    def news(self) -> bytes | None:
        """The text, if it is another one than the last that was read or written here."""
        revision, length = _HEAD.unpack_from(self._shared)
        if revision == self._revision or revision % 2:
            return None
        text = self._shared[_HEAD.size : _HEAD.size + length]
        if _HEAD.unpack_from(self._shared)[0] != revision:
            return None  # it is being written: the next one who asks has it whole
        self._revision = revision
        return bytes(text)

    def _head(self, revision: int, length: int) -> None:
        _HEAD.pack_into(self._shared, 0, revision, length)
