"""The reference is what the code says, in plain Markdown; the README is a first page."""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import reference
from reference import ROOT

from celery_dlq import registry
from celery_dlq.config import Settings
from celery_dlq.letters.record import record_fields
from celery_dlq.policies.policy import Policy, policy_keys

DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text("utf-8")
NEEDS = {"api.md": "pyspark", "record.md": "pyarrow"}
"""Pages that are made with packages of an extra."""


def texts_of_settings() -> dict[str, str]:
    """What is written about each setting, by its name without the prefix."""
    core = {f.name: f.metadata["doc"] for f in dataclasses.fields(Settings) if f.metadata}
    return core | {name: found.doc for name, (_, found) in registry.settings().items()}


def test_the_readme_names_settings_that_exist() -> None:
    """It sends readers to the reference for all others, so a wrong one would be all they see."""
    named = set(re.findall(r"\bdlq_(\w+)", README))
    assert named
    assert named <= texts_of_settings().keys()


def test_the_readme_is_read_in_minutes() -> None:
    """What grows beyond that is the reference's or a page's."""
    assert len(README.splitlines()) <= 110


@pytest.mark.parametrize(
    "answer",
    [
        "(LICENSE)",
        "beta",
        "(.github/SECURITY.md)",
        "(docs/compatibility.md)",
        "(docs/compatibility.md#uninstall)",
        "(docs/performance.md)",
        "(docs/how-to/redact.md)",
        "dlq_url",
        "default_delay",
        "Parquet",
        "PySpark",
    ],
)
def test_the_readme_answers_what_is_asked_before_an_installation(answer: str) -> None:
    """Licence, state, costs, what is stored, how to leave: one click away at most."""
    assert answer in README


def test_every_field_says_what_it_is() -> None:
    """The reference of settings and of the record is these texts."""
    for name, text in texts_of_settings().items():
        assert "Defaults to" in text, name
    assert all(field.doc.endswith(".") for field in record_fields().values())
    documented = Policy.__doc__ or ""
    features = registry.policy_keys()
    for key in policy_keys():
        text = features[key][1].doc if key in features else documented
        assert f"{key}: " in text or " Unset: " in text, key


@pytest.mark.parametrize("page", reference.pages(), ids=lambda page: page.name)
def test_a_page_says_what_the_code_says(page: Path) -> None:
    """Whoever reads the repository, or a site that shows it, sees every setting and command."""
    if (package := NEEDS.get(page.name)) and find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    changed = page.read_text("utf-8") != reference.rewritten(page)
    assert not changed, "run `python tests/programs/reference.py`, and commit the pages"


def test_all_that_is_made_is_on_a_page() -> None:
    """A table that no page has is one that nobody can read."""
    names = [name for page in reference.pages() for name in reference.names_in(page)]
    assert sorted(names) == sorted(reference.MADE)


def test_pages_need_no_sphinx_to_be_read() -> None:
    """A directive of Sphinx is an empty box in the repository and on a hosting site."""
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]:
        if "_build" not in page.parts:
            text = page.read_text("utf-8")
            assert not re.findall(r"^(?:```|:::)\{.*|^\{\w+\}`", text, re.MULTILINE), page


def test_each_page_is_in_a_list_of_links() -> None:
    """The side bar of the site is made of these lists."""
    listed = set()
    for index in DOCS.rglob("index.md"):
        links = re.findall(r"^- \[.*?\]\(([^)#]+\.md)\)", index.read_text("utf-8"), re.MULTILINE)
        listed |= {(index.parent / link).resolve() for link in links}
    pages = {page for page in DOCS.rglob("*.md") if "_build" not in page.parts}
    assert pages - listed == {DOCS / "index.md"}


def test_the_map_has_the_floors_of_the_import_contract() -> None:
    """Import-linter checks the one; readers see the other."""
    contract = (ROOT / ".importlinter").read_text("utf-8").partition("\nlayers =\n")[2]
    layers = [set(line.strip().split(" : ")) for line in contract.splitlines() if line.strip()]
    page = (DOCS / "explanation/internals.md").read_text("utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*?) \|", page, re.MULTILINE)
    assert [int(number) for number, _ in rows] == list(range(len(layers), 0, -1))
    assert [set(re.findall(r"`(\w+)/?`", rooms)) for _, rooms in rows] == layers
    assert f"from floor {len(layers)} to floor 1" in page
