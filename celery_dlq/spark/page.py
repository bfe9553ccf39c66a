"""A triage as one HTML file: sentences, bars and tables, no script, nothing loaded."""

from __future__ import annotations

from collections import Counter, defaultdict
from datetime import datetime, timezone
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import MissingExtra
from celery_dlq.export.wholefile import save
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.spark import charts
from celery_dlq.spark.triage.rows import MAX_ROWS, MOST_DRAWN
from celery_dlq.spark.triage.trends import bucket_width

if TYPE_CHECKING:
    from celery_dlq.letters.explanation import Explanation
    from celery_dlq.spark.triage.rows import Findings, Row

_MAX_TEXT_CHARS = 240
_MAX_FINDINGS = 8  # of a cause
_KINDS = {"returned": "back"}


class Card(NamedTuple):
    """What the page shows of one cause."""

    group: Row
    why: Explanation | None
    state: str  # a key of `charts.COLOURS`
    label: str  # the state in a word
    bars: str
    marks: tuple[tuple[str, float], ...]  # releases: what they did, and when


def write_page(found: Findings, path: Path | str, now: datetime) -> Path:
    """Write the page."""
    return save(Path(path), rendered_page(found, now).encode("utf-8", "replace"))


def rendered_page(found: Findings, now: datetime) -> str:
    """Render the page as text; see `write_page`."""
    try:
        from jinja2 import Environment  # noqa: PLC0415 - imported when used
        from markupsafe import Markup, escape  # noqa: PLC0415 - comes with Jinja2
    except ImportError as exc:
        feature = "the page of a triage"
        raise MissingExtra(feature, "jinja2", "spark") from exc

    environment = Environment(autoescape=True, finalize=_safe_text)
    template = environment.from_string(
        (files("celery_dlq.spark") / "page.html.j2").read_text("utf-8")
    )
    triage = found.triage
    cards = cards_of(found)
    letters = charts.counted(triage.letters, "dead letter")
    causes = charts.counted(triage.causes, "cause")
    return template.render(
        title=f"{letters} of {causes} in {charts.counted(len(triage.queues), 'queue')}",
        cards=cards,
        timeline=_timeline(found, cards),
        most_rows=MAX_ROWS,
        most_findings=_MAX_FINDINGS,
        found=found,
        triage=triage,
        now=now,
        charts=charts,
        svg=Markup,  # of numbers and our own names
        cause=_cause_of,
        share=lambda share: charts.percent(share, 1),
        last_part=_last_part,
        moment=_moment_text,
        at=lambda seconds: _moment_text(datetime.fromtimestamp(seconds, timezone.utc))[:16],
        number=lambda value, places=0: f"{value:,.{places}f}",
        whole=lambda texts: Markup(" ").join(map(one_line, texts)),  # escaped, and not cut
        # A long name is broken after a dot, not within a word.
        name=lambda text: Markup("<wbr>").join(
            map(escape, charts.parts_of(shortened(one_line(text), _MAX_TEXT_CHARS)))
        ),
    )


def cards_of(found: Findings) -> list[Card]:
    """The largest causes, each with its state and its bars."""
    news = {row.fingerprint: row.kind for row in found.new}
    width = bucket_width(found.triage.bucket).total_seconds()
    first, last = _first_and_last(found)
    cards = []
    for group in found.triage.groups[:MOST_DRAWN]:
        why = found.causes.get(group.fingerprint)
        state, label = _state_of(why, news.get(group.fingerprint), found.news_from)
        marks = tuple(_marks_of(why))
        counts = {
            bucket: {state: letters}
            for bucket, letters in found.over_time.get(group.fingerprint, {}).items()
        }
        lines = [at / width for _what, at in marks]
        drawn = charts.draw_bars(counts, first, last, lines) if counts else ""
        cards.append(Card(group, why, state, label, drawn, marks))
    return cards


def _first_and_last(found: Findings) -> tuple[int, int]:
    """The first and the last bucket of all letters."""
    buckets = [bucket for course in found.over_time.values() for bucket in course]
    return min(buckets, default=0), max(buckets, default=0)


def _state_of(why: Explanation | None, news: str | None, since: datetime | None) -> tuple[str, str]:
    """The state of a cause, and its word."""
    timing = None if why is None else why.timing
    if timing is None or (timing.onset, timing.trend) == (None, None):
        return ("new", _KINDS.get(news, news)) if news else ("known", "known")
    kind = timing.trend.kind if timing.trend else "steady"
    if kind == "over":
        return "over", kind
    began = timing.onset is not None and since is not None and timing.onset.at >= since.timestamp()
    if kind == "returned" or began:
        return "new", _KINDS.get(kind, "new")
    return "known", kind if kind in {"growing", "shrinking"} else "known"


def _marks_of(why: Explanation | None) -> list[tuple[str, float]]:
    timing = None if why is None else why.timing
    if timing is None:
        return []
    releases = (("began with", timing.began_with), ("mended by", timing.mended_by))
    return [(f"{what} {one.name}", one.at) for what, one in releases if one is not None]


def _timeline(found: Findings, cards: list[Card]) -> str:
    """The bars of all letters, by the states of their causes."""
    states = {card.group.fingerprint: card.state for card in cards}
    counts: dict[int, Counter[str]] = defaultdict(Counter)
    for fingerprint, course in found.over_time.items():
        for bucket, letters in course.items():
            counts[bucket][states.get(fingerprint or "", "smaller")] += letters
    return charts.draw_bars(counts, *_first_and_last(found)) if counts else ""


def _safe_text(value: Any) -> Any:
    """Put the text of every expression on one line, and cut it; markup stays as it is."""
    if not isinstance(value, str) or hasattr(value, "__html__"):
        return value
    return shortened(one_line(value), _MAX_TEXT_CHARS)


def _cause_of(group: Row) -> str:
    return _last_part(group.exception_type) if group.exception_type else ", ".join(group.reasons)


def _last_part(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _moment_text(value: datetime | None) -> str:
    return f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}" if value else "unknown"
