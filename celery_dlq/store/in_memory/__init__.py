"""The backend in memory, for tests: its data ends with the process."""

from celery_dlq.store.in_memory.backend import MemoryBackend
from celery_dlq.store.in_memory.counter import MemoryCounter
from celery_dlq.store.in_memory.jobs import MemoryJobStore
from celery_dlq.store.in_memory.letters import MemoryStore
from celery_dlq.store.in_memory.metrics import MemoryMetrics
from celery_dlq.store.in_memory.outbox import MemoryOutbox
from celery_dlq.store.in_memory.reports import MemoryReports
from celery_dlq.store.in_memory.workers import MemoryWorkerRegistry

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
