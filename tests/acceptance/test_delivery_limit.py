"""A quorum queue's own delivery limit, which ends messages that `max_deliveries` never sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery
from kombu import Connection, Queue
from rabbit import RabbitServer
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, DeadLetters, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]
DEAD = "orders.dead"
TO_DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": DEAD}


@pytest.fixture
def place(rabbit_server: RabbitServer) -> Iterator[Place]:
    """Give a RabbitMQ with nothing but a queue for what it dead-letters."""
    names = ("orders", "slow", "patient", "unguarded", DEAD)
    rabbit_server.delete_queues(*names)
    with Connection(rabbit_server.url) as connection:
        Queue(DEAD, channel=connection.channel()).declare()
    yield Place("quorum", {"POISON_BROKER": rabbit_server.url, "POISON_QUEUE_TYPE": "quorum"})
    rabbit_server.delete_queues(*names)


def with_arguments(place: Place, **arguments: Any) -> dict[str, str]:
    """The environment in which ``orders`` has these arguments."""
    return {**place.env, "POISON_QUEUE_ARGUMENTS": json.dumps({"orders": arguments})}


def send(env: dict[str, str], redis_url: str, name: str, *keys: str) -> None:
    """Publish tasks from a process of its own."""
    calls = "; ".join(f"p.{name}.apply_async(({key!r},), task_id={key!r})" for key in keys)
    done = run_python(redis_url, "-c", f"import poison_app as p; {calls}", **env)
    assert done.returncode == 0, done.stderr


def test_a_limit_that_ends_poison_without_a_letter_is_refused(
    start_worker: Start, place: Place
) -> None:
    """One line that names both limits and the mend."""
    env = with_arguments(place, **{"x-delivery-limit": 3})
    worker = start_worker(env=env, wait=False)
    assert worker.process.wait(60) == 1, worker.output
    (line,) = [line for line in worker.output.splitlines() if line.startswith("Error: ")]
    assert "twice max_deliveries (dlq_queues['orders']), got 3" in line
    assert "dlq_adopt" in line


def test_a_limit_that_may_end_messages_is_warned_of(start_worker: Start, place: Place) -> None:
    """The worker starts: as many returns without a start as there is room for may never come."""
    worker = start_worker(env=with_arguments(place, **{"x-delivery-limit": 5}))
    poll(lambda: "A message may vanish: expected the quorum queue 'orders'" in worker.output)
    assert "of at least 6" in worker.output


def test_what_the_broker_ended_has_the_history_that_was_counted(
    start_worker: Start,
    letters: Letters,
    place: Place,
    redis_url: str,
    ran: Callable[[str], int],
) -> None:
    """One letter with each start and its end; its counts are forgotten."""
    env = with_arguments(place, **TO_DEAD, **{"x-delivery-limit": 1})
    worker = start_worker({"dlq_adopt": {DEAD: "lost-orders"}}, env=env)
    send(env, redis_url, "killed", "poison")

    (letter,) = letters("lost-orders")

    assert ran("poison") == 2, worker.output
    assert (letter.task_id, letter.reason, letter.source_queue) == (
        "poison",
        Reason.ADOPTED,
        "orders",
    )
    assert letter.deliveries == 2
    assert [one.outcome for one in letter.history] == [Outcome.WORKER_LOST, Outcome.WORKER_LOST]
    assert letter.first_delivered_at == letter.history[0].started_at
    assert "delivery_limit in queue 'orders'" in letter.description
    assert "A message may vanish" not in worker.output
    with redis.Redis.from_url(redis_url) as client:
        counts = list(client.scan_iter("dlq:*:run:*poison*"))
        assert {field for key in counts for field in client.hkeys(key)} == set()


def test_the_policies_warn_of_the_default_of_rabbitmq_4(
    rabbit_server: RabbitServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command asks the broker for its version; a broker that is away is no error."""
    monkeypatch.setattr("celery_dlq.policies.delivery_limits.FIRST_MAJOR", 3)  # this one counts
    for url, warnings in (("amqp://127.0.0.1:1//", 0), (rabbit_server.url, 1)):
        app = Celery("shop", broker=url, set_as_current=False)
        app.conf.update(dlq_url=redis_url, dlq_queues={"orders": {"max_deliveries": 20}})
        app.conf.task_queues = [Queue("orders", queue_arguments={"x-queue-type": "quorum"})]
        dlq = DeadLetters(app)
        found = [one for one in dlq.policies().warnings if "the default of RabbitMQ 4" in one]
        assert len(found) == warnings
        dlq.close()
        app.close()
