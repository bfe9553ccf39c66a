"""The backend in memory, for tests: its data ends with the process."""

from celery_dlq.backends.memory.backend import MemoryBackend
from celery_dlq.backends.memory.counter import MemoryCounter
from celery_dlq.backends.memory.jobs import MemoryJobStore
from celery_dlq.backends.memory.letters import MemoryStore
from celery_dlq.backends.memory.metrics import MemoryMetrics
from celery_dlq.backends.memory.outbox import MemoryOutbox
from celery_dlq.backends.memory.reports import MemoryReports
from celery_dlq.backends.memory.workers import MemoryWorkerRegistry

__all__ = [
    "MemoryBackend",
    "MemoryCounter",
    "MemoryJobStore",
    "MemoryMetrics",
    "MemoryOutbox",
    "MemoryReports",
    "MemoryStore",
    "MemoryWorkerRegistry",
]
