"""The texts that the reference is made from leave nothing out; the README is a first page."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from celery_dlq import registry
from celery_dlq.config import Settings
from celery_dlq.letters.record import record_fields
from celery_dlq.policies.policy import Policy, policy_keys

README = (Path(__file__).parents[2] / "README.md").read_text("utf-8")


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
