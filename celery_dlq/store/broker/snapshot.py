"""A copy of a queue on the broker: an index in memory, the messages in an unnamed file.

A broker delivers a queue only from its beginning. The copy can be searched by id and read in
either order, any number of times.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from celery_dlq.letters import headers
from celery_dlq.store.base import RawPage, ordered
from celery_dlq.store.broker.message import COMPRESSION_HEADER, decoded

PAGE_BYTES = 8 * 1024 * 1024
_POSITION = re.compile(r"\d{1,20}-\d{1,20}")


@dataclass(slots=True)
class Entry:
    """One entry of a queue: a letter or another message."""

    key: str  # The letter's id; the position of another message
    position: str  # Its place in the order of storing
    offset: int  # Start of the message's body in the file
    size: int  # Size of the body in bytes
    compressed: bool  # True if the body is compressed
    # Delivery tags of the message and of copies of it
    tags: list[Any] = field(default_factory=list)

    @property
    def order(self) -> tuple[int, ...]:
        """The position as a sort key."""
        return ordered(self.position)


class Snapshot:
    """The messages of one queue at one time."""

    def __init__(self) -> None:
        self.complete = True
        self.bytes = 0
        self._file, name = tempfile.mkstemp(prefix="celery_dlq-")
        Path(name).unlink()  # the file is freed with its descriptor, however the process ends
        weakref.finalize(self, os.close, self._file)
        self._entries: dict[str, Entry] = {}
        self._places: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: str) -> bool:
        return key in self._entries

    def add(self, about: Mapping[str, Any], tag: Any, body: bytes) -> None:
        """Add a message; of a copy of a known one only the tag is kept."""
        key, position = _name_of(about, body)
        known = self._entries.get(key)
        if known is not None:
            known.tags.append(tag)
            if ordered(position) < known.order:  # of two copies the first stored is the letter
                del self._places[known.position]
                known.position = position
                self._places[position] = key
            return
        entry = Entry(key, position, self.bytes, len(body), COMPRESSION_HEADER in about, [tag])
        view = memoryview(body)
        while view:
            view = view[os.write(self._file, view) :]
        self.bytes += len(body)
        self._entries[key] = entry
        self._places[position] = key

    def find(self, key: str) -> Entry | None:
        """Return an entry by its key or its position, or ``None``."""
        return self._entries.get(key) or self._entries.get(self._places.get(key, ""))

    def drop(self, entry: Entry) -> None:
        """Delete an entry: it has left the queue."""
        del self._entries[entry.key]
        self._places.pop(entry.position, None)

    def ordered(self) -> list[Entry]:
        """Return all entries in the order of storing."""
        return sorted(self._entries.values(), key=lambda entry: entry.order)

    def fields(self, entry: Entry) -> dict[bytes, bytes]:
        """Return the storage form of an entry."""
        return decoded(self._body(entry), compressed=entry.compressed)

    def pages(
        self, *, after: str | None, until: str | None, page_size: int, newest_first: bool
    ) -> Iterator[RawPage]:
        """Iterate over pages of positions and storage forms, bounded in entries and bytes."""
        low, high = ordered(after) if after else (-1, 0), ordered(until) if until else None
        chosen = [e for e in self.ordered() if low < e.order and (not high or e.order <= high)]
        page: list[tuple[str, Mapping[bytes, bytes]]] = []
        page_bytes = 0
        for entry in reversed(chosen) if newest_first else chosen:
            if page and (len(page) >= page_size or page_bytes + entry.size > PAGE_BYTES):
                yield page
                page, page_bytes = [], 0
            page.append((entry.position, self.fields(entry)))
            page_bytes += entry.size
        if page:
            yield page

    def _body(self, entry: Entry) -> bytes:
        parts, offset, left = [], entry.offset, entry.size
        while left:
            part = os.pread(self._file, left, offset)
            if not part:
                raise OSError(f"the temporary file of a snapshot ends too early, at byte {offset}")
            parts.append(part)
            offset, left = offset + len(part), left - len(part)
        return b"".join(parts)


def _name_of(about: Mapping[str, Any], body: bytes) -> tuple[str, str]:
    """Return the key and position of a message; made from its content if headers are missing."""
    letter_id, position = about.get(headers.LETTER_HEADER), about.get(headers.POSITION_HEADER)
    placed = isinstance(position, str) and _POSITION.fullmatch(position) is not None
    fields = {}
    if not isinstance(letter_id, str) or not placed:  # without its headers
        fields = decoded(body, compressed=COMPRESSION_HEADER in about)
    number = int.from_bytes(hashlib.blake2b(body, digest_size=7).digest(), "big")
    if not placed:
        died = fields.get(b"dead_lettered_at", b"0")
        millis = int(died) // 1000 if died.isdigit() and len(died) < 18 else 0  # noqa: PLR2004
        position = f"{millis}-{number}"
    if not isinstance(letter_id, str):
        letter_id = fields.get(b"id", b"").decode("utf-8", "replace") or str(position)
    return letter_id, str(position)
