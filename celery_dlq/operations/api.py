"""Operations that change letters: redrive, edit, discard, trim; their jobs and the audit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from celery_dlq.backends.base import Backend, Clock, Restored
from celery_dlq.config import Settings
from celery_dlq.errors import CorruptLetter, DLQError, NotFound, NotSupported
from celery_dlq.events import Action, Change, Events, Redriven, whoami
from celery_dlq.filters import LetterFilter
from celery_dlq.metrics import Measuring
from celery_dlq.operations.canary import Canary
from celery_dlq.operations.discard import Discarder, DiscardOptions
from celery_dlq.operations.dry_run import Check, DryRun, Targets, dry_run, refuse_lost
from celery_dlq.operations.edit import Edit, edited
from celery_dlq.operations.jobs import FAILED, STOPPED, Job, JobRun, Jobs
from celery_dlq.operations.message import RedriveOptions, outgoing
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.reading import ID_LENGTH, SHORTEST_PREFIX, Progress, Reading
from celery_dlq.operations.redrive import Redriver
from celery_dlq.operations.results import DiscardReport, RedriveReport
from celery_dlq.operations.retention import Retention
from celery_dlq.operations.selection import RawEntry

_MAX_DISCARDED_SCANNED = 100_000  # per queue, to complete the prefix of an id
_MAX_MARKERS_SCANNED = 200_000


class Operations:
    """Redrives, edits and discards letters; safe against crashes and other operators.

    The methods are those of `DeadLetters`, which describes the arguments that they share.

    Args:
        app: The Celery app.
        settings: Its checked settings.
        backend: Keeps letters, jobs and the audit.
        reading: Finds the letters.
        policies: Knows the policies in force.
        events: Receives every redriven letter and every change.
        measuring: Counts redriven letters.
        clock: Returns the present, aware UTC.
    """

    def __init__(
        self,
        app: Any,
        settings: Settings,
        backend: Backend,
        reading: Reading,
        policies: PolicyAdmin,
        *,
        events: Events,
        measuring: Measuring,
        clock: Clock,
    ) -> None:
        self._app = app
        self._settings = settings
        self._store = backend.letters
        self._registry = backend.workers
        self._jobs = Jobs(backend.jobs)
        self._successes = backend.jobs.succeeded
        self._reading = reading
        self._policies = policies
        self._events = events
        self._measuring = measuring
        self._clock = clock

    # -- redriving ----------------------------------------------------------------

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
        **fields: Any,
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

        Args:
            rate: At most this many letters per second; ``None`` for no limit.
            to_queue: Publish to this queue instead of each message's own.
            delay: Seconds, or a timedelta, before the messages may run.
            new_id: Give each task a new id.
            keep_count: Count earlier deliveries: a message is executed once more, then as
                often as its ``max_deliveries`` has left.
            force: Publish also what would be lost; the job and the audit have it.
            canary: First redrive this many letters, taken from all groups in turn, and watch
                how they end.
            max_failures: Continue if at most this many letters of the canary die again or do
                not end in time.
            canary_wait: Seconds, or a timedelta, to watch the canary.

        Raises:
            NotFound: The queue does not exist.
            StoreUnavailable: The store does not answer.
            RedriveError: All messages would be lost in ``to_queue``.
            DLQError: An option or a field of the filter is not usable.
        """
        where = where or LetterFilter(**fields)
        options = RedriveOptions(
            rate=rate,
            limit=limit,
            to_queue=to_queue,
            delay_seconds=_seconds(delay),
            new_id=new_id,
            keep_count=keep_count,
            force=force,
        )
        self._check_target(to_queue)
        trial = None
        if canary is not None:
            trial = Canary(
                letters=canary, max_failures=max_failures, wait_seconds=_seconds(canary_wait)
            )
        self._reading.check_queue(dead_letter_queue)
        kept = {**options.to_json(), **({} if trial is None else {"canary": trial.to_json()})}
        run = self._new_job("redrive", dead_letter_queue, where, kept)
        return self._redrive(run, where, options, trial, progress, scanned)

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

        Args:
            letter_id: As for `get`.
            change: The change.
            dead_letter_queue: The letter's queue; ``None`` searches all queues.

        Raises:
            NotFound: The letter does not exist.
            DLQError: Its body is not plain JSON, or the change does not fit it.
            RedriveError: The message would be lost.
            StoreUnavailable: The store does not answer.
        """
        options = RedriveOptions(
            to_queue=to_queue,
            delay_seconds=_seconds(delay),
            new_id=new_id,
            keep_count=keep_count,
            force=force,
        )
        self._check_target(to_queue)
        queue, found = self._reading.entry(letter_id, dead_letter_queue)
        apply = edited(change, actor=whoami(), now=self._clock())
        # Apply it once before the claim: a change that does not fit must not touch the letter.
        apply(outgoing(found, options, redrive_id="", now=self._clock()))
        if not force:
            refuse_lost(dry_run([found], self._targets(to_queue)))
        where = LetterFilter(ids=frozenset({found.key}))
        run = self._new_job("redrive", queue, where, {**options.to_json(), "edited": True})
        try:
            report = self._redriver().redrive(run, where, options, transform=apply)
        finally:
            self._store.done()
        if report.published:
            changed = {"letter": found.key, "redrive": report.redrive_id}
            self._record(Action.EDITED, queue, 1, changed)
        self._ended(run, report, Action.REDRIVEN, where)
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
        **fields: Any,
    ) -> DryRun:
        """Report what a redrive would do, and whether its queues and tasks exist.

        Raises:
            NotFound: The queue does not exist.
            StoreUnavailable: The store does not answer.
        """
        RedriveOptions(limit=limit, to_queue=to_queue)  # checks them
        self._check_target(to_queue)
        found = self._reading.entries(
            dead_letter_queue, where, limit=limit, scanned=scanned, **fields
        )
        return dry_run(found, self._targets(to_queue))

    # -- discarding ---------------------------------------------------------------

    def discard(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        forever: bool = False,
        limit: int | None = None,
        export_first: str | Path | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> DiscardReport:
        """Remove letters from their queue; `restore` puts them back within 24 hours.

        Args:
            forever: Remove them permanently.
            export_first: Write them to this Parquet file first, or to a new file in this folder.

        Raises:
            NotFound: The queue does not exist.
            ExportError: The file cannot be written; nothing was removed.
            StoreUnavailable: The store does not answer.
            DLQError: An option or a field of the filter is not usable.
        """
        return self._discard(
            "discard",
            dead_letter_queue,
            where or LetterFilter(**fields),
            DiscardOptions(forever=forever, limit=limit),
            export_first,
            progress,
            scanned,
        )

    def purge(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        limit: int | None = None,
        export_first: str | Path | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> DiscardReport:
        """Remove letters permanently: `discard` with ``forever``; the audit names it a purge."""
        return self._discard(
            "purge",
            dead_letter_queue,
            where or LetterFilter(**fields),
            DiscardOptions(forever=True, limit=limit),
            export_first,
            progress,
            scanned,
        )

    def restore(self, letter_id: str, dead_letter_queue: str | None = None) -> str:
        """Put a discarded letter back, as the newest of its queue.

        Args:
            letter_id: The letter's id, or a prefix of 6 characters or more.
            dead_letter_queue: Its queue; ``None`` searches the bins of all queues.

        Returns:
            The name of its queue.

        Raises:
            NotFound: No bin has the letter, or the prefix fits several discarded letters.
            DLQError: The queue has a letter with this id again.
            StoreUnavailable: The store does not answer.
        """
        self._check_bin()
        if dead_letter_queue is not None:
            self._reading.check_queue(dead_letter_queue)
        names = [dead_letter_queue] if dead_letter_queue else self._store.names()
        names = self._store.binned(names)
        if SHORTEST_PREFIX <= len(letter_id) < ID_LENGTH:
            letter_id = self._discarded_id(names, letter_id)
        for name in names:
            restored = self._store.restore(name, letter_id)
            if restored is Restored.TAKEN:
                raise DLQError(
                    f"{name} has a letter {letter_id} again, because its message died again; "
                    f"the discarded letter stays in the bin"
                )
            if restored is Restored.RESTORED:
                self._record(Action.RESTORED, name, 1, {"letter": letter_id})
                return name
        raise NotFound(
            f"no bin has a letter with the id {letter_id!r}; discarded letters stay there 24 hours"
        )

    def discarded(self, dead_letter_queue: str) -> Iterator[RawEntry]:
        """The letters in the bin of a queue, newest first."""
        self._reading.check_queue(dead_letter_queue)
        self._check_bin()
        for page in self._store.discarded(dead_letter_queue):
            for position, fields in page:
                kept = dict(fields)
                key = kept.pop(b"~key", b"").decode("utf-8", "replace")
                found = RawEntry(position, kept)
                found.key = key or found.key
                yield found

    def trim(self, *dead_letter_queues: str, dry_run: bool = False) -> list[Change]:
        """Remove letters past ``dead_letter_ttl`` or over ``dead_letter_max_length`` now.

        Workers trim on their own; call this for queues that no worker consumes.

        Args:
            *dead_letter_queues: The queues to trim; none for all.
            dry_run: Return what the next pass would trim, up to 500 letters per queue and
                cause, and change nothing.

        Returns:
            One change per queue and cause.

        Raises:
            NotFound: A queue does not exist.
            StoreUnavailable: The store does not answer.
        """
        for name in dead_letter_queues:
            self._reading.check_queue(name)
        table = self._policies.in_force()
        retention = Retention(self._store, self._registry, self._events, whoami())
        names = dead_letter_queues or self._store.names()
        policies = {name: table.of_dead_letter_queue(name) for name in names}
        policies = {name: policies[name] for name in retention.due(policies)}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        return [change for n, p in policies.items() for change in retention.trim_all(n, p)]

    # -- jobs and audit -----------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The jobs, newest first; the newest 500 are kept."""
        return self._jobs.all()

    def job(self, job_id: str) -> Job:
        """One job; for a redrive also how many of its messages ``died_again`` and ``succeeded``.

        A new letter's header names the redrive of its message. Workers count successes, on
        guarded queues only.

        Raises:
            NotFound: The job does not exist.
        """
        job = self._jobs.get(job_id)
        if job.kind != "redrive":
            return job
        ends = {"died_again": self._died_again(job), "succeeded": self._successes(job_id)}
        return replace(job, counts={**job.counts, **ends})

    def cancel(self, job_id: str) -> Job:
        """End a job after its current batch; no letter is left half done.

        Raises:
            NotFound: The job does not exist.
            DLQError: The job has ended.
        """
        return self._jobs.cancel(job_id)

    def resume(
        self,
        job_id: str,
        *,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport | DiscardReport:
        """Continue a job whose process died, or that was cancelled or stopped.

        A redrive that has not passed its canary starts with a new canary.

        Raises:
            NotFound: The job does not exist.
            DLQError: The job is running or done, or is an edit, whose change is not kept.
        """
        jobs = self._jobs
        job = jobs.get(job_id)
        if job.options.get("edited"):
            raise DLQError(
                f"job {job_id} is an edit, which cannot be resumed; edit the letter again"
            )
        where = LetterFilter.from_json(job.filter)
        options = {name: value for name, value in job.options.items() if name != "canary"}
        run = jobs.again(job_id)
        if job.kind == "redrive":
            trial = Canary.from_json(job.options.get("canary"))
            return self._redrive(run, where, RedriveOptions(**options), trial, progress, scanned)
        return self._do_discard(run, where, DiscardOptions(**options), progress, scanned)

    def changes(self, limit: int = 100) -> list[Change]:
        """The audit, newest first: who changed what; the newest 10,000 changes are kept."""
        return self._registry.changes(limit=limit)

    # -- internals ----------------------------------------------------------------

    def _discarded_id(self, names: Sequence[str], prefix: str) -> str:
        """The only id in the bins with this prefix; the prefix itself if there is none."""
        found: set[str] = set()
        for name in names:
            for entry in islice(self.discarded(name), _MAX_DISCARDED_SCANNED):
                if entry.key.startswith(prefix):
                    found.add(entry.key)
                if len(found) > 1:
                    raise NotFound(
                        f"several discarded letters have an id that begins with {prefix!r}: "
                        f"{', '.join(sorted(found))}; give more characters"
                    )
        return found.pop() if found else prefix

    def _redriver(self) -> Redriver:
        return Redriver(
            self._app,
            self._store,
            self._clock,
            dead_letter_queue_of=self._dead_letter_queue_of,
            confirmed=self._redriven,
        )

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

    def _redrive(
        self,
        run: JobRun,
        where: LetterFilter,
        options: RedriveOptions,
        canary: Canary | None,
        progress: Progress | None,
        scanned: Progress | None,
    ) -> RedriveReport:
        try:
            with _noting(self, run, Action.REDRIVEN, where):
                report = self._redriver().redrive(
                    run,
                    where,
                    options,
                    canary=canary,
                    loss=None if options.force else self._loss(options.to_queue),
                    progress=progress,
                    scanned=scanned,
                )
        finally:
            self._store.done()
            self._measuring.close()
        self._ended(run, report, Action.REDRIVEN, where)
        return report

    def _discard(
        self,
        kind: str,
        queue: str,
        where: LetterFilter,
        options: DiscardOptions,
        export_first: str | Path | None,
        progress: Progress | None,
        scanned: Progress | None,
    ) -> DiscardReport:
        self._reading.check_queue(queue)
        if not options.forever:
            self._check_bin()
        run = self._new_job(kind, queue, where, options.to_json())
        if export_first is not None:
            path = _parquet_path(Path(export_first), run.job.id)
            options = replace(options, export_path=str(path.absolute()))
            run.job = replace(run.job, options=options.to_json())
        return self._do_discard(run, where, options, progress, scanned)

    def _do_discard(
        self,
        run: JobRun,
        where: LetterFilter,
        options: DiscardOptions,
        progress: Progress | None,
        scanned: Progress | None,
    ) -> DiscardReport:
        action = Action.PURGED if run.job.kind == "purge" else Action.DISCARDED
        try:
            with _noting(self, run, action, where):
                report = Discarder(self._store).discard(
                    run, where, options, progress=progress, scanned=scanned
                )
        finally:
            self._store.done()
        self._ended(run, report, action, where)
        return report

    def _new_job(
        self, kind: str, queue: str, where: LetterFilter, options: Mapping[str, Any]
    ) -> JobRun:
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
            until=self._store.last_position(queue),
            total=total,
        )

    def _ended(
        self,
        run: JobRun,
        report: RedriveReport | DiscardReport,
        action: Action,
        where: LetterFilter,
    ) -> None:
        if not run.begun:
            return  # nothing matched
        counts = _numbers(report.to_json())
        note = ""
        if isinstance(report, RedriveReport) and report.state in (STOPPED, FAILED):
            note = "the canary died" if report.state == STOPPED else "the broker took nothing"
        run.end(report.state, counts, note)
        self._record_job(run, action, where, counts)

    def _record_job(
        self, run: JobRun, action: Action, where: LetterFilter, counts: Mapping[str, int]
    ) -> None:
        done = counts.get("published", 0) + counts.get("finished", 0) + counts.get("removed", 0)
        detail = {
            "job": run.job.id,
            "state": run.job.state,
            "filter": _short_filter(where),
            "options": dict(run.job.options),
            "counts": {name: count for name, count in counts.items() if count},
        }
        self._record(action, run.job.queue, done, detail)

    def _record(self, action: Action, target: str, letters: int, detail: Mapping[str, Any]) -> None:
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

    def _died_again(self, job: Job) -> int:
        """Number of new letters whose headers name this job; scans a bounded number."""
        marker, died, scanned = f'"{job.id}"'.encode(), 0, 0
        for page in self._store.fields(job.queue, after=job.until, until=None, page_size=500):
            died += sum(marker in fields.get(b"headers", b"") for _position, fields in page)
            scanned += len(page)
            if scanned >= _MAX_MARKERS_SCANNED:
                break
        return died

    def _dead_letter_queue_of(self, queue: str) -> str:
        return self._settings.policies.dead_letter_queue_of(queue)

    def _targets(self, to_queue: str | None) -> Targets:
        """The queues and tasks of a redrive."""
        return Targets(
            self._app,
            self._registry.workers(),
            configured=self._policies.configured_queues(),
            guarded=self._policies.guarded_queues(),
            to_queue=to_queue,
        )

    def _loss(self, to_queue: str | None) -> Callable[[RawEntry], str]:
        """What says why the message of a letter would be lost.

        Raises:
            RedriveError: All would be, because nobody knows the queue.
        """
        targets = self._targets(to_queue)
        if to_queue is not None:
            there, why = targets.queue(to_queue)
            check = Check(name=to_queue, letters=0, found=there, why=why)
            refuse_lost(DryRun(queues=(check,)))
        return targets.loss

    def _check_target(self, to_queue: str | None) -> None:
        if to_queue is None:
            return
        if to_queue in self._store.names() or self._policies.is_dead_letter_queue(to_queue):
            raise DLQError(
                f"expected to_queue to be a queue of tasks, got the dead-letter queue {to_queue!r}"
            )

    def _check_bin(self) -> None:
        if not self._store.capabilities.bin:
            raise NotSupported(
                f"expected a store that keeps discarded letters for 24 hours, got dlq_store = "
                f"{self._settings.store!r}, which has no bin; use --forever (or purge), and "
                f"--export-first to keep a copy"
            )


class _noting:  # noqa: N801 - used as a context manager only
    """Records the result of a job that ends with an error or Ctrl-C."""

    def __init__(
        self, operator: Operations, run: JobRun, action: Action, where: LetterFilter
    ) -> None:
        self._operator, self._run, self._action, self._where = operator, run, action, where

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
            self._operator._record_job(self._run, self._action, self._where, counts)  # noqa: SLF001 - its part


def _seconds(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def _numbers(report: Mapping[str, Any]) -> dict[str, int]:
    return {
        name: value
        for name, value in report.items()
        if isinstance(value, int) and not isinstance(value, bool)
    }


def _short_filter(where: LetterFilter, max_ids: int = 20) -> dict[str, Any]:
    short = where.to_json()
    if len(short.get("ids", ())) > max_ids:
        short["ids"] = [*short["ids"][:max_ids], f"and {len(short['ids']) - max_ids} more"]
    return short


def _parquet_path(path: Path, job_id: str) -> Path:
    if path.suffix != ".parquet":
        path /= f"discarded-{job_id}.parquet"
    if path.exists():
        raise DLQError(
            f"expected {path} to be a new file, got one that exists; choose another name"
        )
    return path
