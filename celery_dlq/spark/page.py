"""A triage as one HTML file: tables and charts, no script, nothing loaded from anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from celery_dlq.export.wholefile import save
from celery_dlq.spark import picture
from celery_dlq.spark.buckets import bucket_width

if TYPE_CHECKING:
    from celery_dlq.spark.findings import CauseRow, Findings
    from celery_dlq.spark.report import GroupRow, Triage

MOST_GROUPS = 50
_LONGEST_TEXT = 240
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 960, 260, 52, 26, 8
_CERTAIN = 1e-12

_STYLE = """
:root{--ink:#1c2329;--soft:#5d6872;--line:#e1e5e9;--page:#f4f6f8;--card:#fff;--bar:#3d6b99;
--hot:#b3422c;--cell:74,111,143}
@media (prefers-color-scheme:dark){:root{--ink:#e6eaee;--soft:#9aa6b1;--line:#323b44;
--page:#14191e;--card:#1d242b;--bar:#7fa8cc;--hot:#f08a70;--cell:110,160,205}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 20px 60px}
h1{font-size:27px;line-height:1.2;margin:0 0 4px}
h2{font-size:17px;margin:0 0 12px}
h3{font-size:15px;margin:18px 0 6px;overflow-wrap:anywhere}
p{margin:0 0 10px}
.soft,th,.unit{color:var(--soft)}
section{background:var(--card);border:1px solid var(--line);border-radius:8px;
padding:18px 20px;margin-top:16px}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(170px,1fr));gap:12px;
margin-top:18px}
.card{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 16px}
.card b{display:block;font-size:20px;line-height:1.25;overflow-wrap:anywhere}
.two{display:grid;grid-template-columns:repeat(auto-fit,minmax(420px,1fr));gap:16px}
.wide{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:14px}
th{font-weight:500;text-align:left;border-bottom:1px solid var(--line);padding:4px 10px 4px 0}
td{vertical-align:top;border-bottom:1px solid var(--line);padding:6px 10px 6px 0;
overflow-wrap:anywhere}
tr:last-child td{border-bottom:0}
.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
.t{white-space:nowrap}
code{font:13px/1.4 ui-monospace,"DejaVu Sans Mono",monospace}
.track{background:var(--line);border-radius:3px;height:8px;min-width:90px;margin-top:7px}
.track i{display:block;height:8px;border-radius:3px;background:var(--bar)}
.dot{display:inline-block;width:10px;height:10px;border-radius:2px;margin-right:7px}
.tag{border:1px solid currentColor;border-radius:9px;padding:0 8px;font-size:12px}
.hot{color:var(--hot)}
.heat td{text-align:center;border:2px solid var(--card);padding:4px}
.heat td:first-child{text-align:left}
.key{font-size:13px;color:var(--soft);margin-top:6px}
.key span{margin-right:16px;white-space:nowrap}
svg{display:block;width:100%;height:auto}
svg text{font:12px system-ui,"DejaVu Sans",sans-serif;fill:var(--soft)}
svg line{stroke:var(--line)}
@media print{body{background:#fff}section,.card{break-inside:avoid}}
"""


def write_page(found: Findings, path: Path | str, now: datetime) -> Path:
    """Write the page.

    Args:
        found: The rows, as `celery_dlq.spark.findings.findings` returns them.
        path: The file; replaced if it is there, its folder is made if it is not.
        now: The present, aware; it stands on the page.

    Returns:
        The file.

    Raises:
        ExportError: The file cannot be written.
    """
    return save(Path(path), page(found, now).encode())


def page(found: Findings, now: datetime) -> str:
    """The page as text; see `write_page`."""
    triage = found.triage
    title = f"{_counted(triage.letters, 'dead letter')} in {_counted(len(triage.queues), 'queue')}"
    parts = [
        _head(title, triage, now),
        _infos(triage),
        _section("Letters over time, UTC", _timeline(triage)),
        _section("What is dying", _groups(triage)),
        _section("Why: what the largest groups have in common", _causes(found)),
        _section("New and returned", _news(found)),
        (
            f'<div class="two">{_section("Reasons", _reasons(triage))}'
            f"{_section('Deliveries before death', _deliveries(triage))}</div>"
        ),
        *([_section("How many deliveries are worth it", _limits(found))] if found.limits else []),
        _section("Floods", _spikes(found)),
        _section("Causes that look alike", _similar(found)),
    ]
    # The policy forbids everything but the style above: the page cannot call home.
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" '
        "content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<link rel="icon" href="data:,">'
        f"<title>{_text(title)}</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(parts)}</main></body></html>\n"
    )


def _head(title: str, triage: Triage, now: datetime) -> str:
    span = picture.span_text(triage.first_seen_at, triage.last_seen_at)
    queues = ", ".join(triage.queues[:20]) + (" …" if len(triage.queues) > 20 else "")  # noqa: PLR2004
    made = f"{now.astimezone(timezone.utc):%Y-%m-%d %H:%M} UTC"
    return (
        f"<header><h1>{_text(title)}</h1><p class=soft>{_text(span)} · {_text(queues)}<br>"
        f"from <code>{_text(triage.path)}</code>, read {made}</p></header>"
    )


def _infos(triage: Triage) -> str:
    largest = triage.groups[0] if triage.groups else None
    share = picture.percent(largest.letters, triage.letters) if largest else "0%"
    cards = [
        (f"{triage.letters:,}", "dead letters"),
        (f"{len(triage.groups):,}", "causes"),
        (share, "have the largest cause"),
        (_moment(triage.last_seen_at)[:16], "last death, UTC"),
    ]
    inside = "".join(
        f'<div class="card"><b>{_text(value)}</b><span class=soft>{_text(what)}</span></div>'
        for value, what in cards
    )
    return f'<div class="cards">{inside}</div>'


def _timeline(triage: Triage) -> str:
    if not triage.timeline:
        return "<p class=soft>The letters have no times.</p>"
    width = int(bucket_width(triage.bucket).total_seconds())
    starts = [int(row.bucket_start.timestamp()) for row in triage.timeline]
    left, right = picture.window(min(starts), max(starts) + width, width)
    heights: Counter[int] = Counter()
    for start, row in zip(starts, triage.timeline, strict=True):
        heights[start] += row.letters
    top = max(heights.values())
    across = _scale(left, right, _LEFT, _WIDTH - 6)
    up = _scale(0, top, _HEIGHT - _BOTTOM, _TOP)
    marks = [_rule(number, up) for number in _round_numbers(top)]
    marks += [
        f'<text x="{across(tick):.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
        f"{picture.tick_label(tick, right - left)}</text>"
        for tick in picture.ticks(left, right)
    ]
    floor: Counter[int] = Counter()
    bars = []
    for reason in [row.reason for row in triage.reasons]:
        for start, row in zip(starts, triage.timeline, strict=True):
            if row.reason == reason:
                bars.append(_bar(start, width, row.letters, floor[start], reason, across, up))
                floor[start] += row.letters
    unit = triage.bucket.removeprefix("1 ")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="Letters per {unit}">{"".join(marks)}{"".join(bars)}</svg>'
        f'<div class="key">letters per {unit}: {_key(triage)}</div>'
    )


def _bar(
    start: int,
    width: int,
    letters: int,
    below: int,
    reason: str,
    across: Callable[[float], float],
    up: Callable[[float], float],
) -> str:
    x, wide = across(start), max(1.0, across(start + width) - across(start) - 1)
    y, tall = up(below + letters), up(below) - up(below + letters)
    at = f"{datetime.fromtimestamp(start, timezone.utc):%Y-%m-%d %H:%M:%S}"
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{max(tall, 0.5):.1f}" '
        f'fill="{picture.COLOURS.get(reason, picture.OTHER)}">'
        f"<title>{at}: {letters:,} {_text(reason)}</title></rect>"
    )


def _rule(number: int, up: Callable[[float], float]) -> str:
    y = up(number)
    return (
        f'<line x1="{_LEFT}" x2="{_WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{number:,}</text>'
    )


def _key(triage: Triage) -> str:
    return "".join(f"<span>{_dot(row.reason)}{_text(row.reason)}</span>" for row in triage.reasons)


def _groups(triage: Triage) -> str:
    rows = [
        (
            (
                f'<td class="n">{group.letters:,}<div class="track">'
                f'<i style="width:{100 * group.letters / triage.groups[0].letters:.1f}%"></i></div>'
            ),
            (
                f"<td>{_dot(group.main_reason)}<b>{_text(group.task_name)}</b><br>"
                f"{_text(_cause(group))}<br><code class=soft>{_text(group.fingerprint)}</code>"
            ),
            (
                f"<td>{_text(group.example_description)}<br>"
                f"<code class=soft>{_text(group.example_id)}</code>"
            ),
            f'<td class="t">{_moment(group.first_seen_at)}<br>{_moment(group.last_seen_at)}',
            (
                f"<td>{_counted(group.hosts, 'host')}<br>"
                f"<span class=soft>{_text(', '.join(group.releases[:6]))}</span>"
            ),
        )
        for group in triage.groups[:MOST_GROUPS]
    ]
    rest = triage.groups[MOST_GROUPS:]
    note = (
        f"<p class=soft>and {_counted(len(rest), 'smaller group')} with "
        f"{_counted(sum(group.letters for group in rest), 'letter')}</p>"
        if rest
        else ""
    )
    heads = (
        "letters",
        "task, cause, fingerprint",
        "newest example",
        "first and last, UTC",
        "where",
    )
    return _table(heads, rows) + note


def _causes(found: Findings) -> str:
    groups = {group.fingerprint: group for group in found.triage.groups}
    parts = []
    for fingerprint, rows in found.causes.items():
        group = groups[fingerprint]
        parts.append(
            f"<h3>{_text(group.task_name)} · {_text(_cause(group))} "
            f"<code class=soft>{_text(fingerprint)}</code></h3>"
        )
        parts.append(_cause_table(rows))
    if not parts:
        return "<p class=soft>No group is large enough to be compared with others.</p>"
    return (
        "<p class=soft>Values that are more frequent in the group than among other letters, "
        "further than chance explains after correction for all values looked at "
        "(false findings below 1%). A correlation is a lead, not a proof.</p>" + "".join(parts)
    )


def _cause_table(causes: Sequence[CauseRow]) -> str:
    if not causes:
        return "<p>Nothing sets its letters apart from others.</p>"
    rows = [
        (
            f"<td><code>{_text(cause.feature)}</code> = <b>{_text(cause.value)}</b>",
            f'<td><div class="track"><i style="width:{100 * cause.support:.1f}%"></i></div>',
            f'<td class="n">{cause.support:.0%}',
            f'<td class="n">{cause.share_of_others:.1%}',
            f'<td class="n">{cause.lift:,.1f}×',
            f'<td class="n">{_chance(cause.q_value)}',
            f"<td>{_text(cause.against)}",
        )
        for cause in causes
    ]
    heads = ("value", "", "of the group", "of the others", "lift", "chance", "compared with")
    return _table(heads, rows)


def _news(found: Findings) -> str:
    if not found.new:
        return "<p class=soft>No cause is new, and none came back.</p>"
    rows = [
        (
            f'<td><span class="tag hot">{_text(row.kind)}</span>',
            f'<td class="n">{row.letters:,}',
            (
                f"<td><b>{_text(row.task_name)}</b> {_text(_last(row.exception_type or ''))}<br>"
                f"<code class=soft>{_text(row.fingerprint)}</code>"
            ),
            f'<td class="t">{_moment(row.first_seen_at)}',
            f'<td class="t">{_moment(row.gone_since) if row.gone_since else "never"}',
        )
        for row in found.new
    ]
    heads = ("", "letters", "cause", "first since then, UTC", "before that last seen")
    since = f"<p class=soft>since {_moment(found.news_from)} UTC</p>"
    return since + _table(heads, rows)


def _reasons(triage: Triage) -> str:
    rows = [
        (
            f"<td>{_dot(row.reason)}{_text(row.reason)}",
            (
                f'<td><div class="track"><i style="width:{100 * row.share:.1f}%;'
                f'background:{picture.COLOURS.get(row.reason, picture.OTHER)}"></i></div>'
            ),
            f'<td class="n">{row.letters:,}',
            f'<td class="n">{picture.percent(row.letters, triage.letters)}',
        )
        for row in triage.reasons
    ]
    return _table(("reason", "", "letters", "share"), rows)


def _deliveries(triage: Triage) -> str:
    bins = picture.bins([row.deliveries for row in triage.deliveries])
    rows = []
    for label, cells in picture.delivery_rows(triage, bins):
        total = max(sum(cells), 1)
        shown = [
            f'<td style="background:rgba(var(--cell),{0.75 * count / total:.2f})">'
            f"{f'{count:,}' if count else ''}"
            for count in cells
        ]
        rows.append((f"<td>{_text(label)}", *shown))
    heads = ("task", *(picture.bin_label(*bounds) for bounds in bins))
    return _table(heads, rows, kind="heat")


def _limits(found: Findings) -> str:
    rows = [
        (
            f"<td>{_text(row.task_name)}",
            f'<td class="n">{row.delivery:,}',
            f'<td class="n">{row.reached:,.0f}',
            f'<td class="n">{row.succeeded:,.0f}',
            f'<td class="n">{row.died:,}',
            f'<td class="n">{row.share or 0:.1%}',
            f'<td class="n"><b>{row.advised_max_deliveries}</b>',
        )
        for row in found.limits
    ]
    heads = (
        "task",
        "delivery",
        "reached",
        "succeeded",
        "died",
        "succeeded of reached",
        "advised max_deliveries",
    )
    note = (
        "<p class=soft>From the letters and the sample of messages that succeeded, scaled up to "
        "all. The advice is the lowest limit that keeps all but 0.1% of the successes.</p>"
    )
    return note + _table(heads, rows)


def _spikes(found: Findings) -> str:
    if not found.spikes:
        return "<p class=soft>No cause had far more letters than before.</p>"
    rows = [
        (
            f'<td class="t">{_moment(row.bucket_start)}',
            f'<td class="n">{row.letters:,}',
            f'<td class="n">{row.expected:,.1f}',
            f"<td><b>{_text(row.task_name)}</b> <code class=soft>{_text(row.fingerprint)}</code>",
        )
        for row in found.spikes
    ]
    unit = found.triage.bucket.removeprefix("1 ")
    return _table(("from, UTC", f"letters per {unit}", "usual before", "cause"), rows)


def _similar(found: Findings) -> str:
    if not found.similar:
        return "<p class=soft>No two causes have nearly the same message.</p>"
    rows = [
        (
            f'<td class="n">{row.similarity:.0%}',
            (
                f"<td><b>{_text(row.task_name)}</b><br>{_text(row.message)}<br>"
                f"<code class=soft>{_text(row.fingerprint)}</code>"
            ),
            (
                f"<td><b>{_text(row.other_task_name)}</b><br>{_text(row.other_message)}<br>"
                f"<code class=soft>{_text(row.other_fingerprint)}</code>"
            ),
        )
        for row in found.similar
    ]
    return _table(("words in common", "one", "other"), rows)


def _section(title: str, inside: str) -> str:
    return f"<section><h2>{_text(title)}</h2>{inside}</section>"


def _table(heads: Iterable[str], rows: Sequence[Sequence[str]], kind: str = "") -> str:
    """A table; cells bring their opening tag, so that each says how it is set."""
    numeric = [cell.startswith('<td class="n"') for cell in rows[0]] if rows else []
    top = "".join(
        f'<th class="{"n" if is_number else ""}">{_text(head)}</th>'
        for head, is_number in zip(heads, numeric, strict=True)
    )
    body = "".join(f"<tr>{''.join(f'{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="wide"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def _dot(reason: str) -> str:
    colour = picture.COLOURS.get(reason, picture.OTHER)
    return f'<i class="dot" style="background:{colour}"></i>'


def _cause(group: GroupRow) -> str:
    return _last(group.exception_type) if group.exception_type else ", ".join(group.reasons)


def _last(dotted: str) -> str:
    return dotted.rpartition(".")[2]


def _moment(value: datetime | None) -> str:
    return f"{value.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}" if value else "unknown"


def _chance(q_value: float) -> str:
    return f"below {_CERTAIN:.0e}" if q_value < _CERTAIN else f"{q_value:.1g}"


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def _text(value: str) -> str:
    """Text of any origin, cut and escaped."""
    line = "".join(c if c.isprintable() else " " for c in value)
    return escape(line if len(line) <= _LONGEST_TEXT else f"{line[: _LONGEST_TEXT - 1]}…")


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    return lambda value: start + (value - low) / ((high - low) or 1) * (end - start)


def _round_numbers(top: int) -> list[int]:
    """A few whole numbers from 0 up to the highest bar."""
    step, factors = 1, (2, 2.5, 2)
    turn = 0
    while top / step > 4:  # noqa: PLR2004 - lines that do not crowd
        step = int(step * factors[turn % 3])
        turn += 1
    return list(range(0, top + 1, step))
