"""Everything is killed at random, and the books must balance; see ``tests/programs/chaos``.

With ``CELERY_DLQ_TEST_LONG=1`` for ten minutes, on every broker, in every pool, and also with a
limit of 1.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

LONG = os.environ.get("CELERY_DLQ_TEST_LONG") == "1"
TASKS, SECONDS = (3000, 600) if LONG else (120, 90)
RUNS = [("redis", "prefork", 3), ("quorum", "threads", 3)]
MORE_RUNS = [
    ("redis", "gevent", 1),
    ("redis", "solo", 3),
    ("classic", "prefork", 1),
    ("classic", "gevent", 3),
    ("quorum", "prefork", 1),
    ("sqs", "threads", 3),
]


@pytest.mark.parametrize(("broker", "pool", "limit"), [*RUNS, *(MORE_RUNS if LONG else [])])
def test_every_message_succeeds_or_is_one_letter_whatever_is_killed(
    report_of: Callable[..., dict[str, Any]], broker: str, pool: str, limit: int
) -> None:
    """Workers, servers and connections die, hang and come back; nothing is lost or doubled."""
    options = {"seed": 7, "tasks": TASKS, "limit": limit, "pool": pool, "duration": SECONDS}
    more = {} if LONG else {"gap": 1.5, "visibility": 5}
    report = report_of("chaos.run", broker, options | more, timeout_seconds=SECONDS + 300)
    assert report["balanced"]
    assert not report["faults"]
    assert LONG or report["counts"]["published"] == TASKS
    assert all(report["misfortunes"].values()), report["misfortunes"]
    assert report["deploys"]
