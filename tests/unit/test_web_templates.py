"""Templates: everything is escaped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from jinja2 import UndefinedError

import celery_dlq.web
from celery_dlq.letters.record import Reason
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


@pytest.mark.parametrize("reason", sorted({*Reason} - {Reason.HELD}))
def test_each_reason_has_a_colour(reason: str) -> None:
    """In bars and in front of its name; without one it would be black, or like no other reason."""
    style = (FOLDER / "static" / "style.css").read_text()
    assert re.search(rf"--r-{reason}: #[0-9a-f]{{6}};", style)
    assert f".r-{reason} {{ fill: var(--r-{reason}); }}" in style
    assert f".reason.r-{reason}::before {{ background: var(--r-{reason}); }}" in style
