"""The charts of the report: of any triage."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

from celery_dlq.errors import MissingExtra
from celery_dlq.letters.record import Reason
from celery_dlq.spark import charts
from celery_dlq.spark.triage import bucket_for
from celery_dlq.spark.triage.rows import (
    Row,
    Triage,
)

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=timezone.utc)
REASONS = [reason.value for reason in Reason if reason is not Reason.HELD]  # that is no death


def a_triage(
    *,
    groups: int = 1,
    reasons: int = 1,
    span: timedelta = timedelta(0),
    task_name: str = "shop.charge",
    deliveries: int = 3,
) -> Triage:
    """A triage with a given number of everything."""
    return Triage(
        path="letters",
        letters=groups,
        queues=tuple(f"queue-{number}-DLQ" for number in range(groups)),
        first_seen_at=NOON,
        last_seen_at=NOON + span,
        bucket=bucket_for(span.total_seconds()),
        groups=tuple(
            Row(
                fingerprint=f"{number:016x}",
                letters=1,
                first_seen_at=NOON,
                last_seen_at=NOON + span,
                task_name=f"{task_name}{number}",
                reasons=(REASONS[number % reasons],),
                main_reason=REASONS[number % reasons],
                exception_type="builtins.ValueError" if number % 2 else None,
                hosts=1,
                releases=(),
                example_id="1",
                example_description="bad order",
            )
            for number in range(groups)
        ),
        reasons=tuple(
            Row(reason=reason, letters=1, share=1 / reasons) for reason in REASONS[:reasons]
        ),
        timeline=tuple(
            Row(bucket_start=NOON + span * part, reason=reason, letters=2)
            for part in (0, 1)
            for reason in REASONS[:reasons]
        ),
        deliveries=tuple(
            Row(task_name=f"{task_name}{number}", deliveries=count, letters=count + 1)
            for number in range(groups)
            for count in (0, deliveries)
        ),
    )


@pytest.mark.parametrize(
    "triage",
    [
        pytest.param(a_triage(), id="one letter"),
        pytest.param(a_triage(groups=40, reasons=12, span=timedelta(days=9)), id="many"),
        pytest.param(a_triage(groups=3, span=timedelta(days=900), deliveries=250), id="years"),
        pytest.param(a_triage(task_name="$x_{a}$ \n\x1b" + "W漢" * 90), id="odd names"),
    ],
)
def test_any_triage_has_charts(triage: Triage) -> None:
    """Each is one SVG element without a warning, with names as text."""
    pytest.importorskip("matplotlib")
    for svg in (charts.timeline_svg(triage), charts.deliveries_svg(triage)):
        assert svg.startswith("<svg")
        assert svg.endswith("</svg>")


def test_triage_without_times_has_charts() -> None:
    """Letters that nobody dated are drawn without a time axis."""
    pytest.importorskip("matplotlib")
    undated = replace(a_triage(), first_seen_at=None, last_seen_at=None, timeline=())
    assert charts.timeline_svg(undated).startswith("<svg")


def test_every_reason_has_a_colour_of_its_own() -> None:
    """Two reasons look different in every panel."""
    assert set(charts.COLOURS) == set(REASONS)
    assert len({*charts.COLOURS.values(), charts.OTHER}) == len(REASONS) + 1


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_960, "9,960"),
        (10_000, "10k"),
        (999_600, "1M"),
        (5 * 10**9, "5G"),
    ],
)
def test_count_fits_its_cell(number: int, text: str) -> None:
    """A count of any size has at most five characters."""
    assert charts.short(number) == text


@pytest.mark.parametrize(
    ("text", "longest", "cut"),
    [
        ("shop.charge", 20, "shop.charge"),
        ("shop.payments.charge", 12, "shop….charge"),
        ("two\nlines", 20, r"two\nlines"),
    ],
)
def test_long_name_is_cut_in_its_middle(text: str, longest: int, cut: str) -> None:
    """Both ends of a dotted name are kept, on one line."""
    assert charts.elided(text, longest) == cut
    assert len(cut) <= longest


def test_an_endless_name_is_cut_before_it_is_measured() -> None:
    """Laying out 70,000 characters takes minutes."""
    begun = time.process_time()
    charts.deliveries_svg(a_triage(groups=3, task_name="a.b" * 23_333))
    assert time.process_time() - begun < 15


def test_missing_matplotlib_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without matplotlib the error is the command that brings it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'celery_dlq\[spark\]'"):
        charts.timeline_svg(a_triage())
