"""What the pages keep for some seconds, read once for all who look.

The fleet is what changes seldom: workers, policies and problems. Numbers are what open pages ask
for every few seconds: only numbers and ids, never what a message holds.
"""

from __future__ import annotations

import json
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.letters.printable import printable
from celery_dlq.letters.record import iso
from celery_dlq.logs import get_logger
from celery_dlq.registry import features
from celery_dlq.web.templating import duration

if TYPE_CHECKING:
    from celery_dlq import DeadLetters

logger = get_logger("celery_dlq.web")

NUMBERS_SECONDS = 1.8
FLEET_SECONDS = 5.0
MAX_QUEUES = 200
MAX_JOBS = 50
_ENDED_SECONDS = 60.0
_CANARY = ("letters", "succeeded", "died", "open", "held", "verdict")
_LIVE_STATES = ("planned", "running", "waiting", "interrupted")
_SHOWN_KEYS = ("max_deliveries", "max_retries", "dead_letter_ttl", "dead_letter_max_length")


@dataclass(frozen=True, kw_only=True)
class Fleet:
    """Workers, policies, and what endangers the letters."""

    workers: Mapping[str, frozenset[str]]  # Live workers and the queues that they consume
    sources: Mapping[str, tuple[str, ...]]  # Source queues by dead-letter queue
    policies: Mapping[str, str]  # Policy in a line by dead-letter queue
    # Drift, unknown queues, open circuit breakers, and what endangers the letters
    problems: tuple[str, ...]
    memory: Any  # The memory of the letters' Redis; `None` if unknown
    guarded: bool = True  # False if no queue and no task has a policy

    @classmethod
    def read(cls, dlq: DeadLetters) -> Fleet:
        """Ask the store."""
        report = dlq.policies()
        workers = dlq.registry.workers(with_tasks=False)
        sources: dict[str, list[str]] = defaultdict(list)
        policies: dict[str, str] = {}
        for view in report.views:
            if view.task is None:
                for name in view.dead_letter_queues:
                    sources[name].append(view.queue)
                    policies.setdefault(name, _line(view))
        problems = [
            text
            for feature in features()
            if feature.problems
            for text in feature.load(feature.problems)(dlq)
        ]
        memory = dlq.memory()
        problems += [*report.warnings, *([] if memory is None else dlq.warnings(memory))]
        return cls(
            workers={info.hostname: frozenset(info.queues) for info in workers},
            sources={name: tuple(found) for name, found in sources.items()},
            policies=policies,
            problems=tuple(problems),
            memory=memory,
            guarded=bool(report.views),
        )

    @classmethod
    def unknown(cls, exc: DLQError) -> Fleet:
        """What is shown when it could not be read."""
        return cls(workers={}, sources={}, policies={}, problems=(str(exc),), memory=None)

    def consumers(self, dead_letter_queue: str) -> list[str]:
        """The live workers that consume a source of a dead-letter queue."""
        sources = set(self.sources.get(dead_letter_queue, ()))
        return sorted(name for name, queues in self.workers.items() if sources & queues)


class Status:
    """Reads both at most as often as their seconds say."""

    def __init__(self, dlq: DeadLetters) -> None:
        self._dlq = dlq
        self._locks = threading.Lock(), threading.Lock()
        self._fleet: Fleet
        self._fleet_until = 0.0
        self._numbers = b""
        self._numbers_until = 0.0
        self._found: dict[str, Any] = {}
        self._changed_at = 0.0

    def fleet(self) -> Fleet:
        """Workers, policies and problems."""
        with self._locks[0]:
            if time.monotonic() >= self._fleet_until:
                try:
                    self._fleet = Fleet.read(self._dlq)
                except StoreUnavailable:
                    raise
                except DLQError as exc:  # settings that somebody changed; letters can be read
                    self._fleet = Fleet.unknown(exc)
                self._fleet_until = time.monotonic() + FLEET_SECONDS
            return self._fleet

    def forget_fleet(self) -> None:
        """Read it again, after a change."""
        self._fleet_until = 0.0

    def numbers(self) -> bytes:
        """The numbers as JSON. Never raises."""
        with self._locks[1]:  # who waited for another's reading takes that
            if time.monotonic() < self._numbers_until:
                return self._numbers
            begun = time.time()
            try:
                found = _numbers(self._dlq)
            except DLQError:
                found = {"away": True}
            except Exception:
                logger.exception("The live numbers could not be read")
                found = {"away": True}
            if found != self._found:  # a page that is younger than the change knows it already
                self._found, self._changed_at = found, begun
            found = {"at": self._changed_at, **found}
            self._numbers = json.dumps(found, separators=(",", ":")).encode()
            self._numbers_until = time.monotonic() + NUMBERS_SECONDS
            return self._numbers


def _numbers(dlq: DeadLetters) -> dict[str, Any]:
    queues = sorted(dlq.queues(), key=lambda q: (-q.last_hour, -q.letters, q.name))
    # The overview shows those too; names as templates print them.
    shown = {printable(queue.name): queue for queue in queues[:MAX_QUEUES]}
    now = datetime.now(timezone.utc)
    jobs = [
        job
        for job in dlq.jobs()
        if job.state in _LIVE_STATES or (now - job.updated_at).total_seconds() < _ENDED_SECONDS
    ]
    return {
        "letters": {name: queue.letters for name, queue in shown.items()},
        "hour": {name: queue.last_hour for name, queue in shown.items()},
        "jobs": {
            job.id: {
                "state": job.state,
                "ended_at": iso(job.ended_at),
                "counts": {**job.counts, "handled": job.handled},
                "total": job.total,
                "canary": {name: job.canary[name] for name in _CANARY if name in job.canary},
            }
            for job in jobs[:MAX_JOBS]
        },
    }


def _line(view: Any) -> str:
    shown = []
    for key, value in view.to_json()["policy"].items():
        if key in _SHOWN_KEYS and value["value"] not in (None, [], ()):
            text = duration(value["value"]) if key.endswith("_ttl") else value["value"]
            shown.append(f"{key} {text}")
    return ", ".join(shown)
