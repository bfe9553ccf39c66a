"""Discarding and purging: remove letters on purpose, into the bin or permanently."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from itertools import islice
from pathlib import Path
from typing import Any

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import iso
from celery_dlq.operations.job import DONE
from celery_dlq.operations.jobs import CancelledError, JobRun
from celery_dlq.operations.redrive.selection import PositionRange, RawEntry, batches, select
from celery_dlq.operations.results import DiscardReport
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import ClaimState

KEPT_IN_BIN = timedelta(hours=24)

_LETTERS_PER_BATCH = 500
_ROWS_PER_GROUP = 5_000
_LEASE_SECONDS = 60.0

Progress = Callable[[int], object]


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


class Discarder:
    """Removes letters, each completely or not at all."""

    def __init__(self, store: Letters) -> None:
        self._store = store

    def discard(
        self,
        run: JobRun,
        where: LetterFilter,
        options: DiscardOptions,
        *,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> DiscardReport:
        """Run a job; see `DeadLetters.discard`."""
        earlier: dict[str, Any] = {
            name: int(run.job.counts.get(name, 0)) for name in ("removed", "skipped", "exported")
        }
        report = DiscardReport(job_id=run.job.id, export_path=options.export_path, **earlier)
        left = None if options.limit is None else max(0, options.limit - report.touched)
        try:
            if options.export_path is not None and not Path(options.export_path).exists():
                report.exported = self._export(run, where, left, Path(options.export_path))
            if left is not None and where.ids is None and not run.job.position:
                self._bound(run, where, left, scanned)
            for batch in batches(self._selected(run, where, left, scanned), _LETTERS_PER_BATCH):
                run.beat(_counts(report))
                self._batch(run, batch, options, report)
                run.beat(_counts(report), batch[-1].position)
                if progress is not None:
                    progress(len(batch))
        except CancelledError as exc:
            report.state = exc.state
        else:
            report.state = DONE
        if report.removed and not options.forever:
            report.kept_until = iso(self._store.now() + KEPT_IN_BIN)
        return report

    def _bound(self, run: JobRun, where: LetterFilter, left: int, scanned: Progress | None) -> None:
        """Save the last position of a limited job: resumed after a kill, it takes no others."""
        last = deque(self._selected(run, where, left, scanned), maxlen=1)
        if last:
            run.tell(until=last[0].position)
            run.beat(now=True)

    def _selected(
        self, run: JobRun, where: LetterFilter, left: int | None, scanned: Progress | None = None
    ) -> Iterator[RawEntry]:
        def page(entries: int) -> None:  # a filter that seldom matches must not end the beats
            if scanned is not None:
                scanned(entries)
            if run.begun:
                run.beat()

        span = PositionRange(after=run.job.position, until=run.job.until)
        return islice(select(self._store, run.job.queue, where, span=span, scanned=page), left)

    def _batch(
        self, run: JobRun, batch: list[RawEntry], options: DiscardOptions, report: DiscardReport
    ) -> None:
        keys, queue, owner = [found.key for found in batch], run.job.queue, run.owner
        states = self._store.claim(
            queue,
            keys,
            owner=owner,
            lease_seconds=_LEASE_SECONDS,
            previous_run_prefix=run.previous_run_prefix,
        )
        free = (ClaimState.CLAIMED, ClaimState.RECLAIMED, ClaimState.PUBLISHED)
        ours = [key for key, state in zip(keys, states, strict=True) if state in free]
        if options.forever:
            self._store.remove(queue, ours, owner=owner)
        else:
            self._store.discard(queue, ours, owner=owner, keep_seconds=KEPT_IN_BIN.total_seconds())
        # Count what we claimed, not the reply: a removal may succeed and its reply be lost.
        report.removed += len(ours)
        report.skipped += len(keys) - len(ours)

    def _export(self, run: JobRun, where: LetterFilter, left: int | None, path: Path) -> int:
        """Write the letters to a file that appears completely or not at all."""
        from celery_dlq.export import table  # noqa: PLC0415 - pyarrow is an extra
        from celery_dlq.export.wholefile import replacing  # noqa: PLC0415 - the same

        def groups() -> Iterator[list[Mapping[bytes, bytes]]]:
            written = 0
            for batch in batches(self._selected(run, where, left), _ROWS_PER_GROUP):
                run.beat({"exported": written})
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


def _counts(report: DiscardReport) -> dict[str, int]:
    return {name: getattr(report, name) for name in ("removed", "skipped", "exported")}
