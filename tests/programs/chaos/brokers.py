"""The brokers: where the messages are, and how many of them are left."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType, ModuleType
from typing import Any

import redis
from chaos.facts import HEADER
from rabbit import RabbitServer
from servers import RedisServer
from sqs import SqsServer


class Broker:
    """A broker of its own kind, or the Redis that is the store, too."""

    rabbit: RabbitServer | None = None
    port = 0  # of its own server
    options: Mapping[str, Any] = MappingProxyType({})  # of its transport
    without: tuple[str, ...] = ()  # kinds of messages that it cannot carry
    may_have_wrong_clocks = True

    def url(self, port: int | None) -> str:
        """Its URL, by another port if one is given."""
        raise NotImplementedError

    def left(self, app: ModuleType) -> int:
        """How many messages are queued or unacknowledged, as far as it tells."""
        raise NotImplementedError

    def ids(self, app: ModuleType) -> set[str]:
        """The publications that are left when the workers have ended; takes them away."""
        found: set[str] = set()
        with app.app.connection_for_read() as connection:
            queue = app.app.amqp.queues[app.QUEUE](connection.default_channel)
            while message := queue.get(no_ack=True):
                found.add(_publication(message.headers))
        return found


class Redis(Broker):
    """Lists, and three keys of what is unacknowledged."""

    # With clocks that differ by more than the visibility timeout kombu gives every message to a
    # second worker at once.
    may_have_wrong_clocks = False

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    def url(self, port: int | None) -> str:
        return f"redis://127.0.0.1:{port or self._server.port}/0"

    def left(self, app: ModuleType) -> int:
        with redis.Redis.from_url(self._server.url) as client:
            kept = client.hlen("unacked")
            if app.RELIABLE_FETCH:
                kept = max(kept, client.zcard("unacked_index"), client.zcard("unacked_leases"))
            return int(client.llen(app.QUEUE)) + int(kept)

    def ids(self, app: ModuleType) -> set[str]:
        with redis.Redis.from_url(self._server.url) as client:
            entries = [json.loads(entry) for entry in client.lrange(app.QUEUE, 0, -1)]
            entries += [json.loads(record)[0] for record in client.hvals("unacked")]
        return {_publication(entry["headers"]) for entry in entries}


def _publication(headers: Mapping[str, Any]) -> str:
    return str(headers.get(HEADER) or headers.get("id"))


class Rabbit(Broker):
    """A queue; what is unacknowledged is seen when its worker has ended."""

    def __init__(self, rabbit: RabbitServer) -> None:
        self.rabbit = rabbit
        self.port = rabbit.port

    def url(self, port: int | None) -> str:
        return f"amqp://guest:guest@127.0.0.1:{port or self.port}//"

    def left(self, app: ModuleType) -> int:
        with app.app.connection_for_read() as connection:
            queue = connection.default_channel.queue_declare(app.QUEUE, passive=True)
            return int(queue.message_count)


class Sqs(Broker):
    """A queue that tells how many messages are visible, and how many are not."""

    without = ("odd", "poison")

    def __init__(self, server: SqsServer) -> None:
        self._server = server
        self.port = server.port
        self.options = server.options

    def url(self, port: int | None) -> str:
        return f"sqs://key:secret@127.0.0.1:{port or self.port}//"

    def left(self, app: ModuleType) -> int:
        url = self._server.client().get_queue_url(QueueName=app.QUEUE)["QueueUrl"]
        found = self._server.attributes(url)
        return sum(
            int(found[f"ApproximateNumberOfMessages{which}"])
            for which in ("", "NotVisible", "Delayed")
        )


@contextmanager
def _redis(server: RedisServer) -> Iterator[Broker]:
    yield Redis(server)


@contextmanager
def _rabbit(_: RedisServer) -> Iterator[Broker]:
    with RabbitServer() as rabbit:
        yield Rabbit(rabbit)


@contextmanager
def _quorum(_: RedisServer) -> Iterator[Broker]:
    with RabbitServer() as rabbit:
        broker = Rabbit(rabbit)
        # Celery gives it to a chain of delay queues, which others have no part in.
        broker.without = ("later",)
        yield broker


@contextmanager
def _sqs(_: RedisServer) -> Iterator[Broker]:
    with SqsServer() as server:
        yield Sqs(server)


KINDS = {"redis": _redis, "classic": _rabbit, "quorum": _quorum, "sqs": _sqs}
