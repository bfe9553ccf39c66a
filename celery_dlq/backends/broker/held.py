"""The messages of one queue on RabbitMQ, held by one reader.

Reading: one consumer that acknowledges nothing takes all messages, and gives them back in their
order. Meanwhile nobody else may read, or he would see a part; a lock that ends with its
connection says so. Letters that arrive meanwhile wait behind, in the queue.

Measured on RabbitMQ 3.10: messages of a quorum queue that are given back more than 32 at a time,
or whose connection ends, come back in any order, each with its delivery count one higher. So
they are given back 32 at a time, and letters are sorted by their positions whatever happens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from celery_dlq.backends.broker.driver import (
    CONNECT,
    LOCK_SUFFIX,
    MOST_BYTES,
    WAIT_SECONDS,
    busy,
    translated,
)
from celery_dlq.backends.broker.snapshot import Entry, Snapshot
from celery_dlq.errors import StoreError, StoreUnavailable
from celery_dlq.events import whoami

HEARTBEAT_SECONDS = 60

_QUIET_SECONDS = 0.1
_LATE_SECONDS = 1.0
_SETTLING_SECONDS = 2.0
_AT_A_TIME = 32
_LOCKED = 405


class AmqpHeldQueue:
    """The messages of one queue, unacknowledged.

    Args:
        connection: A connection of our own; the broker takes its messages back if it ends.
        queue: The queue.
        kind: ``quorum`` or ``classic``.
        most_letters: Most messages that are taken.
        present: Whether there is such a queue.
    """

    def __init__(
        self, connection: Any, queue: str, kind: str, most_letters: int, *, present: bool
    ) -> None:
        self.snapshot = Snapshot()
        self._connection = connection
        self._queue = queue
        self._kind = kind
        self._most = most_letters
        self.present = present
        self._channel: Any = None
        self._taken = 0
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._over = threading.Event()

    def open(self) -> None:
        """Take all messages; see `AmqpQueueDriver.hold`."""
        if not self.present:
            return
        try:
            with translated(self._connection):
                self._connection.ensure_connection(**CONNECT)
                self._alone()
                self._fill()
        except BaseException:
            self.drop()
            raise
        threading.Thread(target=self._beat, name="dlq-heartbeat", daemon=True).start()

    def refresh(self) -> None:
        """Take what arrived meanwhile.

        Raises:
            StoreUnavailable: The connection is lost: all messages are in the queue again.
        """
        if self.present:
            with self._lock, translated(self._connection):
                self._fill()

    def __len__(self) -> int:
        return sum(len(entry.tags) for entry in self.snapshot.ordered())

    def remove(self, entries: Sequence[Entry]) -> None:
        """Acknowledge messages; comes back when the broker has heard of it.

        Raises:
            StoreUnavailable: The connection is lost: all of them are in the queue again.
        """
        if not entries:
            return
        with self._lock, translated(self._connection):
            for entry in entries:
                for tag in entry.tags:
                    self._channel.basic_ack(tag)
            self._channel.queue_declare(self._queue, passive=True)
        for entry in entries:
            self.snapshot.drop(entry)

    def give_back(self) -> None:
        """Put the rest back in its order, and let others read; never raises."""
        self._over.set()
        with self._lock, suppress(Exception):
            tags = sorted(tag for entry in self.snapshot.ordered() for tag in entry.tags)
            if self._channel is not None and self._channel.is_open and tags:
                self._return(tags)
        self.drop()

    def drop(self) -> None:
        """Disconnect; never raises."""
        self._over.set()
        with self._lock, suppress(Exception):
            self._connection.close()

    def _return(self, tags: Sequence[int]) -> None:
        ready = self._ready()
        step = _AT_A_TIME if self._kind == "quorum" else len(tags)
        for start in range(0, len(tags), step):
            some = tags[start : start + step]
            self._nack_up_to(some[-1])
            # Before the next ones, or they would be one lot, in any order.
            deadline = time.monotonic() + WAIT_SECONDS
            while self._ready() < ready + start + len(some) and time.monotonic() < deadline:
                time.sleep(0.001)

    def _nack_up_to(self, tag: int) -> None:
        from amqp import spec  # type: ignore[import-untyped]  # noqa: PLC0415 - AMQP only

        # py-amqp has no method for RabbitMQ's basic.nack.
        self._channel.send_method(spec.Basic.Nack, "Lbb", (tag, True, True))

    def _ready(self) -> int:
        return int(self._channel.queue_declare(self._queue, passive=True).message_count)

    def _alone(self) -> None:
        """Become the one process that reads this queue, or say who does."""
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            channel = self._connection.channel()
            try:
                # HeldQueue by the connection: a process that dies, or a machine, lets it go.
                channel.queue_declare(
                    f"{self._queue}{LOCK_SUFFIX}", durable=False, exclusive=True, auto_delete=True
                )
            except self._connection.channel_errors as exc:
                if getattr(exc, "code", None) != _LOCKED:
                    raise
                if time.monotonic() >= deadline:
                    raise busy(self._queue) from exc
                time.sleep(0.2)
            else:
                self._channel = channel
                return

    def _fill(self) -> None:
        """Take messages until the broker has none that is ready."""
        channel, expected, before = self._channel, self._settled(), self._taken
        if not expected or self._taken >= self._most:
            self.snapshot.complete = self.snapshot.complete and not expected
            return
        channel.basic_qos(0, min(self._most, 65_535), False)  # noqa: FBT003 - AMQP's order
        tag = f"{whoami()} {time.monotonic_ns()}"
        channel.basic_consume(self._queue, callback=self._take, consumer_tag=tag)
        last, enough_at = time.monotonic(), 0.0
        while not self._full():
            seen, quiet = self._taken, False
            try:
                self._connection.drain_events(timeout=_QUIET_SECONDS)
            except TimeoutError:
                quiet = True
            self._raise_failure()
            if self._taken - before >= expected:
                enough_at = enough_at or time.monotonic()
                # In a flood there is no end: what comes now is for the next reading.
                late = time.monotonic() - enough_at > _LATE_SECONDS
                if late or (quiet and not self._ready()):
                    break
            if self._taken > seen:
                last = time.monotonic()
            elif time.monotonic() - last > WAIT_SECONDS:
                raise StoreUnavailable(
                    f"expected {expected} messages of {self._queue!r}, got "
                    f"{self._taken - before}, and then nothing for {WAIT_SECONDS:.0f} s"
                )
        channel.basic_cancel(tag)
        channel.callbacks[tag] = self._take  # a late one is taken too, not refused
        if self._full():
            self.snapshot.complete = not self._ready()

    def _full(self) -> bool:
        return self._taken >= self._most or self.snapshot.bytes >= MOST_BYTES

    def _settled(self) -> int:
        """How many messages are ready, when the number has come to rest.

        One who gave messages back, or died, may have done so a moment ago.
        """
        one, deadline = self._ready(), time.monotonic() + _SETTLING_SECONDS
        while True:
            time.sleep(0.02)
            other = self._ready()
            if one == other or time.monotonic() > deadline:  # they come all the time
                return other
            one = other

    def _take(self, message: Any) -> None:
        try:
            body = message.body.encode() if isinstance(message.body, str) else bytes(message.body)
            about = dict(message.headers or {})
            self.snapshot.add(body, about, message.delivery_tag, body)
            self._taken += 1
        except Exception as exc:  # noqa: BLE001 - raised where it can be told
            self._failure = exc

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise StoreError(
                f"expected room for the messages of {self._queue!r} in a temporary file, got "
                f"{type(self._failure).__name__}: {self._failure}"
            ) from self._failure

    def _beat(self) -> None:
        """Tell the broker that we live, while an operation has other things to do."""
        while not self._over.wait(HEARTBEAT_SECONDS / 4):
            with self._lock, suppress(Exception):
                self._connection.connection.send_heartbeat()
