"""The one way to publish confirmed: every wait is bounded, and nothing is sent twice in silence.

kombu publishes a second time when the connection is lost while it waits. Who publishes for an
operator must check every second whether it still may; who publishes for a worker must come back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from amqp.exceptions import FrameSyntaxError  # type: ignore[import-untyped]

from celery_dlq import timing

if TYPE_CHECKING:
    from celery_dlq.transport.confirms import Confirms


class ConfirmedProducer:
    """A connection that publishes, and kombu's producer on it.

    Made anew after each error, because a late confirmation would be taken for that of the next
    message. Where RabbitMQ is the broker, a message is published once it has confirmed it.
    """

    def __init__(self, app: Any, *, connect: Mapping[str, Any], longest: float) -> None:
        self._app, self._connect, self._longest = app, connect, longest
        self._confirms: Confirms | None = None
        self._make()

    def _make(self) -> None:
        """Make a connection and a producer; nothing connects yet."""
        connection = self._app.connection_for_write()
        kind, given = connection.transport.driver_type, self._app.conf.broker_transport_options
        options: dict[str, Any] = {}
        self.is_amqp, self.is_sqs = kind == "amqp", kind == "sqs"
        if self.is_amqp:
            from celery_dlq.transport.confirms import Confirms  # noqa: PLC0415 - of RabbitMQ alone

            self._confirms = Confirms(self._longest)
            options = self._confirms.transport_options()
        elif self.is_sqs:
            from celery_dlq.transport.sqs.aws import only_once  # noqa: PLC0415 - of SQS alone

            options = only_once(given)
        elif kind == "redis":
            options = {"retry_on_timeout": False, "socket_timeout": timing.current.publish_reply}
            options |= {k: v for k, v in given.items() if k == "socket_timeout" and v}
        connection = self._app.connection_for_write(transport_options=options)
        self.connection, self.is_connected, self._returned = connection, False, False
        returns = self._note_returned if self.is_amqp else None
        self.producer = self._app.amqp.Producer(connection, auto_declare=False, on_return=returns)

    def _note_returned(self, *_: object) -> None:
        self._returned = True

    def connect(self, waiting: Callable[[str], object]) -> None:
        """Connect, if it is not connected."""
        if self.is_connected:
            return
        self.connection.ensure_connection(errback=lambda *_: waiting(""), **self._connect)
        if self._confirms is not None:
            self.producer.channel.confirm_select()
        if self.is_sqs:
            from celery_dlq.transport.sqs.aws import unshare_clients  # noqa: PLC0415 - as above

            unshare_clients(self.producer.channel)
        self.is_connected = True

    def publish_confirmed(
        self, write: Callable[[], object], waiting: Callable[[str], object]
    ) -> bool:
        """Call what publishes one message by the producer; return when the broker has it.

        False if RabbitMQ returned it, because no queue gets it. ``waiting`` is called about every
        second with what is waited for, if that is an alarm; it may raise. Raises `MessageNacked`
        if a queue refuses the message.
        """
        self.connect(waiting)
        self._returned = False
        if self._confirms is not None:
            self._confirms.wait_until_writable(self.connection, waiting)
        write()
        if self._confirms is not None:
            self._confirms.wait_for_confirm(self.producer.channel, waiting)
        return not self._returned

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """The errors of the broker's client."""
        from celery_dlq.transport.sqs.aws import broker_errors  # noqa: PLC0415 - after an error

        return broker_errors(self.connection)

    def is_lost(self, exc: BaseException) -> bool:
        """True if an error means that the connection is lost, and no message is at fault."""
        lost = isinstance(exc, (OSError, *self.connection.connection_errors))
        return lost and not isinstance(exc, FrameSyntaxError)  # py-amqp cannot encode it

    def disconnect(self) -> None:
        """Drop the connection; a broker that is away or blocks us answers no goodbye."""
        with suppress(Exception):
            self.connection.collect()
        self._make()

    def close(self) -> None:
        """Close the connection; the next message connects again. Never raises."""
        with suppress(Exception):
            self.connection.release()
        self._make()
