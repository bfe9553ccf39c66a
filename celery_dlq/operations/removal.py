"""Removing letters: discard, purge, trim; and back from the bin."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action, Change, Events, whoami
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.operations.discard import DiscardOptions
from celery_dlq.operations.job import JobRun
from celery_dlq.operations.jobs import Jobs
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.reading import ID_LENGTH, SHORTEST_PREFIX, Reading
from celery_dlq.operations.redrive.select import Progress, RawEntry, select
from celery_dlq.operations.results import MOST_COUNTED, DiscardReport, PolicyEffect
from celery_dlq.operations.retention import Retention
from celery_dlq.policies.overrides import GRACE
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import RETENTION, PolicyTable
from celery_dlq.registry import features
from celery_dlq.store.records import Restored

if TYPE_CHECKING:
    from typing_extensions import Unpack

_MAX_DISCARDED_SCANNED = 100_000  # per queue, to complete the prefix of an id


class Removal:
    """Removes letters, and restores those in the bin.

    The methods are those of `DeadLetters`, which describes the arguments that they share.
    """

    def __init__(
        self,
        reading: Reading,
        policies: PolicyAdmin,
        jobs: Jobs,
        events: Events,
    ) -> None:
        self._store = jobs.backend.letters
        self._registry = jobs.backend.workers
        self._reading = reading
        self._policies = policies
        self._jobs = jobs
        self._checks = jobs.checks
        self._events = events

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
        **fields: Unpack[FilterFields],
    ) -> DiscardReport:
        """Remove letters from their queue; `restore` puts them back within 24 hours."""
        return self._discard(
            "discard",
            dead_letter_queue,
            filter_of(where, fields),
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
        **fields: Unpack[FilterFields],
    ) -> DiscardReport:
        """Remove letters permanently: `discard` with ``forever``; the audit names it a purge."""
        return self._discard(
            "purge",
            dead_letter_queue,
            filter_of(where, fields),
            DiscardOptions(forever=True, limit=limit),
            export_first,
            progress,
            scanned,
        )

    def run(
        self,
        run: JobRun,
        export_first: str | Path | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> DiscardReport:
        """Run a discard or a purge, e.g. one that was prepared as a plan."""
        if export_first is not None:
            path = _parquet_path(Path(export_first), run.job.id)
            run.set_options(export_path=str(path.absolute()))
        report: DiscardReport = self._jobs.run(run, progress, scanned)
        return report

    def restore(self, letter_id: str, dead_letter_queue: str | None = None) -> str:
        """Put a discarded letter back, as the newest of its queue."""
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
                self._jobs.record(Action.RESTORED, name, 1, {"letter": letter_id})
                return name
        raise NotFound(
            f"no bin has a letter with the id {letter_id!r}; discarded letters stay there 24 hours"
        )

    def restore_all(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        limit: int | None = None,
        **fields: Unpack[FilterFields],
    ) -> tuple[int, int]:
        """Put discarded letters back, those discarded first as the oldest of them."""
        name, where = dead_letter_queue, filter_of(where, fields)
        DiscardOptions(limit=limit)  # checks it
        found = (
            one for one in self.discarded(name) if not where or where.matches_fields(one.fields)
        )
        keys = [one.key for one in islice(found, limit)]
        done = {Restored.RESTORED: 0, Restored.TAKEN: 0, Restored.NOT_THERE: 0}
        try:
            for key in reversed(keys):
                done[self._store.restore(name, key)] += 1
        finally:
            if done[Restored.RESTORED]:
                detail = {"filter": where.to_json()}
                self._jobs.record(Action.RESTORED, name, done[Restored.RESTORED], detail)
        return done[Restored.RESTORED], done[Restored.TAKEN]

    def discarded(self, dead_letter_queue: str) -> Iterator[RawEntry]:
        """The letters in the bin of a queue, newest first."""
        self._reading.check_queue(dead_letter_queue)
        for page in self._store.discarded(dead_letter_queue):
            for position, fields in page:
                kept = dict(fields)
                key = kept.pop(b"~key", b"").decode("utf-8", "replace")
                found = RawEntry(position, kept)
                found.key = key or found.key
                yield found

    def trim(self, *dead_letter_queues: str, dry_run: bool = False) -> list[Change]:
        """Remove letters past ``dead_letter_ttl`` or over ``dead_letter_max_length`` now.

        Workers trim on their own; call this for queues that no worker consumes. For 24 hours
        `restore` brings the letters back, if the store has a bin.
        """
        for name in dead_letter_queues:
            self._reading.check_queue(name)
        table, retention = self._policies.in_force(), self._retention()
        names = dead_letter_queues or self._store.names()
        if resting := [name for name in dead_letter_queues if table.rests(name)]:
            raise DLQError(
                f"expected a dead-letter queue whose policy was changed more than a minute ago, "
                f"got {resting[0]}; `dlq policies` says when the change begins"
            )
        names = [name for name in names if not table.rests(name)]
        policies = {name: table.of_dead_letter_queue(name) for name in names}
        policies = {name: policies[name] for name in retention.due(policies)}
        if dry_run:
            return [c for n, p in policies.items() for c in retention.trim(n, p, dry_run=True)]
        trimmed = (retention.trim_all(n, p, to_bin=True) for n, p in policies.items())
        return [change for changes in trimmed for change in changes]

    def effect(self, queue: str, keys: frozenset[str], after: PolicyTable) -> PolicyEffect:
        """What a change of a queue's policy would do to its letters; see `PolicyAdmin.after`."""
        name, removed, redriven = after.dead_letter_queue_of(queue), 0, 0
        policy = after.of_dead_letter_queue(name) or Policy()
        if not keys.isdisjoint(RETENTION):
            at = self._registry.now() + GRACE
            removed = self._retention().count(name, policy, at, MOST_COUNTED)
        for feature in features():
            if feature.chooses and not keys.isdisjoint({feature.name, *feature.policy_keys}):
                chooses = feature.load(feature.chooses)(policy, None)
                found = filter(chooses, select(self._store, name, LetterFilter()))
                redriven += 0 if chooses is None else sum(1 for _ in islice(found, MOST_COUNTED))
        return PolicyEffect(dead_letter_queue=name, removed=removed, redriven=redriven)

    def _retention(self) -> Retention:
        return Retention(self._store, self._registry, self._events, whoami())

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
        run = self._jobs.new(kind, queue, where, options)
        return self.run(run, export_first, progress, scanned)

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


def _parquet_path(path: Path, job_id: str) -> Path:
    if path.suffix != ".parquet":
        path /= f"discarded-{job_id}.parquet"
    if path.exists():
        raise DLQError(
            f"expected {path} to be a new file, got one that exists; choose another name"
        )
    return path
