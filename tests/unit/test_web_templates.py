"""Templates: everything is escaped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import celery_dlq.web
from celery_dlq.letters.record import Reason
from celery_dlq.registry import features
from celery_dlq.web.templating import Templates, ago, duration

FOLDER = Path(celery_dlq.web.__file__).parent
TEMPLATES = sorted(FOLDER.parent.rglob("*.html"))


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda path: path.name)
def test_no_template_passes_anything_raw(template: Path) -> None:
    """No filter ``safe``, no inline script or style, no attribute without quotes, no event."""
    text = template.read_text()
    assert not re.search(r"\|\s*safe\b|autoescape|javascript:", text)
    assert not re.search(r"<style|<script(?! src=)|\sstyle=|\son\w+=", text)
    assert not re.search(r"=\{\{", text)


def test_only_times_are_markup_made_in_python() -> None:
    """Markup elsewhere would be escaping by hand."""
    users = {
        path.relative_to(FOLDER).as_posix()
        for path in [*FOLDER.rglob("*.py"), *FOLDER.parent.glob("features/*/pages.py")]
        if "Markup" in path.read_text()
    }
    assert users == {"templating.py"}


_STARTED = """
import gc, sys
from celery import Celery
from celery_dlq import DeadLetters
from celery_dlq.web.asgi import DeadLettersApp
from celery_dlq.web.server import listening, serve

def ready():
    print(gc.get_freeze_count(), *sorted(app.site.templates.environment.cache.keys()))
    sys.exit()

app = DeadLettersApp(DeadLetters(Celery(broker="redis://127.0.0.1:1")))
serve(app, listening("127.0.0.1", 0), ready)
"""


def test_a_server_compiles_its_templates_before_it_is_ready_and_keeps_them_out_of_collections() -> (
    None
):
    """A first request took half a second, and one in ten waited for the garbage collector."""
    command = [sys.executable, "-c", _STARTED]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    frozen, *_ = done.stdout.split()
    assert int(frozen) > 10_000
    assert all(f"'{template.name}'" in done.stdout for template in TEMPLATES)


def test_nothing_unknown_is_shown_as_empty() -> None:
    """A typo in a template fails its test."""
    template = Templates().environment.from_string("{{ nothing }}")
    with pytest.raises(UndefinedError):
        template.render()


@pytest.mark.parametrize("text", ["<script>", "\x1b[2J", "\u202e", "\ud800", '" onclick="'])
def test_texts_are_harmless(text: str) -> None:
    """Whoever wrote them."""
    shown = Templates().environment.from_string('<i title="{{ text }}">{{ text }}</i>')
    page = shown.render(text=text)
    assert page.encode("utf-8")
    assert "<script" not in page
    assert not re.search('[\x1b\u202e]|" onclick', page)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 s"), (0.25, "250 ms"), (90, "90 s"), (7200, "2 h"), (-5, "0 s")]
)
def test_durations_have_one_unit(seconds: float, text: str) -> None:
    """As people say them."""
    assert duration(seconds) == text


def test_what_is_unknown_has_no_unit() -> None:
    """Only a sign that it is."""
    assert [ago(None), duration(None)] == ["–", "–"]


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_a_colour_of_its_own(reason: Reason) -> None:
    """Its bars and the mark in front of its name have it, by the style that is served."""
    style = Templates().static_files["style.css"].decode()
    assert f"\n.r-{reason} {{ --reason: {reason.colour}; }}\n" in style
    assert style.count(reason.colour) == 1
    for ground in re.findall(r"--card: (#\w{6});", style):
        assert _contrast(reason.colour, ground) >= 3, f"expected to see {reason} on {ground}"


def test_a_style_with_other_colours_has_another_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Browsers keep a style for a year, by its path."""
    before = Templates().static["style.css"]
    monkeypatch.setattr(Reason.FAILED, "colour", "#123456")
    assert Templates().static["style.css"] != before


def _contrast(one: str, other: str) -> float:
    """The contrast of two colours, as WCAG has it; graphics need 3."""
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear))


def test_pages_ask_for_panels_and_not_which_routes_there_are() -> None:
    """A panel that no page asks for, of the core or of a feature, would never be seen."""
    package = FOLDER.parents[1]
    texts = [path.read_text() for path in package.rglob("templates/*.html")]
    asked = {name for text in texts for name in re.findall(r'call\.panels\("(\w+)"', text)}
    assert asked == {name for feature in features() for name in feature.panels}
    assert not [text for text in texts if re.search(r"\bin call\.site\.routes(?!\.values)", text)]
