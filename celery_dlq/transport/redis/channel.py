"""kombu's Redis transport with a fetch that leaves no gap.

kombu takes a message with ``BRPOP`` and only then records it as unacknowledged. Here one script
does both, on a connection of its own (`celery_dlq.transport.redis.wake`), as a script cannot block.
Publishing, fanout, remote control and bindings stay kombu's.

Source: ``Channel._brpop_start``, ``Channel._brpop_read``, ``QoS`` and ``MultiChannelPoller`` in
https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from hashlib import sha256
from threading import get_ident
from typing import Any

from kombu.transport import redis as kombu_redis
from kombu.utils.scheduling import cycle_by_name
from redis import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, RedisError, ResponseError

from celery_dlq import timing
from celery_dlq.letters.printable import get_logger
from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.broker import (
    CONNECT_SECONDS,
    REPLY_SECONDS,
    SCRIPTS,
    broker_of,
    refuses_for_now,
)
from celery_dlq.transport.redis.entries import EntryMessage, FetchedEntry, end_of_list, record_end
from celery_dlq.transport.redis.leases import Leases, ReliableQoS
from celery_dlq.transport.redis.wake import (
    FETCH,
    LOOK_SECONDS,
    TRACKED,
    FetchConnection,
    ReliablePoller,
)

logger = get_logger("celery_dlq.transport")

_IDLE_SECONDS, _OVERDUE_SECONDS = 4 * LOOK_SECONDS, 30.0  # the latter as kombu 5.7 for BRPOP
_FIRST_POLL_SECONDS, _LAST_POLL_SECONDS = 0.05, 0.5
_MOST_ALARMS = 5  # without a message, each within a second of the question
# Orders of the queues; each has all their lists, at 130 bytes a list.
_MIN_PLANS, _MAX_PLANS, _MAX_LISTS = 2, 64, 16384
_DUTY_MILLIS, _DUTY_SECONDS = 3500, 1.4 * LOOK_SECONDS  # so, every second call of the timer
_WOKEN, _LAST_ROOM, _LEAVES, _POLLS = 1, 2, 4, 8  # see fetch.lua


class ReliableChannel(kombu_redis.Channel):
    """Mixed in front of kombu's Redis channels."""

    QoS = ReliableQoS
    Message = EntryMessage
    dlq_leases: Leases
    active_queues = queues = ()  # the former for kombu, which would fetch from them
    _polling_logged = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.consumed: dict[str, tuple[bool, Any, str]] = {}  # as `basic_consume` is told
        self._plans: dict[tuple[str, ...], _FetchPlan] = {}
        self.fetching: tuple[str, tuple[str, ...], bool] | None = None
        self._by_digest = False
        self._sleeping = self._refused = self._woken = self._on_duty = False
        self._polls = self._alarms = 0
        self._asked_at = 0.0
        self._due: float | None = None  # to fetch, between two polls
        self._own: FetchConnection | None = None
        self._track_after = 0.0
        super().__init__(*args, **kwargs)
        self._order = cycle_by_name(self.queue_order_strategy)()
        self.connection.cycle.open.append(self)

    # -- fetching -----------------------------------------------------------------

    def basic_consume(
        self, queue: str, no_ack: Any, callback: Any, consumer_tag: str, **kwargs: Any
    ) -> Any:
        """Consume; remember who gets the messages, and whether it acknowledges."""
        self.consumed[queue] = no_ack, callback, consumer_tag
        tag = super().basic_consume(queue, no_ack, callback, consumer_tag, **kwargs)
        self._use_queues_of_now()
        return tag

    def basic_cancel(self, consumer_tag: str) -> Any:
        """Consume no more; while `get` reads, kombu does so afterwards."""
        self.consumed = {k: one for k, one in self.consumed.items() if one[2] != consumer_tag}
        found = super().basic_cancel(consumer_tag)
        self.look_at_queues()
        return found

    def look_at_queues(self) -> None:
        """Fetch from other queues, if others are consumed now."""
        if super().active_queues != self.queues:
            self._use_queues_of_now()

    def _use_queues_of_now(self) -> None:
        self.queues = super().active_queues
        self._order.update(self.queues)
        self._give_duty_up()
        self._plans.clear()
        self._sleeping = False  # fetch, then arm with the queues of now

    def fetch(self) -> None:
        """Send a fetch if it is time for one; called at each turn of the loop."""
        waits = self._sleeping or self.fetching is not None
        if waits or not self.queues or not self.qos.can_consume():
            return
        queues = tuple(self._order.consume(len(self.queues)))
        plan = self._plans.get(queues)
        if plan is None:
            lists = len(queues) * len(self.priority_steps)
            if len(self._plans) >= min(_MAX_PLANS, max(_MIN_PLANS, _MAX_LISTS // lists)):
                self._plans.clear()
            plan = self._plans[queues] = _FetchPlan(self, queues)
        if self._own is not None and self._own.awaits_reply("BRPOP"):
            self._disconnect_fetch()  # Redis would answer when the bell rings
        elif self._may_be_closed():
            self.read()
        try:
            own = self._own or self._open_connection()
        except ResponseError as exc:
            self._wait_for_writes(exc)
            return
        tag = self.dlq_leases.new_tag()
        # To be told of the next one, too: a write of its own costs Redis more than the commands.
        stays = self._on_duty and own.tracks and self.dlq_leases.loop_goes_on
        self.fetching = tag, queues, stays
        last = f"{self._fetch_mode(own)}{self.dlq_leases.take_unsent()}"
        command = plan.fetch_command(own.connection, tag, last, by_digest=self._by_digest)
        self._by_digest, self._woken = True, False
        self._asked_at = time.monotonic()
        try:
            own.send(*(plan.arms if stays else ()), fetch=command)
        except BaseException:
            self._disconnect_fetch()
            raise

    def _fetch_mode(self, own: FetchConnection) -> int:
        mode = _WOKEN if self._woken else 0
        if not own.tracks:
            return mode + _POLLS
        if self._on_duty or self._woken:
            last = self.qos.can_consume_max_estimate() == 1
            leaves = _LAST_ROOM * last if self.dlq_leases.loop_goes_on else _LEAVES
            mode, self._on_duty = mode + leaves, self._on_duty and not leaves
        return mode

    def read(self) -> bool:
        """Read what Redis sent; true if that was a message."""
        replies: dict[str, Any] = {}
        news: set[str] = set()
        try:
            for name, reply, is_news in self._own.read_replies() if self._own is not None else ():
                replies[name] = reply
                if name == FETCH:
                    news.clear()  # it looked after that
                elif is_news and (name or self._on_duty):
                    news.add(name)
        except (RedisError, OSError) as exc:
            self._give_connection_up(exc)
            return False
        fetched = FETCH in replies and self._fetched(replies[FETCH])
        if self._sleeping and not self._refused:
            if news and self._due is None and (self._on_duty or "BRPOP" in news):
                soon = time.monotonic() - self._asked_at < LOOK_SECONDS
                self._alarms = self._alarms + 1 if soon and self._on_duty else 0
                self._polls, self._on_duty = 0, self._on_duty and "GETEX" not in news
                self._get_up()
            elif "BRPOP" in replies:
                self._fall_asleep(on_duty=False)
        return fetched

    def _fetched(self, reply: Any) -> bool:
        if self.fetching is None:
            return False
        (tag, queues, is_armed), self.fetching = self.fetching, None
        if not isinstance(reply, list):
            self.dlq_leases.drop_message(tag)
            if isinstance(reply, NoScriptError):
                self._by_digest = False
            elif isinstance(reply, Exception):
                self._wait_for_writes(reply)
            else:
                self._fall_asleep(on_duty=reply == 1, is_armed=is_armed)
            return False
        self._polls = self._alarms = 0
        number, entry, *duty = reply
        queue = queues[(number - 1) % len(queues)]
        self._order.rotate(queue)
        if duty:  # also if the window is full: who is told of a message then wakes another
            self._fall_asleep(on_duty=True, is_armed=is_armed)
        no_ack, callback, _ = self.consumed.get(queue, (False, self._return, ""))
        (self.dlq_leases.drop_message if no_ack else self.dlq_leases.received)(tag)
        message = self.Message(FetchedEntry(entry, tag, queue), channel=self)
        if not no_ack:
            self.qos.append(message, message.delivery_tag)
        callback(message)
        return True

    def _return(self, message: Any) -> None:
        """Give back what was fetched for a consumer that is cancelled."""
        self.basic_reject(message.delivery_tag, requeue=True)

    def _do_restore_message(self, payload: Any, *args: Any, **kwargs: Any) -> Any:
        # Of a plain worker. kombu loses a message whose headers are null.
        if isinstance(payload, dict) and not payload.get("headers"):
            payload = {**payload, "headers": {}}
        return super()._do_restore_message(payload, *args, **kwargs)

    def _wait_for_writes(self, exc: Exception) -> None:
        """Fetch no more until Redis, or another server in its place, accepts writes.

        An error would end the worker, as it does with kombu's fetch.
        """
        if not refuses_for_now(exc):
            raise exc
        logger.warning("Redis gives no messages now: %s. Asked again every half second", exc)
        self._disconnect_fetch()
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

    def _fall_asleep(self, *, on_duty: bool, is_armed: bool = False) -> None:
        """Wait for a message on duty, or for the bell; poll if Redis forbids that.

        Redis may tell of a change at once, again and again, and there is no message: where it
        forgets what it tracks (``tracking-table-max-keys``), or others are faster. Then wait first.
        """
        self._sleeping, self._on_duty = True, on_duty
        if self._alarms > _MOST_ALARMS:
            self._alarms -= 1  # and ask after the next look
            self._call_in(_LAST_POLL_SECONDS)
        elif not (on_duty and is_armed) and not self._ask_to_be_woken():
            self._call_in(min(_FIRST_POLL_SECONDS * 1.5**self._polls, _LAST_POLL_SECONDS))
        self._polls = min(self._polls + 1, 10)

    def _give_duty_up(self) -> None:
        """Give the duty up, if this is on duty: the bell wakes another."""
        plan = next(iter(self._plans.values()), None)
        connection = self.dlq_leases.connection
        if self._on_duty and plan is not None and connection is not None:
            connection.send_unanswered([plan.ring_command(plan.bell, self.dlq_leases.name)])
        self._on_duty = False
        self.dlq_leases.waiting.pop(self, None)

    def _get_up(self) -> None:
        self.dlq_leases.waiting.pop(self, None)
        self._sleeping, self._woken, self._due = False, True, None
        if self.queues and self.qos.can_consume():
            self.fetch()
        else:
            self._give_duty_up()

    def _ask_to_be_woken(self) -> bool:
        """Arm and stay on duty, or wait for the bell; False if that is not possible."""
        self._due, self._asked_at = None, time.monotonic()
        plan = next(iter(self._plans.values()), None)  # all have the same lists
        if plan is None or self._own is None:
            return False
        if not self._own.tracks:
            if self._asked_at >= self._track_after:
                self._disconnect_fetch()  # and try again
            return False
        try:
            if self._on_duty:
                self._own.send(*plan.arms)
            else:
                self._own.send((("BRPOP", plan.bell, plan.own_bell, timing.current.bell), None))
                self.dlq_leases.waiting[self] = plan
        except (RedisError, OSError) as exc:
            self._give_connection_up(exc)
        return True

    def _open_connection(self) -> FetchConnection:
        own = FetchConnection(self._make_connection, self.dlq_leases.watch)
        tracks = time.monotonic() >= self._track_after
        try:
            sock = own.open(tracks=tracks)
        except ResponseError as exc:
            if not tracks or refuses_for_now(exc):
                raise
            self._cannot_wake(exc)
            sock = own.open(tracks=False)
        self.connection.cycle.listen(self, sock)
        self._own = own
        if self._polling_logged and tracks and own.tracks:
            type(self)._polling_logged = False  # noqa: SLF001
            logger.info("Redis wakes this worker again")
        return own

    def _make_connection(self, **options: Any) -> Any:
        settings = {"socket_timeout": CONNECT_SECONDS, "socket_connect_timeout": CONNECT_SECONDS}
        given = Redis(connection_pool=self.pool).get_connection_kwargs()
        mine = {k: v for k, v in given.items() if v is not None}
        return self.pool.connection_class(**{**settings, **mine, **options})

    def _call_in(self, seconds: float) -> None:
        self._due = time.monotonic() + seconds
        loop = self.connection.cycle.loop
        if loop is not None:
            loop.call_later(seconds, self.tick)

    def tick(self) -> float:
        """Do what is due; return the seconds until the next call."""
        now = time.monotonic()
        if self.connection is None:  # closed
            return LOOK_SECONDS
        if self._own is not None and self._own.awaits_reply():
            overdue = REPLY_SECONDS if self._on_duty else _OVERDUE_SECONDS
            if now - self._asked_at > overdue:
                self.read()  # this process was busy
            if now - self._asked_at > overdue:
                self._give_connection_up(RedisConnectionError(f"no reply in {overdue:g} s"))
        elif self._due is not None:
            if now < self._due:
                return self._due - now
            (self._look_if_writable if self._refused else self._get_up)()
        elif self._sleeping and not self._on_duty:
            self._get_up()
        elif self._sleeping and now - self._asked_at > _DUTY_SECONDS:
            self._fall_asleep(on_duty=True)
        # gevent does not learn that the window is open again.
        return LOOK_SECONDS if self._sleeping else LOOK_SECONDS / 2

    def _give_connection_up(self, exc: Exception) -> None:
        """Give a connection up: kombu starts over if it was in use, as with its own."""
        in_use = self.fetching is not None or (self._sleeping and not self._may_be_closed())
        self._disconnect_fetch()
        if refuses_for_now(exc):
            self._wait_for_writes(exc)
        elif isinstance(exc, ResponseError):
            self._cannot_wake(exc)
        elif in_use:
            raise RedisConnectionError(str(exc)) from exc
        if self._sleeping and not self._refused:
            self._get_up()

    def _may_be_closed(self) -> bool:
        """True if nothing was asked for long: whoever closes idle connections may have done so."""
        return time.monotonic() - self._asked_at > _IDLE_SECONDS

    def _cannot_wake(self, exc: Exception) -> None:
        self._track_after = time.monotonic() + 10.0
        if self._polling_logged:
            return
        type(self)._polling_logged = True  # noqa: SLF001 - later channels know it, too
        logger.warning(
            "Redis cannot wake this worker now (%s: %s): it looks for messages up to every %g s "
            "while it is idle. CLIENT TRACKING, CLIENT CACHING and GETEX must be allowed (in Redis "
            "6.2 by +client|tracking +client|caching)",
            type(exc).__name__,
            exc,
            _LAST_POLL_SECONDS,
        )

    def _disconnect_fetch(self) -> None:
        """Disconnect; what a fetch may have taken goes back."""
        own, fetching, self._own, self.fetching = self._own, self.fetching, None, None
        self.dlq_leases.waiting.pop(self, None)
        if fetching is not None:
            self.dlq_leases.interrupted(fetching[0])
        if own is not None:
            if self.connection is not None:
                self.connection.cycle.unwatch(self)
            own.close()

    def close(self) -> None:
        """Close; an entry whose reply is still on its way goes back to its list."""
        if self.connection is not None and self in self.connection.cycle.open:
            self.connection.cycle.open.remove(self)
        if self._own is not None and self.fetching is not None:
            tag, found, until = self.fetching[0], False, time.monotonic() + REPLY_SECONDS
            try:
                while not found and (left := until - time.monotonic()) > 0:
                    found = FETCH in [name for name, *_ in self._own.read_replies(left)]
                if found and self.dlq_leases.restore_of_another(tag) is not False:
                    self.fetching = None
                    self.dlq_leases.drop_message(tag)
            except Exception as exc:  # noqa: BLE001 - whatever redis-py raises
                logger.debug("A fetch was interrupted: %r", exc)
        self._give_duty_up()
        self._disconnect_fetch()
        super().close()


_ARGUMENT = b"$%d\r\n%b\r\n"  # of a packed command


class _FetchPlan:
    """The parts of a fetch's command for one order of the queues."""

    def __init__(self, channel: Any, queues: tuple[str, ...]) -> None:
        script = script_text("fetch", SCRIPTS)
        # kombu asks for each list, which takes three times as long where there are thousands.
        ends = [end_of_list(channel, step) for step in channel.priority_steps]
        prefix = channel.global_keyprefix
        self.lists: Sequence[str] = [f"{prefix}{queue}{end}" for end in ends for queue in queues]
        broker = broker_of(channel)
        digest = sha256("\n".join(sorted(self.lists)).encode()).hexdigest()[:16]
        self.duty, self.bell = f"{broker.unacked}_duty:{digest}", f"{broker.unacked}_bell:{digest}"
        self.own_bell, self._unacked = f"{self.bell}:{channel.dlq_leases.name}", broker.unacked
        # As often as no number of lists can be counted: so it is on duty, and no list exists.
        self.alone = len(self.lists) + 1
        self.look = ("EXISTS", *self.lists, *[self.duty] * self.alone)
        # On duty: be told, and stay so.
        stays = ("GETEX", self.duty, "PX", _DUTY_MILLIS), channel.dlq_leases.name.encode()
        self.arms = TRACKED, (("EXISTS", *self.lists), 0), stays
        keys = (len(self.lists) + 5, *broker.keys, self.duty, self.bell, *self.lists)
        self._calls = ("EVAL", script.text, *keys), ("EVALSHA", script.digest, *keys)
        names = ("" if channel.consumed.get(q, [False])[0] else record_end(q) for q in queues)
        self._rest = (channel.dlq_leases.lease_seconds, *names)
        self._packed: dict[bool, list[bytes]] = {}  # what is before and after the tag

    def ring_command(self, bell: str, leaves: str = "") -> tuple[Any, ...]:
        """The command that wakes one worker, and with a name ends the duty of that one."""
        text = script_text("ring", SCRIPTS).text
        return ("EVAL", text, 3, self._unacked, bell, self.duty, leaves)

    def fetch_command(self, connection: Any, tag: str, end: str, *, by_digest: bool) -> list[bytes]:
        """The packed command: only the tag is new, always as long, and the argument at the end."""
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
    _dlq_ends: Any = ()  # of what the event loop calls

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.cycle = ReliablePoller()

    def establish_connection(self) -> Any:
        """Connect; acknowledgements and leases use this broker from now on."""
        connection = super().establish_connection()
        channel = self.cycle.open[-1]
        self.dlq_connected(channel)
        channel.async_pool.disconnect()  # of its ping; closed later, it ends kombu 5.4's polling
        return connection

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Fetch in each turn of the worker's event loop, and look now and then."""
        leases, cycle = self.Channel.dlq_leases, self.cycle
        leases.loop_thread = get_ident()
        cycle.loop, cycle.on_ready = loop, self.on_readable
        cycle.send_acknowledgements = leases.send_acknowledgements
        super().register_with_event_loop(connection, loop)
        loop.on_tick.add(cycle.turn)
        # As kombu does, which knows the option since 5.7.
        every = connection.client.transport_options.get("unacked_restore_interval", 0)
        timers = (
            (LOOK_SECONDS, cycle.tick),
            (max(every, 0) or 10.0, cycle.restore_visible),
        )
        stops = (loop.call_repeatedly(*one).cancel for one in timers)
        self._dlq_ends = *stops, partial(loop.on_tick.discard, cycle.turn)

    def close_connection(self, connection: Any) -> None:
        """Close, and stop looking."""
        for end in self._dlq_ends:
            end()
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
