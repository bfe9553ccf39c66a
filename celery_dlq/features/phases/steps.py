"""What is next after a redrive, by the verdict on its messages: as commands, and for the pages."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from celery_dlq.operations.incidents import Incidents, hold_command, on_queue
from celery_dlq.operations.job import DONE, REDRIVES, RUNNING, STOPPED, WAITING, Job

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.operations.incidents import Incident
    from celery_dlq.store.records import Group

_RESUMED = ("interrupted", "cancelled", "stopped", "failed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step that is likely next.

    Attributes:
        words: What it does.
        command: The command of ``dlq`` that does it; ``TEXT`` stands for what one writes.
    """

    words: str
    command: str
    # Where the pages have it: a route with its query and parts, or a place on the job's page
    route: str = ""
    query: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, str] = field(default_factory=dict)
    place: str = ""
    incident: Incident | None = None  # Of the step that holds it: with what sets its letters apart


class Steps:
    """Says what is next; `DeadLetters` describes the arguments that methods share."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly

    def next_steps(self, job_id: str) -> list[Step]:
        """What is likely next after a redrive, by how its messages do: the most likely first.

        They died: look, hold, note. They are held: release. They are open: wait. They succeeded:
        redrive the rest, or resolve the cause.
        """
        return [*self.after(self._assembly.jobs().job(job_id))]

    def after(self, job: Job) -> Iterator[Step]:
        """The steps after a job whose messages' ends are counted."""
        if job.kind not in REDRIVES:
            return
        canary, cause = job.canary, self._assembly.reading().group_of(job)
        verdict = canary.get("verdict", "") if job.state == STOPPED else ""
        died = verdict == "died again" or job.counts.get("died_again", 0)
        if job.state in (RUNNING, WAITING):
            yield Step(words="Wait: it goes on by itself", command=f"jobs status {job.id}")
        if died:
            yield from self._after_deaths(job, cause)
        held = canary if verdict == "held" else job.unfinished if job.state == STOPPED else {}
        for hold_id in held.get("holds", ()):
            release = f"release {shlex.quote(hold_id)}"
            yield Step(words="Release what holds them", command=release, route="holds")
        if job.unknown or verdict == "not finished":
            watch = f"jobs status {job.id}"
            yield Step(words="Watch how the open ones end", command=watch)
        if job.state in _RESUMED:
            words = "Go on with it" if verdict in ("", "held") else "Try again, once it is mended"
            yield Step(words=words, command=f"jobs resume {job.id}", place="resume")
        if job.state == DONE and cause is not None and not died:
            yield from self._after_success(job, cause)

    def _incident_of(self, queue: str, cause: Group) -> Incident | None:
        """A cause with what sets its letters apart: what is held of it."""
        if not cause.letters:
            return None
        incidents = Incidents(self._assembly)
        return incidents.of_cause(queue, cause, incidents.example_of(queue, cause))

    def _named(self, job: Job, cause: Group) -> str:
        """A cause as commands name it: with its queue, if another queue has it, too."""
        elsewhere = self._assembly.reading().is_elsewhere(job.queue, cause.fingerprint)
        of_queue = f" --queue {shlex.quote(job.queue)}" if elsewhere else ""
        return f"{cause.digits}{of_queue}"

    def _after_deaths(self, job: Job, cause: Group | None) -> Iterator[Step]:
        where = f"headers.dlq_redrive={job.id}"
        look = on_queue("list", job.queue, f"--where {where}")
        of_queue = {"queue": job.queue}
        query = {"conditions": where}
        words = "Look at those that died again"
        yield Step(words=words, command=look, route="letters", query=query, parts=of_queue)
        if cause is None:
            return
        digits = cause.digits
        if cause.task_name:
            incident = self._incident_of(job.queue, cause)
            conditions = incident.conditions if incident is not None else ()
            hold = hold_command(cause.task_name, conditions, digits)
            place = "" if incident is None else "hold"
            words = "Hold the task"
            if incident is not None and incident.remark:
                words = f"Hold all of the task ({incident.remark})"
            yield Step(words=words, command=hold, route="holds", place=place, incident=incident)
        yield Step(
            words="Note it", command=f"note {self._named(job, cause)} TEXT", place="incident"
        )

    def _after_success(self, job: Job, cause: Group) -> Iterator[Step]:
        digits = cause.digits
        if cause.letters:
            yield Step(
                words=f"Redrive the other {cause.letters:,}",
                command=on_queue("redrive", job.queue, f"--fingerprint {digits}"),
                route="redrive_form",
                query={"fingerprint": cause.fingerprint},
                parts={"queue": job.queue},
            )
        workers = self._assembly.backend.workers.workers(with_tasks=False)
        release = cause.release_with_fix(one.release for one in workers)
        in_release = f" --release {shlex.quote(release)}" if release else ""
        words = f"Resolve in {release}" if release else "Resolve"
        if job.unknown:
            words += ", when none of them dies again"
        yield Step(
            words=words, command=f"resolve {self._named(job, cause)}{in_release}", place="incident"
        )
