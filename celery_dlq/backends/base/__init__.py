"""The contracts between those who use a backend and its implementations, one file a topic.

A `Backend` has all of them. Its implementations stand beside this folder, including
the one in memory, which ships and is tested by the same suite.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Protocol

from celery_dlq.backends.base.counting import Count, CountStatus, DeliveryCounter, MessageKey
from celery_dlq.backends.base.exports import ExportLease, ExportLeaseStore
from celery_dlq.backends.base.jobs import JobStore
from celery_dlq.backends.base.letters import (
    Capabilities,
    ClaimState,
    DeadLetterStore,
    Glance,
    Group,
    LetterSummary,
    QueueSummary,
    RawPage,
    RedriveOutcome,
    Restored,
    Stored,
    StoredLetter,
)
from celery_dlq.backends.base.outbox import LetterOutbox, Outbox, OutboxEntry
from celery_dlq.backends.base.positions import ordered, position_at, stored_at
from celery_dlq.backends.base.reports import Reports
from celery_dlq.backends.base.samples import SUCCEEDED, Samples
from celery_dlq.backends.base.workers import Override, WorkerInfo, WorkerRegistry
from celery_dlq.metrics import MetricsStore

__all__ = [
    "SUCCEEDED",
    "Backend",
    "Capabilities",
    "ClaimState",
    "Clock",
    "Count",
    "CountStatus",
    "DeadLetterStore",
    "DeliveryCounter",
    "ExportLease",
    "ExportLeaseStore",
    "Glance",
    "Group",
    "JobStore",
    "LetterOutbox",
    "LetterSummary",
    "MessageKey",
    "Outbox",
    "OutboxEntry",
    "Override",
    "QueueSummary",
    "RawPage",
    "RedriveOutcome",
    "Restored",
    "Samples",
    "Stored",
    "StoredLetter",
    "WorkerInfo",
    "WorkerRegistry",
    "ordered",
    "position_at",
    "stored_at",
]

Clock = Callable[[], datetime]
"""Gives the present as an aware UTC datetime."""


class Backend(Protocol):
    """All that an app keeps: one object for each of its processes.

    Its parts share their connections, which are made when there is first something to send.

    Attributes:
        counter: Deliveries.
        letters: Dead letters.
        workers: Live workers, overrides of policies, and the audit.
        jobs: Redrives and discards.
        outbox: What dead-letter exchanges must still get.
        metrics: Counts of all processes.
        samples: Takes samples of messages that succeeded.
        sampled: The samples, read as letters are.
        reports: Decides which letters an error tracker is told of.
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

    def separate(self) -> Backend:
        """The same place over connections of its own, for another thread or process.

        Connections to a broker serve one thread, and a forked process must not share any.
        In memory there is nothing to separate: it is the same object.
        """

    def close(self) -> None:
        """Let go of all connections; what is used afterwards opens them again. Never raises."""
