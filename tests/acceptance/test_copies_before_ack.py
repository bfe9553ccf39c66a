"""With ``before_ack`` RabbitMQ has a copy of a letter before the message is acknowledged."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import command_line
import pytest
import redis
from kombu import Connection, Queue
from rabbit import RabbitServer
from waiting import poll
from workers import HERE, Place, Worker, run_python

from celery_dlq import DeadLetter, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]
Ran = Callable[[str], int]

COPIES = "orders.copies"
EXCHANGE = {"name": "", "routing_key": COPIES, "before_ack": True}
CONF: dict[str, Any] = {
    "dlq_queues": {"orders": {"max_deliveries": 3, "dead_letter_exchange": EXCHANGE}}
}

# A worker that is killed at one step of a death.
DIES = """
import os, signal
from celery_dlq.features.exchange.connection import Exchanges
from celery_dlq.store.new_letters import NewLetters
from poison_app import *

def killed(*_, **__):
    os.killpg(os.getpgid(0), signal.SIGKILL)

def then_killed(function):
    return lambda *args, **kwargs: (function(*args, **kwargs), killed())

step = os.environ["DIES_AT"]
if step == "publishing":
    Exchanges.publish = killed
elif step == "published":
    Exchanges.publish = then_killed(Exchanges.publish)
else:
    NewLetters.dead_letter = then_killed(NewLetters.dead_letter)
"""


@pytest.fixture
def place(rabbit_server: RabbitServer) -> Iterator[Place]:
    """Give a RabbitMQ with an empty queue for copies, and nothing else of these tests."""
    names = ("orders", "slow", "patient", "unguarded", COPIES)
    rabbit_server.delete_queues(*names)
    declare(rabbit_server)
    yield Place("classic", {"POISON_BROKER": rabbit_server.url})
    rabbit_server.delete_queues(*names)


def declare(server: RabbitServer, **arguments: Any) -> None:
    """Make the queue of copies."""
    with Connection(server.url) as connection:
        queue = Queue(COPIES, queue_arguments=arguments or {"x-queue-type": "quorum"})
        queue(connection.default_channel).declare()


def ready(server: RabbitServer, queue: str = COPIES) -> int:
    """The number of messages that a queue would give out now."""
    with Connection(server.url) as connection:
        return int(connection.default_channel.queue_declare(queue, passive=True).message_count)


def send(place: Place, redis_url: str, name: str) -> None:
    """Publish a task from a process of its own."""
    code = f"import poison_app as p; p.{name}.delay({name!r})"
    done = run_python(redis_url, "-c", code, **place.env)
    assert done.returncode == 0, done.stderr


def imported(place: Place, redis_url: str) -> tuple[int, int]:
    """What `dlq import` says of the copies: new letters, and those that were known."""
    done = command_line.run("import", COPIES, "--json", redis_url=redis_url, **place.env)
    report = done.lines[-1]
    return report["adopted"], report["known"]


def test_a_letter_is_read_back_as_it_was_when_redis_has_lost_it(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    redis_url: str,
    rabbit_server: RabbitServer,
) -> None:
    """With reason, history and id; not while it is there, nor after it was redriven."""
    worker = start_worker(CONF, env=place.env)
    send(place, redis_url, "fails")
    (letter,) = letters()
    assert ready(rabbit_server) == 1, worker.output
    assert [one.outcome for one in letter.history] == [Outcome.FAILED]
    worker.stop()
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()

    assert imported(place, redis_url) == (1, 0)

    assert letters() == [letter]
    assert ready(rabbit_server) == 0
    start_worker(CONF, env=place.env)
    done = command_line.run(
        "redrive", "orders-DLQ", "--yes", "--all", redis_url=redis_url, **place.env
    )
    assert done.exit_code == 0, done.stderr
    poll(lambda: ran("fails") == 2, timeout_seconds=20)
    poll(lambda: ready(rabbit_server) == 1, timeout_seconds=20)  # it died again
    (again,) = letters()
    assert again.redrives == 1
    assert imported(place, redis_url) == (0, 1)
    assert letters() == [again]


@pytest.mark.parametrize(("step", "copies"), [("publishing", 1), ("published", 2), ("stored", 1)])
def test_a_worker_killed_at_any_step_leaves_one_letter_and_its_copy(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    place: Place,
    redis_url: str,
    rabbit_server: RabbitServer,
    tmp_path: Path,
    step: str,
    copies: int,
) -> None:
    """The message is at the broker until both are there; copies of one letter have one id."""
    (tmp_path / "dying_app.py").write_text(DIES)
    env = {**place.env, "PYTHONPATH": f"{HERE}:{tmp_path}", "DIES_AT": step}
    first = start_worker(CONF, env=env, app="dying_app")
    send(place, redis_url, "to_dlq")
    assert first.process.wait(30) == -signal.SIGKILL
    poll(lambda: ready(rabbit_server, "orders") == 1, timeout_seconds=20)  # not acknowledged
    assert ready(rabbit_server) == (step != "publishing")

    start_worker(CONF, env=place.env).process.poll()

    (letter,) = letters()
    assert (letter.reason, letter.task_name) == (Reason.REJECTED, "poison_app.to_dlq")
    poll(lambda: ready(rabbit_server, "orders") == 0, timeout_seconds=20)
    assert ready(rabbit_server) == copies
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()
    assert imported(place, redis_url) == (1, copies - 1)
    assert [found.id for found in letters()] == [letter.id]


@pytest.mark.parametrize("early", [False, True], ids=["late", "early"])
def test_what_rabbitmq_does_not_confirm_is_not_acknowledged(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    place: Place,
    redis_url: str,
    rabbit_server: RabbitServer,
    early: bool,
) -> None:
    """Its letter waits, in the spool if the message was acknowledged early; tasks go on."""
    rabbit_server.delete_queues(COPIES)
    declare(rabbit_server, **{"x-max-length": 0, "x-overflow": "reject-publish"})
    worker = start_worker(CONF, env=place.env)
    send(place, redis_url, "fails_early" if early else "fails")
    where = "to the spool" if early else "not acknowledged"
    poll(lambda: where in worker.output, timeout_seconds=20)
    assert "a queue refused it: is it full?" in worker.output
    send(place, redis_url, "healthy")
    poll(lambda: "healthy" in worker.output, timeout_seconds=20)
    assert [queue.letters for queue in poison.dlq.queues() if queue.letters] == []

    rabbit_server.delete_queues(COPIES)
    declare(rabbit_server)

    (letter,) = letters(timeout_seconds=60)
    assert letter.exception_type == "LookupError", worker.output
    poll(lambda: ready(rabbit_server) == 1, timeout_seconds=20)


def test_a_worker_refuses_a_queue_of_copies_that_is_not_durable(
    start_worker: Start, place: Place, rabbit_server: RabbitServer
) -> None:
    """A restart of RabbitMQ would lose what it confirmed."""
    rabbit_server.delete_queues(COPIES)
    with Connection(rabbit_server.url) as connection:
        Queue(COPIES, durable=False)(connection.default_channel).declare()
    worker = start_worker(CONF, env=place.env, wait=False)
    assert worker.process.wait(60) == 1, worker.output
    assert "to be durable" in worker.output
    assert "Traceback" not in worker.output
