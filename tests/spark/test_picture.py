"""The dashboard: a real picture of any triage."""

from __future__ import annotations

import struct
import sys
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from celery_dlq.errors import ExportError, MissingExtra
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


def size(png: Path) -> tuple[int, int]:
    """Width and height, from the header that makes a PNG one."""
    header = png.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


@pytest.mark.parametrize(
    "triage",
    [
        pytest.param(a_triage(), id="one letter"),
        pytest.param(a_triage(groups=40, reasons=12, span=timedelta(days=9)), id="many"),
        pytest.param(a_triage(groups=3, span=timedelta(days=900), deliveries=250), id="years"),
        pytest.param(a_triage(task_name="$x_{a}$ \n\x1b" + "W漢" * 90), id="odd names"),
    ],
)
def test_picture_is_a_png_of_readable_size(triage: Triage, tmp_path: Path) -> None:
    """Any triage gives a real PNG that fits a screen, without a warning."""
    pytest.importorskip("matplotlib")
    width, height = size(charts.draw(triage, tmp_path / "new folder" / "triage.png"))
    assert width == 1800
    assert 600 <= height <= 1500


def test_triage_without_times_has_a_picture(tmp_path: Path) -> None:
    """Letters that nobody dated are drawn without a time axis."""
    pytest.importorskip("matplotlib")
    rows = a_triage()
    undated = Triage(
        path=rows.path,
        letters=1,
        queues=(),
        first_seen_at=None,
        last_seen_at=None,
        bucket="1 second",
        groups=rows.groups,
        reasons=(Row(reason="unknown", letters=1, share=1.0),),
        timeline=(),
        deliveries=rows.deliveries,
    )
    assert size(charts.draw(undated, tmp_path / "triage.png"))[0] == 1800


def test_no_text_leaves_the_picture_or_covers_another(tmp_path: Path) -> None:
    """Labels of any length stay apart from each other and inside of the page."""
    pytest.importorskip("matplotlib")
    from matplotlib.text import Text

    triage = a_triage(groups=40, reasons=12, span=timedelta(days=3), task_name="W" * 60)
    with charts.styled():
        figure = charts.dashboard(triage)
        figure.savefig(tmp_path / "triage.png")
        boxes = [
            text.get_window_extent()
            for text in figure.findobj(Text)
            if isinstance(text, Text) and text.get_visible() and text.get_text().strip()
        ]
    boxes = [box for box in boxes if box.width > 1]
    assert all(figure.bbox.contains(*box.min) and figure.bbox.contains(*box.max) for box in boxes)
    overlapping = [
        (one, other)
        for place, one in enumerate(boxes)
        for other in boxes[place + 1 :]
        if one.shrunk(0.9, 0.5).overlaps(other.shrunk(0.9, 0.5))
    ]
    assert overlapping == []


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


def test_an_endless_name_is_cut_before_it_is_measured(tmp_path: Path) -> None:
    """Laying out 70,000 characters takes minutes."""
    begun = time.process_time()
    charts.draw(a_triage(groups=3, task_name="a.b" * 23_333), tmp_path / "triage.png")
    assert time.process_time() - begun < 15


def test_unwritable_picture_is_one_line(tmp_path: Path) -> None:
    """A picture that cannot be written says so, with its name."""
    pytest.importorskip("matplotlib")
    (tmp_path / "file").touch()
    with pytest.raises(
        ExportError, match=r"expected .*triage\.png to be a file that can be written"
    ):
        charts.draw(a_triage(), tmp_path / "file" / "triage.png")


def test_missing_matplotlib_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without matplotlib the error is the command that brings it."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingExtra, match=r"pip install 'celery_dlq\[spark\]'"):
        charts.draw(a_triage(), tmp_path / "triage.png")
