"""Poison-message handling for Celery: count deliveries, dead-letter, inspect, redrive.

The public names are loaded on first use (:pep:`562`), so that ``import
celery_dlq`` costs nothing and pulls in no third-party package. That matters
twice: every ``celery`` command imports the plugin's CLI entry point, and every
Spark executor imports :mod:`celery_dlq.spark` on machines without Celery.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_dlq.decorators import RejectToDLQ, dead_letter_policy
    from celery_dlq.errors import DLQError
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.letters.record import DeadLetter, Delivery, Outcome, Reason
    from celery_dlq.loader import Loader
    from celery_dlq.plugin import DeadLetters
    from celery_dlq.policies.policy import Policy

__version__ = "0.1.0"

_HOME = {
    "DLQError": "errors",
    "DeadLetter": "letters.record",
    "DeadLetters": "plugin",
    "Delivery": "letters.record",
    "LetterFilter": "letters.filters",
    "Loader": "loader",
    "Outcome": "letters.record",
    "Policy": "policies.policy",
    "Reason": "letters.record",
    "RejectToDLQ": "decorators",
    "dead_letter_policy": "decorators",
}

__all__ = [
    "DLQError",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "LetterFilter",
    "Loader",
    "Outcome",
    "Policy",
    "Reason",
    "RejectToDLQ",
    "__version__",
    "dead_letter_policy",
]


def __getattr__(name: str) -> object:
    """Load a public name from its module the first time it is asked for."""
    if name not in _HOME:
        raise AttributeError(f"module 'celery_dlq' has no attribute {name!r}")
    value: object = getattr(import_module(f"celery_dlq.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List the lazy names too."""
    return sorted({*globals(), *__all__})
