"""What keeps or moves messages now: holds, circuit breakers and jobs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from celery_dlq.operations.job import INTERRUPTED, RUNNING, WAITING

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.operations.job import Job
    from celery_dlq.operations.release import HeldMessages

_INTERRUPTED_SHOWN = timedelta(days=1)


@dataclass(frozen=True, kw_only=True)
class InForce:
    """What keeps or moves messages now, as people may see it."""

    held: Sequence[HeldMessages] = ()  # Holds and circuit breakers
    # Those that run, wait, or were interrupted within the last day; newest first
    jobs: Sequence[Job] = ()
    error: str = ""  # Why that is unknown now

    @classmethod
    def of(cls, assembly: Assembly, jobs: Sequence[Job]) -> InForce:
        """Ask the store for what is held."""
        held, now = assembly.held_queues().held_messages(), datetime.now(timezone.utc)
        active = [
            job
            for job in jobs
            if job.state in (RUNNING, WAITING)
            or (job.state == INTERRUPTED and now - job.updated_at < _INTERRUPTED_SHOWN)
        ]
        return cls(
            held=[one.shown(assembly.redaction) for one in held],
            jobs=[job.shown(assembly.redaction) for job in active],
        )

    @property
    def names(self) -> list[str]:
        """What there is, each with its state: the pages know by it that something came or went."""
        held = (f"{one.hold.id} {one.state}" for one in self.held)
        return [*held, *(f"{job.id} {job.state}" for job in self.jobs)]

    def holding(self, tasks: Collection[str], queues: Collection[str]) -> list[HeldMessages]:
        """What holds messages of some tasks in some queues."""
        return [
            one
            for one in self.held
            if one.state != "ended"
            and any(one.hold.covers(task, queue) for task in tasks for queue in queues)
        ]


NOTHING_IN_FORCE = InForce()
