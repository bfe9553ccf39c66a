"""Publish redriven messages: always confirmed, in batches if the transport can."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from celery_dlq.errors import RedriveError
from celery_dlq.headers import CONTENT_TYPE_OF_ENTRY
from celery_dlq.logs import get_logger
from celery_dlq.operations.message import Outgoing
from celery_dlq.transport.aws import broker_errors, is_sqs, renamed, send_body
from celery_dlq.transport.envelope import Envelopes

logger = get_logger("celery_dlq")

_RETRY = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2}
_MESSAGES_PER_PIPELINE = 500
_MESSAGES_PER_ROUND = 100  # published one by one
_BEAT_SECONDS = 2.0


@dataclass(slots=True)
class Sent:
    """The results of publishing; filled message by message, so that an interrupt loses none.

    Attributes:
        confirmed: Ids of letters whose message the broker has.
        refused: Ids of letters whose message the broker does not have, with the error.
        doubtful: Ids of letters whose message the broker may have, with the error.
    """

    confirmed: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    doubtful: dict[str, str] = field(default_factory=dict)

    @property
    def confirmed_set(self) -> frozenset[str]:
        """The confirmed ids, for fast lookups."""
        return frozenset(self.confirmed)


class Publisher:
    """Publishes to the app's broker; a context manager that holds one connection.

    Args:
        app: The Celery app.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._connection: Any = None
        self._producer: Any = None
        self._confirms = self._is_sqs = False

    def __enter__(self) -> Publisher:  # noqa: PYI034 - Self came with Python 3.11
        self._open()
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    @property
    def batch_size(self) -> int:
        """Number of messages to publish at a time; after a crash all of them are doubtful."""
        return _MESSAGES_PER_PIPELINE if self._can_batch else _MESSAGES_PER_ROUND

    def envelopes(self) -> Envelopes | None:
        """Return what makes this broker's list entries; ``None`` if it is not kombu's Redis."""
        try:
            if self._producer is None:
                self._open()
            return Envelopes(self._producer) if Envelopes.supported(self._producer) else None
        except self.errors:
            return None

    def publish(self, messages: Sequence[Outgoing], sent: Sent) -> None:
        """Publish messages and wait until the broker has them; fills ``sent``."""
        if self._producer is None:
            self._open()
        if self._can_batch:
            self._batch(messages, sent)
        else:
            self._one_by_one(messages, sent)

    @property
    def _can_batch(self) -> bool:
        # New in kombu 5.7. Its Redis transport writes one pipeline and never replays it.
        return bool(getattr(self._producer, "supports_batch_publish", False))

    def _batch(self, messages: Sequence[Outgoing], sent: Sent) -> None:
        waiting: list[str] = []
        try:
            self._producer.channel.connection  # noqa: B018 - connects
            self.declare({message.queue for message in messages})
        except self.errors as exc:
            sent.refused.update({m.letter_id: not_published(m, exc) for m in messages})
            self._close()
            return
        try:
            with self._producer.batch(max_size=max(1, len(messages))):
                for message in messages:
                    try:
                        self._put(message)
                    except (
                        TypeError,
                        ValueError,
                        RedriveError,
                    ) as exc:  # this message cannot be encoded
                        sent.refused[message.letter_id] = not_published(message, exc)
                    else:
                        waiting.append(message.letter_id)
        except self.errors as exc:
            for message in messages:
                if message.letter_id not in sent.refused:
                    sent.doubtful[message.letter_id] = not_published(message, exc)
            self._close()
        else:
            sent.confirmed += waiting

    def _one_by_one(self, messages: Sequence[Outgoing], sent: Sent) -> None:
        for message in messages:
            connected = False
            try:
                if self._producer is None:
                    self._open()
                self.declare({message.queue})
                connected = bool(self._producer.channel)
                self._put(message, mandatory=self._confirms, retry=True, retry_policy=_RETRY)
            except (TypeError, ValueError, RedriveError) as exc:
                sent.refused[message.letter_id] = not_published(message, exc)
            except self.errors as exc:
                lost = connected and isinstance(exc, (OSError, *self._connection_errors))
                result = sent.doubtful if lost else sent.refused
                result[message.letter_id] = not_published(message, exc)
                # A late confirmation would be taken for that of the next message.
                self._close()
            else:
                sent.confirmed.append(message.letter_id)

    def _put(self, message: Outgoing, **options: Any) -> None:
        properties = message.properties
        if self._is_sqs:
            properties = renamed(message.queue, properties, message.letter_id)
        if message.content_type == CONTENT_TYPE_OF_ENTRY:
            self._push(message, properties)
            return
        # To the queue itself, because its exchange could route copies to other queues.
        self._producer.publish(
            message.body,
            exchange="",
            routing_key=message.queue,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=message.headers,
            **options,
            **properties,
        )

    def _push(self, message: Outgoing, properties: dict[str, Any]) -> None:
        if self._is_sqs:
            send_body(self._producer.channel, message.queue, message.body, properties)
            return
        envelopes = self.envelopes()
        if envelopes is None:
            raise RedriveError(
                "it was an entry of a Redis list, or a body of Amazon SQS, and no message; only "
                "a broker of that kind can take it back"
            )
        envelopes.push(message.queue, message.properties.get("priority"), message.body)

    def declare(self, queues: set[str]) -> None:
        """Declare those of the queues that the app knows."""
        for name in queues:
            known = self._app.amqp.queues.get(name)
            if known is not None:
                # kombu before 5.5 does not declare an unbound queue when it may retry.
                bound = known.bind(self._producer.channel)
                self._producer.maybe_declare(bound, retry=True, **_RETRY)

    def _open(self) -> None:
        connection = self._app.connection_for_write()
        self._confirms = connection.transport.driver_type == "amqp"
        if self._confirms:
            connection = self._app.connection_for_write(transport_options={"confirm_publish": True})
        self._connection = connection
        self._is_sqs = is_sqs(connection)
        self._producer = self._app.amqp.Producer(connection, auto_declare=False)

    def _close(self) -> None:
        with suppress(Exception):
            self._connection.release()
        self._producer = None

    @property
    def _connection_errors(self) -> tuple[type[BaseException], ...]:
        return tuple(self._connection.connection_errors)

    @property
    def errors(self) -> tuple[type[BaseException], ...]:
        """The errors of the broker's client."""
        return broker_errors(self._connection)


def not_published(message: Outgoing, exc: BaseException) -> str:
    """Return the text of a failure."""
    return (
        f"letter {message.letter_id} was not published to queue {message.queue!r}: "
        f"{type(exc).__name__}: {exc}; it stays in the dead-letter queue"
    )


def broker_name(app: Any) -> str:
    """The broker of an app, as jobs and holds name it: two hosts may call it differently."""
    with app.connection_for_write() as connection:
        place = str(connection.virtual_host or "").strip("/")
        return f"{connection.transport.driver_type} /{place}"


class GrowingPace:
    """One letter in the first second, twice as many in each later one; as `Pace`.

    Args:
        beat: Called at least every 2 seconds during a wait; may raise to end it.
    """

    def __init__(self, beat: Callable[[], object]) -> None:
        self._beat = beat
        self._began = self._next = time.monotonic()

    @property
    def rate(self) -> float:
        """Letters a second, now."""
        return 2.0 ** int(min(time.monotonic() - self._began, 20.0))

    def wait(self, letters: int) -> None:
        """Wait until this many letters may be published."""
        while (left := self._next - time.monotonic()) > 0:
            time.sleep(min(left, 0.5))
            self._beat()
        self._next = max(time.monotonic(), self._next) + letters / self.rate


class Pace:
    """Limits a redrive to ``rate`` letters per second.

    Args:
        rate: Letters per second; ``None`` for no limit.
        beat: Called at least every 2 seconds during a wait; may raise to end it.
    """

    def __init__(self, rate: float | None, beat: Callable[[], object]) -> None:
        self._gap = 0.0 if rate is None else 1.0 / rate
        self._beat = beat
        self._next = time.monotonic()

    def wait(self, letters: int) -> None:
        """Wait until this many letters may be published."""
        if not self._gap:
            return
        while (left := self._next - time.monotonic()) > 0:
            time.sleep(min(left, _BEAT_SECONDS))
            self._beat()
        self._next = max(time.monotonic(), self._next) + letters * self._gap
