"""Redriving and editing letters, now or as a plan that waits for a yes.

A plan is a job that has not started: its dry run fixes the letters, and whoever starts it runs the
very job that was shown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.events import Action
from celery_dlq.letters import json_codec
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.operations.edit import Edit, arguments
from celery_dlq.operations.files import ExportedFiles, opened
from celery_dlq.operations.job import REDRIVES, REMOVALS, Job, JobOptions, JobRun
from celery_dlq.operations.jobs import JobKind
from celery_dlq.operations.reading import Reading, split_arguments
from celery_dlq.operations.redrive.checks import (
    DryRun,
    check_target,
    dry_run,
    refuse_lost,
    targets_of,
)
from celery_dlq.operations.redrive.message import Outgoing, RedriveKeys, RedriveOptions, outgoing
from celery_dlq.operations.redrive.redrive import redrive
from celery_dlq.operations.redrive.remarks import remarks_of
from celery_dlq.operations.redrive.select import Progress, RawEntry, select_entries, without
from celery_dlq.operations.redrive.work import RedriveReport, edited_by
from celery_dlq.operations.release import release
from celery_dlq.operations.removal import DiscardOptions, RestoreOptions, discard, restore
from celery_dlq.policies.checks import check_names
from celery_dlq.store.letters import Letters

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.assembly import Assembly

KINDS = {
    "redrive": JobKind(Action.REDRIVEN, RedriveOptions, redrive),
    "edit": JobKind(Action.EDITED, RedriveOptions, redrive),
    "discard": JobKind(Action.DISCARDED, DiscardOptions, discard),
    "purge": JobKind(Action.PURGED, DiscardOptions, discard),
    "restore": JobKind(Action.RESTORED, RestoreOptions, restore),
    "release": JobKind(Action.RELEASED, RedriveOptions, release),
}
"""The kinds of job, by their names."""

_PREVIEW_SECONDS = 10.0


class RedriveArguments(RedriveKeys, FilterFields, total=False):
    """What a redrive takes: its options, and the fields of a filter."""


class PlanOptions(RedriveKeys, total=False):
    """The options of a job that is planned: those of a redrive, or of a discard."""

    forever: bool


class Operations:
    """Redrives and edits letters, and plans that.

    The methods are those of `DeadLetters`, which describes the arguments that they share.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._store = assembly.backend.letters
        self._reading = Reading(self._store)  # not masked: they work on it
        self._jobs = assembly.jobs()

    def redrive(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **given: Unpack[RedriveArguments],
    ) -> RedriveReport:
        """Publish the original messages of letters again, then remove the letters.

        Exactly once where the letters are on the server of the Redis broker: each is published
        and removed in one step. Elsewhere at least once: after a crash between publishing and
        removing, the next redrive publishes no letter that is known to be published. One batch may
        be uncertain; its letters are published and counted in ``maybe_twice``. Letters that arrive
        during the redrive are not touched.

        A message that would be lost is not published: its letter stays, and the report counts it
        by name under ``refused_by``. Lost means that its queue is neither on the broker nor known
        to anybody, or that no live worker that consumes the queue has its task. The others are
        redriven. If ``to_queue`` is such a queue, nothing is. Each queue and task is checked
        once, when its first letter is met.

        The options are ``limit``, the fields of a filter, and:

        - ``rate``: at most this many letters a second.
        - ``at_most``: go on only while fewer than so many redriven messages wait or run, 1,000 at
          most. It needs what a canary needs: a policy on their queues, or results. The job stops if
          none of them ends for 15 minutes, or all are held; `Job.unfinished` says more.
        - ``to_queue``: publish to this queue instead of each message's own.
        - ``delay``: seconds, or a `timedelta`, before the messages may run.
        - ``new_id``: give each task a new id; its old result stays.
        - ``keep_count``: count earlier deliveries instead of starting at 0. A letter whose message
          has no delivery left stays.
        - ``force``: publish also what would be lost; with ``keep_count``, for one more delivery.
        - ``canary``: first redrive so many letters, spread over the groups, and watch how they
          end, for ``canary_wait`` seconds (default 60). The others follow if at most
          ``max_failures`` (default 0) of them die again or do not end.
        - ``note``: why, for people: for example a ticket. Jobs and audit show it.
        - ``files``: the folder or URL of an export, or what `DeadLetters.files` gives: redrive the
          letters in its files. A letter that is in Redis, too, is removed from there, and goes
          once. Redis keeps a receipt of each letter that was redriven since its queue was first
          exported, for 400 days after the last one, the newest 5.5 million of a queue: whoever
          redrives it again, from Redis or from any folder, is told that it is gone.
        """
        taken = ("progress", "scanned", *RedriveKeys.__annotations__)
        where, options = split_arguments("redrive", where, given, taken)
        run = self._new("redrive", dead_letter_queue, where, options)
        report: RedriveReport = self._jobs.run(run, progress, scanned)
        return report

    def edit(
        self,
        letter_id: str,
        change: Edit,
        dead_letter_queue: str | None = None,
        **options: Unpack[RedriveKeys],
    ) -> RedriveReport:
        """Change the arguments of one letter's message, and redrive it.

        The header ``dlq_edited`` records who changed what, when, and the old values. If the
        message dies again, the new letter has it too. The options are those of `redrive`.
        """
        files = self._files(options)
        reading = self._reading if files is None else files
        queue, found = reading.entry(letter_id, dead_letter_queue)
        where = LetterFilter(ids=frozenset({found.key}))
        run, seen = self.prepare("edit", queue, where, options, change=change)
        refuse_lost(seen, force=run.options.force)
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
        keep_count: bool = False,
        files: str | ExportedFiles = "",
        scanned: Progress | None = None,
        **fields: Unpack[FilterFields],
    ) -> DryRun:
        """Report what a redrive would do, and whether its queues and tasks exist."""
        options: dict[str, Any] = {"limit": limit, "to_queue": to_queue, "keep_count": keep_count}
        options |= {"files": files} if files else {}
        where = filter_of(where, fields)
        return self.prepare("redrive", dead_letter_queue, where, options, scanned=scanned)[1]

    # -- plans --------------------------------------------------------------------

    def plan(
        self,
        /,
        kind: str,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        change: Edit | None = None,
        seconds: float = _PREVIEW_SECONDS,
        **options: Unpack[PlanOptions],
    ) -> Job:
        """Make a dry run and keep it as a job, which `start` starts within 15 minutes.

        The job works on the letters that match now, and with a limit on the oldest of them: those
        that go meanwhile are left out and counted in its note, no others take their place. The
        newest 50 plans are kept.
        """
        run, _ = self.prepare(
            kind, dead_letter_queue, where, options, change=change, seconds=seconds
        )
        return self._jobs.keep_plan(run.job)

    def prepare(
        self,
        kind: str,
        queue: str,
        where: LetterFilter | None,
        options: Mapping[str, Any],
        *,
        change: Edit | None = None,
        seconds: float = float("inf"),
        scanned: Progress | None = None,
    ) -> tuple[JobRun, DryRun]:
        """As `plan`, but nothing is kept: a run that this process may begin, and its dry run."""
        run = self._new(kind, queue, where or LetterFilter(), options, change)
        return run, self._previewed(run, seconds, scanned)

    def start(self, job_id: str, *, at: datetime | None = None, force: bool = False) -> Job:
        """Let a plan wait for a process that runs jobs: a worker, `dlq web`, or your own.

        Whoever calls it second, or clicks twice, gets the same job. What would be lost is looked
        for again when it is run; ``force`` is that of `redrive`, for who has read the plan.
        """
        return self._jobs.start(job_id, partial(_started, force=force), at=at)

    def edited_arguments(self, job_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """``args`` and ``kwargs`` of a letter before and after an edit that is planned."""
        job = self._jobs.get(job_id)
        if not job.change:
            raise DLQError(f"expected a planned edit, got job {job_id}, a {job.kind}")
        letter_id = next(iter(job.filter["ids"]), "")  # none if it went while it was planned
        options = RedriveOptions.from_json(job.options)
        files = self._files({"files": options.files})
        reading = self._reading if files is None else files
        _, found = reading.entry(letter_id, job.queue)
        apply = edited_by(self._jobs, Edit.from_text(job.change), job.actor)
        before = _arguments(self._message(found, options))
        return before, _arguments(apply(self._message(found, options)))

    def _new(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: Mapping[str, Any],
        change: Edit | None = None,
    ) -> JobRun:
        """A job on letters in Redis, or in files of an export."""
        files = self._files(options)
        if files is not None:
            options = {**options, "files": files.place, "files_end": files.source.end(queue)}
        kept = self._options(kind, options)
        reading = self._reading if files is None else files
        reading.check_queue(queue)
        if kind == "edit":
            if change is None or len(where.ids or ()) != 1:
                raise DLQError("expected a change and the id of one letter, to edit it")
            _, found = reading.entry(next(iter(where.ids or ())), queue)
            edited_by(self._jobs, change)(self._message(found, kept))  # to see if it fits
            kept = replace(kept, changed=tuple(change.paths()))
            where = LetterFilter(ids=frozenset({found.key}))
        source = None if files is None else files.source.until(kept.files_end)
        if source is not None and where:  # without a filter its letters are counted
            source.narrowed(where).length(queue)  # names a damaged file before anything is sent
        return self._jobs.new(kind, queue, where, kept, change, source)

    def _files(self, options: Mapping[str, Any]) -> ExportedFiles | None:
        """The files that a redrive names, which must have the bodies of letters."""
        if not options.get("files"):
            return None
        files = opened(options["files"], self._store)
        files.source.refuse_redacted()
        return files

    def _options(self, kind: str, options: Mapping[str, Any]) -> Any:
        """The checked options of a kind of job; those of discards do not know ``force``."""
        if kind in REDRIVES:
            known = (*RedriveKeys.__annotations__, *(["files_end"] if options.get("files") else []))
            check_names(f"options of {kind}", options, known)
            kept = RedriveOptions.of(**options)
            check_target(self._jobs, kept.to_queue)
            return kept
        if kind not in (*REDRIVES, *REMOVALS):
            kinds = ", ".join((*REDRIVES, *REMOVALS))
            raise DLQError(f"expected a kind of job ({kinds}), got {kind!r}")
        check_names(f"options of {kind}", options, [each.name for each in fields(DiscardOptions)])
        return DiscardOptions(**{**options, **({"forever": True} if kind == "purge" else {})})

    def _message(self, found: RawEntry, options: RedriveOptions) -> Outgoing:
        return outgoing(found, options, redrive_id="", now=self._jobs.clock())

    def _previewed(self, run: JobRun, seconds: float, scanned: Progress | None) -> DryRun:
        """Make a dry run; from then on the job has only letters that this has counted."""
        job, where, limit, last = run.job, run.where, run.options.limit, run.job.until
        keys, unread, gone, claimed = set[str](), list[int](), list[int](), list[int]()
        source = self._jobs.source(run, "args_json", "kwargs_json")  # for which a hold may ask
        redrives = isinstance(run.options, RedriveOptions)

        def matching(check: Progress) -> Iterator[RawEntry]:
            nonlocal last
            found = select_entries(
                source, job.queue, where, until=job.until, scanned=check, unread=unread.append
            )
            if source is not self._store:
                found = without(found, partial(source.claims.gone, job.queue), gone.append)
            count = partial(self._count_claimed, job.queue, claimed)
            for one in without(islice(found, limit), count):
                yield one if run.change is None else self._edited(one, run.change, run.options)
                last = one.position  # it was counted in time
                if where.ids is not None:
                    keys.add(one.key)

        targets = targets_of(self._jobs, run.options.to_queue) if redrives else None
        keeps_count = redrives and run.options.keep_count and not run.options.force
        seen = dry_run(matching, targets, keeps_count=keeps_count, seconds=seconds, scanned=scanned)
        waits_for = {**_too_late(run.options), **seen.waits_for}
        seen = replace(seen, waits_for=waits_for, unread=sum(unread), claimed=sum(claimed))
        if redrives and isinstance(source, Letters):
            causes = [str(each["fingerprint"]) for each in seen.groups]
            known = remarks_of(self._jobs, job.queue, causes)
            seen = replace(seen, warnings=known.warnings, notes=known.notes)
        why = [f"letters that match and were redriven before: {sum(gone):,}"] if any(gone) else []
        seen = replace(seen, warnings=[*seen.warnings, *why])
        letters = seen.letters + seen.corrupt
        if limit is not None and not seen.exact:
            run.update(note=_cut_note(letters, limit, seconds))
            seen = replace(seen, exact=True)  # the job has these, and no others
        if seen.exact:
            run.update(total=letters)
            if where.ids is not None and not any(gone):  # the job says what has gone
                run.update(where=replace(where, ids=frozenset(keys)))
            elif limit is not None and source is self._store:
                run.update(until=last)
        run.update(preview=seen.preview())
        return seen

    def _count_claimed(self, queue: str, claimed: list[int], keys: list[str]) -> tuple[()]:
        """Count letters that other operations have now; they are letters of a dry run, too."""
        claimed.append(len(self._store.claims.held_by_others(queue, keys)))
        return ()

    def _edited(self, found: RawEntry, change: Edit, options: RedriveOptions) -> RawEntry:
        """The entry of a letter with the arguments and headers that its message would have."""
        sent = edited_by(self._jobs, change)(self._message(found, options))
        parts = {**_arguments(sent), "headers": sent.headers}
        new = {name: json_codec.dumps(part).encode() for name, part in parts.items()}
        named = {b"args_json": new["args"], b"kwargs_json": new["kwargs"]}
        return RawEntry(found.position, {**found.fields, **named, b"headers": new["headers"]})


def _too_late(options: JobOptions) -> dict[str, int]:
    """A delay that lets no canary end in time, as `DryRun.waits_for` has it."""
    canary = options.canary if isinstance(options, RedriveOptions) else None
    if not isinstance(options, RedriveOptions) or canary is None:
        return {}
    delay = options.delay_seconds
    if delay < canary.wait_seconds:
        return {}
    watched = f"longer than the canary is watched, {canary.wait_seconds:g} s"
    return {f"the delay of {delay:g} s, which is {watched}": canary.letters}


def _cut_note(letters: int, limit: int, seconds: float) -> str:
    """What a plan says that has fewer letters than its limit, because time ran out."""
    if not letters:
        raise DLQError(
            f"expected letters for a plan with a limit of {limit:,}, found none in {seconds:g} s; "
            f"narrow the filter or leave out limit"
        )
    return f"the time for the plan ended at {letters:,} letters of at most {limit:,}"


def _started(job: Job, *, force: bool) -> Job:
    """The job of a plan; refused if nothing would be left: letters that would be lost stay."""
    if job.kind not in REDRIVES:
        if force:
            raise DLQError(f"expected a plan of a redrive to force, got {job.id}, a {job.kind}")
        return job
    plan, given = DryRun.of_preview(job.preview), job.options
    force = force or bool(given.get("force"))
    kinds = (plan.queues, plan.tasks)
    lost = max(sum(one.letters for one in each if one.found is False) for each in kinds)
    if plan.letters and lost >= plan.letters:
        refuse_lost(plan, force=force)
    return replace(job, options={**given, "force": True}) if force else job


def _arguments(message: Outgoing) -> dict[str, Any]:
    found = arguments(message.content_type, message.body, message.headers)
    return {"args": found.args, "kwargs": found.kwargs}
