"""Publishes letters to dead-letter exchanges, so that other services hear of them.

A entry goes into the outbox before its letter is stored, and out of it when the broker has
confirmed the message. So whatever is killed between, some worker's publisher finds the entry;
one whose letter was never stored is dropped in the end. At least once: two copies have the
same message id.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any
from uuid import UUID, uuid5

from amqp.exceptions import FrameSyntaxError  # type: ignore[import-untyped]
from kombu.entity import Exchange
from kombu.exceptions import OperationalError
from kombu.utils.functional import LRUCache

from celery_dlq.backends.base import Backend, Outbox, OutboxEntry
from celery_dlq.decorators import policy_of
from celery_dlq.errors import BrokerUnavailable, DLQError, SettingsError
from celery_dlq.events import DeadLettered, Event
from celery_dlq.headers import death_headers
from celery_dlq.logs import get_logger
from celery_dlq.policies.exchange import DeadLetterExchange
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.record import DeadLetter

logger = get_logger("celery_dlq.dlx.publisher")

LEASE_SECONDS = 10.0
"""How long a entry that was tried is left to who tried it."""

_A_ROUND = 100
_MISSING_SECONDS = 600.0  # a letter is stored right after its entry
_MOST_REMEMBERED = 10_000
_TRANSPORT_OPTIONS = {"confirm_publish": True, "read_timeout": 10, "write_timeout": 10}
_CONNECT: dict[str, Any] = {"max_retries": 1, "interval_start": 0.2, "interval_step": 0.2}
_NOTICES = UUID("0a3c1c0e-5c7b-5a55-8a39-0d1a3f0f6f0b")

# Set by a broker on an earlier journey; RabbitMQ drops what it takes for a circle.
_STALE = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "redelivered")
_KEPT_PROPERTIES = ("correlation_id", "reply_to", "priority", "type", "app_id", "delivery_mode")


class _Refused(BrokerUnavailable):
    """The broker, or its client, refuses one message: others may pass."""


class Targets:
    """Tells to which exchange a letter goes.

    Args:
        app: The Celery app, for the policies of its tasks.
        policies: Its queue policies.
    """

    def __init__(self, app: Any, policies: PolicyTable) -> None:
        self._app = app
        self._policies = policies

    def entry(self, letter: DeadLetter) -> OutboxEntry | None:
        """The entry of a letter; ``None`` if its policy names no exchange."""
        task = self._app.tasks.get(letter.task_name)
        own = None if task is None else policy_of(task)
        policy = self._policies.resolve(letter.source_queue, own)
        if policy is None or policy.dead_letter_exchange is None:
            return None
        if not policy.dead_letter_exchange.name and policy.dead_letter_routing_key is None:
            return None  # refused at start-up: it would go back to its queue
        return OutboxEntry(
            letter_id=letter.id,
            exchange=policy.dead_letter_exchange.name,
            routing_key=policy.dead_letter_routing_key or letter.source_queue,
        )

    def exchanges(self) -> dict[str, DeadLetterExchange]:
        """All exchanges of all policies, by name.

        Raises:
            SettingsError: Two policies name one exchange with two types.
        """
        found: dict[str, tuple[str, DeadLetterExchange]] = {}
        for where, policy in self._named():
            exchange = policy.dead_letter_exchange
            if exchange is None:
                continue
            before, known = found.setdefault(exchange.name, (where, exchange))
            if known != exchange:
                raise SettingsError(
                    f"expected one type for the exchange {exchange.name!r}, got {known.type!r} "
                    f"from {before} and {exchange.type!r} from {where}"
                )
        return {name: exchange for name, (_where, exchange) in found.items()}

    def queues_by_name(self) -> list[tuple[str, str]]:
        """Queues that the default exchange must reach, with who says so.

        Raises:
            SettingsError: The queue is not named, or is one whose dead messages are told of.
        """
        found = []
        for where, policy in self._named():
            if policy.dead_letter_exchange is None or policy.dead_letter_exchange.name:
                continue
            key = policy.dead_letter_routing_key
            if key is None or key in self._policies.queues:
                got = "none" if key is None else f"{key!r}, whose workers would run the dead tasks"
                raise SettingsError(
                    f"expected {where}['dead_letter_routing_key'] to name a queue of your own, "
                    f"because dead_letter_exchange is the default exchange, got {got}"
                )
            found.append((where, key))
        return found

    def _named(self) -> Iterator[tuple[str, Policy]]:
        for name in self._policies.queues:
            yield f"dlq_queues[{name!r}]", self._policies.queues[name]
        for task in list(self._app.tasks.values()):
            policy = policy_of(task)
            if policy is not None:
                yield f"dead_letter_policy of {task.name}", policy


class ExchangeOutbox:
    """The `LetterOutbox` of all policies that name an exchange.

    Args:
        outbox: Keeps the entries.
        targets: Tells which letters have one.
    """

    def __init__(self, outbox: Outbox, targets: Targets) -> None:
        self._outbox = outbox
        self._targets = targets

    def add(self, letter: DeadLetter) -> None:
        """Keep the entry of a letter that is about to be stored."""
        entry = self._targets.entry(letter)
        if entry is not None:
            self._outbox.add(letter.dead_letter_queue, entry)


class ExchangePublisher:
    """Publishes what is in the outbox.

    Args:
        app: The Celery app; its broker has the exchanges.
        backend: Where letters and entries are; its own, because it works in a thread.
        targets: Knows the exchanges.
    """

    def __init__(self, app: Any, backend: Backend, targets: Targets) -> None:
        self.backend = backend
        self._store = backend.letters
        self._outbox = backend.outbox
        self._targets = targets
        self._exchanges: dict[str, DeadLetterExchange] = {}
        self._missing: MutableMapping[OutboxEntry, float] = LRUCache(_MOST_REMEMBERED)  # type: ignore[no-untyped-call]
        self._connection = app.connection_for_write(transport_options=_TRANSPORT_OPTIONS)
        self._returns = self._connection.transport.driver_type == "amqp"
        self._producer: Any = None
        self._returned: list[str] = []
        self._new: set[str] = set()
        self._said: MutableMapping[str, None] = LRUCache(_MOST_REMEMBERED)  # type: ignore[no-untyped-call]
        self.wake = threading.Event()

    def check(self) -> None:
        """Declare all exchanges, and look for the queues that must be there.

        Raises:
            SettingsError: The broker has an exchange of that name with another type, refuses
                it, or has no such queue.
            BrokerUnavailable: The broker does not answer.
        """
        exchanges, queues = self._targets.exchanges(), self._targets.queues_by_name()
        if not exchanges:
            return
        try:
            with self._errors():
                self._connection.ensure_connection(**_CONNECT)
                for exchange in exchanges.values():
                    self._declare(exchange)
                for where, queue in queues if self._returns else ():
                    self._look_for(queue, where)
        finally:
            self.close()  # nothing that a pool child would inherit

    def stored(self, event: Event) -> None:
        """An observer of events: publish the letter soon; may be called from any thread."""
        if isinstance(event, DeadLettered) and self._targets.entry(event.letter) is not None:
            self._new.add(event.letter.dead_letter_queue)
            self.wake.set()

    def deliver_new(self) -> None:
        """Publish entries of letters that this process stored; see `deliver`."""
        self.wake.clear()
        while self._new:
            self._deliver(self._new.pop())

    def deliver(self, dead_letter_queues: Iterable[str] | None = None) -> None:
        """Publish all entries that are due.

        Args:
            dead_letter_queues: Of which queues; ``None`` for all.

        Raises:
            BrokerUnavailable: The broker does not take one; it and the rest stay.
            StoreUnavailable: The store does not answer.
        """
        names = self._store.names() if dead_letter_queues is None else [*dead_letter_queues]
        for name in self._outbox.holding(names):
            self._deliver(name)

    def close(self) -> None:
        """Disconnect; the next message connects again. Never raises."""
        self._producer = None
        with suppress(Exception):
            self._connection.close()

    def _deliver(self, dead_letter_queue: str) -> None:
        while True:
            due = self._outbox.due(dead_letter_queue, most=_A_ROUND, lease_seconds=LEASE_SECONDS)
            over: list[OutboxEntry] = []
            try:
                for number, entry in enumerate(due):
                    # Not this one: if it is to blame, the others come first next time.
                    with self._put_back(dead_letter_queue, due[number + 1 :]):
                        if self._published(dead_letter_queue, entry):
                            over.append(entry)
            finally:
                self._outbox.done(dead_letter_queue, over)
            if len(due) < _A_ROUND:
                return

    @contextmanager
    def _put_back(self, dead_letter_queue: str, entries: list[OutboxEntry]) -> Iterator[None]:
        """After a failure these are due at once, for any worker."""
        try:
            yield
        except BrokerUnavailable:
            for entry in entries:
                self._outbox.add(dead_letter_queue, entry)
            raise

    def _published(self, dead_letter_queue: str, entry: OutboxEntry) -> bool:
        """Publish a entry's letter; whether the entry is over."""
        letter = self._store.get(dead_letter_queue, entry.letter_id)
        if letter is None:
            return self._is_lost(entry)
        try:
            with self._errors():
                self._publish(letter, entry)
        except _Refused as exc:
            self._say_once(entry.letter_id, "Letter %s is not published: %s", exc)
            return False
        if not self._returned:
            return True
        self._returned.clear()
        return self._unroutable(entry)

    def _publish(self, letter: DeadLetter, entry: OutboxEntry) -> None:
        producer, exchange = self._open(), self._exchanges.get(entry.exchange)
        properties = letter.decoded("properties") or {}
        producer.publish(
            letter.body,
            exchange=entry.exchange,
            routing_key=entry.routing_key,
            declare=[_entity(exchange)] if exchange is not None and exchange.name else None,
            content_type=letter.content_type or "application/octet-stream",
            content_encoding=letter.content_encoding or "binary",
            headers=announced_headers(letter),
            message_id=str(uuid5(_NOTICES, letter.id)),
            mandatory=self._returns,
            retry=False,
            **{name: properties[name] for name in _KEPT_PROPERTIES if properties.get(name)},
        )

    def _open(self) -> Any:
        if self._producer is None:
            self._exchanges = self._targets.exchanges()
            self._connection.ensure_connection(**_CONNECT)
            self._producer = self._connection.Producer(
                channel=self._connection.channel(),
                auto_declare=False,
                on_return=self._on_return if self._returns else None,
            )
        return self._producer

    def _on_return(self, exc: Any, exchange: str, routing_key: str, _message: Any) -> None:
        self._returned.append(f"{exchange} {routing_key} {exc}")

    def _unroutable(self, entry: OutboxEntry) -> bool:
        """The broker took the message and had no queue for it; whether the entry is over."""
        self._say_once(
            f"{entry.exchange!r} with routing key {entry.routing_key!r}",
            "Nobody gets the letters of exchange %s: %s. The letters are stored; this is said once",
            "no queue is bound to it",
        )
        # A named exchange without subscribers is well; a queue that is gone may come back.
        return bool(entry.exchange)

    def _say_once(self, what: str, message: str, why: object) -> None:
        if what in self._said:
            return
        self._said[what] = None
        logger.warning(message, what, why)

    def _is_lost(self, entry: OutboxEntry) -> bool:
        """No letter: not stored yet, or removed before it could be published."""
        now = time.monotonic()
        if now - self._missing.setdefault(entry, now) < _MISSING_SECONDS:
            return False
        del self._missing[entry]
        logger.warning(
            "Letter %s is gone, and exchange %r never got it: it was redriven or removed before "
            "it could be published there",
            entry.letter_id,
            entry.exchange,
        )
        return True

    def _declare(self, exchange: DeadLetterExchange) -> None:
        if not exchange.name:
            return
        channel = self._connection.channel()
        try:
            if exchange.name.startswith("amq."):  # the broker's own; kombu never declares them
                channel.exchange_declare(exchange.name, exchange.type, passive=True)
            else:
                _entity(exchange)(channel).declare()  # type: ignore[no-untyped-call]
        except self._connection.channel_errors as exc:
            raise SettingsError(
                f"expected the broker {self._connection.as_uri()} to have, or to make, the "
                f"{exchange.type} exchange {exchange.name!r} for dead_letter_exchange, got: {exc}; "
                f"name its real type (and it must be durable), or another exchange"
            ) from exc

    def _look_for(self, queue: str, where: str) -> None:
        try:
            self._connection.channel().queue_declare(queue, passive=True)
        except self._connection.channel_errors as exc:
            raise SettingsError(
                f"expected the queue {queue!r}, which {where}['dead_letter_routing_key'] names, to "
                f"be on the broker {self._connection.as_uri()}, got: {exc}; make it first"
            ) from exc

    @contextmanager
    def _errors(self) -> Iterator[None]:
        connection = self._connection
        try:
            yield
        except DLQError:
            raise
        except Exception as exc:
            self.close()
            message = (
                f"expected the broker {connection.as_uri()} to take a letter for its dead-letter "
                f"exchange, got {type(exc).__name__}: {exc}"
            )
            lost = (OSError, OperationalError, *connection.connection_errors)
            if isinstance(exc, lost) and not isinstance(exc, FrameSyntaxError):
                raise BrokerUnavailable(message) from exc
            raise _Refused(message) from exc


def announced_headers(letter: DeadLetter) -> dict[str, Any]:
    """The original headers, and the death: a contract, see docs/reference/wire.md."""
    original = letter.decoded("headers")
    kept = original.items() if isinstance(original, dict) else ()
    return {
        **{name: value for name, value in kept if not str(name).startswith(_STALE)},
        **death_headers(letter),
    }


def _entity(exchange: DeadLetterExchange) -> Exchange:
    return Exchange(exchange.name, type=exchange.type)  # type: ignore[no-untyped-call]
