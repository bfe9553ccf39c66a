"""The contracts of a backend, one module per topic.

A `Backend` has a part for each. The implementations are in the folders beside this one;
the one in memory ships too and passes the same contract tests.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import TYPE_CHECKING, Protocol

from celery_dlq.metrics import MetricsStore
from celery_dlq.store.base.circuits import CircuitStore, Ends, Succeeded
from celery_dlq.store.base.counting import Count, CountStatus, DeliveryCounter, MessageKey
from celery_dlq.store.base.exports import ExportLease, ExportLeaseStore
from celery_dlq.store.base.jobs import MOST_JOBS, JobStore, may_start_at
from celery_dlq.store.base.letters import (
    ClaimState,
    DeadLetterStore,
    Glance,
    Group,
    GroupOrder,
    LetterSummary,
    QueueEntry,
    QueueSummary,
    RawPage,
    RedriveCall,
    RedriveOutcome,
    Restored,
    Seed,
    Stored,
    StoredLetter,
)
from celery_dlq.store.base.memory import ServerMemory
from celery_dlq.store.base.notes import OPEN_GROUP, GroupNotes, GroupState, GroupStatus, Note
from celery_dlq.store.base.outbox import LetterOutbox, Outbox, OutboxEntry
from celery_dlq.store.base.positions import ordered, position_at, stored_at
from celery_dlq.store.base.reports import Reports
from celery_dlq.store.base.samples import SUCCEEDED, Samples
from celery_dlq.store.base.workers import (
    MAX_TASKS,
    HeartbeatReply,
    WorkerInfo,
    WorkerRegistry,
)

if TYPE_CHECKING:
    from celery_dlq.store.instructions import Instructions

__all__ = [
    "MAX_TASKS",
    "MOST_JOBS",
    "OPEN_GROUP",
    "SUCCEEDED",
    "Backend",
    "CircuitStore",
    "ClaimState",
    "Clock",
    "Count",
    "CountStatus",
    "DeadLetterStore",
    "DeliveryCounter",
    "Ends",
    "ExportLease",
    "ExportLeaseStore",
    "Glance",
    "Group",
    "GroupNotes",
    "GroupOrder",
    "GroupState",
    "GroupStatus",
    "HeartbeatReply",
    "JobStore",
    "LetterOutbox",
    "LetterSummary",
    "MessageKey",
    "Note",
    "Outbox",
    "OutboxEntry",
    "QueueEntry",
    "QueueSummary",
    "RawPage",
    "RedriveCall",
    "RedriveOutcome",
    "Restored",
    "Samples",
    "Seed",
    "ServerMemory",
    "Stored",
    "StoredLetter",
    "Succeeded",
    "WorkerInfo",
    "WorkerRegistry",
    "may_start_at",
    "ordered",
    "position_at",
    "stored_at",
]

Clock = Callable[[], datetime]
"""Returns the current time, aware, in UTC."""


class Backend(Protocol):
    """Everything an app stores; each process has one backend.

    Its parts share connections, which are opened when the first command is sent.
    """

    @property
    def counter(self) -> DeliveryCounter: ...  # noqa: D102 - see above
    @property
    def letters(self) -> DeadLetterStore: ...  # noqa: D102
    @property
    def workers(self) -> WorkerRegistry: ...  # noqa: D102
    @property
    def jobs(self) -> JobStore: ...  # noqa: D102
    @property
    def outbox(self) -> Outbox: ...  # noqa: D102
    @property
    def metrics(self) -> MetricsStore: ...  # noqa: D102
    @property
    def samples(self) -> Samples: ...  # noqa: D102
    @property
    def sampled(self) -> DeadLetterStore: ...  # noqa: D102
    @property
    def reports(self) -> Reports: ...  # noqa: D102
    @property
    def notes(self) -> GroupNotes: ...  # noqa: D102
    @property
    def instructions(self) -> Instructions: ...  # noqa: D102
    @property
    def held(self) -> DeadLetterStore: ...  # noqa: D102
    @property
    def circuits(self) -> CircuitStore: ...  # noqa: D102

    def memory(self) -> ServerMemory | None:
        """Return the memory of the server that counts and keeps letters; ``None`` if unknown."""

    def separate(self) -> Backend:
        """Return a backend on the same data with its own connections.

        For another thread or process: a connection to a broker serves one thread, and a
        forked process must not share any. The backend in memory returns itself.
        """

    def close(self) -> None:
        """Close all connections; later use opens them again. Never raises."""
