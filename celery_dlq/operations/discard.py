"""Discarding and purging: remove letters on purpose, into the bin or permanently, as a job."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters.record import iso
from celery_dlq.operations.job import DONE, CancelledError, JobRun
from celery_dlq.operations.redrive.select import (
    PositionRange,
    Progress,
    RawEntry,
    batches,
    select,
)
from celery_dlq.operations.results import DiscardReport
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import ClaimState

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs

KEPT_IN_BIN = timedelta(hours=24)

_LETTERS_PER_BATCH = 500
_ROWS_PER_GROUP = 5_000
_LEASE_SECONDS = 60.0
_COUNTS = ("removed", "skipped", "exported")


@dataclass(frozen=True, slots=True, kw_only=True)
class DiscardOptions:
    """The options of a discard."""

    forever: bool = False  # Remove the letters permanently; else the bin keeps them for 24 hours
    limit: int | None = None  # At most this many letters; `None` for all
    # Write them to this new Parquet file first; `None` for no export
    export_path: str | None = None

    def __post_init__(self) -> None:
        if self.limit is not None and self.limit < 1:
            raise DLQError(f"expected limit to be 1 or more, got {self.limit}")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping of the options that differ from their defaults."""
        return {
            f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DiscardOptions:
        """Read what `to_json` wrote from the options of a job, which has others, too."""
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


def discard(
    jobs: Jobs, run: JobRun, progress: Progress | None, scanned: Progress | None
) -> DiscardReport:
    """Remove the letters of a job, each completely or not at all."""
    return _Discard(jobs.backend.letters, run, scanned).run(progress)


class _Discard:
    """One job that removes letters."""

    def __init__(self, store: Letters, run: JobRun, scanned: Progress | None) -> None:
        self._store = store
        self._run = run
        self._scanned = scanned
        self._options: DiscardOptions = run.options
        # Of an earlier run, whose process may have been killed
        earlier: dict[str, Any] = {name: int(run.job.counts.get(name, 0)) for name in _COUNTS}
        path = self._options.export_path
        self._report = DiscardReport(job_id=run.job.id, export_path=path, **earlier)

    def run(self, progress: Progress | None) -> DiscardReport:
        """Export the letters if that is wanted, then remove them."""
        run, report, options = self._run, self._report, self._options
        left = None if options.limit is None else max(0, options.limit - report.touched)
        try:
            if options.export_path is not None and not Path(options.export_path).exists():
                report.exported = self._export(left, Path(options.export_path))
            if left is not None and run.where.ids is None and not run.job.position:
                # A resumed run must take no other letters than this one would have.
                last = deque(self._selected(left), maxlen=1)
                if last:
                    run.tell(until=last[0].position)
                    run.beat(now=True)
            for batch in batches(self._selected(left), _LETTERS_PER_BATCH):
                run.beat(self._counts())
                self._remove([found.key for found in batch])
                run.beat(self._counts(), batch[-1].position)
                if progress is not None:
                    progress(len(batch))
        except CancelledError as exc:
            report.state = exc.state
        else:
            report.state = DONE
        if report.removed and not options.forever:
            report.kept_until = iso(self._store.now() + KEPT_IN_BIN)
        return report

    def _counts(self) -> dict[str, int]:
        return {name: getattr(self._report, name) for name in _COUNTS}

    def _selected(self, left: int | None, *, quietly: bool = False) -> Iterator[RawEntry]:
        run = self._run

        def page(entries: int) -> None:  # a filter that seldom matches must not end the beats
            if self._scanned is not None and not quietly:
                self._scanned(entries)
            if run.begun:
                run.beat()

        span = PositionRange(after=run.job.position, until=run.job.until)
        return islice(select(self._store, run.job.queue, run.where, span=span, scanned=page), left)

    def _remove(self, keys: list[str]) -> None:
        queue, owner = self._run.job.queue, self._run.owner
        states = self._store.claims.claim(
            queue,
            keys,
            owner=owner,
            lease_seconds=_LEASE_SECONDS,
            previous_run_prefix=self._run.previous_run_prefix,
        )
        free = (ClaimState.CLAIMED, ClaimState.RECLAIMED, ClaimState.PUBLISHED)
        ours = [key for key, state in zip(keys, states, strict=True) if state in free]
        if self._options.forever:
            self._store.remove(queue, ours, owner=owner)
        else:
            self._store.discard(queue, ours, owner=owner, keep_seconds=KEPT_IN_BIN.total_seconds())
        # Count what we claimed, not the reply: a removal may succeed and its reply be lost.
        self._report.removed += len(ours)
        self._report.skipped += len(keys) - len(ours)

    def _export(self, left: int | None, path: Path) -> int:
        """Write the letters to a file that appears completely or not at all."""
        from celery_dlq.export import table  # noqa: PLC0415 - pyarrow is an extra
        from celery_dlq.export.wholefile import replacing  # noqa: PLC0415 - the same

        def groups() -> Iterator[list[Mapping[bytes, bytes]]]:
            written = 0
            for batch in batches(self._selected(left, quietly=True), _ROWS_PER_GROUP):
                self._run.beat({"exported": written})
                yield [found.fields for found in batch]
                written += len(batch)

        try:
            with replacing(path) as temporary:
                return table.write_file(temporary, groups())
        except OSError as exc:
            raise ExportError(
                f"expected {path} to be a file that can be written, got {type(exc).__name__}: "
                f"{exc.strerror or exc}; nothing was removed"
            ) from exc
