"""The plain records that a worker gives the store, and those that it gets back.

`celery_dlq.store.records` has those of whoever reads letters; a worker does without them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from enum import Enum
from typing import Any, NamedTuple

from celery_dlq.letters.record import Recorded, letter_id

Clock = Callable[[], datetime]
"""Returns the current time, aware, in UTC."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MessageKey:
    """Identifies one message; the task id alone does not.

    ``Task.retry()`` uses it again, and so may whoever gives ids of their own.
    """

    dead_letter_queue: str  # Where its letter would go; counters are kept beside the letters
    task_id: str  # The task's id
    retries: int = 0  # The message's `retries` header
    redrives: int = 0  # Number of times the message was redriven
    nesting: int = 0  # Number of times `Task.replace` passed the id on before
    # What tells it from other messages with the same task id; empty if that is not known
    publication: str = ""

    def in_queue(self, dead_letter_queue: str) -> MessageKey:
        """The same message, with its letter in this queue."""
        if dead_letter_queue == self.dead_letter_queue:
            return self
        return replace(self, dead_letter_queue=dead_letter_queue)

    @property
    def place(self) -> str:
        """The message among those of its task id, as its counts are named; without a colon."""
        return f"{self.retries}.{self.publication}" if self.publication else str(self.retries)

    @property
    def letter_id(self) -> str:
        """The id of its letter; see `celery_dlq.letters.record.letter_id`."""
        return letter_id(
            self.dead_letter_queue,
            self.task_id,
            self.retries,
            self.redrives,
            self.nesting,
            self.publication,
        )


class CountStatus(Enum):
    """Result of counting a delivery; only with ``COUNTED`` was it counted."""

    LIMIT_REACHED = 0  # the limit of deliveries was reached before
    COUNTED = 1
    RUNNING = 2  # an earlier delivery runs on a live worker
    UNCERTAIN = 3  # the worker of an earlier delivery may just have died; ask again
    SUSPECT = 4  # its last delivery vanished, and ``alone`` was false
    DEAD = 5  # its letter was stored before
    RETRIED = 6  # it was retried before


@dataclass(frozen=True, slots=True)
class Count:
    """Reply to `DeliveryCounter.count_delivery`."""

    status: CountStatus  # The result
    number: int  # The number of this delivery, or of the last one counted
    # True if the last delivery vanished: it may have killed its worker
    suspect: bool = field(default=False, compare=False)


class Stored(Enum):
    """Result of storing a letter."""

    ALREADY_THERE = 0
    NEW = 1
    REGRESSED = 2  # new, and its group was resolved


TASK_PREFIX = "task:"
"""Begins the name of a task where others are queues."""

MAX_TASKS = 5000
"""A worker lists at most this many tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerInfo(Recorded):
    """A worker's description of itself for all processes of its app."""

    hostname: str  # Its node name, e.g. `celery@web-1`
    pid: int  # Process id of its main process
    version: str  # Version of celery_dlq
    started_at: datetime  # When it started, aware UTC
    queues: tuple[str, ...] = ()  # The queues it consumes
    tasks: tuple[str, ...] = ()  # The names of its registered tasks
    release: str = ""  # The release of its code, as `dlq_release` names it; empty if unknown
    # Policy by queue or pattern, and by task as `task:<name>`; JSON-ready
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


class HeartbeatReply(NamedTuple):
    """What a worker learns with its heartbeat."""

    known: bool  # True if its info is stored; else it registers again
    revision: int  # The revision of the instructions; it changes with each of them
    job_waits: bool  # True if a job waits for a process that runs jobs, and may start now


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """What a server says of its memory."""

    used: int  # Bytes in use, as the server compares them with its maximum
    maximum: int  # Bytes it may use (`maxmemory`); 0 for no limit
    policy: str = ""  # What it does at the maximum (`maxmemory-policy`); empty if unknown

    @property
    def share(self) -> float | None:
        """The share of the maximum in use; ``None`` without a maximum."""
        return self.used / self.maximum if self.maximum else None
