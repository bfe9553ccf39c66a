"""Queues to adopt from: take a message, and remove it when its letter is stored.

A broker's queue is read and acknowledged through kombu. A Redis list is read in place, and an
entry is removed when its letter is stored: kombu pops a message before it is recorded anywhere
else, so it would be lost if the process were killed then, or if kombu could not read it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from queue import Empty
from typing import Any

from kombu.exceptions import KombuError
from kombu.message import Message as KombuMessage
from kombu.utils.json import loads

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, NotFound
from celery_dlq.transport.redis.entries import end_of_list


@dataclass(frozen=True, slots=True)
class TakenMessage:
    """A message of a queue."""

    message: Any  # The kombu message
    # True if it was never delivered before, so it has no letter yet. False proves nothing
    fresh: bool = False
    entry: bytes = b""  # Its bytes in a Redis list
    key: str = ""  # The key of that list


def source_of(app: Any, queue: str) -> BrokerQueue:
    """Make the source for a queue of the app's broker; the first `take_message` connects."""
    connection = app.connection_for_read()
    if connection.transport_cls == "sqs":
        return SqsQueue(connection, queue)
    kind = RedisList if connection.transport.driver_type == "redis" else BrokerQueue
    return kind(connection, queue)


class BrokerQueue:
    """A queue that kombu reads; every method but `close` may raise `BrokerUnavailable`."""

    def __init__(self, connection: Any, queue: str) -> None:
        self._connection = connection
        self._queue = queue
        self._channel: Any = None

    def take_message(self) -> TakenMessage | None:
        """The next message, oldest first, unacknowledged; ``None`` if the queue is empty now."""
        with self._errors():
            channel = self._open_channel()
            try:
                raw = channel.basic_get(self._queue, no_ack=False)
            except Empty:
                return None
            if raw is None:
                return None
            convert = getattr(channel, "message_to_python", None)
            message = convert(raw) if convert is not None else raw
        delivery = message.delivery_info or {}
        return TakenMessage(message, fresh=delivery.get("redelivered") is False)

    def remove_message(self, found: TakenMessage) -> None:
        """Remove a message: its letter is stored."""
        with self._errors():
            found.message.ack()

    def close(self) -> None:
        """Disconnect: messages that were not removed are in their queue again. Never raises."""
        self._channel = None
        with suppress(Exception):
            self._connection.close()

    def _open_channel(self) -> Any:
        if self._channel is None:
            self._connection.ensure_connection(**{**timing.CONNECT, "max_retries": 3})
            self._channel = self._opened()
        return self._channel

    def _opened(self) -> Any:
        channel = self._connection.channel()
        # Passive: a mistyped name must not create a queue.
        channel.queue_declare(self._queue, passive=True)
        return channel

    def _client_errors(self) -> tuple[type[Exception], ...]:
        """The errors of the broker's client."""
        transport = self._connection.transport
        return (KombuError, OSError, *transport.connection_errors, *transport.channel_errors)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Translate errors of the broker's client into ours, without passwords."""
        try:
            yield
        except Exception as exc:
            self._channel = None  # RabbitMQ closes a channel after an error
            if not isinstance(exc, self._client_errors()):
                raise
            place = self._connection.as_uri()
            if getattr(exc, "code", None) == 404:  # noqa: PLR2004 - AMQP's "not found"
                raise NotFound(
                    f"there is no queue {self._queue!r} on the broker {place}; check the name and "
                    f"the virtual host"
                ) from exc
            raise BrokerUnavailable(
                f"cannot read {self._queue!r} from the broker {place}: {type(exc).__name__}: {exc}"
            ) from exc


class SqsQueue(BrokerQueue):
    """A queue of Amazon SQS; a message that kombu cannot read is taken, too."""

    def __init__(self, connection: Any, queue: str) -> None:
        from celery_dlq.transport.sqs.channel import receiving  # noqa: PLC0415 - only users of SQS have it

        super().__init__(connection, queue)
        transport = receiving()
        connection.get_transport_cls = lambda: transport

    def _client_errors(self) -> tuple[type[Exception], ...]:
        from celery_dlq.transport.sqs.aws import broker_errors  # noqa: PLC0415 - as above

        return broker_errors(self._connection)

    def _opened(self) -> Any:
        from celery_dlq.transport.sqs.aws import queue_exists  # noqa: PLC0415 - as above

        channel = self._connection.channel()
        if not queue_exists(channel, self._queue):
            raise NotFound(
                f"there is no queue {self._queue!r} at Amazon SQS; check the name, the region "
                f"and, if there are predefined_queues, that it is one of them"
            )
        return channel


class RedisList(BrokerQueue):
    """A list in Redis, filled by kombu or by another program."""

    def __init__(self, connection: Any, queue: str) -> None:
        super().__init__(connection, queue)
        # Sent again after a late reply, a removal would take an equal entry that has no letter.
        connection.transport_options["retry_on_timeout"] = False

    def take_message(self) -> TakenMessage | None:
        """The entry that would be popped next; it stays in its list, and the next may be large."""
        with self._errors():
            channel = self._open_channel()
            with channel.conn_or_acquire() as client:
                for step in channel.priority_steps:
                    # Kombu adds its key prefix only to commands that it uses itself.
                    key = channel.global_keyprefix + self._queue + end_of_list(channel, step)
                    if entries := client.execute_command("LRANGE", key, -1, -1):
                        return self._taken_message(key, entries[0])
        return None

    def remove_message(self, found: TakenMessage) -> None:
        """Remove one identical entry, searched from the end."""
        with self._errors(), self._open_channel().conn_or_acquire() as client:
            client.execute_command("LREM", found.key, -1, found.entry)

    def _opened(self) -> Any:
        return self._connection.default_channel

    def _taken_message(self, key: str, entry: bytes | str) -> TakenMessage:
        data = entry.encode("utf-8", "surrogateescape") if isinstance(entry, str) else entry
        try:
            payload = loads(data.decode("utf-8"))  # type: ignore[no-untyped-call]
            message = self._channel.Message(payload, channel=self._channel)
        except Exception:  # noqa: BLE001 - not written by kombu
            message = _plain_message(data)
        return TakenMessage(message, entry=data, key=key)


def _plain_message(entry: bytes) -> KombuMessage:
    """Make a message of an entry that kombu did not write: all of it is the body."""
    try:
        json.loads(entry)
    except (ValueError, RecursionError):
        kind, encoding = "application/octet-stream", "binary"
    else:
        kind, encoding = "application/json", "utf-8"
    return KombuMessage(  # type: ignore[no-untyped-call]
        body=entry, content_type=kind, content_encoding=encoding
    )
