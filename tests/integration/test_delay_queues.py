"""RabbitMQ's delay queues are read in place: messages keep their order and their time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import amqp
import pytest
from celery import Celery
from rabbit import RabbitServer
from waiting import poll

from celery_dlq.errors import BrokerUnavailable
from celery_dlq.transport.amqp import delay_queues
from celery_dlq.transport.amqp.delay_queues import DelayQueues

LEVEL = 3  # 8 seconds
SECONDS = float(2**LEVEL)
NAME = f"celery_delayed_{LEVEL}"
MESSAGES = 80

native = pytest.importorskip("kombu.transport.native_delayed_delivery")  # new in kombu 5.5


@pytest.fixture
def app(rabbit_server: RabbitServer) -> Iterator[Celery]:
    """An app on RabbitMQ with empty delay queues; what leaves the last one is in ``arrived``."""
    made = Celery(
        broker=f"amqp://guest:guest@127.0.0.1:{rabbit_server.port}//", set_as_current=False
    )
    with made.connection_for_write() as connection:
        native.declare_native_delayed_delivery_exchanges_and_queues(connection, "quorum")
        channel = connection.default_channel
        for name in delay_queues.QUEUES:
            channel.queue_purge(name)
        channel.queue_declare("arrived", durable=True, auto_delete=False)
        channel.queue_bind("arrived", "celery_delayed_delivery", "#.arrived")
        channel.queue_purge("arrived")
    yield made
    made.close()


@pytest.fixture
def publish(app: Celery) -> Iterator[Callable[[str], None]]:
    """Put a message into the delay queue of 8 seconds."""
    key = native.calculate_routing_key(int(SECONDS), "arrived")
    with app.connection_for_write(transport_options={"confirm_publish": True}) as connection:
        producer = connection.Producer()
        yield lambda body: producer.publish(body, exchange="celery_delayed_27", routing_key=key)


def read(app: Celery) -> list[str]:
    """Read all delay queues once: the bodies, which name the messages; or why it cannot be."""
    delays = DelayQueues(app)
    try:
        found, why_not = delays.messages()
        return [message.payload for message in found] or [why_not]
    finally:
        delays.close()


def test_messages_that_are_read_move_on_in_time_and_in_order(
    app: Celery, publish: Callable[[str], None], rabbit_server: RabbitServer
) -> None:
    """More than are put back at once, read again and again until they have moved on."""
    sent: dict[str, float] = {}
    arrived: list[tuple[str, float]] = []
    ended = threading.Event()

    def consume() -> None:
        with amqp.Connection(f"127.0.0.1:{rabbit_server.port}") as connection:
            connection.channel().basic_consume(
                "arrived", no_ack=True, callback=lambda m: arrived.append((m.body, time.time()))
            )
            while not ended.is_set():
                try:
                    connection.drain_events(timeout=0.2)
                except TimeoutError:
                    continue

    consumer = threading.Thread(target=consume)
    consumer.start()
    try:
        for number in range(MESSAGES):
            sent[str(number)] = time.time()
            publish(str(number))
            time.sleep(2.0 / MESSAGES)  # so that their times differ
        assert read(app) == [*sent]
        for _ in range(3):
            assert set(read(app)) <= sent.keys()
        poll(lambda: len(arrived) == MESSAGES, timeout_seconds=30)
    finally:
        ended.set()
        consumer.join()
    assert [body for body, _ in arrived] == [*sent]
    late = [at - sent[body] - SECONDS for body, at in arrived]
    assert min(late) > -0.1
    assert max(late) < 2.0


def test_a_reader_that_dies_and_a_second_one_lose_nothing(
    app: Celery, publish: Callable[[str], None]
) -> None:
    """What the first holds is back when its connection ends; the second does not read meanwhile."""
    for number in range(5):
        publish(str(number))
    first = DelayQueues(app)
    assert len(first.messages()[0]) == 5
    locked = ["another process is reading them now"]
    assert read(app) == locked  # until `close`
    first._connection.transport.close_connection(first._connection.connection)
    poll(lambda: read(app) != locked, timeout_seconds=10)
    delays = DelayQueues(app)
    assert delays.lengths() == {NAME: 5}
    delays.close()


def test_a_message_is_read_only_some_times(app: Celery, publish: Callable[[str], None]) -> None:
    """Each reading counts as a delivery, and RabbitMQ 4 ends a message after 20 of them."""
    for number in range(3):
        publish(str(number))
    seen = [len(read(app)) for _ in range(14)]
    assert seen[:10] == [3] * 10
    assert seen[-1] == 1


def test_who_may_not_read_is_told(
    app: Celery, publish: Callable[[str], None], rabbit_server: RabbitServer
) -> None:
    """The lengths are still counted."""
    publish("0")
    url = rabbit_server.add_user("reader", configure="^$", write="^$", read=".*")
    other = Celery(broker=url, set_as_current=False)
    delays = DelayQueues(other)
    assert delays.lengths() == {NAME: 1}
    found, why_not = delays.messages()
    assert found == []
    assert "ACCESS_REFUSED" in why_not
    delays.close()
    assert read(app) == ["0"]


def test_a_broker_without_delay_queues_has_none(rabbit_server: RabbitServer) -> None:
    """Nor does one that does not answer pass for empty."""
    with amqp.Connection(f"127.0.0.1:{rabbit_server.port}") as connection:
        for name in delay_queues.QUEUES:
            connection.channel().queue_delete(name)
    for port, lengths in ((rabbit_server.port, {}), (1, None)):
        app = Celery(broker=f"amqp://127.0.0.1:{port}//", set_as_current=False)
        delays = DelayQueues(app)
        if lengths is None:
            with pytest.raises(BrokerUnavailable):
                delays.lengths()
        else:
            assert (delays.lengths(), delays.messages()) == (lengths, ([], ""))
        delays.close()
