"""Shutdowns whose signal reaches the pool's processes too, as supervisors and terminals send it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from types import ModuleType
from typing import Any

import intervals
import pytest
import redis
from celery import VERSION
from test_counting import count_of, runs
from test_holds import publish
from waiting import poll
from workers import Place, Worker

from celery_dlq import Outcome

KEYS = ("one", "two")

SHUTDOWNS: dict[str, tuple[signal.Signals, dict[str, Any], dict[str, str]]] = {
    "warm": (signal.SIGTERM, {}, {}),
    "cold": (signal.SIGQUIT, {}, {}),
    "remapped": (signal.SIGTERM, {}, {"REMAP_SIGTERM": "SIGQUIT"}),
    "soft": (signal.SIGQUIT, {"worker_soft_shutdown_timeout": 1}, {}),
}

CASES = [
    (how, first, ("quorum", "redis")[(row + column) % 2])
    for row, how in enumerate(SHUTDOWNS)
    for column, first in enumerate(("all at once", "pool first"))
]
"""Each shutdown in both orders, on one broker and on the other."""


@pytest.mark.parametrize(("how", "first", "place"), CASES, indirect=["place"])
def test_a_signal_to_the_whole_group_charges_nothing(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    ran: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    place: Place,
    how: str,
    first: str,
) -> None:
    """At a limit of one start, a deploy makes no letter: the messages run on the next worker."""
    number, more, env = SHUTDOWNS[how]
    if more and VERSION < (5, 5):
        pytest.skip("soft shutdowns came with Celery 5.5")
    intervals.change(monkeypatch, signal_follows=3.0)  # on a busy machine it follows later
    conf = {"dlq_queues": {"orders": {"max_deliveries": 1}}, **more}
    worker = start_worker(conf, env={**place.env, **env})
    publish(redis_url, place, *(("sleeps", key, {"kwargs": {"seconds": 40}}) for key in KEYS))
    poll(lambda: all(map(ran, KEYS)), timeout_seconds=20)

    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as traces:
        pool = [int(traces.lindex(f"ran:{key}", 0) or 0) for key in KEYS]
    if first == "pool first":
        for pid in pool:
            os.kill(pid, number)
        later = time.monotonic() + 0.05
        poll(lambda: time.monotonic() > later)
        os.kill(worker.process.pid, number)
    else:
        os.killpg(worker.process.pid, number)
    worker.process.wait(30)
    start_worker(conf, env=place.env)
    poll(lambda: all(ran(key) == 2 for key in KEYS), timeout_seconds=40)

    assert not poison.dlq.queues()
    counts = runs(redis_url)
    assert [count_of(found) for found in counts.values()] == ["1", "1"]
    for found in counts.values():
        assert Outcome.SHUTDOWN.value in "".join(v for k, v in found.items() if "aside" in k)
