"""Copies of letters in a queue of RabbitMQ: published before, read back once."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from builders import a_letter, key_of
from celery import Celery
from fork_server import run_forked
from kombu import Connection, Queue
from rabbit import RabbitServer
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.events import DeadLettered
from celery_dlq.features.exchange.connection import Exchanges
from celery_dlq.features.exchange.publisher import outbox_of

COPIES = "orders.copies"
DIES = """
import os, signal, sys
from celery import Celery
from celery_dlq import DeadLetters
from celery_dlq.features.adopt import sources
from celery_dlq.store.new_letters import NewLetters
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
sources.BrokerQueue.remove_message = die
if sys.argv[3] == "storing":
    NewLetters.dead_letter = die
app = Celery("dies", broker=sys.argv[1])
app.conf.dlq_url = sys.argv[2]
DeadLetters(app).adopt("orders.copies")
"""


@pytest.fixture
def server(rabbit_server: RabbitServer) -> Iterator[RabbitServer]:
    """Give a RabbitMQ without a queue of copies."""
    rabbit_server.delete_queues(COPIES)
    yield rabbit_server
    rabbit_server.delete_queues(COPIES)


@pytest.fixture
def dlq(server: RabbitServer, redis_url: str) -> Iterator[DeadLetters]:
    """Give an app whose letters have copies."""
    app = Celery("shop", broker=server.url, set_as_current=False)
    exchange = {"name": "", "routing_key": COPIES, "before_ack": True}
    app.conf.update(dlq_url=redis_url, dlq_queues={"orders": {"dead_letter_exchange": exchange}})
    found = DeadLetters(app)
    yield found
    found.close()


def declare(server: RabbitServer) -> None:
    with Connection(server.url) as connection:
        Queue(COPIES)(connection.default_channel).declare()


def ready(server: RabbitServer) -> int:
    """The number of copies."""
    with Connection(server.url) as connection:
        return int(connection.default_channel.queue_declare(COPIES, passive=True).message_count)


def lose(redis_url: str) -> None:
    """Lose all that Redis has."""
    with redis.Redis.from_url(redis_url) as client:
        client.flushdb()


@pytest.fixture
def outbox(dlq: DeadLetters) -> Iterator[Any]:
    """Give what publishes copies."""
    found = outbox_of(dlq.assembly)
    assert found is not None
    yield found
    found.close()


def store(dlq: DeadLetters, outbox: Any, letter: DeadLetter) -> None:
    """Store a letter as a worker does."""
    outbox.before_store(letter)
    dlq.store.dead_letter(letter, key_of(letter))


def test_without_a_queue_nothing_is_confirmed(outbox: Any, server: RabbitServer) -> None:
    """What nobody has is no copy; it is not published at every second while tasks wait."""
    letter = a_letter()
    with pytest.raises(StoreUnavailable, match="no queue is bound to it"):
        outbox.before_store(letter)
    with pytest.raises(StoreUnavailable, match="tried again soon"):
        outbox.before_store(letter)
    declare(server)

    def is_confirmed() -> bool:
        try:
            outbox.before_store(letter)
        except StoreUnavailable:
            return False
        return True

    poll(is_confirmed, timeout_seconds=10)
    assert ready(server) == 1


@pytest.mark.parametrize(
    "headers",
    ['{"big":99999999999999999999999}', '{"large":"%s"}' % ("x" * 200_000), '["no mapping"]'],
    ids=["no form in AMQP", "larger than a frame", "no mapping"],
)
def test_headers_that_a_copy_cannot_carry_are_in_its_record(
    dlq: DeadLetters, outbox: Any, server: RabbitServer, redis_url: str, headers: str
) -> None:
    """No letter may block its message for ever."""
    declare(server)
    letter = a_letter(headers=headers, body=b"\x80\xff", content_type="application/x-odd")
    store(dlq, outbox, letter)
    assert ready(server) == 1
    lose(redis_url)
    assert dlq.adopt(COPIES).adopted == 1
    assert list(dlq.letters("orders-DLQ")) == [letter]


@pytest.mark.parametrize("step", ["storing", "acknowledging"])
def test_an_import_that_is_killed_reads_each_copy_back_once(
    dlq: DeadLetters, outbox: Any, server: RabbitServer, redis_url: str, step: str
) -> None:
    """The copy is removed when its letter is stored; it is not published again, nor announced."""
    declare(server)
    letters = [a_letter() for _ in range(3)]
    for letter in (*letters, letters[0]):  # its worker was killed before it stored the letter
        store(dlq, outbox, letter)
    lose(redis_url)
    heard: list[Any] = []
    dlq.events.subscribe(heard.append)
    done = run_forked("-c", DIES, server.url, redis_url, step)
    assert done.returncode == -signal.SIGKILL, done.stderr
    poll(lambda: ready(server) == 4)

    report = dlq.adopt(COPIES)

    assert (report.adopted, report.known) == ((3, 1) if step == "storing" else (2, 2))
    assert {letter.id: letter for letter in dlq.letters("orders-DLQ")} == {
        letter.id: letter for letter in letters
    }
    assert ready(server) == 0
    assert [event for event in heard if isinstance(event, DeadLettered)] == []


def test_a_copy_whose_record_is_damaged_is_adopted_as_any_message(
    dlq: DeadLetters, server: RabbitServer
) -> None:
    """With its body; nothing is lost."""
    declare(server)
    with Connection(server.url) as connection:
        connection.Producer().publish(
            b"what it was", routing_key=COPIES, headers={"dlq_record": "odd", "id": "t-1"}
        )
    assert dlq.adopt(COPIES, "odd-DLQ").adopted == 1
    (letter,) = dlq.letters("odd-DLQ")
    assert (letter.reason.value, letter.body) == ("adopted", b"what it was")


def test_only_rabbitmq_confirms(redis_url: str) -> None:
    """A push to Redis says nothing of a queue behind an exchange."""
    app = Celery("shop", broker=redis_url, set_as_current=False)
    exchange = {"name": "deaths", "before_ack": True}
    app.conf.update(dlq_queues={"orders": {"dead_letter_exchange": exchange}})
    dlq = DeadLetters(app)
    with pytest.raises(SettingsError, match="with RabbitMQ as the broker, got redis"):
        Exchanges(app, dlq.assembly.policy_table()).declare_all()
    dlq.close()
