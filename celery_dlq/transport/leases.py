"""The messages that this worker holds: acknowledged, renewed while it lives, restored for others.

A message belongs to the worker that fetched it until it is acknowledged or given back, across
lost connections too. A thread renews its lease while the event loop is busy; that thread also
restores what dead workers held, and confirms acknowledgements.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4
from weakref import ReferenceType, ref

from redis.exceptions import RedisError, ResponseError

from celery_dlq.backends.redis.connect import PipelinedConnection
from celery_dlq.backends.redis.scripts import ScriptText, script_text
from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.transport.entries import recorded, redelivered
from celery_dlq.transport.native import seconds_since_boot, sleep, start_thread

logger = get_logger("celery_dlq.transport")

SCRIPTS = "celery_dlq.transport"
_TAGS_PER_CALL = 500
_RESTORED_PER_CALL = 100
_MAX_UNCONFIRMED = 4096
_TICK_SECONDS = 0.25
_CONFIRM_SECONDS = 1.0
_CLOSE_SECONDS = 5.0
_LOG_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A Redis as kombu's channel uses it.

    Attributes:
        client: A client with the channel's settings and no prefix.
        url: Shown in messages; without a password.
        unacked: Full name of kombu's hash of unacknowledged messages.
        index: Full name of kombu's sorted set of them.
        prefix: The setting ``global_keyprefix``.
        sep: Separates a queue's name from its priority.
        steps: The priorities that have a list.
        priority_of: Returns the priority of an envelope.
    """

    client: Any
    url: str
    unacked: str
    index: str
    prefix: str
    sep: str
    steps: Sequence[int]
    priority_of: Callable[[Any], int]

    @property
    def leases(self) -> str:
        """ZSET: tag to the time its lease ends, in seconds since 1970 by the server's clock."""
        return f"{self.unacked}_leases"

    @property
    def keys(self) -> tuple[str, str, str]:
        """The keys of unacknowledged messages, in the order of the scripts."""
        return (self.unacked, self.index, self.leases)

    def list_of(self, queue: str, envelope: Any) -> str:
        """The list to which a message belongs; ``envelope`` is ``None`` if it is unreadable."""
        priority = 0 if envelope is None else self.priority_of(envelope)
        step = self.steps[bisect(self.steps, priority) - 1]
        return f"{self.prefix}{queue}{self.sep}{step}" if step else f"{self.prefix}{queue}"


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
        self._thread: _Keeper | None = None
        self._lock = threading.Lock()

    # -- the event loop -----------------------------------------------------------

    def connected(self, broker: Broker) -> None:
        """Use the broker of a new connection; start the thread at the first."""
        with self._lock:
            old, self._connection = (
                self._connection,
                PipelinedConnection(
                    broker.client, broker.url, failing="Acknowledgements wait in memory"
                ),
            )
            self._broker = broker
            if old is not None:
                old.close()
            if self._thread is None:
                self._thread = _Keeper(self, broker)
            else:
                self._thread.broker = broker

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
            gone = connection.call(*_renewal(broker, self.lease_seconds, [str(tag)]))
        except StoreUnavailable as exc:
            logger.error("A message does not start, because its lease is unknown: %s", exc)
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
        if self._held.pop(tag, None) is not None:
            self.restore_of_another(tag, first=first)

    def restore_of_another(self, tag: str, *, first: bool = True) -> None:
        """Give a message back to its queue, whoever fetched it by script; see `restore`."""
        if self._connection is not None and self._broker is not None:
            restore(self._connection.call, self._broker, tag, first=first)

    def connection_closes(self, running: Mapping[str, Any]) -> None:
        """Go on holding the messages of tasks that run while their connection is closed.

        Args:
            running: Celery's requests, by tag.
        """
        self._running |= {tag: ref(request) for tag, request in running.items()}

    def close(self) -> None:
        """Confirm all acknowledgements, give back what is still held, and disconnect."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop()
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
            for command in _removals(self._broker, tags):
                self._connection.call(*command)
        except StoreUnavailable as exc:
            self._acknowledged.extend(tags)
            logger.error("%d acknowledgements are not confirmed: %s", len(tags), exc)
            return False
        return True

    # -- the thread ---------------------------------------------------------------

    def confirm(self, call_all: Callable[[Sequence[Any]], Sequence[Any]], broker: Broker) -> None:
        """Repeat acknowledgements and wait for the replies."""
        while tags := _taken(self._acknowledged):
            try:
                call_all(_removals(broker, tags))
            except Exception:
                self._acknowledged.extend(tags)
                raise

    def renew(self, call: Callable[..., Any], broker: Broker) -> None:
        """Renew all leases, and find out which messages others own now."""
        now, tags = seconds_since_boot(), tuple(self._held)
        gone: list[str] = []
        for start in range(0, len(tags), _TAGS_PER_CALL):
            some = tags[start : start + _TAGS_PER_CALL]
            gone += [_text(tag) for tag in call(*_renewal(broker, self.lease_seconds, some))]
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


class _Keeper:
    """The thread: renews, confirms and restores, on a connection of its own."""

    def __init__(self, leases: Leases, broker: Broker) -> None:
        self.broker = broker
        self._leases = leases
        self._connection: Any = None
        self._connected_to: Broker | None = None
        self._stopped = False
        self._ended = False
        self._due: dict[str, float] = {}
        self._restore_from = 0.0
        self._logged_at = -_LOG_SECONDS
        start_thread(self._run)

    def stop(self) -> None:
        """End the thread; waits at most 5 seconds for it."""
        self._stopped = True
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self._ended and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._stopped:
            sleep(_TICK_SECONDS)
            try:
                self._tick()
            except (RedisError, OSError) as exc:
                self._disconnect()
                # After an outage, live workers renew first.
                self._restore_from = time.monotonic() + self._leases.lease_seconds / 2
                self._log("Leases are not renewed now: %s: %s", type(exc).__name__, exc)
            except Exception:
                self._disconnect()
                logger.exception("Leases are not renewed now")
        self._disconnect()
        self._ended = True

    def _tick(self) -> None:
        leases, broker = self._leases, self.broker
        lease = leases.lease_seconds
        if self._is_due("confirm", _CONFIRM_SECONDS):
            leases.confirm(self._call_all, broker)
            self._restore_ended(broker)
        if self._is_due("renew", lease / 3):
            leases.renew(self._call, broker)
        if time.monotonic() >= self._restore_from and self._is_due("restore", min(5.0, lease / 6)):
            self._restore_expired(broker)

    def _is_due(self, what: str, every: float) -> bool:
        # By a clock that goes on during a suspension: then everything is due at once.
        now = seconds_since_boot()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    def _restore_expired(self, broker: Broker) -> None:
        script = script_text("expired", SCRIPTS)
        while not self._stopped:
            tags = self._call(
                "EVAL", script.text, len(broker.keys), *broker.keys, _RESTORED_PER_CALL
            )
            done = sum(restore(self._call, broker, _text(tag), expired=True) for tag in tags)
            if done:
                logger.warning(
                    "%d messages are back in their queues: their worker gave no sign of life "
                    "until their leases ended",
                    done,
                )
            if not done or len(tags) < _RESTORED_PER_CALL:
                return

    def _restore_ended(self, broker: Broker) -> None:
        from celery.worker import state

        for tag in self._leases.restore_ended(
            lambda request: request in state.active_requests or request in state.reserved_requests
        ):
            if self._leases.give_up(tag):
                restore(self._call, broker, tag)

    def _call(self, *command: Any) -> Any:
        return self._call_all([command])[0]

    def _call_all(self, commands: Sequence[Any]) -> list[Any]:
        if self._connected_to is not self.broker:
            self._disconnect()
        if self._connection is None:
            self._connection = self.broker.client.connection_pool.make_connection()
            self._connected_to = self.broker
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies, error = [], None
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except ResponseError as exc:
                error = exc
        if error is not None:
            raise error
        return replies

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                connection.disconnect()
            except Exception:  # noqa: BLE001, S110 - it is gone either way
                pass

    def _log(self, text: str, *args: Any) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            logger.error(text, *args)


def restore(
    call: Callable[..., Any],
    broker: Broker,
    tag: str,
    *,
    first: bool = True,
    expired: bool = False,
) -> bool:
    """Return one message to its queue, marked as redelivered.

    Args:
        call: Sends a command and returns its reply.
        broker: The Redis.
        tag: The message's.
        first: True to make it the next that is fetched.
        expired: True to leave it if its lease was renewed.

    Returns:
        True if it was there.
    """
    record = call("HGET", broker.unacked, tag)
    found = recorded(record) if record is not None else None
    if found is None:
        return False
    entry, envelope = redelivered(found[0])
    script: ScriptText = script_text("restore", SCRIPTS)
    keys = (*broker.keys, broker.list_of(found[1], envelope))
    args = (tag, entry, int(first), int(expired))
    return bool(call("EVAL", script.text, len(keys), *keys, *args))


def _renewal(broker: Broker, lease: float, tags: Iterable[str]) -> tuple[Any, ...]:
    script = script_text("renew", SCRIPTS)
    return ("EVAL", script.text, 2, broker.index, broker.leases, lease, *tags)


def _removals(broker: Broker, tags: Sequence[str]) -> list[tuple[Any, ...]]:
    """The commands that acknowledge; the hash first, which is what makes it so."""
    if not tags:
        return []
    return [
        ("HDEL", broker.unacked, *tags),
        ("ZREM", broker.index, *tags),
        ("ZREM", broker.leases, *tags),
    ]


def _taken(tags: deque[str]) -> list[str]:
    taken = []
    while len(taken) < _TAGS_PER_CALL:
        try:
            taken.append(tags.popleft())
        except IndexError:
            break
    return taken


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
