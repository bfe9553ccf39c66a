"""Running jobs: makes them, runs them to their ends, and records these in the audit."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from celery_dlq.errors import CorruptLetter, DLQError
from celery_dlq.events import Action, Change, Events, Redriven, on_behalf_of, whoami
from celery_dlq.features.auto_redrive.operations import AutoRedrives, Due, numbers
from celery_dlq.features.auto_redrive.policy import AutoRedrive
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import from_micros
from celery_dlq.metrics import Measuring
from celery_dlq.operations.discard import Discarder, DiscardOptions
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.job import DONE, FAILED, REDRIVES, STOPPED, WAITING, Job
from celery_dlq.operations.jobs import CancelledError, JobRun, Jobs
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.reading import Progress
from celery_dlq.operations.redrive.canary import Canary, why_stopped
from celery_dlq.operations.redrive.checks import Checks
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions, released
from celery_dlq.operations.redrive.publisher import broker_name
from celery_dlq.operations.redrive.redrive import Loss, Redriver, first_failures
from celery_dlq.operations.redrive.selection import RawEntry
from celery_dlq.operations.results import DiscardReport, RedriveReport
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.instructions import Hold
from celery_dlq.store.records import Clock, MessageKey
from celery_dlq.store.store import Store

_LOOK_SECONDS = 0.5
_ACTIONS = {
    "redrive": Action.REDRIVEN,
    "edit": Action.REDRIVEN,
    "discard": Action.DISCARDED,
    "purge": Action.PURGED,
    "release": Action.RELEASED,
}


class Running:
    """Makes and runs jobs; safe against crashes and other operators."""

    def __init__(
        self,
        app: Any,
        backend: Store,
        policies: PolicyAdmin,
        checks: Checks,
        *,
        events: Events,
        measuring: Measuring,
        clock: Clock,
    ) -> None:
        self.checks = checks
        self._app = app
        self._store = backend.letters
        self._held = backend.held
        self._instructions = backend.instructions
        self._registry = backend.workers
        self._jobs = Jobs(backend.jobs)
        self._policies = policies
        self._events = events
        self._measuring = measuring
        self._clock = clock

    # -- new jobs -----------------------------------------------------------------

    def new(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: Mapping[str, Any],
        change: str = "",
    ) -> JobRun:
        """Make a job on the letters of a queue that are there now; listed once it has begun."""
        # In this order: a letter that arrives in between is counted, but not worked on.
        until = self._store.last_position(queue) or self._store.position_at(from_micros(0))
        total: int | None = None
        if where.ids is not None:
            total = len(where.ids)
        elif not where:
            total = self._store.length(queue)
        return self._jobs.new(
            kind,
            queue,
            where=where.to_json(),
            options=options,
            until=until,
            total=total,
            change=change,
            broker=self._broker() if kind in REDRIVES else "",
        )

    def new_release(self, hold_id: str, options: Mapping[str, Any]) -> JobRun:
        """Make a job that releases held messages; for `Holds`, which says which ones."""
        return self._jobs.new(
            "release",
            hold_id,
            where={},
            options=options,
            until=None,
            total=None,
            broker=self._broker(),
        )

    def release_probe(self, hold_id: str, marker: str) -> int:
        """Release the oldest message of a circuit breaker's hold; return how many were (0 or 1).

        Not listed as a job: there is one every few seconds for as long as it is open.
        """
        options = {"limit": 1, "marker": marker}
        run = self._jobs.unlisted("release", hold_id, options=options)
        report = self._release(run, None, None)
        return report.published + report.finished

    # -- running them -------------------------------------------------------------

    def run(
        self,
        run: JobRun,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        *,
        edit: Edit | None = None,
    ) -> Any:
        """Run a job, planned or not; for an edit whose change the job does not keep, pass it."""
        action = _ACTIONS[run.job.kind]
        report: RedriveReport | DiscardReport
        try:
            with _noting(self, run, action):
                if run.job.kind == "release":
                    report = self._release(run, progress, scanned)
                elif run.job.kind in REDRIVES:
                    report = self._redrive(run, progress, scanned, edit)
                else:
                    report = Discarder(self._store).discard(
                        run,
                        LetterFilter.from_json(run.job.filter),
                        DiscardOptions.from_json(run.job.options),
                        progress=progress,
                        scanned=scanned,
                    )
        finally:
            self._measuring.close()
        self._ended(run, report, action)
        return report

    def resume(
        self,
        job_id: str,
        *,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport | DiscardReport:
        """Continue a job here whose process died, or that waits, was cancelled or stopped.

        A redrive that has not passed its canary starts with a new canary.
        """
        _check_change(self._jobs.get(job_id))
        report: RedriveReport | DiscardReport = self.run(
            self._jobs.again(job_id), progress, scanned
        )
        return report

    def resume_in_background(self, job_id: str) -> Job:
        """Like `resume`, but by a process that runs jobs; also from there if it has ended."""
        _check_change(self._jobs.get(job_id))
        return self._jobs.wait_again(job_id)

    def run_next(self, stopping: Callable[[], bool]) -> Job | None:
        """Run the job that waits longest, on behalf of who started it; for `Runner`."""
        run = self._jobs.next_run(self._may_run)
        if run is None:
            return None
        run.stopping = stopping
        with on_behalf_of(run.job.actor):
            self.run(run)
        return run.job

    def redrive_due(
        self, table: PolicyTable, stopping: Callable[[], bool]
    ) -> Generator[Job, None, None]:
        """Redrive what is due by the policy key ``auto_redrive``; yields each job when it ended."""

        def new_job(queue: str, options: Mapping[str, Any]) -> JobRun:
            return self.new("redrive", queue, LetterFilter(), options)

        due = AutoRedrives(self._store, self._jobs, new_job, self.run)
        return due.due(lambda name: _rule_of(table, name), stopping)

    def record(self, action: Action, target: str, letters: int, detail: Mapping[str, Any]) -> None:
        """Record a change in the audit, and emit it."""
        change = Change(
            at=self._clock(),
            action=action,
            actor=whoami(),
            target=target,
            letters=letters,
            detail=detail,
        )
        self._registry.record(change)
        self._events.emit(change)

    # -- internals ----------------------------------------------------------------

    def _may_run(self, job: Job) -> bool:
        """False for a job of a later version, of another broker, or with a file elsewhere."""
        return (
            job.kind in _ACTIONS
            and job.broker in ("", self._broker())
            and ("export_path" not in job.options or job.host == socket.gethostname())
        )

    def _broker(self) -> str:
        """The broker of this process, as a job names it: two hosts may call it differently."""
        return broker_name(self._app)

    def _redrive(
        self,
        run: JobRun,
        progress: Progress | None,
        scanned: Progress | None,
        edit: Edit | None,
    ) -> RedriveReport:
        job, transform = run.job, None
        where = LetterFilter.from_json(job.filter)
        if job.kind == "edit":
            edit = edit or Edit.from_text(job.change)
            transform = self.checks.edited(edit)
        options = RedriveOptions.from_json(job.options)
        due = Due.from_json(job.options.get("due"))
        rule = _rule_of(self._policies.in_force(), job.queue) if due else None
        if due and (rule is None or due not in numbers(rule)):
            raise DLQError("the policy of the queue has no auto_redrive any more, or just changed")
        report = self._redriver().redrive(
            run,
            where,
            options,
            canary=Canary.from_json(job.options.get("canary")),
            transform=transform,
            loss=None if options.force else self.checks.loss(options.to_queue),
            due=due,
            progress=progress,
            scanned=scanned,
        )
        run.tell(failed=first_failures(report))
        if job.kind == "edit" and report.published + report.finished:
            (letter_id,) = where.ids or ("",)
            changed = {
                "letter": letter_id,
                "redrive": report.redrive_id,
                "changed": job.options.get("changed", []),
            }
            self.record(Action.EDITED, job.queue, 1, changed)
        return report

    def _redriver(self) -> Redriver:
        return Redriver(
            self._app,
            self._store,
            self._clock,
            counted_in=self._policies.counted_in,
            confirmed=self._redriven,
            held=self._holds_of,
        )

    def _holds_of(self, messages: Sequence[tuple[MessageKey, Outgoing]]) -> list[str]:
        """The ids of the holds that have some of these messages, one for each of them."""
        holds, found = self._instructions.of(Hold) if messages else [], []
        for key, message in messages:
            for hold in holds:
                entry = replace(key, dead_letter_queue=hold.id).letter_id
                task = str(message.headers.get("task"))
                if hold.covers(task, message.queue) and self._held.entry(hold.id, entry):
                    found.append(hold.id)
                    break
        return found

    def _redriven(self, queue: str, found: Sequence[RawEntry], redrive_id: str) -> None:
        """Count a published batch; decode its letters only if somebody subscribed."""
        self._measuring.redriven(queue, len(found))
        if not self._events.wanted(Redriven):
            return
        for each in found:
            with suppress(CorruptLetter):
                self._events.emit(
                    Redriven(at=self._clock(), letter=each.letter(), redrive_id=redrive_id)
                )

    def _release(
        self, run: JobRun, progress: Progress | None, scanned: Progress | None
    ) -> RedriveReport:
        marker, loss = str(run.job.options.get("marker", "")), self.checks.loss(None)
        if marker:
            loss = self._while_admitted(run.job.queue, marker, loss)
        message_of = partial(released, marker=marker)
        options = RedriveOptions.from_json(run.job.options)
        return Redriver(self._app, self._held, self._clock, message_of=message_of).redrive(
            run,
            LetterFilter(),
            options,
            loss=loss,
            # An unreadable entry at the head would be all that a limit, or a probe, ever meets.
            due=None if options.limit is None else _is_readable,
            progress=progress,
            scanned=scanned,
        )

    def _while_admitted(self, hold_id: str, marker: str, loss: Loss) -> Loss:
        """End a release once its circuit breaker opens again: workers would hold the messages."""
        looked_at = float("-inf")

        def checked(found: RawEntry) -> str:
            nonlocal looked_at
            if time.monotonic() - looked_at > _LOOK_SECONDS:
                looked_at, now = time.monotonic(), self._instructions.now()
                for hold in self._instructions.of(Hold):
                    if hold.id == hold_id and hold.in_force(now) and not hold.admits(marker):
                        raise CancelledError
            return loss(found)

        return checked

    def _ended(self, run: JobRun, report: RedriveReport | DiscardReport, action: Action) -> None:
        if not run.begun:
            return  # nothing matched
        counts = _numbers(report.to_json())
        note = ""
        if isinstance(report, RedriveReport) and report.state in (STOPPED, FAILED):
            away = run.job.note or "the broker took nothing"
            note = why_stopped(run.job.canary) if report.state == STOPPED else away
        elif report.state == DONE and run.job.preview.get("exact") and run.job.run == 1:
            gone = (run.job.total or 0) - report.touched - counts.get("refused", 0)
            note = f"{gone:,} of the {run.job.total:,} planned letters had gone" if gone > 0 else ""
        if run.end(report.state, counts, note).state != WAITING:
            self._record_job(run, action, counts)

    def _record_job(self, run: JobRun, action: Action, counts: Mapping[str, int]) -> None:
        done = counts.get("published", 0) + counts.get("finished", 0) + counts.get("removed", 0)
        detail = {
            "job": run.job.id,
            "state": run.job.state,
            "filter": _short_filter(run.job.filter),
            "options": dict(run.job.options),
            "counts": {name: count for name, count in counts.items() if count},
        }
        self.record(action, run.job.queue, done, detail)


class _noting:  # noqa: N801 - used as a context manager only
    """Records the result of a job that ends with an error or Ctrl-C."""

    def __init__(self, running: Running, run: JobRun, action: Action) -> None:
        self._running, self._run, self._action = running, run, action

    def __enter__(self) -> None:
        return

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, *_: object
    ) -> None:
        if exc is None or not self._run.begun:
            return
        counts = dict(self._run.job.counts)
        with suppress(DLQError):  # the first error is the one to raise
            self._run.end(FAILED, counts, f"{type(exc).__name__}: {exc}"[:500])
            self._running._record_job(self._run, self._action, counts)  # noqa: SLF001 - its part
        if isinstance(exc, KeyboardInterrupt):  # the command prints it
            job = self._run.job.id
            exc.args = (f"Job {job} is interrupted; `dlq jobs resume {job}` goes on.",)


def _is_readable(found: RawEntry) -> bool:
    try:
        released(found, RedriveOptions(), redrive_id="", now=from_micros(0))
    except CorruptLetter:
        return False
    return True


def _check_change(job: Job) -> None:
    if job.kind == "edit" and not job.change:
        raise DLQError(
            f"job {job.id} is an edit that was too long to be kept, so it cannot be resumed; "
            f"edit the letter again"
        )


def _numbers(report: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: value
        for name, value in report.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _short_filter(where: Mapping[str, Any], max_ids: int = 20) -> dict[str, Any]:
    short = dict(where)
    if len(short.get("ids", ())) > max_ids:
        short["ids"] = [*short["ids"][:max_ids], f"and {len(short['ids']) - max_ids} more"]
    return short


def _rule_of(table: PolicyTable, dead_letter_queue: str) -> AutoRedrive | None:
    """What the policy says of automatic redrives; nothing while a change has yet to begin."""
    return (
        None
        if table.rests(dead_letter_queue)
        else table.value_of(dead_letter_queue, "auto_redrive")
    )
