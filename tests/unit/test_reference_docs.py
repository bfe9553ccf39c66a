"""The README's tables and the texts that the reference is made from leave nothing out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from celery_dlq import registry
from celery_dlq.config import PREFIX, Settings
from celery_dlq.letters.record import record_fields
from celery_dlq.policies.policy import Policy, policy_keys

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


def first_column(header: str) -> set[str]:
    """The first column of the README's table under a header."""
    table = README.partition(f"| {header} | meaning | default |\n")[2].partition("\n\n")[0]
    return set(re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE))


def texts_of_settings() -> dict[str, str]:
    """What is written about each setting, by its name without the prefix."""
    core = {f.name: f.metadata["doc"] for f in dataclasses.fields(Settings) if f.metadata}
    return core | {name: found.doc for name, (_, found) in registry.settings().items()}


def test_the_readme_has_every_setting() -> None:
    """It names no setting that is gone."""
    assert first_column("setting") == {PREFIX + name for name in texts_of_settings()}


def test_the_readme_has_every_policy_key() -> None:
    """The same."""
    assert first_column("policy key") == {*policy_keys()}


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
