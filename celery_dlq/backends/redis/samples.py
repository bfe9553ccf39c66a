"""Samples of successful messages in Redis: one bounded stream per dead-letter queue."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from celery_dlq.backends.redis.connect import Command, PipelinedConnection
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.letters.packed import packed

MOST_SAMPLES = 10_000
"""About so many of the newest samples of each queue are kept."""

KEPT_SECONDS = 30 * 24 * 3600
"""A sample stream expires this many seconds after its last entry."""


class RedisSamples:
    """The `Samples` of Redis.

    Args:
        connection: The worker's connection that is written and read later.
        keys: Key names.
    """

    _MOST_WAITING = 1000  # between two ticks; what comes beyond that is left out
    _A_WRITE = 50

    def __init__(self, connection: PipelinedConnection, keys: Keys) -> None:
        self._connection = connection
        self._keys = keys
        self._waiting: deque[tuple[str, Mapping[str, bytes]]] = deque()

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Note it for the next write."""
        if len(self._waiting) < self._MOST_WAITING:
            self._waiting.append((dead_letter_queue, fields))

    def flush(self) -> None:
        """Write what was noted; lost if Redis does not answer, for it is only a sample."""
        while self._waiting:
            count = min(self._A_WRITE, len(self._waiting))
            some = [self._waiting.popleft() for _ in range(count)]
            commands = [self._added(queue, fields) for queue, fields in some]
            queues = {queue for queue, _fields in some}
            commands += [("EXPIRE", self._keys.samples(name), KEPT_SECONDS) for name in queues]
            if not self._connection.send_unanswered(commands):
                self._waiting.clear()

    def _added(self, queue: str, fields: Mapping[str, bytes]) -> Command:
        flat = [part for pair in packed(fields).items() for part in pair]
        return ("XADD", self._keys.samples(queue), "MAXLEN", "~", MOST_SAMPLES, "*", *flat)
