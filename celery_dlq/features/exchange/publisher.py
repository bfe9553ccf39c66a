"""Letters on their way to dead-letter exchanges, for other services, and to tasks of the app.

An outbox entry is added before its letter is stored, and removed when the broker has confirmed
the message. Whichever process is killed in between, some worker's publisher finds the entry; an
entry whose letter was never stored is dropped after ten minutes. Publishing is at least once:
copies have the same message id.

RabbitMQ refuses a message that one of its queues refuses, and the others have it then. So an entry
whose message may be somewhere waits longer each time, and one that is refused is given up at last;
the entry itself has the count. The letter stays where it is.

With ``before_ack`` there is no entry: the broker confirms the copy first, then the letter is
stored, then the message is acknowledged. Killed in between, the message comes back and all is done
again; the copies have one letter id. What the broker does not confirm is treated as a store that
is away: the message stays unacknowledged, or its letter waits in the spool.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

from amqp.exceptions import MessageNacked  # type: ignore[import-untyped]

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, StoreUnavailable
from celery_dlq.events import DeadLettered, Event, Events
from celery_dlq.features.exchange.connection import Exchanges, Refused
from celery_dlq.letters.printable import get_logger, readable
from celery_dlq.letters.record import DeadLetter
from celery_dlq.registry import interval
from celery_dlq.store.part import Part, of_each
from celery_dlq.store.store import Store
from celery_dlq.worker.housekeeping import LongTask, Stopping
from celery_dlq.worker.observer import Observer, WorkerParts

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.features.exchange.deliveries import Deliveries

logger = get_logger("celery_dlq.features.exchange.publisher")


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxEntry:
    """A letter that is still to be published to a dead-letter exchange."""

    letter_id: str  # The letter's id
    exchange: str  # The name of the exchange
    routing_key: str  # The routing key to publish with
    tries: int = 0  # How often it was published without a confirmation
    task: str = ""  # The task that it is sent to, in place of an exchange

    def __str__(self) -> str:
        if self.task:
            return f"task {self.task!r}"
        return f"exchange {self.exchange!r} with routing key {self.routing_key!r}"


class Outbox(Part):
    """Entries of letters that are still to be published."""

    lua = "celery_dlq.features.exchange"

    def add_entry(
        self, dead_letter_queue: str, entry: OutboxEntry, *, after_seconds: float = 0.0
    ) -> None:
        """Add an entry, due after so long; an equal entry that is there is due then, too."""
        self._connection.raise_if_away()
        at = int((self.now().timestamp() + after_seconds) * 1000) if after_seconds else 0
        self._client.zadd(self._keys.outbox(dead_letter_queue), {_member_of(entry): at})

    def due_entries(
        self, dead_letter_queue: str, *, most: int, lease_seconds: float
    ) -> list[OutboxEntry]:
        """Return at most ``most`` due entries; they are due again after ``lease_seconds``."""
        found = self._run_script("due", most, int(lease_seconds * 1000), queue=dead_letter_queue)
        entries = (
            readable("an entry of an outbox", partial(_parsed_entry, text)) for text in found
        )
        return [entry for entry in entries if entry is not None]

    def remove_entries(self, dead_letter_queue: str, entries: Sequence[OutboxEntry]) -> None:
        """Remove entries: they are published."""
        if entries:
            texts = [_member_of(entry) for entry in entries]
            self._client.zrem(self._keys.outbox(dead_letter_queue), *texts)

    def holding(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return those of the given queues that have entries."""
        found = of_each(
            self._client,
            dead_letter_queues,
            lambda pipe, name: pipe.exists(self._keys.outbox(name)),
        )
        return [name for name, (there,) in found if there]

    def waiting(self, dead_letter_queue: str) -> int:
        """Return the number of entries of a queue."""
        return int(self._client.zcard(self._keys.outbox(dead_letter_queue)))


def _member_of(entry: OutboxEntry) -> str:
    """Return the member of the sorted set; equal for equal entries."""
    parts = [entry.letter_id, entry.exchange, entry.routing_key, entry.tries]
    return json.dumps([*parts, entry.task] if entry.task else parts)


def _parsed_entry(text: bytes) -> OutboxEntry:
    letter_id, exchange, routing_key, tries, task = (*json.loads(text), "")[:5]
    return OutboxEntry(
        letter_id=letter_id, exchange=exchange, routing_key=routing_key, tries=tries, task=task
    )


def outbox_of(assembly: Assembly) -> ExchangeOutbox | None:
    """What records letters before they are stored; ``None`` if no policy has a use for it."""
    exchanges = Exchanges(assembly.app, assembly.policy_table())
    return ExchangeOutbox(assembly.backend, exchanges) if exchanges.is_used else None


def publisher_of(assembly: Assembly) -> ExchangePublisher:
    """The publisher of the entries; it has connections of its own."""
    exchanges = Exchanges(assembly.app, assembly.policy_table())
    return ExchangePublisher(assembly.backend.separate(), exchanges, assembly.events)


def observer(parts: WorkerParts) -> Observer | None:
    """The outbox and the publisher of a worker; checks what the broker has."""
    outbox = outbox_of(parts.dlq)
    if outbox is None:
        return None
    try:
        if outbox.exchanges.named_exchanges:
            outbox.exchanges.declare_all()
    except BrokerUnavailable as exc:  # Celery waits for the broker; they are declared later
        logger.warning("Could not check the dead-letter exchanges: %s", exc)
    outbox.publisher = publisher_of(parts.dlq)
    return outbox


class ExchangeOutbox(Observer):
    """Records letters of policies that name an exchange; called by any thread."""

    publisher: ExchangePublisher | None = None
    """Of a worker: it publishes copies in a thread, because the broker may be slow to confirm."""

    def __init__(self, backend: Store, exchanges: Exchanges) -> None:
        self._outbox = backend.part(Outbox)
        self.exchanges = exchanges
        self._lock = threading.Lock()
        self._pauses: dict[tuple[str, str], tuple[timing.Backoff, float]] = {}  # and its end

    @property
    def tasks(self) -> Sequence[LongTask]:
        """The thread that publishes the copies of letters."""
        one = self.publisher
        if one is None:
            return ()
        return [LongTask(name="exchange", work=one.publish_new, is_due=one.is_due, close=one.close)]

    def before_store(self, letter: DeadLetter) -> DeadLetter:
        """Add an entry, or publish the copy; an entry without a letter lives for ten minutes."""
        if task := self.exchanges.task_of(letter):
            entry = OutboxEntry(letter_id=letter.id, exchange="", routing_key="", task=task)
            self._outbox.add_entry(letter.dead_letter_queue, entry)
        exchange = self.exchanges.exchange_of(letter)
        if exchange is not None:
            name, key = exchange.name, exchange.routing_key or letter.source_queue
            if exchange.before_ack:
                with self._lock:
                    self._publish(letter, name, key)
            else:
                entry = OutboxEntry(letter_id=letter.id, exchange=name, routing_key=key)
                self._outbox.add_entry(letter.dead_letter_queue, entry)
        return letter

    def close(self) -> None:
        """Disconnect; the next copy connects again. Never raises."""
        with self._lock:
            self.exchanges.close()

    def _publish(self, letter: DeadLetter, name: str, key: str) -> None:
        """Publish a copy, or raise; after a failure not at once again: tasks wait meanwhile."""
        new = timing.Backoff(1.0, interval("outbox_max_pause"))
        backoff, end = self._pauses.get((name, key), (new, 0.0))
        where = f"exchange {name!r} with routing key {key!r}"
        if time.monotonic() < end:
            raise StoreUnavailable(f"{where} has not confirmed a copy; it is tried again soon")
        try:
            routed = self._confirmed(letter, name, key)
            why = "no queue is bound to it"
        except BrokerUnavailable as exc:
            routed, why = False, str(exc)
        if routed:
            self._pauses.pop((name, key), None)
            return
        self._pauses[name, key] = backoff, time.monotonic() + backoff.failed()
        raise StoreUnavailable(f"{where} does not confirm the copy of letter {letter.id}: {why}")

    def _confirmed(self, letter: DeadLetter, name: str, key: str) -> bool:
        try:
            return self.exchanges.publish(letter, name, key, before_ack=True)
        except Refused as exc:
            if isinstance(exc.__cause__, MessageNacked):
                raise
            # AMQP has no form for some headers that JSON has; the record in the copy has all.
            return self.exchanges.publish(letter, name, key, before_ack=True, plain=True)


class ExchangePublisher:
    """Publishes the letters of outbox entries."""

    def __init__(self, backend: Store, exchanges: Exchanges, events: Events) -> None:
        self.backend = backend
        self._events = events
        self._outbox = backend.part(Outbox)
        self._exchanges = exchanges
        self._new: set[str] = set()
        self._sweep_at = 0.0
        events.subscribe(self.on_stored, lambda kind: kind is DeadLettered)

    @cached_property
    def _deliveries(self) -> Deliveries:
        from celery_dlq.features.exchange.deliveries import Deliveries  # noqa: PLC0415 - when one is due

        return Deliveries(self.backend, self._exchanges)

    def on_stored(self, event: Event) -> None:
        """Observe an event: publish a new letter at the next tick; called from any thread."""
        if isinstance(event, DeadLettered):
            exchange = self._exchanges.exchange_of(event.letter)
            copied = exchange is not None and not exchange.before_ack
            if copied or self._exchanges.task_of(event.letter):
                self._new.add(event.letter.dead_letter_queue)

    def is_due(self) -> bool:
        """Whether there are new letters, or it is time to look at all outboxes."""
        return bool(self._new) or time.monotonic() >= self._sweep_at

    def publish_new(self, stopping: Stopping = lambda: False) -> None:
        """Publish the entries of queues with new letters; every five seconds, of all queues."""
        names, self._new = list(self._new), set()
        sweep_at, self._sweep_at = self._sweep_at, 0.0  # at once, if this fails
        if time.monotonic() >= sweep_at:
            names, sweep_at = (
                self.backend.new_letters.names(),
                time.monotonic() + interval("outbox_sweep"),
            )
        for name in self._outbox.holding(names):
            self._deliveries.deliver(name, stopping)
        self._sweep_at = sweep_at

    def close(self) -> None:
        """Publish no more."""
        self._events.unsubscribe(self.on_stored)
        self._exchanges.close()
        self.backend.close()
