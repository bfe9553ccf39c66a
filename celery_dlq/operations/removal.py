"""Removing letters: discard, purge, trim; and back from the bin."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import chain, islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action, Change, whoami
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.letters.record import iso
from celery_dlq.operations.job import CancelledError, Job, JobOptions, JobRun, counts_of
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.reading import ID_LENGTH, SHORTEST_PREFIX, Reading, split_arguments
from celery_dlq.operations.redrive.checks import DryRun
from celery_dlq.operations.redrive.select import (
    Progress,
    RawEntry,
    batches,
    redriven,
    select_entries,
)
from celery_dlq.operations.retention import KEPT_IN_BIN, Retention
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import RETENTION, PolicyTable
from celery_dlq.store.claims import ClaimState
from celery_dlq.store.letters import Letters, Restored
from celery_dlq.store.records import RawPage

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.assembly import Assembly

_MAX_DISCARDED_SCANNED = 100_000  # per queue, to complete the prefix of an id
LETTERS_PER_BATCH = 500
_COUNTS = ("removed", "skipped", "gone")
MOST_COUNTED = 10_000
"""The letters that a change of a policy would remove or redrive are counted up to here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardOptions(JobOptions):
    """The options of a discard."""

    forever: bool = False  # Remove the letters permanently; else the bin keeps them for 24 hours


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions(JobOptions):
    """The options of a restore."""

    discard: str | None = None  # Only what this job discarded; `None` for whatever is in the bin


class PurgeKeys(FilterFields, total=False):
    """What a purge takes: a filter, and what `DeadLetters` describes."""

    limit: int | None
    note: str
    progress: Progress | None
    scanned: Progress | None


@dataclass(slots=True)
class DiscardReport:
    """The result of a discard or purge, in numbers of letters.

    Attributes:
        job_id: Id of its job.
        removed: Removed from their queue.
        kept_until: Time until which the bin keeps them, ISO 8601; ``None`` after a purge.
        skipped: Claimed by another operator, or gone.
        gone: Of those skipped, how many were gone: redriven, discarded or trimmed by others.
        state: ``done``, ``cancelled`` or ``interrupted`` (another process goes on with the job).
        note: Why it ended so, e.g. by whom it was cancelled.
    """

    job_id: str
    removed: int = 0
    kept_until: str | None = None
    skipped: int = 0
    gone: int = 0
    state: str = "done"
    note: str = ""

    @property
    def touched(self) -> int:
        """Number of letters processed."""
        return self.removed + self.skipped

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True)
class RestoreReport:
    """The result of a restore, in numbers of letters."""

    job_id: str  # Id of its job
    restored: int = 0  # Back in their queue
    # Still discarded: their messages failed again, and the queue has the new letters
    taken: int = 0
    state: str = "done"  # `done`, `cancelled` or `interrupted`
    note: str = ""  # Why it ended so

    @property
    def touched(self) -> int:
        """Number of letters processed."""
        return self.restored + self.taken

    def counts(self) -> dict[str, int]:
        """The numbers, for the job."""
        return {"restored": self.restored, "taken": self.taken}

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEffect:
    """What a change of a policy would do to the letters that are there now."""

    dead_letter_queue: str  # Their queue
    removed: int = 0  # Letters that retention would remove
    redriven: int = 0  # Letters that a key would redrive, sooner or later

    def __str__(self) -> str:
        """In words; empty for nothing."""
        counts = {"removes": self.removed, "redrives": self.redriven}
        return " and ".join(
            f"{verb} {'at least ' * (number >= MOST_COUNTED)}{number:,} letter{'s' * (number > 1)} "
            f"of {self.dead_letter_queue}"
            for verb, number in counts.items()
            if number
        )


class Removal:
    """Removes letters, and restores those in the bin.

    The methods are those of `DeadLetters`, which describes the arguments that they share.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._store = assembly.backend.letters
        self._reading = Reading(self._store)
        self._jobs = assembly.jobs()
        self._policies = self._jobs.policies

    def discard(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        forever: bool = False,
        **given: Unpack[PurgeKeys],
    ) -> DiscardReport:
        """Remove letters from their queue; `restore` puts them back within 24 hours."""
        return self._removed("discard", dead_letter_queue, where, given, forever=forever)

    def purge(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        **given: Unpack[PurgeKeys],
    ) -> DiscardReport:
        """Remove letters permanently: `discard` with ``forever``; the audit names it a purge."""
        return self._removed("purge", dead_letter_queue, where, given, forever=True)

    def restore(self, letter_id: str, dead_letter_queue: str | None = None) -> str:
        """Put a discarded letter back, as the newest of its queue."""
        if dead_letter_queue is not None:
            self._reading.check_queue(dead_letter_queue)
        names = [dead_letter_queue] if dead_letter_queue else self._store.names()
        names = self._store.binned(names)
        if SHORTEST_PREFIX <= len(letter_id) < ID_LENGTH:
            letter_id = self._discarded_id(names, letter_id)
        for name in names:
            operation, detail = f"restore-{uuid4().hex}", {"letter": letter_id}
            change = self._jobs.audit.counted(self._store, operation, Action.RESTORED, name, detail)
            change.open()
            restored = self._store.restore(name, letter_id, operation=operation)
            if change.close() is not None:
                return name
            if restored is Restored.TAKEN:
                raise DLQError(
                    f"{name} has a letter {letter_id} again, because its message failed again; "
                    f"the discarded letter is not restored"
                )
        raise NotFound(
            f"expected the id of a discarded letter, got {letter_id!r}; they are kept for 24 hours"
        )

    def restore_all(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        limit: int | None = None,
        job: str | None = None,
        progress: Progress | None = None,
        **fields: Unpack[FilterFields],
    ) -> tuple[int, int]:
        """Put discarded letters back, those discarded first as the oldest of them."""
        run = self.new_restore(dead_letter_queue, filter_of(where, fields), limit=limit, job=job)
        report: RestoreReport = self._jobs.run(run, progress)
        return report.restored, report.taken

    def plan_restore(self, job_id: str) -> Job:
        """Plan to take back a discard, by its job; nobody else's letters are touched."""
        job = self.discard_of(job_id)
        run = self.new_restore(job.queue, LetterFilter(), job=job_id)
        found = [one.size for one in self.discarded(job.queue, job=job_id)]
        seen = DryRun(letters=len(found), bytes=sum(found))
        run.update(total=seen.letters, preview=seen.preview())
        return self._jobs.keep_plan(run.job)

    def discard_of(self, job_id: str) -> Job:
        """The job of a discard whose letters can be restored."""
        job = self._jobs.get(job_id)
        if job.kind != "discard" or job.options.get("forever"):
            what = "a discard with --forever" if job.kind == "discard" else f"a {job.kind}"
            raise DLQError(f"expected the job of a discard to take back, got {job_id}, {what}")
        return job

    def new_restore(
        self,
        dead_letter_queue: str,
        where: LetterFilter,
        *,
        limit: int | None = None,
        job: str | None = None,
    ) -> JobRun:
        """A job that restores what is in the bin now."""
        options = RestoreOptions(limit=limit, discard=job)
        newest = next(self.discarded(dead_letter_queue), None)
        run = self._jobs.make("restore", dead_letter_queue, where, options)
        run.update(filter=where.to_json(), until=newest.position if newest else "0-0")
        return run

    def discarded(self, dead_letter_queue: str, *, job: str | None = None) -> Iterator[RawEntry]:
        """The letters in the bin of a queue, newest first; with ``job`` only those of a discard."""
        self._reading.check_queue(dead_letter_queue)
        return _bin_entries(self._store.discarded(dead_letter_queue), job)

    def trim(self, *dead_letter_queues: str, dry_run: bool = False) -> list[Change]:
        """Remove letters past ``dead_letter_ttl`` or over ``dead_letter_max_length`` now.

        Workers trim on their own; call this for queues that no worker consumes. For 24 hours
        `restore` brings the letters back.
        """
        for name in dead_letter_queues:
            self._reading.check_queue(name)
        table, retention = self._policies.in_force(), self._retention()
        names = dead_letter_queues or self._store.names()
        if resting := [name for name in dead_letter_queues if table.never_trims(name)]:
            raise DLQError(
                f"expected a dead-letter queue whose policy was changed more than a minute ago, "
                f"got {resting[0]}; `dlq policies` says when the change begins"
            )
        names = [name for name in names if not table.never_trims(name)]
        policies = {name: table.of_dead_letter_queue(name) for name in names}
        policies = {name: policies[name] for name in retention.due_queues(policies)}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        trimmed = (retention.trim_all(n, p, to_bin=True) for n, p in policies.items())
        return [change for changes in trimmed for change in changes]

    def policy_effect_on(
        self, queue: str, keys: frozenset[str], after: PolicyTable
    ) -> PolicyEffect:
        """What a change of a queue's policy would do to its letters; see `policies_after`."""
        name, removed, to_redrive = after.dead_letter_queue_of(queue), 0, 0
        policy = after.of_dead_letter_queue(name) or Policy()
        if not keys.isdisjoint(RETENTION):
            at = self._store.now() + timing.current.grace
            removed = self._retention().count_trimmable(name, policy, at, MOST_COUNTED)
        for takes in redriven(policy, keys):
            found = filter(takes, select_entries(self._store, name, LetterFilter()))
            to_redrive += sum(1 for _ in islice(found, MOST_COUNTED))
        return PolicyEffect(dead_letter_queue=name, removed=removed, redriven=to_redrive)

    def _retention(self) -> Retention:
        jobs = self._jobs
        return Retention(self._store, jobs.backend.workers, jobs.events, whoami())

    def _removed(
        self, kind: str, queue: str, where: LetterFilter | None, given: PurgeKeys, *, forever: bool
    ) -> DiscardReport:
        taken = [*PurgeKeys.__annotations__, *(["forever"] if kind == "discard" else [])]
        where, options = split_arguments(kind, where, given, taken)
        note = options.get("note", "")
        kept = DiscardOptions(forever=forever, limit=options.get("limit"), note=note)
        self._reading.check_queue(queue)
        run = self._jobs.new(kind, queue, where, kept)
        done = self._jobs.run(run, options.get("progress"), options.get("scanned"))
        report: DiscardReport = done
        return report

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


def _bin_entries(pages: Iterable[RawPage], job: str | None) -> Iterator[RawEntry]:
    """The letters of a bin, perhaps only those that a job put there."""
    for position, raw in chain.from_iterable(pages):
        if job is not None and raw.get(b"~job", b"") != job.encode():
            continue
        kept = dict(raw)
        kept.pop(b"~job", None)
        key = kept.pop(b"~key", b"").decode("utf-8", "replace")
        found = RawEntry(position, kept)
        found.key = key or found.key
        yield found


def restore(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> RestoreReport:
    """Restore the letters of a job, those discarded first as the oldest."""
    store, job, where, limit = jobs.backend.letters, run.job, run.where, run.options.limit
    report = RestoreReport(job_id=job.id, taken=int(job.counts.get("taken", 0)))
    report.restored = store.claims.changed(job.queue, job.id)

    def chosen(*, newest_first: bool) -> Iterator[RawEntry]:
        pages = store.discarded(
            job.queue, after=run.job.position, until=job.until, newest_first=newest_first
        )
        found = _bin_entries(pages, run.options.discard)
        return (one for one in found if not where or where.matches_fields(one.fields))

    try:
        found = chosen(newest_first=False)
        if limit is not None:  # of the newest; of an earlier run, those are left that were later
            left = islice(chosen(newest_first=True), max(0, limit - report.touched))
            found = reversed(list(left))
        for one in found:
            run.send_heartbeat(report.counts())
            restored = store.restore(job.queue, one.key, operation=run.operation)
            report.taken += restored is Restored.TAKEN
            report.restored += restored is Restored.RESTORED
            run.send_heartbeat(report.counts(), one.position)
            if progress is not None:
                progress(1)
            if scanned is not None:
                scanned(1)
    except CancelledError as exc:
        report.state = exc.state
    report.restored = store.claims.changed(job.queue, job.id)  # also of a reply that was lost
    return report


def discard(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> DiscardReport:
    """Remove the letters of a job, each completely or not at all."""
    return Discard(jobs.backend.letters, run, scanned).run(progress)


class Discard:
    """One job that removes letters."""

    def __init__(self, store: Letters, run: JobRun, scanned: Progress | None) -> None:
        self._store = store
        self._run = run
        self._scanned = scanned
        self._options: DiscardOptions = run.options
        # Of an earlier run, whose process may have been killed
        job = run.job
        counts = counts_of(job, store.claims) if job.run > 1 else job.counts
        earlier: dict[str, Any] = {name: int(counts.get(name, 0)) for name in _COUNTS}
        self._report = DiscardReport(job_id=run.job.id, **earlier)

    def run(self, progress: Progress | None) -> DiscardReport:
        """Remove the letters, batch by batch."""
        run, report, options = self._run, self._report, self._options
        left = None if options.limit is None else max(0, options.limit - report.touched)
        try:
            if left is not None and run.where.ids is None and not run.job.position:
                # A resumed run must take no other letters than this one would have.
                last = deque(self._selected(left, self._scanned), maxlen=1)
                if last:
                    run.update(until=last[0].position)
                    run.send_heartbeat(now=True)
            for batch in batches(self._selected(left, self._scanned), LETTERS_PER_BATCH):
                run.send_heartbeat(self._job_counts())
                self.remove([found.key for found in batch])
                run.send_heartbeat(self._job_counts(), batch[-1].position)
                if progress is not None:
                    progress(len(batch))
        except CancelledError as exc:
            report.state = exc.state
        if report.removed and not options.forever:
            report.kept_until = iso(self._store.now() + KEPT_IN_BIN)
        return report

    def _job_counts(self) -> dict[str, int]:
        return {name: getattr(self._report, name) for name in _COUNTS}

    def _selected(self, left: int | None, scanned: Progress | None) -> Iterator[RawEntry]:
        return islice(self._run.selected(self._store, self._run.send_heartbeat, scanned), left)

    def remove(self, keys: list[str]) -> None:
        """Remove those of a batch that no other operation has."""
        queue, owner = self._run.job.queue, self._run.owner
        states = self._run.claimed(self._store, keys, timing.current.claim)
        free = (ClaimState.CLAIMED, ClaimState.RECLAIMED, ClaimState.PUBLISHED)
        ours = [key for key, state in states.items() if state in free]
        keep_seconds = 0.0 if self._options.forever else KEPT_IN_BIN.total_seconds()
        if ours:
            self._report.removed = self._store.remove(
                queue,
                ours,
                owner=owner,
                keep_seconds=keep_seconds,
                wanted=True,
                operation=self._run.operation,
            )
        self._report.skipped += len(keys) - len(ours)
        self._report.gone += [*states.values()].count(ClaimState.GONE)
