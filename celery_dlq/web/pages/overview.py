"""All dead-letter queues: is something burning, where, since when, and who acts already?"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_dlq.store.records import QueueSummary
from celery_dlq.web.http import Call, Page

if TYPE_CHECKING:
    from celery_dlq.operations.job import Job

Columns = Sequence[tuple[str, Mapping[str, int]]]

MAX_QUEUES = 200
MINUTES_PER_BAR = 2


@dataclass(frozen=True, kw_only=True)
class Row:
    """One dead-letter queue."""

    queue: QueueSummary  # Its size, age and reasons
    columns: Columns  # Letters by reason for each part of the last hour
    reasons: Sequence[tuple[str, int]]  # The reasons with their letters, the most frequent first
    policy: str  # The policy of its source, in a line
    sources: Sequence[str]  # The queues whose messages it gets
    workers: Sequence[str]  # Live workers that consume one of them
    jobs: Sequence[Job]  # Jobs that have not ended


def overview(call: Call) -> Page:
    """Show all dead-letter queues."""
    queues = sorted(call.dlq.queues(), key=lambda q: (-q.last_hour, -q.letters, q.name))
    fleet = call.site.status.fleet()
    jobs: dict[str, list[Job]] = defaultdict(list)
    for job in call.dlq.jobs():
        if job.state in ("running", "waiting", "interrupted"):
            jobs[job.queue].append(job)
    rows = [
        Row(
            queue=queue,
            columns=_columns(queue),
            reasons=sorted(queue.reasons.items(), key=lambda pair: -pair[1]),
            policy=fleet.policies.get(queue.name, ""),
            sources=fleet.sources.get(queue.name, ()),
            workers=fleet.consumers(queue.name),
            jobs=jobs[queue.name][:3],
        )
        for queue in queues[:MAX_QUEUES]
    ]
    more = len(queues) - len(rows)
    problems = list(fleet.problems)
    if more > 0:
        problems.append(f"{more:,} queues with fewer letters are not shown; `dlq queues` has all.")
    return call.page(
        "overview.html",
        section="overview",
        title="Dead-letter queues",
        rows=rows,
        problems=problems,
        memory=fleet.memory,
        guarded=fleet.guarded,
        workers=fleet.workers,
    )


def _columns(queue: QueueSummary) -> Columns:
    """Letters by reason in each of the last thirty times two minutes, for bars."""
    columns = []
    for start in range(0, 60, MINUTES_PER_BAR):
        counts = {
            reason: sum(minutes[start : start + MINUTES_PER_BAR])
            for reason, minutes in queue.arrivals.items()
        }
        columns.append((f"{60 - start} to {60 - start - MINUTES_PER_BAR} minutes ago", counts))
    return columns
