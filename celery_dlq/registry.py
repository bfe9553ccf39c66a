"""The seam: what a feature adds, and the one list that plugs features in.

A feature is a folder of `celery_dlq.features`; its ``__init__`` has a ``FEATURE``. The core asks
this module and never imports a feature: take a folder and its line below away, and the rest works.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import Any

FEATURES = (
    "adopt",
    "auto_redrive",
    "circuit_breaker",
    "dead_letter",
    "differences",
    "exceptions",
    "exchange",
    "groups",
    "hold",
    "prometheus",
    "redaction",
    "sentry",
)
"""The features that are plugged in, by the name of their folder; the order is that of observers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What one feature adds; places are written ``module:name``, below the feature's folder.

    Places are imported when they are first needed: every ``celery`` command and every publisher
    imports this module.
    """

    name: str
    # Keys of a policy, each with the check that makes a value of what users write
    policy_keys: Mapping[str, Callable[[str, object], Any]] = field(default_factory=dict)
    # Commands of `celery dlq`, by name
    commands: Mapping[str, str] = field(default_factory=dict)

    def load(self, place: str) -> Any:
        """What a place names."""
        module, _, name = place.partition(":")
        return getattr(import_module(f"celery_dlq.features.{self.name}.{module}"), name)


@cache
def features() -> tuple[Feature, ...]:
    """The features that are plugged in."""
    return tuple(
        import_module(f"celery_dlq.features.{name}").FEATURE  # type: ignore[misc, unused-ignore]
        for name in FEATURES
    )
