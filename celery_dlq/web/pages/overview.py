"""All dead-letter queues: is something burning, where, since when, and who acts already?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_dlq.backends.base import QueueSummary
from celery_dlq.errors import DLQError, NotSupported

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Job
    from celery_dlq.operations.policies import PolicyReport
    from celery_dlq.web.http import Response
    from celery_dlq.web.web import Call

Columns = Sequence[tuple[str, Mapping[str, int]]]

MAX_QUEUES = 200
_SHOWN_KEYS = ("max_deliveries", "max_retries", "dead_letter_ttl", "dead_letter_max_length")


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dead-letter queue.

    Attributes:
        queue: Its size, age and reasons.
        columns: Letters by reason for each part of the last hour.
        reasons: The most frequent reasons with their letters.
        policy: The policy of its source, in a line.
        sources: The queues whose messages it gets.
        workers: Live workers that consume one of them.
        jobs: Jobs that have not ended.
    """

    queue: QueueSummary
    columns: Columns
    reasons: Sequence[tuple[str, int]]
    policy: str
    sources: Sequence[str]
    workers: Sequence[str]
    jobs: Sequence[Job]


def overview(call: Call) -> Response:
    """Show all dead-letter queues."""
    dlq = call.dlq
    reading = dlq.reading()
    queues = sorted(reading.queues(), key=lambda q: (-q.last_hour, -q.letters, q.name))
    arrivals = reading.arrivals([queue.name for queue in queues[:MAX_QUEUES]])
    around = call.web.surroundings()
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in dlq.operations().jobs():
        if job.state in ("running", "waiting", "interrupted"):
            jobs[job.queue].append(job)
    rows = [
        Row(
            queue=queue,
            columns=arrivals.get(queue.name, ()),
            reasons=sorted(queue.reasons.items(), key=lambda pair: -pair[1])[:3],
            policy=around.policies.get(queue.name, ""),
            sources=around.sources.get(queue.name, ()),
            workers=around.consumers(queue.name),
            jobs=jobs[queue.name][:3],
        )
        for queue in queues[:MAX_QUEUES]
    ]
    more = len(queues) - len(rows)
    problems = list(around.problems)
    if more > 0:
        problems.append(f"{more:,} queues with fewer letters are not shown; `dlq queues` has all.")
    return call.page(
        "overview.html",
        section="overview",
        title="Dead-letter queues",
        rows=rows,
        problems=problems,
        memory=around.memory,
        workers=around.workers,
    )


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What changes seldom, and is read every few seconds for all pages.

    Attributes:
        workers: Live workers and the queues that they consume.
        sources: Source queues by dead-letter queue.
        policies: Policy in a line by dead-letter queue.
        problems: Drift, unknown queues, and what endangers the letters.
        memory: The memory of the letters' Redis; ``None`` if unknown.
    """

    workers: Mapping[str, frozenset[str]]
    sources: Mapping[str, tuple[str, ...]]
    policies: Mapping[str, str]
    problems: tuple[str, ...]
    memory: Any

    @classmethod
    def read(cls, dlq: Any) -> Surroundings:
        """Ask the store."""
        report: PolicyReport = dlq.policy_admin().policies()
        workers = dlq.backend.workers.workers(with_tasks=False)
        sources: dict[str, list[str]] = defaultdict(list)
        policies: dict[str, str] = {}
        for view in report.views:
            if view.task is None:
                sources[view.dead_letter_queue].append(view.queue)
                policies.setdefault(view.dead_letter_queue, _line(view))
        problems, memory = list(report.warnings), None
        with suppress(NotSupported):
            check = dlq.memory_check()
            memory = check.memory()
            problems += [] if memory is None else check.warnings_of(memory)
        return cls(
            workers={info.hostname: frozenset(info.queues) for info in workers},
            sources={name: tuple(found) for name, found in sources.items()},
            policies=policies,
            problems=tuple(problems),
            memory=memory,
        )

    @classmethod
    def unknown(cls, exc: DLQError) -> Surroundings:
        """What is shown when it could not be read."""
        return cls(workers={}, sources={}, policies={}, problems=(str(exc),), memory=None)

    def consumers(self, dead_letter_queue: str) -> list[str]:
        """The live workers that consume a source of a dead-letter queue."""
        sources = set(self.sources.get(dead_letter_queue, ()))
        return sorted(name for name, queues in self.workers.items() if sources & queues)


def _line(view: Any) -> str:
    shown = []
    for key, value in view.to_json()["policy"].items():
        if key in _SHOWN_KEYS and value["value"] not in (None, [], ()):
            shown.append(f"{key} {value['value']}")
    return ", ".join(shown)
