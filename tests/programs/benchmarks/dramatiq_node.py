"""The module that Dramatiq's workers and the driver import."""

from __future__ import annotations

import os

import dramatiq
from benchmarks.node import charge
from dramatiq.brokers.redis import RedisBroker

dramatiq.set_broker(RedisBroker(url=os.environ["BENCH_URL"]))
_TALLY = os.open(os.environ["BENCH_TALLY"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)


@dramatiq.actor(max_retries=0)
def fails(order: str) -> None:
    """Fail as the others do."""
    os.write(_TALLY, b".")
    charge(order)
