"""Publishes letters to dead-letter exchanges, for other services.

An outbox entry is added before its letter is stored, and removed when the broker has confirmed
the message. Whichever process is killed in between, some worker's publisher finds the entry; an
entry whose letter was never stored is dropped after ten minutes. Publishing is at least once:
copies have the same message id.

RabbitMQ refuses a message that one of its queues refuses, and the others have it then. So an entry
whose message may be somewhere waits longer each time, and one that is refused is given up at last;
the entry itself has the count. The letter stays where it is.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from uuid import UUID, uuid5

from amqp.exceptions import FrameSyntaxError, MessageNacked  # type: ignore[import-untyped]
from kombu.entity import Exchange
from kombu.exceptions import OperationalError
from kombu.utils.functional import LRUCache

from celery_dlq.decorators import policy_of
from celery_dlq.errors import BrokerUnavailable, DLQError, SettingsError
from celery_dlq.events import DeadLettered, Event
from celery_dlq.features.exchange.policy import DeadLetterExchange
from celery_dlq.letters.headers import death_headers
from celery_dlq.letters.record import DeadLetter
from celery_dlq.logs import get_logger
from celery_dlq.metrics import INTERNAL_ERRORS
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.base import Backend, Outbox, OutboxEntry

logger = get_logger("celery_dlq.features.exchange.publisher")

LEASE_SECONDS = 20.0
"""Time for which an entry that is being published is hidden from other publishers."""

TRIES = 5
"""An entry that is refused so often is given up, after half an hour: the waits grow fourfold."""

_ENTRIES_PER_ROUND = 100
_ROUND_SECONDS = 5.0  # with the longest publication, less than the lease
_MISSING_SECONDS = 600.0  # a letter is stored right after its entry
_MAX_REMEMBERED = 10_000
_TRANSPORT_OPTIONS = {"confirm_publish": True, "read_timeout": 10, "write_timeout": 10}
_CONNECT: dict[str, Any] = {"max_retries": 1, "interval_start": 0.2, "interval_step": 0.2}
_MESSAGE_ID_NAMESPACE = UUID("0a3c1c0e-5c7b-5a55-8a39-0d1a3f0f6f0b")

# Set by a broker earlier; RabbitMQ drops messages that seem to go in a cycle.
_STALE = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "redelivered")
_KEPT_PROPERTIES = ("correlation_id", "reply_to", "priority", "type", "app_id", "delivery_mode")


class _Refused(BrokerUnavailable):
    """The broker or its client refuses one message; others may pass."""


class Targets:
    """Maps letters to exchanges."""

    def __init__(self, app: Any, policies: PolicyTable) -> None:
        self._app = app
        self._policies = policies

    def entry(self, letter: DeadLetter) -> OutboxEntry | None:
        """The outbox entry of a letter; ``None`` if its policy names no exchange."""
        task = self._app.tasks.get(letter.task_name)
        own = None if task is None else policy_of(task)
        policy = self._policies.resolve(letter.source_queue, own)
        exchange = None if policy is None else policy.of("dead_letter_exchange")
        if policy is None or exchange is None:
            return None
        if not exchange.name and policy.of("dead_letter_routing_key") is None:
            return None  # refused at start-up: it would return to its queue
        return OutboxEntry(
            letter_id=letter.id,
            exchange=exchange.name,
            routing_key=policy.of("dead_letter_routing_key") or letter.source_queue,
        )

    def exchanges(self) -> dict[str, DeadLetterExchange]:
        """All exchanges of all policies, by name."""
        found: dict[str, tuple[str, DeadLetterExchange]] = {}
        for where, policy in self._named():
            exchange = policy.of("dead_letter_exchange")
            if not exchange:
                continue
            before, known = found.setdefault(exchange.name, (where, exchange))
            if known != exchange:
                raise SettingsError(
                    f"expected one type for the exchange {exchange.name!r}, got {known.type!r} "
                    f"from {before} and {exchange.type!r} from {where}"
                )
        return {name: exchange for name, (_where, exchange) in found.items()}

    def queues_by_name(self) -> list[tuple[str, str]]:
        """Queues to publish to by the default exchange, each with the policy that names it."""
        found = []
        for where, policy in self._named():
            exchange = policy.of("dead_letter_exchange")
            if not exchange or exchange.name:
                continue
            key = policy.of("dead_letter_routing_key")
            if not key or key in self._policies.queues:
                got = "none" if not key else f"{key!r}, whose workers would run the dead tasks"
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
    """The `LetterOutbox` of all policies that name an exchange."""

    def __init__(self, outbox: Outbox, targets: Targets) -> None:
        self._outbox = outbox
        self._targets = targets

    def add(self, letter: DeadLetter) -> None:
        """Add the entry of a letter that is about to be stored."""
        entry = self._targets.entry(letter)
        if entry is not None:
            self._outbox.add(letter.dead_letter_queue, entry)


class ExchangePublisher:
    """Publishes the letters of outbox entries."""

    def __init__(self, app: Any, backend: Backend, targets: Targets) -> None:
        self.backend = backend
        self._store = backend.letters
        self._outbox = backend.outbox
        self._targets = targets
        self._exchanges: dict[str, DeadLetterExchange] = {}
        self._missing: MutableMapping[OutboxEntry, float] = LRUCache(_MAX_REMEMBERED)  # type: ignore[no-untyped-call]
        self._connection = app.connection_for_write(transport_options=_TRANSPORT_OPTIONS)
        self._returns = self._connection.transport.driver_type == "amqp"
        self._producer: Any = None
        self._returned: list[str] = []
        self._new: set[str] = set()
        self._warned: MutableMapping[str, None] = LRUCache(_MAX_REMEMBERED)  # type: ignore[no-untyped-call]
        self.wake = threading.Event()

    def check(self) -> None:
        """Declare all exchanges, and check that the queues of the default exchange exist."""
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
            self.close()  # a pool child must not inherit the connection

    def stored(self, event: Event) -> None:
        """Observe an event: publish a new letter soon; may be called from any thread."""
        if isinstance(event, DeadLettered) and self._targets.entry(event.letter) is not None:
            self._new.add(event.letter.dead_letter_queue)
            self.wake.set()

    def deliver_new(self) -> None:
        """Publish letters that this process stored; see `deliver`."""
        self.wake.clear()
        while self._new:
            self._deliver(self._new.pop())

    def deliver(self, dead_letter_queues: Iterable[str] | None = None) -> None:
        """Publish all entries that are due."""
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
            until = time.monotonic() + _ROUND_SECONDS
            due = self._outbox.due(
                dead_letter_queue, most=_ENTRIES_PER_ROUND, lease_seconds=LEASE_SECONDS
            )
            left, over = deque(due), []
            try:
                # Not when it is slow: what is left would soon be another worker's, too.
                while left and time.monotonic() < until:
                    entry = left.popleft()
                    if self._published(dead_letter_queue, entry):
                        over.append(entry)
            finally:
                self._outbox.done(dead_letter_queue, over)
                for entry in left:  # due at once, for any worker
                    self._outbox.add(dead_letter_queue, entry)
            if not left and len(due) < _ENTRIES_PER_ROUND:
                return

    def _published(self, dead_letter_queue: str, entry: OutboxEntry) -> bool:
        """Publish an entry's letter; return True if the entry is done."""
        letter = self._store.get(dead_letter_queue, entry.letter_id)
        if letter is None:
            return self._is_lost(entry)
        with self._errors():
            producer = self._open()
        self._returned.clear()
        try:
            with self._errors():
                self._publish(producer, letter, entry)
        except _Refused as exc:
            return self._refused(dead_letter_queue, entry, exc)
        except BrokerUnavailable:
            self._postpone(dead_letter_queue, entry)  # the broker may have it
            raise
        return not self._returned or self._unroutable(dead_letter_queue, entry)

    def _refused(self, dead_letter_queue: str, entry: OutboxEntry, exc: _Refused) -> bool:
        """Try an entry again later, or give it up; return True if it is done."""
        if entry.tries + 1 < TRIES:
            self._warn_once(entry.letter_id, "Letter %s is not published yet: %s", exc)
            self._postpone(dead_letter_queue, entry)
            return False
        self.backend.metrics.add({(INTERNAL_ERRORS.name, "exchange"): 1})
        logger.error(
            "Letter %s is given up for exchange %r with routing key %r, after %d publications: %s. "
            "It stays in %s; subscribers that took it have copies with one message id. Make room "
            "in the queue that refuses, or unbind it; this letter is not published there again",
            entry.letter_id,
            entry.exchange,
            entry.routing_key,
            TRIES,
            exc,
            dead_letter_queue,
        )
        return True

    def _postpone(self, dead_letter_queue: str, entry: OutboxEntry) -> None:
        """Let an entry wait, four times as long as before; it counts how often."""
        later = replace(entry, tries=min(entry.tries + 1, TRIES - 1))
        wait_seconds = LEASE_SECONDS * 4**entry.tries
        self._outbox.add(dead_letter_queue, later, after_seconds=wait_seconds)
        if later != entry:
            self._outbox.done(dead_letter_queue, [entry])

    def _publish(self, producer: Any, letter: DeadLetter, entry: OutboxEntry) -> None:
        exchange = self._exchanges.get(entry.exchange)
        properties = letter.decoded("properties") or {}
        producer.publish(
            letter.body,
            exchange=entry.exchange,
            routing_key=entry.routing_key,
            declare=[_entity(exchange)] if exchange is not None and exchange.name else None,
            content_type=letter.content_type or "application/octet-stream",
            content_encoding=letter.content_encoding or "binary",
            headers=announced_headers(letter),
            message_id=str(uuid5(_MESSAGE_ID_NAMESPACE, letter.id)),
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

    def _unroutable(self, dead_letter_queue: str, entry: OutboxEntry) -> bool:
        """Warn that no queue got the message; return True if the entry is done."""
        self._warn_once(
            f"{entry.exchange!r} with routing key {entry.routing_key!r}",
            "Letters for exchange %s are lost there: %s. They are stored; this is logged once",
            "no queue is bound to it",
        )
        if not entry.exchange:  # a missing queue may be made again
            self._postpone(dead_letter_queue, entry)
        return bool(entry.exchange)  # a named one may have no subscribers

    def _warn_once(self, what: str, message: str, why: object) -> None:
        if what in self._warned:
            return
        self._warned[what] = None
        logger.warning(message, what, why)

    def _is_lost(self, entry: OutboxEntry) -> bool:
        """True if an entry's letter was removed unpublished, False if it may be stored yet."""
        now = time.monotonic()
        if now - self._missing.setdefault(entry, now) < _MISSING_SECONDS:
            return False
        del self._missing[entry]
        logger.warning(
            "Letter %s was never published to exchange %r: it was redriven or removed before",
            entry.letter_id,
            entry.exchange,
        )
        return True

    def _declare(self, exchange: DeadLetterExchange) -> None:
        if not exchange.name:
            return
        channel = self._connection.channel()
        try:
            if exchange.name.startswith("amq."):  # the broker's own, which kombu never declares
                channel.exchange_declare(exchange.name, exchange.type, passive=True)
            else:
                _entity(exchange)(channel).declare()  # type: ignore[no-untyped-call]
        except self._connection.channel_errors as exc:
            raise SettingsError(
                f"expected the broker {self._connection.as_uri()} to have or create the "
                f"{exchange.type} exchange {exchange.name!r} of dead_letter_exchange, got: {exc}; "
                f"set its real type (it must be durable), or name another exchange"
            ) from exc

    def _look_for(self, queue: str, where: str) -> None:
        try:
            self._connection.channel().queue_declare(queue, passive=True)
        except self._connection.channel_errors as exc:
            raise SettingsError(
                f"expected the queue {queue!r}, which {where}['dead_letter_routing_key'] names, to "
                f"exist on the broker {self._connection.as_uri()}, got: {exc}; create it first"
            ) from exc

    @contextmanager
    def _errors(self) -> Iterator[None]:
        connection = self._connection
        try:
            yield
        except DLQError:
            raise
        except MessageNacked as exc:
            raise _Refused("a queue refused it: is it full?") from exc
        except Exception as exc:
            self.close()
            message = (
                f"the broker {connection.as_uri()} did not accept a letter for its dead-letter "
                f"exchange: {type(exc).__name__}: {exc}"
            )
            lost = (OSError, OperationalError, *connection.connection_errors)
            if isinstance(exc, lost) and not isinstance(exc, FrameSyntaxError):
                raise BrokerUnavailable(message) from exc
            raise _Refused(message) from exc


def announced_headers(letter: DeadLetter) -> dict[str, Any]:
    """The original headers and those of the death; documented in docs/reference/wire.md."""
    original = letter.decoded("headers")
    kept = original.items() if isinstance(original, dict) else ()
    return {
        **{name: value for name, value in kept if not str(name).startswith(_STALE)},
        **death_headers(letter),
    }


def _entity(exchange: DeadLetterExchange) -> Exchange:
    return Exchange(exchange.name, type=exchange.type)  # type: ignore[no-untyped-call]
