"""A consumer of RabbitMQ that reads a few messages at a time."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
from kombu import Connection, Consumer, Queue
from kombu.asynchronous import Hub
from rabbit import RabbitServer

from celery_dlq.transport.amqp import acknowledge_at_once, read_ahead

MESSAGES = 200
LARGE = "x" * 300_000


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_all_messages_are_handled_though_one_of_them_asks_the_broker(
    rabbit_server: RabbitServer, pool: str
) -> None:
    """While it waits for the answer the next messages arrive; none is left behind in a buffer."""
    queue = Queue("read-ahead")
    rabbit_server.delete_queues(queue.name)
    got: list[Any] = []
    hub = Hub() if pool == "prefork" else None
    with Connection(rabbit_server.url) as connection, connection.channel() as channel:
        producer = connection.Producer()
        for number in range(MESSAGES):
            body = {"number": number, "text": LARGE if number % 50 == 0 else "text"}
            producer.publish(body, routing_key=queue.name, declare=[queue])

        def on_message(message: Any) -> None:
            got.append(message.decode()["number"])
            if len(got) % 7 == 1:
                channel.basic_qos(0, 20 + len(got), False)
            message.ack()

        if hub is not None:
            connection.transport.register_with_event_loop(connection.connection, hub)
        kind = type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})
        kind.is_green = hub is None  # type: ignore[attr-defined]
        read_ahead(SimpleNamespace(connection=connection, hub=hub, pool=kind()))
        channel.basic_qos(0, 20, False)
        consumer = Consumer(channel, [queue], on_message=on_message)
        consumer.consume()
        until = time.monotonic() + 20
        loop = None if hub is None else hub.create_loop()
        while len(got) < MESSAGES and time.monotonic() < until:
            if loop is None:
                connection.drain_events(timeout=5)
            else:
                next(loop)
        consumer.cancel()
        if hub is not None:
            hub.close()
    rabbit_server.delete_queues(queue.name)
    assert got == list(range(MESSAGES))


def test_a_prefork_worker_acknowledges_as_py_amqp_does(rabbit_server: RabbitServer) -> None:
    """One message, all up to one, and none of another channel; a lost connection is an error."""
    queue = Queue("acknowledged")
    rabbit_server.delete_queues(queue.name)
    with Connection(rabbit_server.url) as connection:
        producer = connection.Producer()
        for number in range(6):
            producer.publish({"number": number}, routing_key=queue.name, declare=[queue])
        acknowledge_at_once(connection.default_channel)
        sent = connection.connection.bytes_sent
        bound = queue(connection.default_channel)
        messages = [bound.get() for _ in range(6)]
        messages[3].ack()
        messages[1].ack(multiple=True)
        assert connection.connection.bytes_sent > sent + 6
        other = connection.channel()
        assert "basic_ack" not in vars(other)
        other.close()
        assert [m.acknowledged for m in messages] == [False, True, False, True, False, False]
        connection.connection.transport.close()
        with pytest.raises(connection.connection_errors):
            messages[5].ack()
    with Connection(rabbit_server.url) as connection:
        bound = queue(connection.default_channel)
        left = [bound.get() for _ in range(4)]
        assert [m and m.decode()["number"] for m in left] == [2, 4, 5, None]
    rabbit_server.delete_queues(queue.name)
