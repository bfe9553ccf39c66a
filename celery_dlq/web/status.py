"""What the pages keep for some seconds, read once for all who look.

The fleet is what changes seldom: workers, policies and problems. What is in force stands on every
page: holds, circuit breakers and jobs. Numbers are what open pages ask for every few seconds: only
numbers and ids, never what a message holds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.letters.printable import get_logger, printable
from celery_dlq.letters.record import iso
from celery_dlq.operations.in_force import InForce
from celery_dlq.policies.policy import DLQ_SUFFIX

if TYPE_CHECKING:
    from celery_dlq import DeadLetters
    from celery_dlq.operations.job import Job
    from celery_dlq.store.worker_records import WorkerInfo

_Value = TypeVar("_Value")

logger = get_logger("celery_dlq.web")

NUMBERS_SECONDS = 1.8
FLEET_SECONDS = 5.0
MAX_QUEUES = 100
MAX_JOBS = 50
_ENDED_SECONDS = 60.0
_LIVE_STATES = ("planned", "running", "waiting", "interrupted")
_SHOWN_KEYS = ("max_deliveries", "max_retries", "dead_letter_ttl", "dead_letter_max_length")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers, policies, and what endangers the letters."""

    workers: Sequence[WorkerInfo] = ()  # The live ones
    # By dead-letter queue: its source queues, the live workers that consume one of them, and the
    # limits there
    sources: Mapping[str, Collection[str]] = field(default_factory=dict)
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Drift, unknown queues, and what endangers the letters
    problems: tuple[str, ...]
    memory: Any = None  # The memory of the letters' Redis; `None` if unknown
    guarded: bool = True  # False if no queue and no task has a policy

    def sources_of(self, dead_letter_queue: str) -> Collection[str]:
        """The queues whose letters it has; without their policy, as they are usually named."""
        return self.sources.get(dead_letter_queue) or {dead_letter_queue.removesuffix(DLQ_SUFFIX)}

    @classmethod
    def read(cls, dlq: DeadLetters) -> Fleet:
        """Ask the store."""
        report = dlq.policies()
        workers = dlq.registry.workers(with_tasks=False)
        sources: dict[str, set[str]] = defaultdict(set)
        policies: dict[str, Mapping[str, Any]] = {}
        for view in report.views:
            if view.task is None:
                limits = {
                    key: value["value"]
                    for key, value in view.to_json()["policy"].items()
                    if key in _SHOWN_KEYS and value["value"] is not None
                }
                for name in view.dead_letter_queues:
                    sources[name].add(view.queue)
                    policies.setdefault(name, limits)
        memory = dlq.memory()
        problems = [*report.warnings, *([] if memory is None else dlq.warnings(memory))]
        return cls(
            workers=workers,
            sources=sources,
            consumers={
                name: sorted(one.hostname for one in workers if found & set(one.queues))
                for name, found in sources.items()
            },
            policies=policies,
            problems=tuple(problems),
            memory=memory,
            guarded=bool(report.views),
        )


class _Kept(Generic[_Value]):
    """A value that is read again after some seconds, once for all who wait for it."""

    def __init__(self, read: Callable[[], _Value], seconds: float) -> None:
        self._read, self._seconds = read, seconds
        self._lock = threading.Lock()
        self.last: _Value | None = None  # What was read, however long ago
        self.until = 0.0

    def __call__(self) -> _Value:
        with self._lock:
            if self.last is None or time.monotonic() >= self.until:
                self.last = self._read()
                self.until = time.monotonic() + self._seconds
            return self.last


class Status:
    """Reads each of them at most as often as their seconds say."""

    def __init__(self, dlq: DeadLetters) -> None:
        self._dlq = dlq
        self.fleet = _Kept(self._read_fleet, FLEET_SECONDS)
        """Gives workers, policies and problems."""
        self.jobs = _Kept(dlq.jobs, NUMBERS_SECONDS)
        self.in_force = _Kept(self._read_in_force, NUMBERS_SECONDS)
        """Gives holds, circuit breakers and jobs; never raises."""
        self.numbers = _Kept(self._read_numbers, NUMBERS_SECONDS)
        """Gives the numbers as JSON; never raises."""
        self._found: dict[str, Any] = {}
        self._changed_at = 0.0

    def forget(self) -> None:
        """Read what pages show again, after a change."""
        self.fleet.until = self.jobs.until = self.in_force.until = 0.0

    def _read_in_force(self) -> InForce:
        try:
            return InForce.of(self._dlq.assembly, self.jobs())
        except DLQError as exc:
            return InForce(error=str(exc))

    def _read_fleet(self) -> Fleet:
        try:
            return Fleet.read(self._dlq)
        except StoreUnavailable:
            raise
        except DLQError as exc:  # settings that somebody changed; letters can be read
            return Fleet(problems=(str(exc),))

    def _read_numbers(self) -> bytes:
        begun = time.time()
        try:
            found = numbers_of(self._dlq, self.jobs(), self.in_force())
        except DLQError:
            found = {"away": True}
        except Exception:
            logger.exception("The live numbers could not be read")
            found = {"away": True}
        if found != self._found:  # a page that is younger than the change knows it already
            self._found, self._changed_at = found, begun
        return json.dumps({"at": self._changed_at, **found}, separators=(",", ":")).encode()


def numbers_of(dlq: DeadLetters, jobs: Sequence[Job], in_force: InForce) -> dict[str, Any]:
    """The letters of each queue, the jobs that changed lately, and what is in force."""
    # The overview shows those too; names as templates print them.
    busiest = islice(dlq.assembly.reading().busiest().items(), MAX_QUEUES)
    shown = {printable(name): counts for name, counts in busiest}
    now = datetime.now(timezone.utc)
    recent = [
        job
        for job in jobs
        if job.state in _LIVE_STATES or (now - job.updated_at).total_seconds() < _ENDED_SECONDS
    ]
    return {
        "letters": {name: letters for name, (letters, _) in shown.items()},
        "hour": {name: hour for name, (_, hour) in shown.items()},
        "held": {one.hold.id: one.held for one in in_force.held},
        "in_force": in_force.names,
        "jobs": {
            job.id: {
                "state": job.state,
                "ended_at": iso(job.ended_at),
                "counts": {
                    **job.counts,
                    "handled": job.handled,
                    "changed": job.changed,
                    "unchanged": job.handled - job.changed,
                },
                "total": job.total,
                "left": job.seconds_left(now),
            }
            for job in recent[:MAX_JOBS]
        },
    }
