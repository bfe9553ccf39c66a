"""What the pages keep for some seconds, read once for all who look.

The fleet is what changes seldom: workers, policies and problems. Numbers are what open pages ask
for every few seconds: only numbers and ids, never what a message holds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.letters.printable import get_logger, printable
from celery_dlq.letters.record import iso

if TYPE_CHECKING:
    from celery_dlq import DeadLetters
    from celery_dlq.store.records import WorkerInfo

_Value = TypeVar("_Value")

logger = get_logger("celery_dlq.web")

NUMBERS_SECONDS = 1.8
FLEET_SECONDS = 5.0
MAX_QUEUES = 100
MAX_JOBS = 50
_ENDED_SECONDS = 60.0
_CANARY = ("letters", "succeeded", "died", "open", "held", "verdict")
_LIVE_STATES = ("planned", "running", "waiting", "interrupted")
_SHOWN_KEYS = ("max_deliveries", "max_retries", "dead_letter_ttl", "dead_letter_max_length")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers, policies, and what endangers the letters."""

    workers: Sequence[WorkerInfo] = ()  # The live ones
    # By dead-letter queue: the live workers that consume a source of it, and the limits there
    consumers: Mapping[str, Sequence[str]] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    # Drift, unknown queues, open circuit breakers, and what endangers the letters
    problems: tuple[str, ...]
    memory: Any = None  # The memory of the letters' Redis; `None` if unknown
    guarded: bool = True  # False if no queue and no task has a policy

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
        held = (one.shown(dlq.redaction) for one in dlq.assembly.held_queues().held_messages())
        problems = [one.problem for one in held if one.problem]
        memory = dlq.memory()
        problems += [*report.warnings, *([] if memory is None else dlq.warnings(memory))]
        return cls(
            workers=workers,
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
        self._value: _Value
        self.until = 0.0

    def __call__(self) -> _Value:
        with self._lock:
            if time.monotonic() >= self.until:
                self._value = self._read()
                self.until = time.monotonic() + self._seconds
            return self._value


class Status:
    """Reads both at most as often as their seconds say."""

    def __init__(self, dlq: DeadLetters) -> None:
        self._dlq = dlq
        self.fleet = _Kept(self._read_fleet, FLEET_SECONDS)
        """Gives workers, policies and problems."""
        self.numbers = _Kept(self._read_numbers, NUMBERS_SECONDS)
        """Gives the numbers as JSON; never raises."""
        self._found: dict[str, Any] = {}
        self._changed_at = 0.0

    def forget_fleet(self) -> None:
        """Read it again, after a change."""
        self.fleet.until = 0.0

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
            found = numbers_of(self._dlq)
        except DLQError:
            found = {"away": True}
        except Exception:
            logger.exception("The live numbers could not be read")
            found = {"away": True}
        if found != self._found:  # a page that is younger than the change knows it already
            self._found, self._changed_at = found, begun
        return json.dumps({"at": self._changed_at, **found}, separators=(",", ":")).encode()


def numbers_of(dlq: DeadLetters) -> dict[str, Any]:
    """The letters of each queue, and the jobs that changed lately."""
    # The overview shows those too; names as templates print them.
    busiest = islice(dlq.assembly.reading().busiest().items(), MAX_QUEUES)
    shown = {printable(name): counts for name, counts in busiest}
    now = datetime.now(timezone.utc)
    jobs = [
        job
        for job in dlq.jobs()
        if job.state in _LIVE_STATES or (now - job.updated_at).total_seconds() < _ENDED_SECONDS
    ]
    return {
        "letters": {name: letters for name, (letters, _) in shown.items()},
        "hour": {name: hour for name, (_, hour) in shown.items()},
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
                "canary": {name: job.canary[name] for name in _CANARY if name in job.canary},
            }
            for job in jobs[:MAX_JOBS]
        },
    }
