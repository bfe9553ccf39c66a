"""RabbitMQ closes all connections again and again while messages kill their processes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from kombu import Connection
from rabbit import RabbitServer
from raw import JSON, headers
from waiting import poll
from workers import Place, Worker

from celery_dlq import DeadLetter, Reason

LONG = os.environ.get("CELERY_DLQ_TEST_LONG") == "1"
CLOSINGS = 40 if LONG else 16
EVERY_SECONDS = 0.8
KILLERS, HEALTHY = 4, 30 * CLOSINGS


def publish(broker: str, keys: dict[str, str]) -> None:
    """Publish a message for each key, whose value is its task.

    Confirmed: a quorum queue that has much to do does not take all before the channel ends.
    """
    with Connection(broker, transport_options={"confirm_publish": True}) as connection:
        producer = connection.Producer()
        for key, task in keys.items():
            body = json.dumps([[key], {}, {}]).encode()
            more: Any = {"headers": headers(f"poison_app.{task}", key), **JSON}
            producer.publish(body, exchange="", routing_key="orders", **more)


@pytest.mark.parametrize("place", ["classic", "quorum"], indirect=True)
@pytest.mark.parametrize("limit", [1, 3])
def test_no_message_starts_too_often_and_no_neighbour_dies_of_it(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
    place: Place,
    rabbit_server: RabbitServer,
    limit: int,
) -> None:
    """No count is taken back of a message that started, though its connection went."""
    conf = {"worker_prefetch_multiplier": 8, "dlq_queues": {"orders": {"max_deliveries": limit}}}
    sent = {f"killer-{n}": "killed_later" for n in range(KILLERS)}
    sent |= {f"healthy-{n}": "healthy" for n in range(HEALTHY)}
    worker = start_worker(conf, env=place.env)
    publish(place.env["POISON_BROKER"], sent)
    # Those that come while the worker connects say nothing in its log.
    with rabbit_server.closing_connections(4 * CLOSINGS, every_seconds=EVERY_SECONDS):
        poll(
            lambda: worker.output.count("closed by the test") >= CLOSINGS // 4, timeout_seconds=120
        )
        found = letters(count=KILLERS, timeout_seconds=90)
    missing: list[str] = []

    def all_ran() -> bool:
        missing[:] = [key for key in sent if not ran(key)]
        return not missing

    try:
        poll(all_ran, timeout_seconds=60)
    except AssertionError as error:
        said = f"{missing} did not run\n{rabbit_server.state()}\n{worker.output}"
        raise AssertionError(said) from error

    starts = {key: ran(key) for key, task in sent.items() if task == "killed_later"}
    assert max(starts.values()) <= limit, f"{starts}\n{worker.output}"
    assert {letter.task_id for letter in found} == {*starts}
    assert {letter.reason for letter in found} == {Reason.MAX_DELIVERIES_EXCEEDED}
