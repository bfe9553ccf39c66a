"""The pytest plugin: the fixture ``dead_letters``.

Every pytest run imports this module where celery_dlq is installed, so only the fixture
imports Celery and Redis.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from celery_dlq.testing.watched import WatchedLetters


@pytest.fixture
def dead_letters() -> Iterator[WatchedLetters]:
    """Watch Celery apps, keep their dead letters in a Redis of the tests' own, and assert on them.

    Call ``dead_letters.watch(app)`` before a worker of the app starts. The app is restored
    after the test.

    Example:
        ``dead_letters.assert_dead_lettered(charge, description="no such order")``
    """
    from celery_dlq.testing.watched import WatchedLetters  # noqa: PLC0415 - loads Celery

    watched = WatchedLetters()
    yield watched
    watched.close()
