"""Templates of the pages: everything is escaped, nothing unknown is shown as empty."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import cached_property
from importlib.resources import files
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from celery_dlq.letters.bodies import argument_texts, unread_text
from celery_dlq.letters.course import pace_text
from celery_dlq.letters.printable import one_line, printable, shortened
from celery_dlq.letters.record import Reason
from celery_dlq.registry import features

_UNITS = ((86_400, "d"), (3600, "h"), (60, "min"), (1, "s"))
_MAX_EXACT_CHARS = 2000
_MOST_SHOWN = 10**18
_REASONS = [reason.value for reason in Reason]
# Attributes, no styles: the content policy forbids those.
_BAR = '<rect class="r-%s" x="%d" y="%.2f" width="5" height="%.2f"><title>%s</title></rect>\n'
_LINE = '<line class="release" x1="{x}" x2="{x}" y1="0" y2="28"><title>{text}</title></line>'
_BARS = """<svg class="bars{wide}" role="img" aria-label="{text}" viewBox="0 0 {width} 28"
preserveAspectRatio="none"><title>{text}</title>
<line class="axis" x1="0" x2="{width}" y1="27.5" y2="27.5"/>
{drawn}</svg>"""

STATIC_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Templates:
    """Renders the templates of the pages, and knows the static files."""

    def __init__(self) -> None:
        shown = (one.name for one in features() if one.pages or one.panels)
        packages = ["celery_dlq.web", *(f"celery_dlq.features.{name}" for name in shown)]
        self.environment = Environment(
            loader=FileSystemLoader([str(files(name) / "templates") for name in packages]),
            autoescape=True,
            auto_reload=False,  # Else each include, two in each row, asks for the file's time
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_shown_value,
        )
        self.environment.filters |= {
            "ago": ago,
            "carried": json.dumps,
            "count": count,
            "duration": duration,
            "exact": exact,
            "last_part": lambda path: path.replace("\\", "/").rpartition("/")[2],
            "moment": moment,
            "pace": pace_text,
            "plain": plain,
            "short": short,
        }
        self.environment.globals |= {
            "argument_texts": argument_texts,
            "bars": bars,
            "reasons": _REASONS,
            "style": self.static["style.css"],
            "script": self.static["page.js"],
            "unread_text": unread_text,
            "icon": self.static["icon.svg"],
        }

    def render(self, template: str, **values: Any) -> bytes:
        """Render a template to UTF-8."""
        text = self.environment.get_template(template).render(
            now=datetime.now(timezone.utc), **values
        )
        return text.encode("utf-8", "backslashreplace")

    def compile(self) -> None:
        """Compile all templates: a server does before its first request, which would wait."""
        for name in self.environment.list_templates(extensions=["html"]):
            self.environment.get_template(name)

    @cached_property
    def static_files(self) -> Mapping[str, bytes]:
        """The static files by their names; the style has a colour for each reason."""
        folder = files("celery_dlq.web") / "static"
        found = {
            each.name: each.read_bytes()
            for each in folder.iterdir()
            if each.name[each.name.rfind(".") :] in STATIC_TYPES
        }
        colours = "".join(f".r-{each} {{ --reason: {each.colour}; }}\n" for each in Reason)
        return {**found, "style.css": found["style.css"] + colours.encode()}

    @cached_property
    def static(self) -> Mapping[str, str]:
        """Hash of the content by the name of a static file; it is part of its path."""
        return {
            name: hashlib.sha256(content).hexdigest()[:12]
            for name, content in self.static_files.items()
        }


def _shown_value(value: Any) -> Any:
    """Escape control characters and lone surrogates, wherever a text comes from."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable(value)
    return "" if value is None else value


def count(value: int | None) -> str:
    """A number with separators."""
    return "–" if value is None else f"{value:,}"


def duration(value: timedelta | float | None) -> str:
    """A time span in its largest unit."""
    if value is None:
        return "–"
    seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)
    for length, unit in _UNITS:
        if seconds >= 2 * length or (unit == "s" and seconds >= 1):
            return f"{seconds // length:.0f} {unit}"
    return "0 s" if seconds <= 0 else f"{seconds * 1000:.0f} ms"


def ago(value: datetime | None) -> Markup | str:
    """How long ago something was, with its time; the script adds the viewer's zone."""
    if value is None:
        return "–"
    past = datetime.now(timezone.utc) - value
    text = f"{duration(past)} ago" if past >= timedelta() else f"in {duration(-past)}"
    return _time_markup(value, text, relative=True)


def moment(value: datetime | None) -> Markup | str:
    """A time in UTC; the script adds the viewer's zone."""
    if value is None:
        return "–"
    return _time_markup(value, f"{_utc_text(value)} UTC", relative=False)


def bars(
    columns: Sequence[tuple[str, Mapping[str, int]]],
    label: str,
    *,
    wide: bool = False,
    lines: Sequence[tuple[int, object, str]] = (),
) -> Markup:
    """Stacked bars of letters by reason; no template, for a page has thousands of them."""
    heights = [sum(counts.values()) for _name, counts in columns]
    scale, width, drawn = 26 / max(1, *heights), 6 * len(columns), []
    for place, (name, counts) in enumerate(columns):
        if not heights[place]:  # As most are
            continue
        y = 27.0
        for why, letters in counts.items():
            if letters:
                tall = max(scale * letters, 1)
                y -= tall
                kind, title = why if why in _REASONS else "other", f"{name}: {letters:,} {why}"
                shown = escape(printable(title))
                drawn.append(_BAR % (kind, 6 * place, max(y, 0), tall, shown))
    for place, _at, what in lines:
        drawn.append(_LINE.format(x=6 * place + 3, text=escape(printable(what))))
    text, more = escape(f"{printable(label)}: {sum(heights):,}"), " wide" if wide else ""
    made = _BARS.format(text=text, width=width, drawn="".join(drawn), wide=more)
    return Markup(made)  # noqa: S704 - its texts are escaped


def short(text: object, limit: int = 200) -> str:
    """A text in one line, cut."""
    return shortened(" ".join(str(text).split()), limit)


def exact(text: str) -> str:
    """A text in one line with all that it has, invisible characters as escapes."""
    return shortened(one_line(text), _MAX_EXACT_CHARS)


def plain(value: Any) -> str:
    """The value of a setting or an option, as people write it."""
    if isinstance(value, Mapping):
        shown = ((name, plain(each)) for name, each in value.items() if each)
        return ", ".join(f"{name.replace('_', ' ')} {text}" for name, text in shown)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(plain, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < _MOST_SHOWN else "a number of many digits"
    return f"{value:,.10g}" if isinstance(value, float) else str(value)


def _time_markup(value: datetime, text: str, *, relative: bool) -> Markup:
    kind, title = "data-ago" if relative else "data-at", f"{_utc_text(value)} UTC"
    machine = value.astimezone(timezone.utc).isoformat(timespec="milliseconds")
    made = f'<time datetime="{machine}" title="{title}" {kind}>{escape(text)}</time>'
    return Markup(made)  # noqa: S704 - numbers, and a text that is escaped


def _utc_text(value: datetime) -> str:
    return value.astimezone(timezone.utc).isoformat(" ", "seconds")[:19]
