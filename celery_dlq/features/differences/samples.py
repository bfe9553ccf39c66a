"""Samples of successful messages in Redis: one bounded stream per dead-letter queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

from celery_dlq.letters.packed import packed
from celery_dlq.store.part import Part
from celery_dlq.store.pipelined import Command

if TYPE_CHECKING:
    from celery_dlq.store.keys import Keys
    from celery_dlq.store.store import Store

SUCCEEDED = "succeeded"
"""The value of the ``reason`` field in a sample."""

MOST_SAMPLES = 10_000
"""Approximate number of samples kept per queue, the newest."""

KEPT_SECONDS = 30 * 24 * 3600
"""A sample stream expires this many seconds after its last entry."""


class Samples(Part):
    """Records samples of messages that succeeded."""

    _MAX_WAITING = 1000  # between two flushes; further samples are dropped
    _SAMPLES_PER_WRITE = 50

    def __init__(self, store: Store, keys: Keys | None = None) -> None:
        super().__init__(store, keys)
        self._waiting: deque[tuple[str, Mapping[str, bytes]]] = deque()

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Queue a sample, in the storage form of a letter. Sends nothing, never raises."""
        if len(self._waiting) < self._MAX_WAITING:
            self._waiting.append((dead_letter_queue, fields))

    def flush(self) -> None:
        """Send queued samples without waiting; drop them if that fails. Never raises."""
        while self._waiting:
            count = min(self._SAMPLES_PER_WRITE, len(self._waiting))
            some = [self._waiting.popleft() for _ in range(count)]
            commands = [self._added(queue, fields) for queue, fields in some]
            queues = {queue for queue, _fields in some}
            commands += [("EXPIRE", self._keys.samples(name), KEPT_SECONDS) for name in queues]
            if not self._connection.send_unanswered(commands):
                self._waiting.clear()

    def _added(self, queue: str, fields: Mapping[str, bytes]) -> Command:
        flat = [part for pair in packed(fields).items() for part in pair]
        return ("XADD", self._keys.samples(queue), "MAXLEN", "~", MOST_SAMPLES, "*", *flat)
