"""Plain Celery is the oracle of odd messages; see ``tests/programs/fuzz``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

LONG = os.environ.get("CELERY_DLQ_TEST_LONG") == "1"
MESSAGES = 1000 if LONG else 60
SEEDS = {"redis": 1, "classic": 2, "quorum": 3}


@pytest.mark.parametrize("broker", ["redis", "classic", "quorum"] if LONG else ["redis"])
def test_odd_messages_fare_as_with_plain_celery_or_become_letters(
    report_of: Callable[..., dict[str, Any]], broker: str
) -> None:
    """We run what Celery runs, keep what it loses, and nothing kills a worker twice."""
    options = {"seed": SEEDS[broker], "messages": MESSAGES}
    report = report_of("fuzz", broker, options, timeout_seconds=3600 if LONG else 240)
    assert not report["differences"]
    assert report["messages"] + report["not possible on this broker"] == MESSAGES
