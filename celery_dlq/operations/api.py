"""What operators change: letters redriven, edited, discarded, trimmed; jobs; the audit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
from celery_dlq.operations.dry_run import DryRun, dry_run
from celery_dlq.operations.edit import Edit, edited
from celery_dlq.operations.jobs import FAILED, STOPPED, Job, JobRun, Jobs
from celery_dlq.operations.message import RedriveOptions, outgoing
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.reading import ID_LENGTH, SHORTEST_PREFIX, Progress, Reading
from celery_dlq.operations.redrive import Redriver
from celery_dlq.operations.results import DiscardReport, RedriveReport
from celery_dlq.operations.retention import Retention
from celery_dlq.operations.selection import RawEntry
from celery_dlq.policies.policy import Policy

_MOST_LOOKED_AT = 100_000  # discarded letters of a queue, for the beginning of an id
_MOST_MARKERS_READ = 200_000


class Operations:
    """Redrives, edits and discards letters; safe against crashes and other operators.

    Args:
        app: The Celery app.
        settings: Its checked settings.
        backend: Where letters, jobs and the audit are.
        reading: Finds the letters.
        policies: The policies in force.
        events: Told of what happens.
        measuring: Counts what is redriven.
        clock: The present, aware UTC.
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
        canary: int | None = None,
        max_failures: int = 0,
        canary_wait: float | timedelta = 60,
        progress: Progress | None = None,
        scanned: Progress | None = None,
        **fields: Any,
    ) -> RedriveReport:
        """Publish the original messages of letters again, then remove the letters.

        At least once: killed between publishing and removing, the next redrive
        publishes no letter again that is known to be published; of the one batch where
        that is not known, it says how many (``maybe_twice``). Letters that arrive
        meanwhile are not touched.

        Args:
            dead_letter_queue: Its name.
            where: Which letters; or give the fields of `LetterFilter` as keywords. With
                neither, all of them.
            rate: Most letters a second; ``None`` for as fast as the broker takes them.
            limit: Most letters.
            to_queue: Publish to this queue instead of the one each message came from.
            delay: Seconds, or a timedelta, after which the messages may run.
            new_id: Give each task a new id.
            keep_count: Earlier deliveries count: a message is executed once more, and then
                only as often as its ``max_deliveries`` has left.
            canary: Redrive so many letters first, spread over the groups, and look what
                becomes of them.
            max_failures: Go on when at most so many of the canary die again or do not end.
            canary_wait: Seconds, or a timedelta, for which to watch the canary.
            progress: Called with the size of every batch that is done.
            scanned: Called with the size of every page that was read.
            **fields: E.g. ``fingerprint="…"``.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
            DLQError: An option or a field is not usable.
        """
        where = where or LetterFilter(**fields)
        options = RedriveOptions(
            rate=rate,
            limit=limit,
            to_queue=to_queue,
            delay_seconds=_seconds(delay),
            new_id=new_id,
            keep_count=keep_count,
        )
        self._check_target(to_queue)
        birds = None
        if canary is not None:
            birds = Canary(
                letters=canary, max_failures=max_failures, wait_seconds=_seconds(canary_wait)
            )
        self._reading.check_queue(dead_letter_queue)
        told = {**options.to_json(), **({} if birds is None else {"canary": birds.to_json()})}
        run = self._new_job("redrive", dead_letter_queue, where, told)
        return self._redrive(run, where, options, birds, progress, scanned)

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
    ) -> RedriveReport:
        """Change the arguments of one letter's message, and redrive it.

        The header ``dlq_edited`` keeps who changed what, when, from what; it is in the next
        letter too, should the message die again.

        Args:
            letter_id: As for `get`.
            change: The change.
            dead_letter_queue: Where the letter is; ``None`` looks in all.
            to_queue: As for `redrive`.
            delay: The same.
            new_id: The same.
            keep_count: The same.

        Raises:
            NotFound: There is no such letter.
            DLQError: Its body is not plain JSON, or the change does not fit it.
            StoreUnavailable: Redis does not answer.
        """
        options = RedriveOptions(
            to_queue=to_queue, delay_seconds=_seconds(delay), new_id=new_id, keep_count=keep_count
        )
        self._check_target(to_queue)
        queue, found = self._reading.entry(letter_id, dead_letter_queue)
        apply = edited(change, actor=whoami(), now=self._clock())
        # Tried out first: a change that does not fit must not even claim the letter.
        apply(outgoing(found, options, redrive_id="", now=self._clock()))
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
        """What a redrive would do, and whether its queues and tasks are there.

        Args:
            dead_letter_queue: As for `redrive`.
            where: The same.
            limit: The same.
            to_queue: The same.
            scanned: The same.
            **fields: The same.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
        """
        options = RedriveOptions(limit=limit, to_queue=to_queue)
        self._check_target(to_queue)
        found = self._reading.entries(
            dead_letter_queue, where, limit=limit, scanned=scanned, **fields
        )
        return dry_run(self._app, found, options, self._registry.workers())

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
        """Take letters out of their queue; for 24 hours, `restore` puts them back.

        Args:
            dead_letter_queue: Its name.
            where: Which letters; or give the fields of `LetterFilter` as keywords. With
                neither, all of them.
            forever: Remove them for good.
            limit: Most letters.
            export_first: Write them to this Parquet file first, or to a new one in this folder.
            progress: Called with the size of every batch that is done.
            scanned: Called with the size of every page that was read.
            **fields: E.g. ``fingerprint="…"``.

        Raises:
            NotFound: There is no such queue.
            ExportError: The file cannot be written; nothing was removed.
            StoreUnavailable: Redis does not answer.
            DLQError: An option or a field is not usable.
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
        """Remove letters for good; `discard` with ``forever``, named so in the audit."""
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
            letter_id: Its id, or how it begins (6 characters or more).
            dead_letter_queue: Where it was; ``None`` looks in the bins of all.

        Returns:
            The name of its queue.

        Raises:
            NotFound: It is in no bin (any more), or several discarded letters begin so.
            DLQError: Its queue has a letter of this id again.
            StoreUnavailable: Redis does not answer.
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
                    f"expected {name} to have no letter {letter_id}, got one: the message died "
                    f"again meanwhile; the discarded letter stays in the bin"
                )
            if restored is Restored.RESTORED:
                self._record(Action.RESTORED, name, 1, {"letter": letter_id})
                return name
        raise NotFound(
            f"expected a discarded letter with the id {letter_id!r}, found none in the bin"
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

        Workers do it by themselves; this is for queues that no worker looks after.

        Args:
            *dead_letter_queues: Which queues; none for all.
            dry_run: Say what the next pass would trim, at most some hundred letters a
                queue and cause, and change nothing.

        Returns:
            What was trimmed: one change per queue and cause.

        Raises:
            NotFound: There is no such queue.
            StoreUnavailable: Redis does not answer.
        """
        for name in dead_letter_queues:
            self._reading.check_queue(name)
        book = self._policies.in_force()
        retention = Retention(self._store, self._registry, self._events, whoami())
        names = dead_letter_queues or self._store.names()
        policies = {name: book.of_dead_letter_queue(name) for name in names}
        policies = {name: policies[name] for name in retention.due(policies)}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        return [change for n, p in policies.items() for change in retention.trim_all(n, p)]

    # -- jobs and audit -----------------------------------------------------------

    def jobs(self) -> list[Job]:
        """The newest jobs, newest first; at most five hundred are remembered."""
        return self._jobs.all()

    def job(self, job_id: str) -> Job:
        """One job; of a redrive also how many of its messages ``died_again`` and ``succeeded``.

        A death is seen by the mark that the new letter carries; a success is counted by the
        worker, on guarded queues.

        Raises:
            NotFound: There is no such job.
        """
        job = self._jobs.get(job_id)
        if job.kind != "redrive":
            return job
        ends = {"died_again": self._died_again(job), "succeeded": self._successes(job_id)}
        return replace(job, counts={**job.counts, **ends})

    def cancel(self, job_id: str) -> Job:
        """Let a job end after its present batch; no letter is left half done.

        Raises:
            NotFound: There is no such job.
            DLQError: It has ended.
        """
        return self._jobs.cancel(job_id)

    def resume(
        self,
        job_id: str,
        *,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport | DiscardReport:
        """Go on with a job whose process died, or that was cancelled or stopped.

        A redrive that has not passed its canary begins with another one.

        Raises:
            NotFound: There is no such job.
            DLQError: It runs, it is done, or it was an edit, whose change is not kept.
        """
        jobs = self._jobs
        job = jobs.get(job_id)
        if job.options.get("edited"):
            raise DLQError(
                f"expected a job that can go on, got {job_id}, an edit; edit the letter again"
            )
        where = LetterFilter.from_json(job.filter)
        options = {name: value for name, value in job.options.items() if name != "canary"}
        run = jobs.again(job_id)
        if job.kind == "redrive":
            birds = Canary.from_json(job.options.get("canary"))
            return self._redrive(run, where, RedriveOptions(**options), birds, progress, scanned)
        return self._do_discard(run, where, DiscardOptions(**options), progress, scanned)

    def changes(self, limit: int = 100) -> list[Change]:
        """Who changed what, newest first; the newest ten thousand changes are kept."""
        return self._registry.changes(limit=limit)

    # -- how ----------------------------------------------------------------------

    def _discarded_id(self, names: Sequence[str], beginning: str) -> str:
        """The one id in the bins that begins so; the beginning itself if there is none."""
        found: set[str] = set()
        for name in names:
            for entry in islice(self.discarded(name), _MOST_LOOKED_AT):
                if entry.key.startswith(beginning):
                    found.add(entry.key)
                if len(found) > 1:
                    raise NotFound(
                        f"expected one discarded letter whose id begins so, got several: "
                        f"{', '.join(sorted(found))}; give more of it"
                    )
        return found.pop() if found else beginning

    def _redriver(self) -> Redriver:
        return Redriver(
            self._app,
            self._store,
            self._clock,
            dead_letter_queue_of=self._dead_letter_queue_of,
            confirmed=self._redriven,
        )

    def _redriven(self, queue: str, found: Sequence[RawEntry], redrive_id: str) -> None:
        """Told of every batch that was published; letters are only read for who wants them."""
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
                    run, where, options, canary=canary, progress=progress, scanned=scanned
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
            return  # nothing matched: nothing happened
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
        """New letters whose message carries the mark of this job; reads a bounded number."""
        mark, died, read = f'"{job.id}"'.encode(), 0, 0
        for page in self._store.fields(job.queue, after=job.until, until=None, page_size=500):
            died += sum(mark in fields.get(b"headers", b"") for _position, fields in page)
            read += len(page)
            if read >= _MOST_MARKERS_READ:
                break
        return died

    def _dead_letter_queue_of(self, queue: str) -> str:
        policy = self._settings.policies.resolve(queue) or Policy()
        return policy.dead_letter_queue_of(queue)

    def _check_target(self, to_queue: str | None) -> None:
        if to_queue is not None and to_queue in self._store.names():
            raise DLQError(
                f"expected to_queue to be a queue of tasks, got the dead-letter queue {to_queue!r}"
            )

    def _check_bin(self) -> None:
        if not self._store.capabilities.bin:
            raise NotSupported(
                f"expected a store that keeps discarded letters for a while, got dlq_store = "
                f"{self._settings.store!r}, where they are gone for good; say --forever (or "
                f"purge), and --export-first to keep a copy"
            )


class _noting:  # noqa: N801 - used as a context manager only
    """Keeps what a job did when it ends with an error or Ctrl-C."""

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
        with suppress(DLQError):  # the first error is the one to tell
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


def _short_filter(where: LetterFilter, most: int = 20) -> dict[str, Any]:
    told = where.to_json()
    if len(told.get("ids", ())) > most:
        told["ids"] = [*told["ids"][:most], f"and {len(told['ids']) - most} more"]
    return told


def _parquet_path(path: Path, job_id: str) -> Path:
    if path.suffix != ".parquet":
        path /= f"discarded-{job_id}.parquet"
    if path.exists():
        raise DLQError(
            f"expected {path} to be a new file, got one that is there; choose another name"
        )
    return path
