"""The seam: what a feature adds, and the one list that plugs features in.

A feature is a folder of `celery_dlq.features`; its ``__init__`` has a ``FEATURE``. The core asks
this module and never imports a feature: take a folder and its line below away, and the rest works.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any

FEATURES = (
    "adopt",
    "auto_redrive",
    "dead_letter",
    "hold",
    "held",
    "circuit_breaker",
    "differences",
    "doctor",
    "exceptions",
    "groups",
    "phases",
    "search",
    "trends",
    "prometheus",
    "sentry",
    "exchange",
)
"""The features that are plugged in, by the name of their folder; the order is that of observers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyKey:
    """A key of a policy; a feature adds it, or it is a field of `Policy`."""

    # Its check, of a feature the place of it: `(where, value) -> value`, frozen and hashable; a
    # value with behaviour is a `celery_dlq.policies.policy.KeyValue`
    check: Any
    doc: str  # What it means, and after "Unset:" what counts without it
    why_not: str = ""  # Why operators cannot change it while workers run; empty if they can
    example: Any = None  # Of a feature's key a value, as users write it
    # It redrives letters by itself, so it is about a whole dead-letter queue. Place of
    # `(value, due) -> takes | None`: which letters, or which of a job that it made with ``due``
    redrives: str = ""
    is_name: bool = False  # Users write a name, so a text such as ``off`` is one
    kind: str = "Mapping[str, Any]"  # What users write, for type checkers


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A Celery setting with the prefix ``dlq_`` that a feature adds."""

    # Place of its check: `(where, value) -> value`; ``:NAME`` is in `celery_dlq.policies.checks`
    check: str
    default: Any
    doc: str  # Its meaning, unit, special value and default, as in `celery_dlq.config.Settings`


class Block(str, Enum):
    """What a command is for: the block of it in ``celery dlq --help``."""

    LOOK = "Look"
    ACT = "Act"
    STOP = "Stop what burns"
    SERVE = "Serve"


class Measure(str, Enum):
    """The type of a Prometheus metric."""

    COUNTER = "counter"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, of the core or of a feature."""

    name: str
    measure: Measure
    labels: tuple[str, ...]  # `task` comes last
    help: str
    # Place of `(assembly) -> samples`: the values of a feature's gauge, each with its labels
    read: str = ""

    @classmethod
    def counter(cls, name: str, labels: str, text: str) -> Metric:
        """What processes count in memory."""
        return cls(f"celery_dlq_{name}_total", Measure.COUNTER, tuple(labels.split()), text)

    @classmethod
    def gauge(cls, name: str, labels: str, text: str, read: str = "") -> Metric:
        """What an exporter reads at each scrape."""
        return cls(f"celery_dlq_{name}", Measure.GAUGE, tuple(labels.split()), text, read)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    """What one feature adds; places are written ``module:name``, below the feature's folder.

    Places are imported when they are first needed: every ``celery`` command and every publisher
    imports this module.
    """

    name: str
    # Keys of a policy; `Policy.of` has their values
    policy_keys: Mapping[str, PolicyKey] = field(default_factory=dict)
    # Settings, without their prefix; `Settings.of` has their values
    settings: Mapping[str, Setting] = field(default_factory=dict)
    # Place of `(settings) -> None`, which refuses those that contradict each other
    check_settings: str = ""
    # Commands of `celery dlq`, by name, and what they are for
    commands: Mapping[str, str] = field(default_factory=dict)
    block: Block = Block.LOOK
    # What it does in a worker: a function of `celery_dlq.worker.observer.WorkerParts` that returns
    # an `Observer` or `None`
    observer: str = ""
    # Place of `(assembly) -> Observer | None`: where letters are stored without a worker, its
    # `before_store` records them elsewhere first
    outbox: str = ""
    # Instructions to workers, by their kind: places of subclasses of
    # `celery_dlq.store.instructions.Instruction`
    instructions: Mapping[str, str] = field(default_factory=dict)
    # Methods that it adds to `DeadLetters`, by name: ``module:Class.method`` of a class that is
    # made of an assembly
    operations: Mapping[str, str] = field(default_factory=dict)
    # Place of `(app, store) -> Waits`: what takes messages that a redrive publishes, such as a hold
    waits: str = ""
    # How often it looks and how long it waits, in seconds; `interval` has them
    intervals: Mapping[str, float] = field(default_factory=dict)
    # Its metrics; those that it counts lie in its ``__init__``, where its other modules find them
    metrics: tuple[Metric, ...] = ()
    # Place of the routes of its pages; its templates lie in its folder `templates`
    pages: str = ""
    # Place of `(assembly, queue, fingerprint) -> Explained`: why the letters of a cause died
    explains: str = ""
    # What it shows on pages of the core: `(call, subject) -> Panel`, by the place on a page
    panels: Mapping[str, str] = field(default_factory=dict)

    def load(self, place: str) -> Any:
        """What a place names."""
        module, _, name = place.partition(":")
        whole = f"features.{self.name}.{module}" if module else "policies.checks"
        return attrgetter(name)(import_module(f"celery_dlq.{whole}"))


@cache
def features() -> tuple[Feature, ...]:
    """The features that are plugged in."""
    return tuple(
        import_module(f"celery_dlq.features.{name}").FEATURE  # type: ignore[misc, unused-ignore]
        for name in FEATURES
    )


@cache
def policy_keys() -> Mapping[str, tuple[Feature, PolicyKey]]:
    """The policy keys of the features, each with its feature."""
    return {key: (each, found) for each in features() for key, found in each.policy_keys.items()}


@cache
def settings() -> Mapping[str, tuple[Feature, Setting]]:
    """The settings of the features, without their prefix, each with its feature."""
    return {name: (each, found) for each in features() for name, found in each.settings.items()}


def interval(name: str) -> float:
    """An interval of a feature, in seconds, as tests may have changed it."""
    from celery_dlq import timing  # noqa: PLC0415 - no command needs it

    changed = timing.current.of_features
    return changed[name] if name in changed else _intervals()[name]


@cache
def _intervals() -> Mapping[str, float]:
    return {name: seconds for each in features() for name, seconds in each.intervals.items()}
