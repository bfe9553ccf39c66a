"""Reliable fetch for one worker: whether it can be used here, and turning it on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from uuid import uuid4

from kombu.transport import redis as kombu_redis
from redis import Redis
from redis.exceptions import (
    BusyLoadingError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
)

from celery_dlq.backends.redis.scripts import script_text
from celery_dlq.config import Settings, visibility_timeout
from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.logs import get_logger
from celery_dlq.metrics import LOST_LEASES, RESTORED, STORE_ERRORS, Counts, Metric
from celery_dlq.transport.broker import SCRIPTS, Broker
from celery_dlq.transport.channel import broker_of, reliable
from celery_dlq.transport.keeper import Keeper
from celery_dlq.transport.leases import Leases

logger = get_logger("celery_dlq.transport")

_OLDEST_REDIS = (6, 2)
_TRANSPORTS = tuple(
    getattr(kombu_redis, name)
    for name in ("Transport", "SentinelTransport")
    if hasattr(kombu_redis, name)
)
# Redis works, but not now: no reason to fall back.
_FOR_NOW = (BusyLoadingError, OutOfMemoryError, ReadOnlyError)
_FOR_NOW_TEXTS = ("MISCONF", "NOREPLICAS", "MASTERDOWN", "LOADING", "OOM", "READONLY")


class ReliableFetch:
    """Turns reliable fetch on for the connections of one worker's consumer.

    Args:
        settings: The checked settings.
        options: ``broker_transport_options``.
    """

    def __init__(self, settings: Settings, options: Mapping[str, Any] | None) -> None:
        self._wanted = settings.reliable_fetch
        self.leases = Leases(settings.lease_for(visibility_timeout("redis", options)))
        self._keeper = Keeper(self.leases)
        self._counted: Mapping[Metric, int] = {}
        self._emulates = bool((options or {}).get("ack_emulation", True))

    def watch(self, consumer: Any) -> None:
        """Wrap what connects the consumer; a second call changes nothing.

        Source: ``Consumer.ensure_connected`` in
        https://github.com/celery/celery/blob/main/celery/worker/consumer/consumer.py
        """
        if getattr(consumer, "dlq_fetches", None) is not None:
            return
        consumer.dlq_fetches = self
        ensure_connected = consumer.ensure_connected
        told: list[str] = []

        def tell(level: str, text: str, *args: Any) -> None:
            if text not in told:  # once, not at every reconnection
                told.append(text)
                getattr(logger, level)(text, *args)

        def ensure_reliable(connection: Any) -> Any:
            base = connection.get_transport_cls()
            reason = self._unsupported(base)
            if reason is not None:
                if base.driver_type == "redis":
                    tell("warning", "Reliable fetch is off: %s", reason)
                return ensure_connected(connection)
            connection.get_transport_cls = lambda: self._class_of(connection)
            connected = ensure_connected(connection)
            reason = refusal(connected.default_channel)
            if reason is None:
                text = "Reliable fetch is on for %s: leases of %g s"
                url = url_without_secrets(str(connection.as_uri()))
                tell("info", text, url, self.leases.lease_seconds)
                return connected
            tell(
                "warning",
                "Reliable fetch is off, %s. Messages are fetched as kombu does: a worker that "
                "dies may take one along",
                reason,
            )
            del connection.get_transport_cls
            connection.close()
            return ensure_connected(connection)

        consumer.ensure_connected = ensure_reliable

    def count(self, counts: Counts) -> None:
        """Count what the thread did since the last call."""
        totals = {
            RESTORED: self._keeper.restored,
            LOST_LEASES: self.leases.taken,
            STORE_ERRORS: self._keeper.errors,
        }
        for metric, total in totals.items():
            more = total - self._counted.get(metric, 0)
            if more:
                counts.count(metric, *("lease" for _ in metric.labels), by=more)
        self._counted = totals

    def close(self) -> None:
        """Confirm acknowledgements and give back what is held."""
        self._keeper.stop()
        self.leases.close()

    def _connected(self, broker: Broker) -> None:
        self.leases.connected(broker)
        self._keeper.connected(broker)

    def _class_of(self, connection: Any) -> type:
        """The transport of the URL that the connection uses now; with failover it changes."""
        base = type(connection).get_transport_cls(connection)
        return reliable(base, self.leases, self._connected) if base in _TRANSPORTS else base

    def _unsupported(self, transport: type) -> str | None:
        if not self._wanted:
            return "dlq_reliable_fetch is False"
        if transport not in _TRANSPORTS:
            return f"the transport is {transport.__module__}.{transport.__qualname__}, not kombu's"
        if not self._emulates:
            return "broker_transport_options['ack_emulation'] is False"
        return None


def refusal(channel: Any) -> str | None:
    """The reason why a Redis cannot be used; ``None`` if it can.

    Runs every command of the transport once, on keys of its own, which begin like those of the
    unacknowledged messages.
    """
    client = Redis(connection_pool=channel.pool)
    try:
        version = str(client.info("server").get("redis_version", ""))
        numbers = tuple(int(part) for part in version.split(".")[:2])
        if numbers < _OLDEST_REDIS:
            return f"expected Redis 6.2 or later, got {version}"
    except (RedisError, ValueError):
        pass  # INFO may be forbidden
    broker = broker_of(channel)
    unacked, index, leases = (f"{key}_probe:{uuid4().hex}" for key in broker.keys)
    keys = (unacked, index, leases, f"{unacked}:list")
    run = client.execute_command
    try:
        run("LPUSH", keys[3], "{}")
        run("EVAL", script_text("fetch", SCRIPTS).text, 4, *keys, "probe", 60, '"probe"')
        run("EVAL", script_text("renew", SCRIPTS).text, 3, *keys[:3], 60, "probe")
        run("EVAL", script_text("expired", SCRIPTS).text, 3, *keys[:3], 1)
        run("EVAL", script_text("restore", SCRIPTS).text, 4, *keys, "probe", "{}", 1, 0)
        run("HDEL", unacked, "probe")
        run("ZREM", index, "probe")
        run("DEL", *keys)
        _probe_no_reply(client)
    except ResponseError as exc:
        if isinstance(exc, _FOR_NOW) or str(exc).startswith(_FOR_NOW_TEXTS):
            return None
        return f"because Redis refused a command that it needs: {exc}"
    except (RedisError, OSError) as exc:
        logger.debug("Reliable fetch could not be tried: %r", exc)
    return None


def _probe_no_reply(client: Redis) -> None:
    """Check that ``CLIENT REPLY SKIP`` is allowed; raises its error."""
    connection = client.connection_pool.make_connection()
    try:
        commands = [("CLIENT", "REPLY", "SKIP"), ("PING",), ("ECHO", "probe")]
        connection.send_packed_command(connection.pack_commands(commands))
        connection.read_response()
    finally:
        connection.disconnect()
