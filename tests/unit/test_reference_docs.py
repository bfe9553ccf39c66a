"""The README's tables and the texts that the reference is made from leave nothing out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from celery_dlq.config import PREFIX, Settings
from celery_dlq.letters.record import DeadLetter, field_kinds
from celery_dlq.policies.policy import Policy

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def first_column(header: str) -> set[str]:
    """The first column of the README's table under a header."""
    table = README.partition(f"| {header} | meaning | default |\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))


def test_the_readme_has_every_setting() -> None:
    """It names no setting that is gone."""
    assert first_column("setting") == {PREFIX + f.name for f in dataclasses.fields(Settings)}


def test_the_readme_has_every_policy_key() -> None:
    """The same."""
    assert first_column("policy key") == {f.name for f in dataclasses.fields(Policy)}


def test_every_field_says_what_it_is() -> None:
    """The reference of settings and of the record is these texts."""
    for field in dataclasses.fields(Settings):
        assert "Defaults to" in field.metadata["doc"], field.name
    kinds = field_kinds()
    texts = {f.name: f.metadata.get("doc", "") for f in dataclasses.fields(DeadLetter)}
    assert all(texts[name].endswith(".") for name in kinds)
    said = Policy.__doc__ or ""
    assert all(f"{field.name}: " in said for field in dataclasses.fields(Policy))
