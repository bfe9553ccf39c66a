"""The backend in memory and its samples."""

from __future__ import annotations

from collections.abc import Mapping

from celery_dlq.store.in_memory.circuits import MemoryCircuits
from celery_dlq.store.in_memory.demands import MemoryDemands
from celery_dlq.store.in_memory.holds import MemoryHolds
from celery_dlq.store.in_memory.jobs import MemoryJobStore
from celery_dlq.store.in_memory.letters import MemoryStore
from celery_dlq.store.in_memory.metrics import MemoryMetrics
from celery_dlq.store.in_memory.outbox import MemoryOutbox
from celery_dlq.store.in_memory.reports import MemoryReports
from celery_dlq.store.in_memory.workers import MemoryWorkerRegistry


class MemorySamples:
    """The `Samples` in memory: none are kept."""

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Drop the sample."""

    def flush(self) -> None:
        """Do nothing."""


class MemoryBackend:
    """The `Backend` in memory, for an app that is one process."""

    def __init__(self, letters: MemoryStore | None = None) -> None:
        self.letters = letters or MemoryStore()
        self.counter = self.letters.counter
        self.jobs = MemoryJobStore()
        self.workers = MemoryWorkerRegistry(self.jobs)
        self.outbox = MemoryOutbox()
        self.metrics = MemoryMetrics()
        self.samples = MemorySamples()
        self.sampled = MemoryStore()
        self.notes = self.letters.notes
        self.reports = MemoryReports(self.notes)
        self.held = MemoryStore()
        self.demands = MemoryDemands(self.workers.changed)
        self.holds = MemoryHolds(self.workers.changed, self.held.length)
        self.circuits = MemoryCircuits()

    def memory(self) -> None:
        """Return ``None``: letters in memory are for tests."""

    def separate(self) -> MemoryBackend:
        """Return itself: another object would have other data."""
        return self

    def close(self) -> None:
        """Do nothing."""
