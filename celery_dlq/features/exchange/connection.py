"""A connection to the broker's dead-letter exchanges: declares them, and publishes confirmed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from uuid import UUID, uuid5

from amqp.exceptions import MessageNacked  # type: ignore[import-untyped]
from kombu.entity import Exchange
from kombu.exceptions import OperationalError

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, DLQError, SettingsError
from celery_dlq.features.exchange.policy import DeadLetterExchange
from celery_dlq.letters.copies import death_headers, record_of
from celery_dlq.letters.headers import RECORD_HEADER, is_of_broker
from celery_dlq.letters.record import DeadLetter
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.transport.confirmed import ConfirmedProducer

KEY, TASK_KEY = "dead_letter_exchange", "dead_letter_task"

_MESSAGE_ID_NAMESPACE = UUID("0a3c1c0e-5c7b-5a55-8a39-0d1a3f0f6f0b")
_MOST_HEADER_CHARS = 64 * 1024  # beside the record, in one frame of AMQP
_NOT_EQUIVALENT = 406  # AMQP's reply code

_KEPT_PROPERTIES = ("correlation_id", "reply_to", "priority", "type", "app_id", "delivery_mode")
_DURABLE = 2


class Refused(BrokerUnavailable):
    """The broker or its client refuses one message; others may pass."""


class Exchanges:
    """The exchanges of an app's policies: publishes letters there; connects when it must."""

    def __init__(self, app: Any, table: PolicyTable) -> None:
        self._app = app
        self._table = table
        named = (policy.of(TASK_KEY) for _where, policy in table.named_policies())
        self._tasks = frozenset(filter(None, named))
        wait = timing.current.publish_reply  # a task may wait so long
        self._link = ConfirmedProducer(app, connect=timing.CONNECT, longest=wait)

    @property
    def named_exchanges(self) -> list[tuple[str, DeadLetterExchange]]:
        """Each exchange that a policy names, with what to call that policy in an error."""
        found = ((where, policy.of(KEY)) for where, policy in self._table.named_policies())
        return [(f"{where}[{KEY!r}]", exchange) for where, exchange in found if exchange]

    @property
    def is_used(self) -> bool:
        """True if a policy names an exchange or a task."""
        return bool(self.named_exchanges or self._tasks)

    def _policy_of(self, letter: DeadLetter) -> Policy | None:
        own = self._table.tasks.get(letter.task_name)
        return self._table.resolve(letter.source_queue, own)

    def task_of(self, letter: DeadLetter) -> str:
        """The task that gets a letter; empty if there is none, or the letter is of such a task."""
        if letter.task_name in self._tasks:
            return ""  # else each of its deaths would send it once more
        policy = self._policy_of(letter) if self._tasks else None
        return "" if policy is None else policy.of(TASK_KEY) or ""

    def exchange_of(self, letter: DeadLetter) -> DeadLetterExchange | None:
        """The exchange of a letter; ``None`` if its policy names none."""
        policy = self._policy_of(letter)
        found: DeadLetterExchange | None = None if policy is None else policy.of(KEY)
        if not found or not (found.name or found.routing_key):
            return None  # without both it is refused at start-up: it would return to its queue
        return found

    def declare_all(self) -> None:
        """Declare all exchanges, and check that the queues of the default exchange exist."""
        exchanges = self.checked()
        try:
            with self._errors():
                self._link.connect(_go_on)
                for exchange in exchanges.values():
                    self._declare(exchange)
                for where, exchange in self.named_exchanges if self._link.is_amqp else ():
                    if not exchange.name:
                        self._look_for(exchange, where)
        finally:
            self.close()  # a pool child must not inherit the connection

    def checked(self) -> dict[str, DeadLetterExchange]:
        """All exchanges by name, if the policies agree about them."""
        found: dict[str, tuple[str, DeadLetterExchange]] = {}
        for where, exchange in self.named_exchanges:
            before, known = found.setdefault(exchange.name, (where, exchange))
            if known.type != exchange.type:
                raise SettingsError(
                    f"expected one type for the exchange {exchange.name!r}, got {known.type!r} "
                    f"from {before} and {exchange.type!r} from {where}"
                )
            key = exchange.routing_key
            if not exchange.name and (not key or key in self._table.queues):
                got = "none" if not key else f"{key!r}, whose workers would run the dead tasks"
                raise SettingsError(
                    f"expected {where}['routing_key'] to name a queue of your own, because the "
                    f"exchange is the default one, got {got}"
                )
            if exchange.before_ack and not self._link.is_amqp:
                raise SettingsError(
                    f"expected {where}['before_ack'] with RabbitMQ as the broker, got "
                    f"{self._link.connection.transport.driver_type}, which confirms nothing"
                )
        return {name: exchange for name, (_where, exchange) in found.items()}

    def publish(
        self,
        letter: DeadLetter,
        name: str,
        routing_key: str,
        *,
        before_ack: bool = False,
        plain: bool = False,
    ) -> bool:
        """Publish a letter, confirmed; return False if no queue got it.

        Before the message is acknowledged the copy has the whole letter; ``plain`` leaves out the
        message's own headers, which that has too. Raises `Refused` if only this message cannot be
        published, else `BrokerUnavailable`.
        """
        with self._errors():
            exchange = next((one for _, one in self.named_exchanges if one.name == name), None)
            properties = (letter.decoded("properties") or {}) if not plain else {}
            kept = {key: properties[key] for key in _KEPT_PROPERTIES if properties.get(key)}
            if plain or (before_ack and len(letter.headers) > _MOST_HEADER_CHARS):
                headers = death_headers(letter)
            else:
                headers = announced_headers(letter)
            if before_ack:
                kept["delivery_mode"] = _DURABLE
                headers[RECORD_HEADER] = record_of(letter)
            publish = partial(
                self._link.producer.publish,
                letter.body,
                exchange=name,
                routing_key=routing_key,
                declare=[_exchange_entity(exchange)] if exchange and name else None,
                content_type=letter.content_type or "application/octet-stream",
                content_encoding=letter.content_encoding or "binary",
                headers=headers,
                message_id=str(uuid5(_MESSAGE_ID_NAMESPACE, letter.id)),
                mandatory=self._link.is_amqp,
                retry=False,
                **kept,
            )
            return self._link.publish_confirmed(publish, _go_on)

    def send_to_task(self, letter: DeadLetter, task: str) -> bool:
        """Send a letter to a task, confirmed; return False if no queue got it.

        Raises what `publish` raises.
        """
        mandatory = {"mandatory": True} if self._link.is_amqp else {}
        with self._errors():
            send = partial(
                self._app.send_task,
                task,
                args=[letter.to_json()],
                task_id=str(uuid5(_MESSAGE_ID_NAMESPACE, f"{task} {letter.id}")),
                producer=self._link.producer,
                retry=False,
                ignore_result=True,
                **mandatory,
            )
            return self._link.publish_confirmed(send, _go_on)

    def close(self) -> None:
        """Disconnect; the next message connects again. Never raises."""
        self._link.close()

    def _declare(self, exchange: DeadLetterExchange) -> None:
        if not exchange.name:
            return
        channel = self._link.connection.channel()
        try:
            if exchange.name.startswith("amq."):  # the broker's own, which kombu never declares
                channel.exchange_declare(exchange.name, exchange.type, passive=True)
            else:
                _exchange_entity(exchange)(channel).declare()  # type: ignore[no-untyped-call]
        except self._link.connection.channel_errors as exc:
            raise SettingsError(
                f"expected the broker {self._link.connection.as_uri()} to have or create the "
                f"{exchange.type} exchange {exchange.name!r} of dead_letter_exchange, got: {exc}; "
                f"set its real type (it must be durable), or name another exchange"
            ) from exc

    def _look_for(self, exchange: DeadLetterExchange, where: str) -> None:
        queue, connection = exchange.routing_key, self._link.connection
        place = f"which {where} names, on the broker {connection.as_uri()}"
        try:
            connection.channel().queue_declare(queue, passive=True)
        except connection.channel_errors as exc:
            raise SettingsError(
                f"expected the queue {queue!r}, {place}, to exist, got: {exc}; create it first"
            ) from exc
        if not exchange.before_ack:
            return
        try:  # it is there: this changes nothing, and RabbitMQ compares the durability first
            connection.channel().queue_declare(queue, durable=True, auto_delete=False)
        except connection.channel_errors as exc:
            if getattr(exc, "code", None) == _NOT_EQUIVALENT and "'durable'" in str(exc):
                raise SettingsError(
                    f"expected the queue {queue!r}, {place}, to be durable, got: {exc}"
                ) from exc

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except MessageNacked as exc:
            raise Refused("a queue refused it: is it full?") from exc
        except DLQError:
            self._link.disconnect()  # RabbitMQ may confirm it after all
            raise
        except Exception as exc:
            where = self._link.connection.as_uri()
            lost = isinstance(exc, OperationalError) or self._link.is_lost(exc)
            self._link.disconnect()
            message = (
                f"the broker {where} did not accept a letter for its dead-letter exchange: "
                f"{type(exc).__name__}: {exc}"
            )
            raise (BrokerUnavailable if lost else Refused)(message) from exc


def announced_headers(letter: DeadLetter) -> dict[str, Any]:
    """The original headers and those of the death; documented in docs/reference/wire.md."""
    original = letter.decoded("headers")
    kept = original.items() if isinstance(original, dict) else ()
    return {
        **{name: value for name, value in kept if not is_of_broker(str(name))},
        **death_headers(letter),
    }


def _exchange_entity(exchange: DeadLetterExchange) -> Exchange:
    return Exchange(exchange.name, type=exchange.type)  # type: ignore[no-untyped-call]


def _go_on(_waiting_for: str) -> None:
    """Wait on: nobody can take over what this process publishes meanwhile."""
