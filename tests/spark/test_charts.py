"""The charts of the report: of any triage."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest

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
        causes=groups,
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


def test_bars_are_the_letters_of_each_state() -> None:
    """Their heights are in proportion, their places those of the buckets; a lone letter shows."""
    drawn = charts.draw_bars({5: {"known": 50, "new": 50}, 9: {"over": 1}}, 5, 9, marks=[7.5, 99.0])
    (large, larger, small) = re.findall(r'class="(\w+)" x="([\d.]+)" .*? height="([\d.]+)"', drawn)
    assert (large, larger) == (("new", "0.04", "50.0"), ("known", "0.04", "50.0"))
    assert (small[0], small[1]) == ("over", "4.04")
    assert float(small[2]) > 1
    assert drawn.count("<line") == 1
    assert 'viewBox="0 0 5 100"' in drawn


def test_bars_of_years_are_wide_enough_to_be_seen() -> None:
    """Of 10,000 buckets each bar is as wide as some of them; without letters there are no bars."""
    assert 'width="16.67"' in charts.draw_bars({0: {"known": 1}}, 0, 9_999)
    assert "<rect" not in charts.draw_bars({}, 0, 0)


def test_deliveries_of_many_tasks_are_in_few_rows() -> None:
    """The largest tasks have rows of their own; deliveries above 20 share a column."""
    rows = charts.delivery_rows(a_triage(groups=40, deliveries=250))
    assert len(rows) == charts.MAX_TASKS + 1
    assert rows[-1][0] == "30 other tasks"
    assert rows[0][1] == [1, 0, 0, 0, 0, 0, 0, 251]
    assert charts.delivery_rows(replace(a_triage(), deliveries=())) == []


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (9_960, "9,960"),
        (10_000, "10k"),
        (600_000, "600k"),
        (999_600, "1M"),
        (5 * 10**9, "5G"),
    ],
)
def test_count_fits_its_cell(number: int, text: str) -> None:
    """A count of any size has at most five characters."""
    assert charts.short_number(number) == text


def test_a_long_name_may_be_broken_after_a_dot() -> None:
    """And nowhere else; what follows the last dot stays whole."""
    assert [*charts.parts_of("shop.charge_card")] == ["shop.", "charge_", "card"]
    assert "".join(charts.parts_of("a.b@c: d")) == "a.b@c: d"
