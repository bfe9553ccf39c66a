"""The messages that this worker holds: acknowledged, renewed while it lives, restored for others.

A message belongs to the worker that fetched it until it is acknowledged or given back, across
lost connections too. A thread renews its lease while the event loop is busy; that thread also
restores what dead workers held, and confirms acknowledgements.

Source: ``QoS`` in https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from threading import get_ident
from typing import Any
from uuid import uuid4

from kombu.transport import redis as kombu_redis
from kombu.transport import virtual
from kombu.utils.encoding import bytes_to_str

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import get_logger
from celery_dlq.store.endless import LOG_SECONDS
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.store import Store
from celery_dlq.transport.held import LeasedMessages, seconds_since_boot
from celery_dlq.transport.redis.broker import Broker, removals, renewal, restore
from celery_dlq.transport.redis.wake import Watch

logger = get_logger("celery_dlq.transport")

_TAGS_PER_CALL = 500
_MAX_UNCONFIRMED = 4096
_POOL_RESTS_SECONDS = 60.0


class Leases(LeasedMessages):
    """What one worker holds.

    A tag is in exactly one of: requested (its fetch was sent), held, returning.
    """

    def __init__(self, lease_seconds: float, store: Store | None = None) -> None:
        super().__init__()
        self.lease_seconds = lease_seconds
        self._shared = store and store.connection  # the store is on the broker's server
        self._found_gone = 0  # of them, not reported yet
        self.loop_goes_on = False  # while tasks run: what it sends may wait for the turn's end
        self.loop_thread: int | None = None
        self._unsent: deque[str] = deque()  # acknowledged in this turn
        self.name = uuid4().hex  # of the worker, for others
        self.watch = Watch(() if store is None else (store.keys.instructions(),))
        self._tags = f"{self.name}-"
        self._tag_end = ""
        self._fetched = 0
        self._requested: dict[str, float] = {}  # tag to the time its fetch was sent
        self.held: dict[str, float]  # the same; the lease began at that time or later
        self._renewed: tuple[float, frozenset[str]] = (0.0, frozenset())
        self._unknown: set[str] = set()  # of those that are held
        self._returning: deque[str] = deque()
        self.acknowledged: deque[str] = deque()
        self.connection: PipelinedConnection | None = None
        self.waiting: dict[Any, Any] = {}  # channel to how it waits, while it does, for the bell
        self._broker: Broker | None = None
        self._logged_at = -LOG_SECONDS

    # -- the event loop, and the threads of a pool ----------------------------------

    def connected(self, broker: Broker) -> None:
        """Use the broker of a new connection."""
        old, self._broker = self.connection, broker
        self._tag_end = broker.tag_end
        self.connection = self._shared or PipelinedConnection(
            broker.client, broker.url, failing="Acknowledgements wait in memory"
        )
        if old not in (None, self._shared):
            old.close()

    def new_tag(self) -> str:
        """A tag for the next fetch, which may hold a message from now on."""
        self._fetched += 1
        # Sorts by time, for those who restore.
        tag = f"{self._tags}{self._fetched:012x}{self._tag_end}"
        self._requested[tag] = seconds_since_boot()
        return tag

    def received(self, tag: str) -> None:
        """Hold the message that was fetched.

        Its lease counts from the request: the reply may have lain in the socket for long.
        """
        requested = self._requested.get(tag)
        if requested is not None:
            self.held[tag] = requested  # first, so that a renewal sees it in one of the two
            self._idle.add(tag)
            del self._requested[tag]

    def drop_message(self, tag: str) -> None:
        """Hold it no longer: nothing was fetched, or it returns when its lease ends."""
        self._requested.pop(tag, None)
        super().drop_message(tag)

    let_lapse = drop_message  # as receipts of SQS call it

    def interrupted(self, tag: str) -> None:
        """Give back what a fetch may have taken: its connection was lost before the reply."""
        if self._requested.pop(tag, None) is not None:
            self._returning.append(tag)

    def is_own(self, tag: object) -> bool:
        """True if this worker fetched the message."""
        return isinstance(tag, str) and tag.startswith(self._tags)

    def acknowledge(self, tag: str) -> None:
        """Acknowledge without waiting for the reply; the thread repeats it and waits.

        In the event loop at the end of its turn, with the next fetch if there is one: each write
        costs as much as all else here. Does nothing if others own the message now.
        """
        self._forget(tag)
        if self.held.pop(tag, None) is None:
            return
        self.acknowledged.append(tag)
        self._unsent.append(tag)
        if not self.loop_goes_on or get_ident() != self.loop_thread:
            self.send_acknowledgements()
        if len(self.acknowledged) > _MAX_UNCONFIRMED:
            self._confirm_here()

    def take_unsent(self) -> str:
        """Take what was acknowledged and not sent, one tag a line."""
        return "\n".join(_take_tags(self._unsent)) if self._unsent else ""

    def send_acknowledgements(self) -> None:
        """Send what no fetch took along; called at the end of a turn."""
        tags = _take_tags(self._unsent) if self._unsent else ()  # most turns have none
        connection, broker = self.connection, self._broker
        if tags and connection is not None and broker is not None:
            connection.send_unanswered([("HDEL", broker.unacked, *tags)])

    def still_holds(self, tag: object) -> bool:
        """True if a message may start: no other worker owns it.

        Asks Redis if the lease may have run out: this process, or the machine, stood still.
        If Redis does not answer, the message is given up; it returns when its lease ends.
        """
        if not isinstance(tag, str) or not self.is_own(tag):
            return True
        requested = self.held.get(tag)
        if requested is None:
            return False
        now = seconds_since_boot()
        if now < requested + self.lease_seconds:
            return True
        renewed_at, renewed = self._renewed
        if now < renewed_at + self.lease_seconds and tag in renewed:
            return True
        connection, broker = self.connection, self._broker
        if connection is None or broker is None:
            return False
        try:
            given, unknown = connection.send_and_wait(*renewal(broker, self.lease_seconds, [tag]))
        except StoreUnavailable as exc:
            self._log_failure("It is unknown who owns a message, so it does not start: %s", exc)
            self.drop_message(tag)
            return False
        if unknown:
            self._unknown.add(tag)
        if given and self.held.pop(tag, None) is not None:
            self._found_gone += 1
        return not given

    def is_known(self, tag: str) -> bool:
        """False if Redis has lost its record of a held message: others may have it as well."""
        return tag not in self._unknown

    def restore(self, tag: str, *, first: bool) -> None:
        """Give a message back to its queue; if Redis does not answer, the thread does it later."""
        self._forget(tag)
        if self.held.pop(tag, None) is None:
            return
        if self.restore_of_another(tag, first=first) is False:
            self._returning.append(tag)

    def restore_of_another(self, tag: str, *, first: bool = True) -> bool | None:
        """Give a message back to its queue, whoever fetched it by script."""
        if self.connection is None or self._broker is None:
            return False
        try:
            found = restore(self.connection.send_and_wait, self._broker, tag, first=first)
        except StoreUnavailable as exc:
            self._log_failure("A message is not back in its queue yet: %s", exc)
            return False
        return None if found is None else True

    def has_lease(self, tag: str | bytes) -> bool:
        """True if a message is held by lease, here or elsewhere, or if that is unknown."""
        if self.connection is None or self._broker is None:
            return True
        try:
            return self.connection.send_and_wait("ZSCORE", self._broker.leases, tag) is not None
        except StoreUnavailable as exc:
            self._log_failure("Messages of dead workers are not looked for: %s", exc)
            return True

    def connection_closes(self, tags: Iterable[str]) -> None:
        """Go on holding the messages that are at work; let the thread give back the others."""
        for tag in tags:
            if tag in self.held and self._goes_back(tag):
                self._give_back(tag)

    def _give_back(self, tag: str) -> None:
        if self.held.pop(tag, None) is not None:
            self._returning.append(tag)

    def close(self) -> None:
        """Confirm all acknowledgements, give back what is still held, and disconnect."""
        while self.acknowledged and self._confirm_here():
            pass
        left = [*self.to_return(), *self.held]
        self.held.clear()
        # From the last, so that the oldest is fetched first.
        while left and self.restore_of_another(left[-1]) is not False:
            left.pop()
        if left:
            logger.warning("%d messages return when their leases end", len(left))
        if self.connection is not None:
            self.connection.close()

    def _confirm_here(self) -> bool:
        if self.connection is None or self._broker is None:
            return False
        tags = _take_tags(self.acknowledged)
        try:
            for command in removals(self._broker, tags):
                self.connection.send_and_wait(*command)
        except StoreUnavailable as exc:
            self.acknowledged.extend(tags)
            self._log_failure(
                "%d acknowledgements are not confirmed: %s", len(self.acknowledged), exc
            )
            return False
        return True

    def _log_failure(self, text: str, *args: Any) -> None:
        """Log a failure, at most every ten seconds."""
        now = seconds_since_boot()
        if now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            logger.warning(text, *args)

    # -- the thread -----------------------------------------------------------------

    def confirm(
        self,
        call_all: Callable[[Sequence[Any]], Sequence[Any]],
        broker: Broker,
        asked: Sequence[Any] = (),
    ) -> Sequence[Any]:
        """Repeat acknowledgements and wait for the replies; return those to what else is asked.

        In one write: where a worker has little to do, Redis spends most on reading its socket.
        """
        while True:
            tags = _take_tags(self.acknowledged)
            last = len(tags) < _TAGS_PER_CALL
            commands = removals(broker, tags)
            try:
                replies = call_all([*commands, *asked] if last else commands)
            except BaseException:
                self.acknowledged.extend(tags)
                raise
            if last:
                return replies[len(commands) :]

    def renew(self, call: Callable[..., Any], broker: Broker) -> None:
        """Renew all leases, and find out which messages others own now."""
        now = seconds_since_boot()
        requested = list(self._requested)  # first: from there they go to those that are held
        held = list(self.held)
        tags, given, unknown = [*requested, *held], set(), set()
        for start in range(0, len(tags), _TAGS_PER_CALL):
            some = tags[start : start + _TAGS_PER_CALL]
            replies = call(*renewal(broker, self.lease_seconds, some))
            given |= {tag.decode() for tag in replies[0]}
            unknown |= {tag.decode() for tag in replies[1]}
        self._renewed = now, frozenset(tags) - given - unknown
        # A fetch that was only requested may not have been executed.
        lost = sum(self.held.pop(tag, None) is not None for tag in given.intersection(held))
        lost, self._found_gone = lost + self._found_gone, 0
        self.taken += lost
        for tag in given:
            self._forget(tag)
        if lost:
            logger.error(
                "This worker stood still, or was cut off from Redis, for more than its lease of "
                "%g s: others took %d of its messages. It does not acknowledge them, and does "
                "not start those that have not started",
                self.lease_seconds,
                lost,
            )
        unknown = {tag for tag in unknown.intersection(held) if tag in self.held}
        if unknown - self._unknown:
            logger.error(
                "Redis has no record of %d messages that this worker holds: it lost data, or a "
                "worker without celery_dlq gave them to others. They run here, as with Celery "
                "alone, unless a count says that they run elsewhere",
                len(unknown),
            )
        self._unknown = unknown

    def to_return(self) -> list[str]:
        """Take the messages that go back to their queues, the oldest first."""
        return sorted(_take_tags(self._returning, len(self._returning)))

    def return_later(self, tags: Iterable[str]) -> None:
        """Keep messages that could not be given back now."""
        self._returning.extend(tags)


def _take_tags(tags: deque[str], most: int = _TAGS_PER_CALL) -> list[str]:
    taken: list[str] = []
    with suppress(IndexError):
        while len(taken) < most:
            taken.append(tags.popleft())
    return taken


logger = get_logger("celery_dlq.transport")


class ReliableQoS(kombu_redis.QoS):
    """Acknowledges and restores what this worker fetched by script; all else as kombu does."""

    _closed_pool_at = float("-inf")
    _closes = False

    @cached_property
    def _leases(self) -> Leases:
        leases: Leases = self.channel.dlq_leases
        return leases

    def append(self, message: Any, delivery_tag: Any) -> None:
        """Add a delivered message."""
        if self._leases.is_own(delivery_tag):  # the fetch has recorded it
            virtual.QoS.append(self, message, delivery_tag)
        else:
            super().append(message, delivery_tag)

    def ack(self, delivery_tag: Any) -> None:
        """Acknowledge a message."""
        if self._leases.is_own(delivery_tag):
            self._leases.acknowledge(delivery_tag)
            virtual.QoS.ack(self, delivery_tag)
        else:
            super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:  # noqa: FBT001, FBT002
        """Remove a message, or return it as the last of its queue."""
        if not self._leases.is_own(delivery_tag):
            super().reject(delivery_tag, requeue=requeue)
        elif requeue:
            self._leases.restore(delivery_tag, first=False)
            virtual.QoS.ack(self, delivery_tag)
        else:
            self.ack(delivery_tag)

    def put_first(self, delivery_tag: Any) -> bool:
        """Return a message as the next of its queue; false if it was not fetched by script."""
        if not self._leases.is_own(delivery_tag):
            return False
        self._leases.restore(delivery_tag, first=True)
        virtual.QoS.ack(self, delivery_tag)
        return True

    def restore_unacked(self, client: Any = None) -> None:
        """Restore what the channel delivered, but for tasks at work: they go on."""
        self._closes = True  # kombu restores one tag after the other
        super().restore_unacked(client)

    def restore_visible(self, *args: Any, **kwargs: Any) -> None:
        """Restore what plain workers held, now and then; in between, nothing needs the pool.

        What a start or a letter opened is closed, but not each second: the next look opens one.
        """
        super().restore_visible(*args, **kwargs)
        if (now := seconds_since_boot()) - self._closed_pool_at >= _POOL_RESTS_SECONDS:
            self._closed_pool_at = now
            self.channel.pool.disconnect(inuse_connections=False)

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:  # noqa: FBT001, FBT002
        """Restore what a dead worker fetched without a lease; a bad record ends no worker.

        After an outage, the index alone does not tell who is dead: leases are renewed then.
        """
        if self._closes and self._leases.is_own(tag):
            self._leases.connection_closes([tag])
            return
        if self._leases.has_lease(tag):
            return
        if self._leases.restore_of_another(bytes_to_str(tag)) is not None:
            return
        try:
            super().restore_by_tag(tag, client=client, leftmost=leftmost)
        except (ValueError, TypeError, RecursionError) as exc:
            logger.error("Message %r cannot be restored: its record is unreadable: %r", tag, exc)  # noqa: TRY400
