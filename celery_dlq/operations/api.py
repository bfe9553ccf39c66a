"""Redriving and editing letters, now or as a plan that waits for a yes.

A plan is a job that has not started: its dry run fixes the letters, and whoever starts it runs the
very job that was shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime, timedelta
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.letters import json_codec
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.operations.discard import DiscardOptions
from celery_dlq.operations.edit import MAX_CHANGE_CHARS, Edit, arguments
from celery_dlq.operations.job import REDRIVES, REMOVALS, Job, JobRun
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.reading import Reading
from celery_dlq.operations.redrive.checks import (
    DryRun,
    Preview,
    dry_run,
    dry_run_of,
    refuse_lost,
)
from celery_dlq.operations.redrive.message import Outgoing, RedriveKeys, RedriveOptions
from celery_dlq.operations.redrive.select import PositionRange, Progress, RawEntry, select
from celery_dlq.operations.results import RedriveReport
from celery_dlq.policies.checks import check_names

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PREVIEW_SECONDS = 10.0
_WAITS_FOR_LETTERS, _WAITS_FOR_SECONDS = 500, 1.0


class PlanOptions(RedriveKeys, total=False):
    """The options of a job that is planned: those of a redrive, or of a discard."""

    forever: bool
    export_path: str | None


class Operations:
    """Redrives and edits letters, and plans that.

    The methods are those of `DeadLetters`, which describes the arguments that they share.
    """

    def __init__(self, reading: Reading, jobs: Jobs) -> None:
        self._store = jobs.backend.letters
        self._reading = reading
        self._jobs = jobs
        self._checks = jobs.checks

    def redrive(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        rate: float | None = None,
        limit: int | None = None,
        to_queue: str | None = None,
        delay: float | timedelta = 0,
        new_id: bool = False,
        keep_count: bool = False,
        force: bool = False,
        canary: int | None = None,
        max_failures: int = 0,
        canary_wait: float | timedelta = 60,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Unpack[FilterFields],
    ) -> RedriveReport:
        """Publish the original messages of letters again, then remove the letters.

        Exactly once where the letters are in the database of the Redis broker: each is published
        and removed in one step. Elsewhere at least once: after a crash between publishing and
        removing, the next redrive publishes no letter that is known to be published. One batch may
        be uncertain; its letters are published and counted in ``maybe_twice``. Letters that arrive
        during the redrive are not touched.

        A message that would be lost is not published: its letter stays, and the report counts it
        by name under ``refused_by``. Lost means that its queue is neither on the broker nor known
        to anybody, or that no live worker that consumes the queue has its task. The others are
        redriven. If ``to_queue`` is such a queue, nothing is. Each queue and task is checked
        once, when its first letter is met.
        """
        where = filter_of(where, fields)
        options = RedriveOptions.of(
            rate=rate,
            limit=limit,
            to_queue=to_queue,
            delay=delay,
            new_id=new_id,
            keep_count=keep_count,
            force=force,
            canary=canary,
            max_failures=max_failures,
            canary_wait=canary_wait,
        )
        self._checks.target(to_queue)
        self._reading.check_queue(dead_letter_queue)
        run = self._jobs.new("redrive", dead_letter_queue, where, options)
        report: RedriveReport = self._jobs.run(run, progress, scanned)
        return report

    def edit(
        self,
        letter_id: str,
        change: Edit,
        dead_letter_queue: str | None = None,
        *,
        to_queue: str | None = None,
        delay: float | timedelta = 0,
        new_id: bool = False,
        keep_count: bool = False,
        force: bool = False,
    ) -> RedriveReport:
        """Change the arguments of one letter's message, and redrive it.

        The header ``dlq_edited`` records who changed what, when, and the old values. If the
        message dies again, the new letter has it too. The options are those of `redrive`.
        """
        options = RedriveOptions.of(
            to_queue=to_queue, delay=delay, new_id=new_id, keep_count=keep_count, force=force
        )
        queue, found = self._reading.entry(letter_id, dead_letter_queue)
        self._checks.edit(change, found, options)
        if not force:
            refuse_lost(dry_run([found], self._checks.targets(to_queue)))
        where = LetterFilter(ids=frozenset({found.key}))
        options = replace(options, changed=tuple(change.paths()))
        run = self._jobs.new("edit", queue, where, options, change)
        report: RedriveReport = self._jobs.run(run)
        return report

    def dry_run(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        limit: int | None = None,
        to_queue: str | None = None,
        scanned: Progress | None = None,
        **fields: Unpack[FilterFields],
    ) -> DryRun:
        """Report what a redrive would do, and whether its queues and tasks exist."""
        RedriveOptions(limit=limit, to_queue=to_queue)  # checks them
        self._checks.target(to_queue)
        found = self._reading.entries(
            dead_letter_queue, where, limit=limit, scanned=scanned, **fields
        )
        return dry_run(found, self._checks.targets(to_queue))

    # -- plans --------------------------------------------------------------------

    def plan(
        self,
        /,
        kind: str,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        change: Edit | None = None,
        force: bool = False,
        seconds: float = _PREVIEW_SECONDS,
        **options: Unpack[PlanOptions],
    ) -> Job:
        """Make a dry run and keep it as a job, which `start` starts within 15 minutes.

        The job works on the letters that match now, and with a limit on the oldest of them: those
        that go meanwhile are left out and counted in its note, no others take their place. The
        newest 50 plans are kept.
        """
        run, _ = self.prepare(
            kind, dead_letter_queue, where, change=change, force=force, seconds=seconds, **options
        )
        return self._jobs.keep(run.job)

    def prepare(
        self,
        /,
        kind: str,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        change: Edit | None = None,
        force: bool = False,
        seconds: float = float("inf"),
        scanned: Progress | None = None,
        **options: Any,
    ) -> tuple[JobRun, DryRun]:
        """As `plan`, but nothing is kept: a run that this process may begin, and its dry run."""
        where = where or LetterFilter()
        self._reading.check_queue(dead_letter_queue)
        kept = self._planned_options(kind, options, force=force)
        if isinstance(kept, RedriveOptions) and kind == "edit":
            where, kept = self._planned_edit(dead_letter_queue, where, change, kept)
        run = self._jobs.new(kind, dead_letter_queue, where, kept, change)
        return run, self._preview(run, seconds, scanned)

    def start(self, job_id: str, *, at: datetime | None = None) -> Job:
        """Let a plan wait for a process that runs jobs: a worker, `dlq web`, or your own.

        Whoever calls it second, or clicks twice, gets the same job. What would be lost is looked
        for again when it is run.
        """
        return self._jobs.start(job_id, _refuse_lost, at=at)

    def edited_arguments(self, job_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """``args`` and ``kwargs`` of a letter before and after an edit that is planned."""
        job = self._jobs.get(job_id)
        if not job.change:
            raise DLQError(f"expected a planned edit, got job {job_id}, a {job.kind}")
        letter_id = next(iter(job.filter["ids"]), "")  # none if it went while it was planned
        _, found = self._reading.entry(letter_id, job.queue)
        apply = self._checks.edited(Edit.from_text(job.change), job.actor)
        options = RedriveOptions.from_json(job.options)
        before = self._checks.message(found, options)
        after = apply(self._checks.message(found, options))
        return _arguments(before), _arguments(after)

    def waits_for(self, dead_letter_queue: str, where: LetterFilter) -> list[str]:
        """What the messages of the oldest letters would wait for; see `DryRun`."""

        def matching(check: Progress) -> Iterator[RawEntry]:
            return islice(
                select(self._store, dead_letter_queue, where, scanned=check), _WAITS_FOR_LETTERS
            )

        targets = self._checks.targets(None)
        found = Preview(matching, seconds=_WAITS_FOR_SECONDS).entries()
        return list(dict.fromkeys(chain.from_iterable(map(targets.waits_for, found))))

    def _planned_options(
        self, kind: str, options: Mapping[str, Any], *, force: bool = False
    ) -> RedriveOptions | DiscardOptions:
        """The checked options of a plan."""
        if kind in REDRIVES:
            check_names(f"options of {kind}", options, RedriveKeys.__annotations__)
            kept = RedriveOptions.of(**options, force=force)
            self._checks.target(kept.to_queue)
            return kept
        if kind not in REMOVALS:
            kinds = ", ".join((*REDRIVES, *REMOVALS))
            raise DLQError(f"expected a kind of job ({kinds}), got {kind!r}")
        check_names(f"options of {kind}", options, [each.name for each in fields(DiscardOptions)])
        return DiscardOptions(**{**options, **({"forever": True} if kind == "purge" else {})})

    def _planned_edit(
        self, queue: str, where: LetterFilter, change: Edit | None, options: RedriveOptions
    ) -> tuple[LetterFilter, RedriveOptions]:
        """The one letter of an edit that is planned, and its options with the changed paths."""
        if change is None or len(where.ids or ()) != 1:
            raise DLQError("expected a change and the id of one letter, to edit it")
        (letter_id,) = where.ids or ("",)
        _, found = self._reading.entry(letter_id, queue)
        self._checks.edit(change, found, options)
        if len(change.to_text()) > MAX_CHANGE_CHARS:
            raise DLQError(
                f"expected a change of at most {MAX_CHANGE_CHARS:,} characters of JSON, got "
                f"a longer one; change single values by their paths"
            )
        only = LetterFilter(ids=frozenset({found.key}))
        return only, replace(options, changed=tuple(change.paths()))

    def _preview(self, run: JobRun, seconds: float, scanned: Progress | None) -> DryRun:
        """Make a dry run; from then on the job has only letters that this has counted."""
        job, where, limit, last = run.job, run.where, run.options.limit, run.job.until
        keys: set[str] = set()

        def matching(check: Progress) -> Iterator[RawEntry]:
            nonlocal last
            span = PositionRange(until=job.until)
            found = select(self._store, job.queue, where, span=span, scanned=check)
            for one in islice(found, limit):
                yield one if run.change is None else self._edited(one, run.change, run.options)
                last = one.position  # it was counted in time
                if where.ids is not None:
                    keys.add(one.key)

        preview = Preview(matching, seconds=seconds, scanned=scanned)
        if isinstance(run.options, RedriveOptions):
            seen = dry_run(preview.entries(), self._checks.targets(run.options.to_queue))
            seen = replace(seen, waits_for={**_too_late(run.options), **seen.waits_for})
        else:
            seen = preview.removal()
        letters = seen.letters + seen.corrupt
        if limit is not None and not preview.exact:
            run.tell(note=_cut(letters, limit, seconds))
            preview.exact = True  # it has these, and no others
        if preview.exact:
            run.tell(total=letters)
            if where.ids is not None:
                run.set_where(replace(where, ids=frozenset(keys)))
            elif limit is not None:
                run.tell(until=last)
        run.tell(preview=preview.to_json(seen))
        return seen

    def _edited(self, found: RawEntry, change: Edit, options: RedriveOptions) -> RawEntry:
        """The entry of a letter with the arguments and headers that its message would have."""
        sent = self._checks.edited(change)(self._checks.message(found, options))
        parts = {**_arguments(sent), "headers": sent.headers}
        new = {name: json_codec.dumps(part).encode() for name, part in parts.items()}
        named = {b"args_json": new["args"], b"kwargs_json": new["kwargs"]}
        return RawEntry(found.position, {**found.fields, **named, b"headers": new["headers"]})


def _too_late(options: RedriveOptions) -> dict[str, int]:
    """A delay that lets no canary end in time, as `DryRun.waits_for` has it."""
    canary, delay = options.canary, options.delay_seconds
    if canary is None or delay < canary.wait_seconds:
        return {}
    watched = f"longer than the canary is watched, {canary.wait_seconds:g} s"
    return {f"the delay of {delay:g} s, which is {watched}": canary.letters}


def _cut(letters: int, limit: int, seconds: float) -> str:
    """What a plan says that has fewer letters than its limit, because time ran out."""
    if not letters:
        raise DLQError(
            f"expected letters for a plan with a limit of {limit:,}, found none in {seconds:g} s; "
            f"narrow the filter or leave out limit"
        )
    return f"the time for the plan ended at {letters:,} letters of at most {limit:,}"


def _refuse_lost(job: Job) -> None:
    """Refuse a plan of which nothing would be left; else the letters that would be lost stay."""
    plan = dry_run_of(job.preview)
    lost = (
        sum(check.letters for check in checks if check.found is False)
        for checks in (plan.queues, plan.tasks)
    )
    if job.kind in REDRIVES and plan.letters and max(lost) >= plan.letters:
        refuse_lost(plan, force=bool(job.options.get("force")))


def _arguments(message: Outgoing) -> dict[str, Any]:
    args, kwargs, _links = arguments(message.content_type, message.body, message.headers)
    return {"args": args, "kwargs": kwargs}
