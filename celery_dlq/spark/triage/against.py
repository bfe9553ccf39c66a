"""What a triage is compared with: another period, the time before a release, another folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters.record import from_micros, iso
from celery_dlq.spark.triage.changes import Period, changes, period_before, whole_span
from celery_dlq.spark.triage.trends import run_sql

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from celery_dlq.spark.triage.selection import Selection

    Read = Callable[[Selection], DataFrame]

MOST = 20
"""Causes that are shown, those with the largest changes."""

_MICROSECOND = timedelta(microseconds=1)
_SHOWN = """
    SELECT *, count(*) OVER () AS among FROM {letters}
    ORDER BY abs(more) DESC, fingerprint LIMIT {most}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedPeriod:
    """What letters are compared with; if nothing is set, with those of the time before.

    Attributes:
        period: Letters of this time in the same folder.
        release: Letters of the time before the first one of this release.
        folder: All letters of another folder.
    """

    period: Period | None = None
    release: str | None = None
    folder: str | None = None

    def __post_init__(self) -> None:
        if self.period is not None and self.period.seconds <= 0:
            since, until = map(iso, self.period)
            raise DLQError(f"expected the period to end after it begins, got {since} to {until}")

    def selected(self, selection: Selection, read: Read) -> Selection:
        """The letters to triage: by default those since the release, or since the period.

        Raises:
            DLQError: ``since`` is missing, or there is no letter of the release.
        """
        if self.release is not None:
            row = read(replace(selection, release=self.release)).selectExpr(
                "unix_micros(min(dead_lettered_at))"
            )
            found = row.collect()[0][0]
            if found is None:
                raise ExportError(f"expected letters of the release {self.release}, got none")
            return replace(selection, since=from_micros(found))
        if self.period is not None and selection.since is None:
            return replace(selection, since=self.period.until)
        if self == ComparedPeriod() and selection.since is None:
            raise DLQError("expected since, to compare the letters since then with those before")
        return selection

    def around(self, selection: Selection) -> Selection:
        """Both periods, as far as they are known before letters are read."""
        if self.folder is not None:
            return selection
        if self.release is not None:
            return replace(selection, since=None)
        until = selection.until or datetime.now(timezone.utc)
        since = selection.since
        if self.period is not None:
            least = self.period.since if since is None else min(since, self.period.since)
            last = selection.until and max(selection.until, self.period.until)
            return replace(selection, since=least, until=last)
        if since is None:
            return selection
        return replace(selection, since=period_before(Period(since, until)).since)

    def compared(
        self, selection: Selection, read: Read, other: Read
    ) -> tuple[Period, Period, DataFrame]:
        """Compare the selected letters with the others; ``other`` reads the other folder.

        Returns both periods, and rows of `changes` with ``among``, the number of all.

        Raises:
            ExportError: There is no letter to compare with.
        """
        letters = read(selection)
        whole = whole_span(letters)
        here = Period(selection.since or whole.since, selection.until or whole.until)
        if self.folder is not None:
            selection = replace(selection, since=None, until=None)
            others = other(selection)
            there = whole_span(others)
        else:
            there = self._covered(self.period or period_before(here), selection, read)
            others = read(replace(selection, since=there.since, until=there.until))
        return here, there, run_sql(_SHOWN, changes(letters, others, here, there), most=MOST)

    @staticmethod
    def _covered(period: Period, selection: Selection, read: Read) -> Period:
        """The part of a period of which the folder has letters: an export begins at some time."""
        every = replace(selection, task=None, release=None, fingerprint=None)
        if not read(replace(every, since=None, until=period.since)).limit(1).isEmpty():
            return period
        inside = read(replace(every, since=period.since, until=period.until))
        if inside.limit(1).isEmpty():
            raise ExportError(f"expected letters of {_span_text(period)} to compare with, got none")
        return Period(whole_span(inside).since, period.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class RateChanges:
    """What changed between two periods, beyond chance."""

    here: Period
    there: Period
    folder: str | None  # Where the letters of the other period are, if elsewhere
    rows: tuple[SimpleNamespace, ...]  # Of `changes`, the `MOST` largest changes

    @property
    def changed(self) -> int:
        """All causes that changed."""
        return self.rows[0].among if self.rows else 0

    @property
    def heading(self) -> str:
        """What was compared with what."""
        other = f"{self.folder}, " if self.folder else ""
        return f"{_span_text(self.here)}, against {other}{_span_text(self.there)}"

    @property
    def note_text(self) -> str:
        """What is not said of other causes."""
        if not self.rows:
            return "No cause changed by a fifth or more beyond chance."
        rest = self.rows[0].compared - self.changed
        shown = f"{self.changed - len(self.rows):,} more changed. " * (
            self.changed > len(self.rows)
        )
        return f"{shown}{rest:,} others did not change by a fifth or more beyond chance."

    @staticmethod
    def rate_text(row: SimpleNamespace) -> str:
        """How the rate of a cause changed, and how sure that is."""
        if row.ratio is None:
            return f"at least × {_short(row.ratio_low)}"
        if not row.letters:
            return f"at most × {_short(row.ratio_high)}"
        return f"× {_short(row.ratio)} ({_short(row.ratio_low)} to {_short(row.ratio_high)})"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping; times as ISO 8601 in UTC."""
        return {
            "period": [iso(moment) for moment in self.here],
            "against": [iso(moment) for moment in self.there],
            "folder": self.folder,
            "changed": self.changed,
            "rows": [
                {k: iso(v) if isinstance(v, datetime) else v for k, v in vars(row).items()}
                for row in self.rows
            ],
        }


def _short(ratio: float) -> str:
    return f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.2g}"  # noqa: PLR2004 - two digits


def _span_text(period: Period) -> str:
    return " to ".join(f"{moment:%Y-%m-%d %H:%M}" for moment in period) + " UTC"
