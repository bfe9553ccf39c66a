"""Reliable fetch for one worker: whether it can be used here, turning it on, and its thread."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from kombu.transport import redis as kombu_redis
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from celery_dlq import timing
from celery_dlq.config import Settings, visibility_timeout
from celery_dlq.letters.printable import get_logger, url_without_secrets
from celery_dlq.registry import Metric
from celery_dlq.store.check import is_cluster_node, too_old
from celery_dlq.store.metrics import LOST_LEASES, RESTORED, STORE_ERRORS
from celery_dlq.store.scripts import script_text
from celery_dlq.store.store import Store
from celery_dlq.transport.held import LeaseThread, WatchedFetch, seconds_since_boot, sleep
from celery_dlq.transport.redis.broker import SCRIPTS, Broker, broker_of, refuses_for_now, restore
from celery_dlq.transport.redis.channel import reliable
from celery_dlq.transport.redis.leases import Leases

logger = get_logger("celery_dlq.transport")

_OFF = (
    "Reliable fetch is off: %s. Messages are fetched as kombu does: a worker that dies may take "
    "one along"
)
_TRANSPORTS = tuple(
    getattr(kombu_redis, name)
    for name in ("Transport", "SentinelTransport")
    if hasattr(kombu_redis, name)
)
_RESTORED_PER_CALL = 100
_SHORT_SECONDS = 0.01  # for a fetch that is on its way


class ReliableFetch(WatchedFetch):
    """Turns reliable fetch on for the connections of one worker's consumer."""

    def __init__(
        self, settings: Settings, options: Mapping[str, Any] | None, store: Store | None = None
    ) -> None:
        self.leases = Leases(settings.lease_for(visibility_timeout("redis", options)), store)
        self._keeper: LeaseKeeper
        super().__init__(LeaseKeeper(self.leases))
        self._wanted = settings.reliable_fetch
        self.told = self.leases.watch.was_unchanged
        self._emulates = bool((options or {}).get("ack_emulation", True))
        self._refusal: str | None = None

    def _connect(self, connection: Any, ensure_connected: Callable[[Any], Any]) -> Any:
        base = connection.get_transport_cls()
        reason = self.unsupported(base)
        if reason is not None:
            if base.driver_type == "redis":
                self._log_once(
                    _OFF, reason, level=logging.WARNING if self._wanted else logging.INFO
                )
            return ensure_connected(connection)
        self._refusal = None
        connection.get_transport_cls = lambda: self._class_of(connection)
        connected = ensure_connected(connection)
        if self._refusal is None:
            url = url_without_secrets(str(connection.as_uri()))
            self._log_once(
                "Reliable fetch is on for %s: leases of %g s", url, self.leases.lease_seconds
            )
            return connected
        self._log_once(_OFF, self._refusal, level=logging.WARNING)
        del connection.get_transport_cls
        connection.close()
        return ensure_connected(connection)

    def _totals_so_far(self) -> Mapping[Metric, int]:
        return {
            RESTORED: self._keeper.restored,
            LOST_LEASES: self.leases.taken,
            STORE_ERRORS: self._keeper.errors,
        }

    def close(self) -> None:
        """Confirm acknowledgements and give back what is held."""
        self._keeper.stop()
        self.leases.close()

    def _connected(self, channel: Any) -> None:
        """Use the broker of a new connection, unless it refuses."""
        self._refusal = refusal(channel)
        if self._refusal is None:
            broker = broker_of(channel)
            self.leases.loop_goes_on = self.loop_goes_on
            self.leases.connected(broker)
            self._keeper.connected(broker)

    def _class_of(self, connection: Any) -> type:
        """The transport of the URL that the connection uses now; with failover it changes."""
        base = type(connection).get_transport_cls(connection)
        return reliable(base, self.leases, self._connected) if base in _TRANSPORTS else base

    def unsupported(self, transport: type) -> str | None:
        """Why a transport cannot fetch so; ``None`` if it can."""
        if not self._wanted:
            return "dlq_reliable_fetch is False"
        if transport not in _TRANSPORTS:
            name = f"{transport.__module__}.{transport.__qualname__}"
            return f"expected a Redis transport of kombu, got {name}"
        if not self._emulates:
            return "expected broker_transport_options['ack_emulation'] to be True, got False"
        return None


def refusal(channel: Any) -> str | None:
    """The reason why a Redis cannot be used; ``None`` if it can, or does not answer now.

    Runs every command of the transport once, on keys of its own, which begin like those of the
    unacknowledged messages.
    """
    client = Redis(connection_pool=channel.pool)
    server: dict[str, Any] = {}
    with suppress(RedisError):  # INFO may be forbidden
        server = client.info("server")
    version = too_old(server)
    if version is not None:
        return f"expected Redis 6.2 or later, got {version}"
    try:
        _probe_script(client.execute_command, broker_of(channel).keys)
    except ResponseError as exc:
        if refuses_for_now(exc):  # no reason to fall back
            return None
        if is_cluster_node(server):
            return f"expected a broker that is no Redis Cluster, or all its keys in one slot: {exc}"
        return f"expected Redis to allow what it needs, got {exc}"
    except (RedisError, OSError) as exc:
        logger.debug("Reliable fetch could not be tried: %r", exc)
    return None


def _probe_script(run: Callable[..., Any], names: Sequence[str]) -> None:
    unacked, index, leases = (f"{name}_probe:{uuid4().hex}" for name in names)
    entries, restored = f"{unacked}:list", f"{unacked}:restored"
    duty, bell = f"{unacked}:duty", f"{unacked}:bell"
    keys, all_keys = (unacked, index, leases, entries), (unacked, index, leases, restored, entries)
    fetched = (*keys[:3], duty, bell, entries)
    fetch = script_text("fetch", SCRIPTS)
    run("LPUSH", entries, "{}", "{}")
    run("EVAL", fetch.text, 6, *fetched, "probe", 60, '"probe"', "1")
    run("BRPOP", bell, 1)
    run("EVALSHA", fetch.digest, 6, *fetched, "probe", 60, '"probe"', "0none")
    run("EVALSHA", fetch.digest, 6, *fetched, "probe", 60, '"probe"', "1")
    run("EVAL", script_text("renew", SCRIPTS).text, 4, *all_keys[:4], 60, "probe")
    run("EVAL", script_text("expired", SCRIPTS).text, 4, *keys[:3], duty, 1, 0)
    run("EVAL", script_text("ring", SCRIPTS).text, 3, unacked, bell, duty, "probe")
    run("HGET", unacked, "probe")
    run("EVAL", script_text("restore", SCRIPTS).text, 5, *all_keys, "probe", "{}", 1, 0)
    run("ZREMRANGEBYSCORE", restored, 0, 0)
    run("HDEL", unacked, "probe")
    run("ZREM", index, "probe")
    run("DEL", *keys, duty, bell)


class LeaseKeeper(LeaseThread):
    """Renews, confirms and restores."""

    what = "Leases are not renewed"
    expected_errors = (RedisError, OSError)
    quiet_failures = 1  # the first may only mean that Redis closed the connection

    def __init__(self, leases: Leases) -> None:
        super().__init__()
        self._leases = leases
        self._broker: Broker | None = None
        self._connection: Any = None
        self._connected_to: Broker | None = None
        self._due: dict[str, float] = {}
        self._replied_at = float("-inf")
        self._restore_from = 0.0
        self.restored = 0

    def connected(self, broker: Broker) -> None:
        """Use the broker of a new connection; the first starts the thread."""
        self._broker = broker
        self.start()

    def successor(self) -> LeaseKeeper:
        """Another one, for the same broker."""
        made = LeaseKeeper(self._leases)
        made._broker, made.restored, made.errors = self._broker, self.restored, self.errors
        return made

    def patience(self) -> float:
        """A quarter of the lease, or longer than a call may take that has to connect first."""
        return max(self._leases.lease_seconds / 4, 3 * timing.current.lease_retry)

    def _pause_seconds(self) -> float:
        # Soon again after a failure: other workers take what is not renewed.
        if self._failures <= self.quiet_failures:
            return timing.current.lease_tick * random.uniform(0.96, 1)  # noqa: S311 - not in step
        return min(timing.current.lease_retry, self._leases.lease_seconds / 8)

    def _failed(self, exc: BaseException) -> None:
        super()._failed(exc)
        self._due.clear()
        self._hold_off()

    def _give_sign_of_life(self) -> None:
        broker, leases, lease = self._broker, self._leases, self._leases.lease_seconds
        if broker is None:
            return
        self.use_broker(broker)
        if self._is_due("renew", lease / 3):
            leases.renew(self._call_script, broker)
        self.give_back(broker)
        every = min(timing.current.lease_max_look, lease / 6)
        if self._is_due("lists", min(timing.current.lease_wait, every)):
            plans, dead = tuple(leases.waiting.values()), self._is_due("look", every)
            looks = [*(plan.look for plan in plans), ("EXISTS", broker.leases, broker.look)]
            there = leases.confirm(self._call_all, broker, looks if dead else looks[:-1])
            for plan, found in zip(plans, there, strict=False):
                self._wake_channel(plan, found)
            if dead and not self._holds_off() and there[-1] == 1:  # and nobody looks
                self.restore_expired(broker, every)

    def use_broker(self, broker: Broker) -> None:
        """Be connected to this broker from now on."""
        if self._connected_to is not broker:
            self.disconnect()
            self._connected_to = broker

    def _is_due(self, what: str, every: float) -> bool:
        # By a clock that goes on during a suspension: then everything is due at once.
        now = seconds_since_boot()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    def _wake_channel(self, plan: Any, found: int) -> None:
        """Wake a channel if whoever is on duty leaves a message in its lists, or nobody is."""
        if found != plan.alone:
            sleep(_SHORT_SECONDS)
            if self._call_script(*plan.look) != plan.alone:
                self._call_script(*plan.ring_command(plan.own_bell))

    def give_back(self, broker: Broker) -> None:
        """Give back what this worker fetched and does not execute."""
        tags, until = self._leases.to_return(), self._loop_until()
        try:
            while tags and time.monotonic() < until:
                restore(self._call_script, broker, tags[-1])  # so that the oldest is fetched first
                tags.pop()
        finally:
            self._leases.return_later(tags)

    def restore_expired(self, broker: Broker, every: float) -> None:
        """Give back what belongs to workers that gave no sign of life until their leases ended."""
        script, restored, until = script_text("expired", SCRIPTS), 0, self._loop_until()
        keys, pause = (*broker.keys, broker.look), int(every * 1000)
        while not self.stopped:
            tags = self._call_script("EVAL", script.text, 4, *keys, _RESTORED_PER_CALL, pause)
            if self._holds_off():
                break
            done = pause = 0
            for tag in tags:
                done += self._restored(broker, tag.decode())
                if time.monotonic() > until:
                    break
            restored += done
            if not done or len(tags) < _RESTORED_PER_CALL:
                break
            if time.monotonic() > until:
                self._call_script("DEL", broker.look)
                self._due.clear()
                break
        if restored:
            self.restored += restored
            logger.warning(
                "%d messages are back in their queues: their worker gave no sign of life until "
                "their leases ended",
                restored,
            )

    def _loop_until(self) -> float:
        """When a loop goes on in the next tick: own leases come first."""
        lease = self._leases.lease_seconds
        return time.monotonic() + min(timing.current.lease_max_loop, lease / 10)

    def _restored(self, broker: Broker, tag: str) -> bool:
        try:
            return bool(restore(self._call_script, broker, tag, expired=True))
        except (RedisError, OSError):
            raise
        except Exception:
            logger.exception("The message %s is left to kombu, which restores it later", tag)
            self._call_script("ZREM", broker.leases, tag)
            return False

    def _holds_off(self) -> bool:
        """True if live workers may have had no chance to renew: Redis, or all of them, stood still.

        They renew within seconds; then it is known who is dead.
        """
        now = seconds_since_boot()
        silence, self._replied_at = now - self._replied_at, now
        if silence > self._leases.lease_seconds / 3:
            self._hold_off()
        return now < self._restore_from

    def _hold_off(self) -> None:
        hold_off = min(self._leases.lease_seconds / 2, timing.current.lease_max_hold_off)
        self._restore_from = seconds_since_boot() + hold_off

    def _call_script(self, *command: Any) -> Any:
        return self._call_all([command])[0]

    def _call_all(self, commands: Sequence[Any]) -> list[Any]:
        self.give_sign_of_life()
        if self._connection is None and self._connected_to is not None:
            # A connection that hangs must not cost the leases.
            most = min(timing.current.lease_reply, max(1.0, self._leases.lease_seconds / 8))
            self._connection = self._connected_to.client.connection_pool.make_connection(most)
            self.give_sign_of_life()
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        return [connection.read_response() for _ in commands]  # an error ends the connection

    def disconnect(self) -> None:
        """Close the connection, if one is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it is gone either way
                connection.disconnect()
