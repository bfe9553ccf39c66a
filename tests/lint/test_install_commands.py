"""What pages and examples say how to install: until there is a release, from the repository."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FROM_AN_INDEX = re.compile(r"pip install [^\n`]*?\bcelery_dlq(?![-/.\w])")
WITH_EXTRA = re.compile(r"pip install 'celery_dlq\[\w+\]'")
"""It adds an extra to what is installed, which pip then needs no index for."""


def released() -> bool:
    """True if the changelog has a release with a date."""
    found = re.findall(r"^## \[?\d.*", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    return any(re.search(r"\d{4}-\d\d-\d\d", heading) for heading in found)


def test_nobody_is_told_to_fetch_an_unreleased_package() -> None:
    """An index does not have it; examples and first steps name the repository."""
    assert not released(), "say `pip install celery_dlq` now, and remove this file"
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*")]
    wrong = []
    for page in pages:
        if not page.is_file() or page.suffix in {".png", ".svg", ".pyc"}:
            continue
        adds = page.is_relative_to(ROOT / "docs") and not page.is_relative_to(ROOT / "docs/start")
        for found in FROM_AN_INDEX.finditer(page.read_text("utf-8")):
            text = page.read_text("utf-8")[found.start() :]
            if not (adds and WITH_EXTRA.match(text)):
                wrong.append(f"{page.relative_to(ROOT)}: {text.splitlines()[0]}")
    assert wrong == []


def test_the_oldest_run_has_what_the_package_still_allows() -> None:
    """A pin below a lower bound tests what nobody can install, one above tests less than that."""
    tox, setup = ((ROOT / name).read_text("utf-8") for name in ("tox.ini", "setup.py"))
    oldest = tox.partition("[testenv:py310-celery54-redis62]")[2].partition("set_env")[0]
    pins = dict(re.findall(r"^    ([\w-]+)(?:\[\w+\])?==([\d.]+?)(?:\.\*)?$", oldest, re.MULTILINE))
    assert "uvicorn" in pins
    for name, version in pins.items():
        (bound,) = set(re.findall(rf"[\"']{name}(?:\[\w+\])?>=([\d.]+)", setup))
        assert f"{version}.".startswith(f"{bound}."), (name, version, bound)
