"""A task that gets each letter: at least once, on Redis and on RabbitMQ, and never in a circle."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from typing import Any

import intervals
import pytest
from builders import a_letter, key_of
from celery import Celery
from celery.contrib.testing.worker import start_worker
from fork_server import run_forked
from rabbit import RabbitServer
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import SettingsError
from celery_dlq.events import DeadLettered
from celery_dlq.features.exchange.publisher import Outbox, outbox_of, publisher_of

TASK = "ops.on_letter"
DIES = """
import os, signal, sys
from celery import Celery
from celery_dlq import DeadLetters
from celery_dlq.features.exchange.connection import Exchanges
from celery_dlq.features.exchange.publisher import publisher_of
import intervals
intervals.inherit()
send = Exchanges.send_to_task
def dies(self, letter, task):
    if sys.argv[3] == "after":
        send(self, letter, task)
    os.kill(os.getpid(), signal.SIGKILL)
Exchanges.send_to_task = dies
app = Celery("shop", broker=sys.argv[1], set_as_current=False)
app.conf.update(dlq_url=sys.argv[2], dlq_queues={"orders": {"dead_letter_task": "ops.on_letter"}})
app.conf.task_routes = {"ops.*": {"queue": "ops"}}
publisher_of(DeadLetters(app).assembly).publish_new()
"""


def an_app(broker: str, redis_url: str, **policy: Any) -> Celery:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(
        dlq_url=redis_url,
        dlq_queues={"*": {"dead_letter_task": TASK, **policy}},
        task_routes={"ops.*": {"queue": "ops"}},
        task_default_queue="orders",
    )
    return app


@pytest.fixture(params=["redis", "rabbitmq"])
def shop(
    request: pytest.FixtureRequest, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[DeadLetters]:
    """An app on each broker, and an empty queue of the task."""
    intervals.change(monkeypatch, outbox_sweep=0.0, outbox_lease=0.2)
    broker = redis_url
    if request.param == "rabbitmq":
        server: RabbitServer = request.getfixturevalue("rabbit_server")
        server.delete_queues("ops", "orders")
        broker = server.url
    made = DeadLetters(an_app(broker, redis_url))
    yield made
    made.close()
    made.app.close()


def stored(dlq: DeadLetters, **changes: Any) -> DeadLetter:
    """Store a letter as a worker does: the outbox first."""
    letter, outbox = a_letter(**changes), outbox_of(dlq.assembly)
    assert outbox is not None
    outbox.before_store(letter)
    dlq.store.dead_letter(letter, key_of(letter))
    dlq.events.emit(DeadLettered(at=letter.dead_lettered_at, letter=letter))
    return letter


def sent(dlq: DeadLetters) -> list[tuple[str, str, Any]]:
    """Task, id and argument of each message in the task's queue, which are taken out."""
    found = []
    with dlq.app.connection_for_read() as connection:
        queue = dlq.app.amqp.queues["ops"](connection.default_channel)
        queue.declare()
        while (message := queue.get()) is not None:
            message.ack()
            args = message.payload[0]
            found.append((message.headers["task"], message.headers["id"], args[0]))
    return found


def deliver(dlq: DeadLetters) -> None:
    """Send what is due, as a worker does."""
    publisher = publisher_of(dlq.assembly)
    try:
        publisher.publish_new()
    finally:
        publisher.close()


def waiting(dlq: DeadLetters, queue: str = "orders-DLQ") -> int:
    """Number of entries."""
    return dlq.assembly.backend.part(Outbox).waiting(queue)


def test_the_task_gets_the_record_of_each_letter(shop: DeadLetters) -> None:
    """Once each, with one id a letter."""
    letters = [stored(shop) for _ in range(3)]
    assert waiting(shop) == 3
    deliver(shop)
    deliver(shop)
    assert waiting(shop) == 0
    found = sent(shop)
    assert {task for task, _id, _record in found} == {TASK}
    assert sorted(record["id"] for _task, _id, record in found) == sorted(one.id for one in letters)
    assert found[0][2] in [json.loads(json.dumps(one.to_json())) for one in letters]
    assert len({task_id for _task, task_id, _record in found}) == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_worker_that_is_killed_while_it_sends_loses_none(
    shop: DeadLetters, redis_url: str, when: str
) -> None:
    """Another one sends it: at least once, and each copy has one task id."""
    letter = stored(shop)
    done = run_forked("-c", DIES, shop.app.conf.broker_url, redis_url, when)
    assert done.returncode == -signal.SIGKILL, done.stderr
    poll(lambda: (deliver(shop), waiting(shop) == 0)[1], timeout_seconds=20)
    found = sent(shop)
    assert len(found) == (1 if when == "before" else 2)
    assert {(task_id, record["id"]) for _task, task_id, record in found} == {
        (found[0][1], letter.id)
    }


def test_a_letter_of_the_task_itself_goes_nowhere(shop: DeadLetters) -> None:
    """Else each of its deaths would send it once more."""
    stored(shop, task_name=TASK)
    assert waiting(shop) == 0
    deliver(shop)
    assert sent(shop) == []


def test_a_real_worker_runs_it(
    redis_url: str, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    """A task dies; the policy's task gets its letter; it fails once itself, and that is all."""
    intervals.change(monkeypatch, outbox_sweep=0.1, tick=0.05)
    app, got = an_app(redis_url, redis_url), list[Any]()

    def charge() -> None:
        raise ValueError("no card")

    def on_letter(record: dict[str, Any]) -> None:
        got.append(record)
        raise RuntimeError("the pager is down")

    app.task(charge, name="shop.charge", shared=False, acks_late=True)
    app.task(on_letter, name=TASK, shared=False, acks_late=True)
    dlq = DeadLetters(app)
    with start_worker(app, perform_ping_check=False, queues=["orders", "ops"], pool="solo"):
        app.send_task("shop.charge")
        poll(lambda: got, timeout_seconds=30)
        poll(lambda: dlq.store.length("ops-DLQ") == 1, timeout_seconds=30)
        poll(lambda: not waiting(dlq) and not waiting(dlq, "ops-DLQ"), timeout_seconds=30)
    (record,) = got
    assert (record["task_name"], record["exception_message"]) == ("shop.charge", "no card")
    assert dlq.store.length("orders-DLQ") == 1
    assert len(recwarn) == 0
    dlq.close()


@pytest.mark.parametrize("value", ["", "  ", 7, ["ops.on_letter"]])
def test_another_value_is_refused(redis_url: str, value: Any) -> None:
    """With what to write."""
    with pytest.raises(SettingsError, match=r"dead_letter_task.*ops\.on_letter"):
        DeadLetters(an_app(redis_url, redis_url, dead_letter_task=value)).validate()
