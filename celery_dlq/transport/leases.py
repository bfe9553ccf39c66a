"""The messages that this worker holds: acknowledged, renewed while it lives, restored for others.

A message belongs to the worker that fetched it until it is acknowledged or given back, across
lost connections too. A thread renews its lease while the event loop is busy; that thread also
restores what dead workers held, and confirms acknowledgements.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4
from weakref import ReferenceType, ref

from celery_dlq.backends.redis.connect import PipelinedConnection
from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.transport.broker import Broker, removals, renewal, restore
from celery_dlq.transport.native import seconds_since_boot

logger = get_logger("celery_dlq.transport")

_TAGS_PER_CALL = 500
_MAX_UNCONFIRMED = 4096


class Leases:
    """What one worker holds.

    Args:
        lease_seconds: How long a message stays with a worker that gives no sign of life.
    """

    def __init__(self, lease_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self._tags = f"{uuid4().hex}-"
        self._fetched = 0
        self._held: dict[str, float] = {}  # tag to the time of the fetch; 0: no reply yet
        self._running: dict[str, ReferenceType[Any]] = {}  # of lost connections
        self._renewed_at = 0.0
        self._acknowledged: deque[str] = deque()
        self._connection: PipelinedConnection | None = None
        self._broker: Broker | None = None

    # -- the event loop -----------------------------------------------------------

    def connected(self, broker: Broker) -> None:
        """Use the broker of a new connection."""
        old, self._broker = self._connection, broker
        self._connection = PipelinedConnection(
            broker.client, broker.url, failing="Acknowledgements wait in memory"
        )
        if old is not None:
            old.close()

    def new_tag(self) -> str:
        """A tag for the next fetch, which may hold a message from now on."""
        self._fetched += 1
        tag = f"{self._tags}{self._fetched}"
        self._held[tag] = 0.0
        return tag

    def received(self, tag: str) -> None:
        """Hold the message that was fetched."""
        self._held[tag] = seconds_since_boot()

    def drop(self, tag: str) -> None:
        """Hold it no longer: nothing was fetched, or it returns when its lease ends."""
        self._held.pop(tag, None)

    def is_own(self, tag: object) -> bool:
        """True if this worker fetched the message."""
        return isinstance(tag, str) and tag.startswith(self._tags)

    def acknowledge(self, tag: str) -> None:
        """Acknowledge without waiting for the reply; the thread repeats it and waits.

        Does nothing if others own the message now.
        """
        if self._held.pop(tag, None) is None:
            return
        self._running.pop(tag, None)
        self._acknowledged.append(tag)
        connection, broker = self._connection, self._broker
        if connection is not None and broker is not None:
            connection.send_unanswered([("HDEL", broker.unacked, tag)])
        if len(self._acknowledged) > _MAX_UNCONFIRMED:
            self._confirm_here()

    def still_holds(self, tag: object) -> bool:
        """True if a message may start: no other worker owns it.

        Asks Redis if the lease may have run out: this process, or the machine, stood still.
        """
        if not self.is_own(tag):
            return True
        fetched = self._held.get(str(tag))
        if fetched is None:
            return False
        if seconds_since_boot() < max(fetched, self._renewed_at) + self.lease_seconds:
            return True
        connection, broker = self._connection, self._broker
        if connection is None or broker is None:
            return False
        try:
            gone = connection.call(*renewal(broker, self.lease_seconds, [str(tag)]))
        except StoreUnavailable as exc:
            logger.warning("A message does not start, because its lease is unknown: %s", exc)
            return False
        if gone:
            self.lost(1)
            self.drop(str(tag))
        return not gone

    def restore(self, tag: str, *, first: bool) -> None:
        """Give a message back to its queue.

        Args:
            tag: The message's.
            first: True to make it the next that is fetched.

        Raises:
            StoreUnavailable: Redis does not answer; the message returns when its lease ends.
        """
        self._running.pop(tag, None)
        held = self._held.pop(tag, None) is not None
        if held and self._connection is not None and self._broker is not None:
            restore(self._connection.call, self._broker, tag, first=first)

    def restore_of_another(self, tag: str) -> bool:
        """Give a message back to its queue if its lease has ended; see `restore`.

        Returns:
            True if a worker fetched it by script, whether its lease has ended or not.
        """
        if self._connection is None or self._broker is None:
            return False
        return restore(self._connection.call, self._broker, tag, expired=True) is not None

    def connection_closes(self, running: Mapping[str, Any]) -> None:
        """Go on holding the messages of tasks that run while their connection is closed.

        Args:
            running: Celery's requests, by tag.
        """
        self._running |= {tag: ref(request) for tag, request in running.items()}

    def close(self) -> None:
        """Confirm all acknowledgements, give back what is still held, and disconnect."""
        while self._acknowledged and self._confirm_here():
            pass
        try:
            for tag in reversed(tuple(self._held)):  # so that the oldest is fetched first
                self.restore(tag, first=True)
        except StoreUnavailable as exc:
            logger.warning("Messages return when their leases end: %s", exc)
        if self._connection is not None:
            self._connection.close()

    def _confirm_here(self) -> bool:
        if self._connection is None or self._broker is None:
            return False
        tags = _taken(self._acknowledged)
        try:
            for command in removals(self._broker, tags):
                self._connection.call(*command)
        except StoreUnavailable as exc:
            self._acknowledged.extend(tags)
            logger.warning("%d acknowledgements are not confirmed: %s", len(tags), exc)
            return False
        return True

    # -- the thread ---------------------------------------------------------------

    def confirm(self, call_all: Callable[[Sequence[Any]], Sequence[Any]], broker: Broker) -> None:
        """Repeat acknowledgements and wait for the replies."""
        while tags := _taken(self._acknowledged):
            try:
                call_all(removals(broker, tags))
            except Exception:
                self._acknowledged.extend(tags)
                raise

    def renew(self, call: Callable[..., Any], broker: Broker) -> None:
        """Renew all leases, and find out which messages others own now."""
        now, tags = seconds_since_boot(), tuple(self._held)
        gone: list[str] = []
        for start in range(0, len(tags), _TAGS_PER_CALL):
            some = tags[start : start + _TAGS_PER_CALL]
            gone += [tag.decode() for tag in call(*renewal(broker, self.lease_seconds, some))]
        self._renewed_at = now
        # A tag without a fetch time was sent, but Redis may not have executed the fetch.
        lost = [tag for tag in gone if self._held.get(tag)]
        for tag in lost:
            self.drop(tag)
        if lost:
            self.lost(len(lost))

    def lost(self, messages: int) -> None:
        """Report messages that others own now."""
        logger.error(
            "%d messages of this worker were given to others, because it did not renew their "
            "leases for more than %g s: it, or its connection, stood still. It will not "
            "acknowledge them, and those that have not started will not start here",
            messages,
            self.lease_seconds,
        )

    def restore_ended(self, is_running: Callable[[Any], bool]) -> list[str]:
        """The messages of lost connections whose tasks ended without an acknowledgement."""
        ended = []
        for tag, request in list(self._running.items()):
            alive = request()
            if alive is None or not is_running(alive):
                ended.append(tag)
        return ended

    def give_up(self, tag: str) -> bool:
        """Hold a message no longer; False if it was acknowledged in the meantime."""
        self._running.pop(tag, None)
        return self._held.pop(tag, None) is not None


def _taken(tags: deque[str]) -> list[str]:
    taken: list[str] = []
    while len(taken) < _TAGS_PER_CALL:
        try:
            taken.append(tags.popleft())
        except IndexError:
            break
    return taken
