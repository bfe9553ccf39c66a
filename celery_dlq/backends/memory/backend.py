"""All parts of the backend in memory."""

from __future__ import annotations

from collections.abc import Mapping

from celery_dlq.backends.memory.jobs import MemoryJobStore
from celery_dlq.backends.memory.letters import MemoryStore
from celery_dlq.backends.memory.metrics import MemoryMetrics
from celery_dlq.backends.memory.outbox import MemoryOutbox
from celery_dlq.backends.memory.reports import MemoryReports
from celery_dlq.backends.memory.workers import MemoryWorkerRegistry


class MemorySamples:
    """The `Samples` in memory: none are taken."""

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Leave it out."""

    def flush(self) -> None:
        """Nothing is put off here."""


class MemoryBackend:
    """The `Backend` in memory: the processes of one app are one process here.

    Args:
        letters: Where letters are, with their counter; ``None`` for a new one.
    """

    def __init__(self, letters: MemoryStore | None = None) -> None:
        self.letters = letters or MemoryStore()
        self.counter = self.letters.counter
        self.workers = MemoryWorkerRegistry()
        self.jobs = MemoryJobStore()
        self.outbox = MemoryOutbox()
        self.metrics = MemoryMetrics()
        self.samples = MemorySamples()
        self.sampled = MemoryStore()
        self.reports = MemoryReports()

    def separate(self) -> MemoryBackend:
        """Itself: another one would be another memory."""
        return self

    def close(self) -> None:
        """Nothing to let go of."""
