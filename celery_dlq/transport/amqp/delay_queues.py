"""RabbitMQ's delay queues, which kombu makes for countdowns and ETAs: counted, and read in place.

A queue is read from its head, and what was read is put back in its order. Measured on RabbitMQ
3.10: a message keeps the time at which it moves on, to the millisecond, and its place.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kombu.entity import Queue
from kombu.exceptions import KombuError

from celery_dlq.errors import BrokerUnavailable
from celery_dlq.store.broker.queue import REQUEUED_PER_BATCH, requeue_up_to

QUEUES = tuple(f"celery_delayed_{level}" for level in range(28))
"""As kombu 5.5 and later make them. In number n a message waits for up to 2 to the n seconds."""

MOST_READ = 1_000
"""Messages that are read at most, those that are to leave the lowest queues first."""

_MOST_BYTES = 64 * 1024 * 1024
_MOST_DELIVERIES = 10  # a reading counts as one; RabbitMQ 4 ends a message after 20
_LOCK = "celery_delayed.reader"
_RETURN_SECONDS = 0.25  # those that move on while they come back are not waited for
_REFUSED, _NOT_FOUND, _LOCKED = 403, 404, 405  # AMQP's reply codes
_CONNECT: dict[str, Any] = {"max_retries": 3, "interval_start": 0.2, "interval_step": 0.3}


class DelayQueues:
    """Reads the delay queues of an app's broker."""

    def __init__(self, app: Any) -> None:
        self._connection = app.connection_for_read()

    @property
    def supported(self) -> bool:
        """True if the broker speaks AMQP."""
        return bool(self._connection.transport.driver_type == "amqp")

    def lengths(self) -> dict[str, int]:
        """The number of messages in each queue that has some, lowest first."""
        with self._channel() as channel:
            return self._lengths(channel)

    def messages(self) -> tuple[list[Any], str]:
        """The first messages of each queue, put back when they are returned."""
        found: list[Any] = []
        with self._channel() as channel:
            try:
                # A lock until `close`, also if this process dies.
                channel.queue_declare(_LOCK, durable=False, exclusive=True, auto_delete=True)
                for name in self._lengths(channel):
                    found += self._head(channel, name, MOST_READ - len(found))
            except self._connection.channel_errors as exc:
                code = getattr(exc, "code", None)
                if code == _LOCKED:
                    return [], "another process is reading them now"
                if code == _REFUSED:
                    return [], f"the broker does not allow it: {exc}"
                raise
        return found, ""

    def close(self) -> None:
        """Disconnect; what another connection reads is free again."""
        self._connection.release()

    def _lengths(self, channel: Any) -> dict[str, int]:
        lengths = {}
        try:
            for name in QUEUES:
                if ready := _ready(channel, name):
                    lengths[name] = ready
        except self._connection.channel_errors as exc:
            if getattr(exc, "code", None) != _NOT_FOUND:  # they are declared all together
                raise
        return lengths

    def _head(self, channel: Any, name: str, most: int) -> list[Any]:
        queue, size = Queue(name, channel=channel, no_declare=True), 0
        found: list[Any] = []
        while len(found) < most and size < _MOST_BYTES:
            message = queue.get(no_ack=False)
            if message is None:
                break
            found.append(message)
            size += len(message.body or b"")
            if int(message.headers.get("x-delivery-count") or 0) >= _MOST_DELIVERIES:
                break
        ready = _ready(channel, name)
        for start in range(0, len(found), REQUEUED_PER_BATCH):
            some = found[start : start + REQUEUED_PER_BATCH]
            requeue_up_to(channel, some[-1].delivery_tag)
            # Wait before the next ones, or all would come back in any order.
            deadline = time.monotonic() + _RETURN_SECONDS
            while _ready(channel, name) < ready + start + len(some) and time.monotonic() < deadline:
                time.sleep(0.001)
        return found

    @contextmanager
    def _channel(self) -> Iterator[Any]:
        connection = self._connection
        try:
            connection.ensure_connection(**_CONNECT)
            with connection.channel() as channel:
                yield channel
        except (
            KombuError,
            OSError,
            *connection.connection_errors,
            *connection.channel_errors,
        ) as exc:
            raise BrokerUnavailable(
                f"cannot read the delay queues of {connection.as_uri()}: "
                f"{type(exc).__name__}: {exc}"
            ) from exc


def _ready(channel: Any, name: str) -> int:
    return int(channel.queue_declare(name, passive=True).message_count)
