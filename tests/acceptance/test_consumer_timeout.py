"""The store is away for longer than RabbitMQ lets a message wait for its acknowledgement."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import intervals
import pytest
from rabbit import RabbitServer
from servers import RedisServer
from test_lost_connections import publish
from waiting import poll
from workers import Place, Worker

from celery_dlq import DeadLetters

Start = Callable[..., Worker]
Ran = Callable[[str], int]

TIMEOUT_SECONDS = 9.0


@pytest.fixture
def store() -> Iterator[RedisServer]:
    """A Redis for counts and letters alone."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def short(rabbit_server: RabbitServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let RabbitMQ lose its patience within seconds, and let workers know."""
    intervals.change(monkeypatch, consumer_timeout=TIMEOUT_SECONDS, spool_after=2.0)
    with rabbit_server.closing_what_waits(TIMEOUT_SECONDS):
        yield


@contextmanager
def reading(poison: ModuleType, store: RedisServer) -> Iterator[DeadLetters]:
    """The letters of a store."""
    dlq = DeadLetters(type(poison.app)("reader", broker=store.url))
    yield dlq
    dlq.close()


def letters_in(dlq: DeadLetters) -> list[str]:
    """The ids of the messages that died."""
    there = "orders-DLQ" in dlq.store.names()
    return sorted(one.task_id for one in dlq.letters("orders-DLQ")) if there else []


def outlast(worker: Worker, broker: str, ran: Ran) -> None:
    """Run healthy tasks for longer than RabbitMQ waits: the worker lives, and takes them."""
    for number in range(int(3 * TIMEOUT_SECONDS)):
        name = f"healthy-{number}"
        publish(broker, {name: "healthy"})
        poll(lambda name=name: ran(name) or worker.process.poll() is not None, timeout_seconds=30)
        assert worker.process.poll() is None, worker.output[-3000:]
        until = time.monotonic() + 1
        poll(lambda until=until: time.monotonic() > until)
    assert "PRECONDITION" not in worker.output


@pytest.mark.parametrize(
    ("place", "spool"), [("classic", True), ("quorum", False)], indirect=["place"]
)
def test_a_store_that_is_away_for_long_ends_no_worker(
    poison: ModuleType,
    start_worker: Start,
    store: RedisServer,
    short: None,
    place: Place,
    ran: Ran,
    spool: bool,
) -> None:
    """Its letters go to the spool, or their messages to their queue; the books balance later."""
    conf: dict[str, Any] = {"dlq_url": store.url, "worker_prefetch_multiplier": 4}
    if not spool:
        conf["dlq_spool_dir"] = None
    worker = start_worker(conf, env=place.env)
    store.kill()
    broker = place.env["POISON_BROKER"]
    publish(broker, {"dies-0": "fails", "dies-1": "fails"})
    poll(lambda: worker.output.count("is not dead-lettered yet") >= 2, timeout_seconds=30)
    outlast(worker, broker, ran)
    assert ("to the spool" in worker.output) is spool
    assert ("goes back to its queue" in worker.output) is not spool
    starts = [ran("dies-0"), ran("dies-1")]
    assert starts == [1, 1] if spool else max(starts) <= 4, starts  # no busy loop
    store.start()
    with reading(poison, store) as dlq:
        poll(lambda: letters_in(dlq) == ["dies-0", "dies-1"], timeout_seconds=60)
