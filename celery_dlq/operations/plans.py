"""Plans: jobs that show what they would do, and wait for a yes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.letters import json_codec
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.discard import DiscardOptions
from celery_dlq.operations.edit import MAX_CHANGE_CHARS, Edit, arguments
from celery_dlq.operations.job import REDRIVES, REMOVALS, Job
from celery_dlq.operations.jobs import JobRun, Jobs
from celery_dlq.operations.preview import Preview, dry_run_of
from celery_dlq.operations.reading import Progress, Reading
from celery_dlq.operations.redrive.canary import too_late
from celery_dlq.operations.redrive.checks import RedriveKeys, redrive_options
from celery_dlq.operations.redrive.dry_run import DryRun, dry_run, refuse_lost
from celery_dlq.operations.redrive.message import Outgoing
from celery_dlq.operations.redrive.selection import PositionRange, RawEntry, select
from celery_dlq.operations.running import Running
from celery_dlq.policies.checks import check_names
from celery_dlq.store.store import Store

if TYPE_CHECKING:
    from typing_extensions import Unpack

_PREVIEW_SECONDS = 10.0
_GLANCED, _GLANCE_SECONDS = 500, 1.0
_PLANNED = (*REDRIVES, *REMOVALS)


class PlanOptions(RedriveKeys, total=False):
    """The options of a job that is planned: those of a redrive, or of a discard."""

    forever: bool
    export_path: str | None


class Plans:
    """Makes plans and starts them; the methods are those of `DeadLetters`."""

    def __init__(self, backend: Store, reading: Reading, running: Running) -> None:
        self._store = backend.letters
        self._jobs = Jobs(backend.jobs)
        self._reading = reading
        self._running = running
        self._checks = running.checks

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
        return self.keep(run.job)

    def keep(self, job: Job) -> Job:
        """Keep a plan that was prepared, so that `start` finds it."""
        return self._jobs.plan(job)

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
        kept, text = self._planned_options(kind, options), ""
        if kind == "edit":
            if change is None or len(where.ids or ()) != 1:
                raise DLQError("expected a change and the id of one letter, to edit it")
            (letter_id,) = where.ids or ("",)
            _, found = self._reading.entry(letter_id, dead_letter_queue)
            text = self._checks.check_edit(change, found, kept)
            if not text:
                raise DLQError(
                    f"expected a change of at most {MAX_CHANGE_CHARS:,} characters of JSON, got "
                    f"a longer one; change single values by their paths"
                )
            where = LetterFilter(ids=frozenset({found.key}))
            kept["changed"] = change.paths()
        if force and kind in REDRIVES:
            kept["force"] = True
        run = self._running.new(kind, dead_letter_queue, where, kept, text)
        return run, self._preview(run, where, seconds, scanned, change)

    def start(self, job_id: str, *, at: datetime | None = None) -> Job:
        """Let a plan wait for a process that runs jobs: a worker, `dlq web`, or your own.

        Whoever calls it second, or clicks twice, gets the same job. What would be lost is looked
        for again when it is run.
        """
        return self._jobs.start(job_id, _refuse_lost, at)

    def edited_arguments(self, job_id: str) -> tuple[dict[str, Any], dict[str, Any]]:
        """``args`` and ``kwargs`` of a letter before and after an edit that is planned."""
        job = self._jobs.get(job_id)
        if not job.change:
            raise DLQError(f"expected a planned edit, got job {job_id}, a {job.kind}")
        letter_id = next(iter(job.filter["ids"]), "")  # none if it went while it was planned
        _, found = self._reading.entry(letter_id, job.queue)
        apply = self._checks.edited(Edit.from_text(job.change), job.actor)
        before = self._checks.message(found, job.options)
        after = apply(self._checks.message(found, job.options))
        return _arguments(before), _arguments(after)

    def waits_for(self, dead_letter_queue: str, where: LetterFilter) -> list[str]:
        """What the messages of the oldest letters would wait for; see `DryRun`."""

        def matching(check: Progress) -> Iterator[RawEntry]:
            return islice(select(self._store, dead_letter_queue, where, scanned=check), _GLANCED)

        targets = self._checks.targets(None)
        found = Preview(matching, seconds=_GLANCE_SECONDS).entries()
        return list(dict.fromkeys(chain.from_iterable(map(targets.waits_for, found))))

    def _planned_options(self, kind: str, options: Mapping[str, Any]) -> dict[str, Any]:
        if kind in REDRIVES:
            check_names(f"options of {kind}", options, RedriveKeys.__annotations__)
            kept = redrive_options(**options)
            self._checks.check_target(kept.get("to_queue"))
            return kept
        if kind not in _PLANNED:
            raise DLQError(f"expected a kind of job ({', '.join(_PLANNED)}), got {kind!r}")
        known = [field.name for field in fields(DiscardOptions)]
        check_names(f"options of {kind}", options, known)
        removal = DiscardOptions(**{**options, **({"forever": True} if kind == "purge" else {})})
        return removal.to_json()

    def _preview(
        self,
        run: JobRun,
        where: LetterFilter,
        seconds: float,
        scanned: Progress | None,
        change: Edit | None,
    ) -> DryRun:
        """Make a dry run; from then on the job has only letters that this has counted."""
        job, limit, last = run.job, run.job.options.get("limit"), run.job.until
        keys: set[str] = set()

        def matching(check: Progress) -> Iterator[RawEntry]:
            nonlocal last
            span = PositionRange(until=job.until)
            found = select(self._store, job.queue, where, span=span, scanned=check)
            for one in islice(found, limit):
                yield one if change is None else self._edited(one, change, job.options)
                last = one.position  # it was counted in time
                if where.ids is not None:
                    keys.add(one.key)

        preview = Preview(matching, seconds=seconds, scanned=scanned)
        if job.kind in REDRIVES:
            seen = dry_run(preview.entries(), self._checks.targets(job.options.get("to_queue")))
            seen = replace(seen, waits_for={**too_late(job.options), **seen.waits_for})
        else:
            seen = preview.removal()
        letters = seen.letters + seen.corrupt
        if limit is not None and not preview.exact:
            run.tell(note=_cut(letters, limit, seconds))
            preview.exact = True  # it has these, and no others
        if preview.exact:
            run.tell(total=letters)
            if where.ids is not None:
                run.tell(filter=replace(where, ids=frozenset(keys)).to_json())
            elif limit is not None:
                run.tell(until=last)
        run.tell(preview=preview.to_json(seen))
        return seen

    def _edited(self, found: RawEntry, change: Edit, options: Mapping[str, Any]) -> RawEntry:
        """The entry of a letter with the arguments and headers that its message would have."""
        sent = self._checks.edited(change)(self._checks.message(found, options))
        parts = {**_arguments(sent), "headers": sent.headers}
        new = {name: json_codec.dumps(part).encode() for name, part in parts.items()}
        named = {b"args_json": new["args"], b"kwargs_json": new["kwargs"]}
        return RawEntry(found.position, {**found.fields, **named, b"headers": new["headers"]})


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
