"""Test your own app: assert which messages become dead letters, and why.

The package installs the pytest fixture ``dead_letters``, a
`celery_dlq.testing.watched.WatchedLetters`.

Example:
    A test of a task that rejects unknown orders::

        def test_an_unknown_order_is_dead_lettered(dead_letters):
            dead_letters.watch(app, task_always_eager=True)
            charge.delay(-1)
            dead_letters.assert_dead_lettered(charge, reason="rejected")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_dlq.store.embedded import embedded
    from celery_dlq.testing.watched import WatchedLetters

__all__ = ["WatchedLetters", "embedded"]


def __getattr__(name: str) -> object:
    """Load on first use, because every pytest run imports this package."""
    modules = {"WatchedLetters": "testing.watched", "embedded": "store.embedded"}
    if name not in modules:
        raise AttributeError(f"module 'celery_dlq.testing' has no attribute {name!r}")
    return getattr(import_module(f"celery_dlq.{modules[name]}"), name)
