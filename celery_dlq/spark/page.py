"""A triage as one HTML file: tables and charts, no script, nothing loaded."""

from __future__ import annotations

from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import MissingExtra
from celery_dlq.export.wholefile import save
from celery_dlq.letters.comparison import SAME_QUEUES, SAME_TASKS, SUCCESSES
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.spark import charts
from celery_dlq.spark.triage.rows import MAX_ROWS

if TYPE_CHECKING:
    from celery_dlq.spark.triage.rows import Findings, Row

_AGAINST = {
    SAME_TASKS: "other letters of its task",
    SAME_QUEUES: "other letters of its queue",
    SUCCESSES: "sampled successes of its task",
}
_MAX_TEXT_CHARS = 240
_MIN_SHOWN_CHANCE = 1e-12


def write_page(found: Findings, path: Path | str, now: datetime) -> Path:
    """Write the page."""
    return save(Path(path), page(found, now).encode("utf-8", "replace"))


def page(found: Findings, now: datetime) -> str:
    """Render the page as text; see `write_page`."""
    try:
        from jinja2 import Environment  # noqa: PLC0415 - imported when used
        from markupsafe import Markup  # noqa: PLC0415 - comes with Jinja2
    except ImportError as exc:
        feature = "the page of a triage"
        raise MissingExtra(feature, "jinja2", "spark") from exc

    environment = Environment(autoescape=True, finalize=_safe_text)
    template = environment.from_string(
        (files("celery_dlq.spark") / "page.html.j2").read_text("utf-8")
    )
    triage = found.triage
    letters = charts.counted(triage.letters, "dead letter")
    largest = triage.groups[0].letters if triage.groups else 0
    # matplotlib escapes the texts in its SVG.
    return template.render(
        title=f"{letters} in {charts.counted(len(triage.queues), 'queue')}",
        timeline=Markup(charts.timeline_svg(triage)) if triage.timeline else None,  # noqa: S704
        deliveries=Markup(charts.deliveries_svg(triage)),  # noqa: S704
        cards=[
            (f"{triage.letters:,}", "dead letters"),
            (f"{len(triage.groups):,}", "causes"),
            (charts.percent(largest, triage.letters), "have the largest cause"),
            (_moment(triage.last_seen_at)[:16], "last death, UTC"),
        ],
        most_rows=MAX_ROWS,
        found=found,
        triage=triage,
        now=now,
        charts=charts,
        against=_AGAINST,
        cause=_cause,
        chance=_chance,
        last_part=_last_part,
        moment=_moment,
        number=lambda value, places=0: f"{value:,.{places}f}",
        whole=lambda texts: Markup(" ").join(map(one_line, texts)),  # escaped, and not cut
    )


def _safe_text(value: Any) -> Any:
    """Put the text of every expression on one line, and cut it; markup stays as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return shortened(one_line(value), _MAX_TEXT_CHARS)


def _cause(group: Row) -> str:
    return _last_part(group.exception_type) if group.exception_type else ", ".join(group.reasons)


def _last_part(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _moment(value: datetime | None) -> str:
    return f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}" if value else "unknown"


def _chance(q_value: float) -> str:
    return f"below {_MIN_SHOWN_CHANCE:.0e}" if q_value < _MIN_SHOWN_CHANCE else f"{q_value:.1g}"
