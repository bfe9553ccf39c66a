"""kombu's Redis transport with a fetch that leaves no gap.

kombu takes a message with ``BRPOP`` and only then records it as unacknowledged. Here one script
does both. A script cannot block, so an idle channel waits for `celery_dlq.transport.redis.wake`.
Publishing, fanout, remote control and bindings stay kombu's.

Source: ``Channel._brpop_start``, ``Channel._brpop_read``, ``QoS`` and ``MultiChannelPoller`` in
https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from queue import Empty
from threading import get_ident
from typing import Any

from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_dlq.letters.printable import get_logger
from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.broker import (
    CONNECT_SECONDS,
    REPLY_SECONDS,
    SCRIPTS,
    broker_of,
    refuses_for_now,
)
from celery_dlq.transport.redis.entries import Entry, EntryMessage, record_end
from celery_dlq.transport.redis.leases import Leases, ReliableQoS
from celery_dlq.transport.redis.wake import LOOK_SECONDS, ReliablePoller, WakeConnection

logger = get_logger("celery_dlq.transport")

_IDLE_SECONDS = 4 * LOOK_SECONDS  # whoever closes connections for being idle may have done so
_OVERDUE_SECONDS = 30.0  # as long as kombu 5.7 waits for the reply to BRPOP
_AGAIN_SECONDS = 10.0
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 0.5
_MAX_PLANS = 64  # orders of the queues, each with its keys
_BELL_MILLIS, _BELL_SECONDS = 1000, 1.5 * LOOK_SECONDS
_WOKEN, _LEAVES, _POLLS = 1, 2, 4  # see fetch.lua


class ReliableChannel(kombu_redis.Channel):
    """Mixed in front of kombu's Redis channels."""

    QoS = ReliableQoS
    Message = EntryMessage
    dlq_leases: Leases
    active_queues: Any = ()  # kombu's property makes a list at each turn of the loop
    _in_poll: Any
    _brpop_sent_at: Any = None  # new in kombu 5.7
    _polling_logged = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._no_ack: set[str] = set()
        self._plans: dict[tuple[str, ...], _Plan] = {}
        self._fetching: tuple[str, tuple[str, ...]] | None = None
        self._by_digest = False
        self._sleeping = self._refused = self._woken = self._on_duty = False
        self._polls = 0
        self._requested_at: float | None = None
        self._looked_at = 0.0
        self._due: float | None = None  # to fetch, between two polls
        self._asked: tuple[object, ...] = ()
        self._wake: WakeConnection | None = None
        self._wake_after = self._wake_lost_at = 0.0
        super().__init__(*args, **kwargs)

    # -- fetching -----------------------------------------------------------------

    def basic_consume(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        """Consume; remember whether the consumer acknowledges."""
        no_ack = kwargs.get("no_ack", args[0] if args else False)
        (self._no_ack.add if no_ack else self._no_ack.discard)(queue)
        return super().basic_consume(queue, *args, **kwargs)

    def _update_queue_cycle(self) -> None:
        self.active_queues = super().active_queues
        super()._update_queue_cycle()
        self._leave()
        self._plans.clear()
        self._sleeping = False  # fetch, then arm with the queues of now

    def _brpop_start(self, timeout: Any = None) -> None:  # noqa: ARG002 - kombu's signature
        queues = tuple(self._queue_cycle.consume(len(self.active_queues)))
        if not queues:
            return
        plan = self._plans.get(queues)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[queues] = _Plan(self, queues)
        self._interrupted()  # if there is a fetch, its connection was lost before the reply
        connection = self.client.connection
        tag = self.dlq_leases.new_tag()
        last = f"{self._mode()}{self.dlq_leases.unsent()}"
        command = plan.fetch(connection, tag, last, by_digest=self._by_digest)
        self._by_digest, self._woken = True, False
        self._fetching = tag, queues
        self._in_poll = connection
        self._brpop_sent_at = time.monotonic()
        try:
            connection.send_packed_command(command)
        except BaseException:
            self._interrupted()
            raise

    def _mode(self) -> int:
        mode = _WOKEN if self._woken else 0
        if self._on_duty:
            room = self.qos.can_consume_max_estimate()
            # A task that runs in the loop leaves nobody to look.
            if room == 1 or not self.dlq_leases.sends_in_turns:
                mode, self._on_duty = mode + _LEAVES, False
        if self._wake is None and time.monotonic() < self._wake_after:
            mode += _POLLS
        return mode

    def _brpop_read(self, **_: Any) -> bool:
        if self._fetching is None:
            self.look_at_idle_connection()
            raise Empty
        (tag, queues), connection = self._fetching, self._in_poll or self.client.connection
        try:
            try:
                reply = connection.read_response()
            except NoScriptError:
                self._by_digest = False
                raise Empty from None
            except ResponseError as exc:
                if not refuses_for_now(exc):
                    raise
                self._wait_for_writes(exc)
                raise Empty from None
            except self.connection_errors:
                self._interrupted()
                connection.disconnect()
                raise
            if isinstance(reply, int):
                self._fall_asleep(on_duty=reply == 1)
                raise Empty
            self._fetching = None  # it is held from here on
        finally:
            self._in_poll = None
            if self._fetching is not None:
                self._fetched_nothing()
            flush = getattr(self, "_flush_brpop_reauth", None)
            if flush is not None:
                flush()
        self._polls = 0
        queue = queues[(reply[0] - 1) % len(queues)]
        self._queue_cycle.rotate(queue)
        if queue not in self._no_ack:
            self.dlq_leases.received(tag)
        else:
            self.dlq_leases.drop(tag)
        self.connection._deliver(Entry(reply[1], tag, queue), queue)  # noqa: SLF001
        return True

    def may_be_closed(self) -> bool:
        """True if the connection was not used for long, and so may be closed for that."""
        sent_at = self._brpop_sent_at
        return (
            not self._in_poll and sent_at is not None and time.monotonic() - sent_at > _IDLE_SECONDS
        )

    def look_at_idle_connection(self) -> None:
        """Nothing was requested, so what can be read is the end.

        After a while that is an idle timeout: the next fetch opens another connection. If not,
        Redis is gone, and kombu, too, starts over.
        """
        connection = self.client.connection
        self._registered = False  # kombu before 5.7 ends all polling when it hears of an end
        try:
            with suppress(*self.connection_errors):
                if connection._sock is not None and not connection.can_read(timeout=0):  # noqa: SLF001
                    return
            quietly = self.may_be_closed() or not self.qos.can_consume()
            if quietly:
                self.connection.cycle.forget(self, self.client, "BRPOP")
                connection.disconnect()
        finally:
            self._registered = True
        if not quietly:
            connection.disconnect()
            raise RedisConnectionError("Redis closed the connection")

    def _look_at_overdue_fetch(self) -> None:
        """Give up a connection that is dead at the other end only."""
        if self._fetching is None or not self.qos.can_consume():
            return
        if time.monotonic() - self._brpop_sent_at < _OVERDUE_SECONDS:
            return
        if not self.client.connection.can_read(timeout=0):
            self.client.connection.disconnect()
            raise RedisConnectionError(f"no reply to a fetch in {_OVERDUE_SECONDS:g} s")
        with suppress(Empty):  # this process was busy
            self._brpop_read()

    def _poll_error(self, type: str, **options: Any) -> Any:  # noqa: A002 - kombu's name
        """Read, without an event loop, what ``poll`` calls an error: the end of a connection."""
        if type == "WAKE":
            return self.wake_read()
        return self._brpop_read() if type == "BRPOP" else super()._poll_error(type, **options)

    def _fetched_nothing(self) -> None:
        self._end_fetch(self.dlq_leases.drop)

    def _interrupted(self) -> None:
        self._end_fetch(self.dlq_leases.interrupted)

    def _end_fetch(self, settle: Callable[[str], None]) -> None:
        fetching, self._fetching = self._fetching, None
        if fetching is not None:
            settle(fetching[0])
        self._in_poll = None

    def _do_restore_message(self, payload: Any, *args: Any, **kwargs: Any) -> Any:
        # Of a plain worker. kombu loses a message whose headers are null.
        if isinstance(payload, dict) and not payload.get("headers"):
            payload = {**payload, "headers": {}}
        return super()._do_restore_message(payload, *args, **kwargs)

    def _wait_for_writes(self, exc: Exception) -> None:
        """Fetch no more until Redis, or another server in its place, accepts writes.

        An error would end the worker, as it does with kombu's fetch.
        """
        logger.warning("Redis gives no messages now: %s. Asked again every half second", exc)
        self._drop_wake()
        self._sleeping = self._refused = True
        self._call_in(_LAST_POLL_SECONDS)

    def _look_if_writable(self) -> None:
        broker = broker_of(self)
        connection = broker.client.connection_pool.make_connection()  # perhaps to a new master
        try:
            connection.send_command("HDEL", broker.unacked, "")
            connection.read_response()
        except (RedisError, OSError):
            self._call_in(_LAST_POLL_SECONDS)
            return
        finally:
            connection.disconnect()
        raise RedisConnectionError("Redis accepts writes again, so this worker connects anew")

    # -- waiting ------------------------------------------------------------------

    def is_asleep(self) -> bool:
        """True while nothing is fetched until something wakes the channel."""
        return self._sleeping

    def _fall_asleep(self, *, on_duty: bool) -> None:
        """Wait for a message on duty, or for the bell; poll if Redis forbids that."""
        self._sleeping, self._on_duty = True, on_duty
        if not self._ask():
            self._call_in(min(_FIRST_POLL_SECONDS * 1.5**self._polls, _LAST_POLL_SECONDS))
        self._polls = min(self._polls + 1, 10)

    def _leave(self) -> None:
        """Give the duty up, if this is on duty: the bell wakes another."""
        plan, connection = next(iter(self._plans.values()), None), self.dlq_leases.connection
        if self._on_duty and plan is not None and connection is not None:
            ring = ("LPUSH", plan.bell, 1), ("PEXPIRE", plan.bell, _BELL_MILLIS)
            connection.send_unanswered([("DEL", plan.duty), *ring])
        self._on_duty = False

    def _get_up(self) -> None:
        self._sleeping, self._woken = False, True
        self._due = None
        if self.active_queues and self.qos.can_consume():
            self.connection.cycle._register_BRPOP(self)  # noqa: SLF001

    def _ask(self) -> bool:
        """Arm, or wait for the bell; False if that is not possible now."""
        self._due, self._looked_at = None, time.monotonic()
        plan = next(iter(self._plans.values()), None)  # all have the same lists
        if plan is None:
            return False
        asked = ("EXISTS", *plan.lists) if self._on_duty else ("BRPOP", plan.bell)
        if self._requested_at is not None:
            if asked == self._asked:
                return True
            self._drop_wake()  # it waits for another bell
        try:
            wake = self._awake()
            if wake is None:
                return False
            # Those whom one flood woke look at different times from then on.
            seconds = _BELL_SECONDS if self._polls else random.uniform(0.05, _BELL_SECONDS)  # noqa: S311
            wake.ask(*asked, *(() if self._on_duty else (f"{seconds:.2f}",)))
        except (RedisError, OSError) as exc:
            self._cannot_wake(exc)
            return False
        self._requested_at, self._asked = self._looked_at, asked
        return True

    def _awake(self) -> WakeConnection | None:
        if self._wake is None:
            if time.monotonic() < self._wake_after:
                return None
            wake = WakeConnection(self._make_wake)
            self.connection.cycle.listen(self, wake, wake.open())
            self._wake = wake
            if self._polling_logged:
                type(self)._polling_logged = False  # noqa: SLF001
                logger.info("Redis wakes this worker again")
        return self._wake

    def _make_wake(self) -> Any:
        settings = {"socket_timeout": CONNECT_SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
        mine = {k: v for k, v in self.pool.connection_kwargs.items() if v is not None}
        return self.pool.connection_class(**{**settings, **mine, "protocol": 3})

    def wake_read(self) -> None:
        """Read what Redis sent: a list was written or exists, the bell rang or did not."""
        wakes = False
        try:
            for answer in self._wake.read() if self._wake is not None else ():
                if answer is None:
                    wakes = self._on_duty
                else:  # it has seen what was written before; a bell that did not ring: look
                    self._requested_at, wakes = None, answer or not self._on_duty
                    if answer:
                        self._polls = 0
        except (RedisError, OSError) as exc:
            if not self._sleeping:  # perhaps for long: closed for being idle
                self._drop_wake()
                return
            self._cannot_wake(exc)
            self._get_up()
            return
        if self._sleeping and wakes and not self._refused:
            self._get_up()

    def _call_in(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds
        loop = self.connection.cycle.loop
        if loop is not None:
            loop.call_later(seconds, self.tick)

    def tick(self) -> float:
        """Do what is due; return the seconds until the next call."""
        now = time.monotonic()
        if self.closed:
            return LOOK_SECONDS
        if not self._sleeping:
            self._look_at_overdue_fetch()
            return LOOK_SECONDS / 2  # gevent does not learn that the window is open again
        if self._due is not None:
            if now < self._due:
                return self._due - now
            self._do_what_is_due()
        elif self._requested_at is not None:
            if now - self._requested_at > REPLY_SECONDS:
                self._cannot_wake(TimeoutError("no reply"))
                self._get_up()
        elif now - self._looked_at >= LOOK_SECONDS * 0.9:
            self._get_up()
        return LOOK_SECONDS

    def _do_what_is_due(self) -> None:
        if self._refused:
            self._look_if_writable()
        else:
            self._get_up()

    def _cannot_wake(self, exc: Exception) -> None:
        worked, now = self._wake is not None, time.monotonic()
        self._drop_wake()
        seldom = now - self._wake_lost_at > _AGAIN_SECONDS
        self._wake_lost_at = now
        if worked and seldom:
            logger.debug("The connection that wakes this worker is lost: %s", exc)
            return  # the next look opens another
        self._wake_after = now + _AGAIN_SECONDS
        if self._polling_logged:
            return
        type(self)._polling_logged = True  # noqa: SLF001 - later channels know it, too
        logger.warning(
            "Redis cannot wake this worker now (%s: %s): it looks for messages up to every %g s "
            "while it is idle. CLIENT TRACKING must be allowed (in Redis 6.2 by "
            "+client|tracking)",
            type(exc).__name__,
            exc,
            _LAST_POLL_SECONDS,
        )

    def _drop_wake(self) -> None:
        wake, self._wake = self._wake, None
        self._requested_at = None
        if wake is not None:
            if self.connection is not None:
                self.connection.cycle.forget(self, wake)
            wake.close()

    def close(self) -> None:
        """Close; an entry whose reply is still on its way goes back to its list."""
        if self._in_poll and self._fetching is not None:
            tag = self._fetching[0]
            try:
                self._in_poll._sock.settimeout(REPLY_SECONDS)  # noqa: SLF001
                if self._in_poll.read_response() is not None:
                    self.dlq_leases.restore_of_another(tag)
                self._fetched_nothing()
            except Exception as exc:  # noqa: BLE001 - whatever redis-py raises
                logger.debug("A fetch was interrupted: %r", exc)
                self._interrupted()
        self._leave()
        self._drop_wake()
        super().close()


_ARGUMENT = b"$%d\r\n%b\r\n"  # of a packed command


class _Plan:
    """The parts of a fetch's command for one order of the queues."""

    def __init__(self, channel: Any, queues: tuple[str, ...]) -> None:
        script = script_text("fetch", SCRIPTS)
        steps = channel.priority_steps
        self.lists: Sequence[str] = [
            channel.global_keyprefix + channel._q_for_pri(queue, step)  # noqa: SLF001
            for step in steps
            for queue in queues
        ]
        broker = broker_of(channel)
        digest = sha256("\n".join(sorted(self.lists)).encode()).hexdigest()[:16]
        self.duty, self.bell = f"{broker.unacked}_duty:{digest}", f"{broker.unacked}_bell:{digest}"
        keys = (len(self.lists) + 5, *broker.keys, self.duty, self.bell, *self.lists)
        self._calls = ("EVAL", script.text, *keys), ("EVALSHA", script.digest, *keys)
        names = ("" if name in channel._no_ack else record_end(name) for name in queues)  # noqa: SLF001
        self._rest = (channel.dlq_leases.lease_seconds, *names)
        self._packed: dict[bool, list[bytes]] = {}  # what is before and after the tag

    def fetch(self, connection: Any, tag: str, end: str, *, by_digest: bool) -> list[bytes]:
        """The packed command, in which only the tag is new, and the argument at the end.

        All tags are of one length.
        """
        own, last = tag.encode(), end.encode()
        if by_digest not in self._packed:
            packed = connection.pack_command(*self._calls[by_digest], tag, *self._rest, "")
            self._packed[by_digest] = b"".join(packed).removesuffix(_ARGUMENT % (0, b"")).split(own)
        return [own.join(self._packed[by_digest]) + _ARGUMENT % (len(last), last)]


class ReliableTransport(kombu_redis.Transport):
    """Mixed in front of kombu's Redis transports."""

    Channel: Any
    dlq_connected: Callable[[Any], None]
    cycle: Any
    _dlq_timer: Any = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = ReliablePoller()

    def establish_connection(self) -> Any:
        """Connect; acknowledgements and leases use this broker from now on."""
        connection = super().establish_connection()
        self.dlq_connected(self._avail_channels[-1])
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Let the worker's event loop look now and then."""
        self.cycle.loop, self.cycle.on_ready = loop, self.on_readable
        leases = self.Channel.dlq_leases
        leases.loop_thread = get_ident()
        self.cycle.send_acknowledgements = leases.send_acknowledgements
        super().register_with_event_loop(connection, loop)
        self._dlq_timer = loop.call_repeatedly(LOOK_SECONDS, self.cycle.tick)

    def close_connection(self, connection: Any) -> None:
        """Close, and stop looking."""
        if self._dlq_timer is not None:
            self._dlq_timer.cancel()
        super().close_connection(connection)


@cache
def reliable(transport: type, leases: Leases, connected: Callable[[Any], None]) -> type:
    """A transport class of kombu's Redis kind, with reliable fetch and leases."""
    channel = type(
        f"Reliable{transport.Channel.__name__}",  # type: ignore[attr-defined]
        (ReliableChannel, transport.Channel),  # type: ignore[attr-defined]
        {"dlq_leases": leases},
    )
    name = f"Reliable{transport.__name__}"
    return type(
        name,
        (ReliableTransport, transport),
        {"Channel": channel, "dlq_connected": staticmethod(connected)},
    )
