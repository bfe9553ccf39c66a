"""More letters than the memory of Redis: nothing is evicted, refused or lost; ``chaos.memory``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


@pytest.mark.parametrize("policy", ["noeviction", "allkeys-lru", "volatile-ttl"])
def test_a_flood_of_letters_takes_no_memory_from_the_broker(
    report_of: Callable[..., dict[str, Any]], policy: str
) -> None:
    """Kombu publishes all the time; each message is a letter in Redis or on disk, then in Redis."""
    options = {"policy": policy, "letters": 1500, "maxmemory": "20mb", "drain": 90}
    (flood,) = report_of("chaos.memory", "redis", options, timeout_seconds=300)["floods"]
    assert flood["published"] == flood["drained"] == 1500
    assert flood["in_spool"] > 500
    assert flood["in_redis"] + flood["in_spool"] + flood["with_broker"] == 1500
    assert flood["missing"] == flood["refused"] == flood["evicted"] == flood["disorder"] == 0
    assert flood["most_used"] < 1
