"""Messages that wait in the lists of a Redis broker, or that its workers hold; read in place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any
from uuid import uuid4

from kombu.exceptions import KombuError
from kombu.utils.encoding import bytes_to_str
from kombu.utils.json import loads
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from celery_dlq.errors import BrokerUnavailable
from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.broker import SCRIPTS, Broker, broker_of, removals, restore
from celery_dlq.transport.redis.entries import record_end, recorded

MOST_ENTRIES = 100_000
"""Entries of one queue, and of those that workers hold, that are looked at."""

_ENTRIES_PER_PAGE = 500

Wanted = Callable[[bytes], bool]
_CONNECT: dict[str, Any] = {"max_retries": 3, "interval_start": 0.2, "interval_step": 0.3}


@dataclass(frozen=True, slots=True)
class WaitingEntry:
    """A message in a list, or one that a worker holds."""

    queue: str  # Its queue
    entry: bytes  # Its bytes
    key: str = ""  # The key of its list; empty if a worker holds it
    tag: str = ""  # The tag of the delivery by which a worker holds it; else empty


class WaitingMessages:
    """Finds messages on a Redis broker, and takes single ones as a worker does.

    Every method may raise `BrokerUnavailable`.
    """

    def __init__(self, app: Any) -> None:
        self._connection = app.connection_for_read()
        self._channel: Any = None

    @property
    def supported(self) -> bool:
        """True if the broker is a Redis."""
        return bool(self._connection.transport.driver_type == "redis")

    def in_lists(self, queue: str, wanted: Wanted) -> Iterator[WaitingEntry]:
        """The wanted entries of a queue's lists, the last that was published first.

        Workers take entries from the other end, so none is missed.
        """
        with self._translated():
            client, broker = self._client(), self._broker()
            for step in broker.steps:
                key = f"{broker.prefix}{queue}{broker.sep}{step}" if step else broker.prefix + queue
                for start in range(0, MOST_ENTRIES, _ENTRIES_PER_PAGE):
                    try:
                        page = client.lrange(key, start, start + _ENTRIES_PER_PAGE - 1)
                    except ResponseError:  # no list
                        break
                    for entry in page:
                        if wanted(entry):
                            yield WaitingEntry(queue, entry, key=key)
                    if len(page) < _ENTRIES_PER_PAGE:
                        break

    def held(self, wanted: Wanted) -> Iterator[WaitingEntry]:
        """The wanted entries that workers hold, of all queues."""
        with self._translated():
            records = self._client().hscan_iter(self._broker().unacked, count=_ENTRIES_PER_PAGE)
            for tag, record in islice(records, MOST_ENTRIES):
                found = _parts(record) if wanted(record) else None
                if found is not None:
                    yield WaitingEntry(found[1], found[0], tag=tag.decode("utf-8", "replace"))

    def length(self, queue: str) -> int:
        """The number of entries in a queue's lists."""
        with self._translated():
            client, broker, total = self._client(), self._broker(), 0
            for step in broker.steps:
                key = f"{broker.prefix}{queue}{broker.sep}{step}" if step else broker.prefix + queue
                with suppress(ResponseError):
                    total += client.llen(key)
            return total

    def message(self, found: WaitingEntry) -> Any:
        """The kombu message of an entry; ``None`` if it is none."""
        try:
            payload = loads(bytes_to_str(found.entry))
            return self._channel.Message(payload, channel=self._channel)
        except Exception:  # noqa: BLE001 - whatever decoders raise
            return None

    def take(self, found: WaitingEntry, lease_seconds: float) -> str | None:
        """Take an entry out of its list; it is unacknowledged then, and comes back if this dies."""
        broker, script = self._broker(), script_text("take", SCRIPTS)
        tag = f"{uuid4().hex}-operator{broker.tag_end}"
        keys = (*broker.keys, found.key)
        args = (tag, lease_seconds, found.entry, record_end(found.queue))
        with self._translated():
            taken = self._call("EVAL", script.text, len(keys), *keys, *args)
        return tag if taken else None

    def acknowledge(self, tag: str) -> None:
        """Remove a message that was taken."""
        with self._translated():
            for command in removals(self._broker(), [tag]):
                self._call(*command)

    def give_back(self, tag: str) -> None:
        """Put a message that was taken back into its list, as the next that is fetched."""
        with self._translated():
            restore(self._call, self._broker(), tag)

    def close(self) -> None:
        """Disconnect; never raises."""
        self._channel = None
        with suppress(Exception):
            self._connection.close()

    def _call(self, *command: Any) -> Any:
        return self._client().execute_command(*command)

    def _client(self) -> Any:
        if self._channel is None:
            self._connection.ensure_connection(**_CONNECT)
            self._channel = self._connection.default_channel
        return Redis(connection_pool=self._channel.pool)

    def _broker(self) -> Broker:
        self._client()
        return broker_of(self._channel)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        errors = (KombuError, RedisError, OSError, *self._connection.connection_errors)
        try:
            yield
        except errors as exc:
            raise BrokerUnavailable(
                f"cannot read from the broker {self._connection.as_uri()}: "
                f"{type(exc).__name__}: {exc}"
            ) from exc


def _parts(record: bytes) -> tuple[bytes, str] | None:
    """The entry and the queue of a record of `unacked`, also of kombu's own."""
    ours = recorded(record)
    if ours is not None:
        return ours
    try:
        payload, _exchange, routing_key = json.loads(record)
        return json.dumps(payload).encode(), str(routing_key)
    except (ValueError, TypeError):
        return None
