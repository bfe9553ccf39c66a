"""Everything is killed at random, and the books must balance; see ``tests/chaos``.

With ``CELERY_DLQ_TEST_LONG=1`` for ten minutes, and also with a limit of 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

LONG = os.environ.get("CELERY_DLQ_TEST_LONG") == "1"
TASKS, SECONDS = (3000, 600) if LONG else (150, 90)
RUNS = [("redis", 3), ("quorum", 3)]
MORE_RUNS = [("redis", 1), ("classic", 1), ("quorum", 1), ("classic", 3)]


@pytest.mark.parametrize(("broker", "limit"), [*RUNS, *(MORE_RUNS if LONG else [])])
def test_every_message_succeeds_or_is_one_letter_whatever_is_killed(
    report_of: Callable[..., dict[str, Any]], broker: str, limit: int
) -> None:
    """Workers and Redis die, hang and come back; nothing is lost, doubled or overcharged."""
    options = {"seed": 7, "tasks": TASKS, "limit": limit, "duration": SECONDS}
    report = report_of("chaos.run", broker, options, timeout_seconds=SECONDS + 150)
    assert report["balanced"]
    assert not report["faults"]
    assert LONG or report["counts"]["published"] == TASKS
    assert all(report["misfortunes"].values()), report["misfortunes"]
    assert report["deploys"]
