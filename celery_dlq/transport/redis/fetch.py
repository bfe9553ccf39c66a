"""Reliable fetch for one worker: whether it can be used here, and turning it on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from uuid import uuid4

from kombu.transport import redis as kombu_redis
from redis import Redis
from redis.exceptions import RedisError, ResponseError

from celery_dlq.config import Settings, visibility_timeout
from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.logs import get_logger
from celery_dlq.metrics import LOST_LEASES, RESTORED, STORE_ERRORS, Metric
from celery_dlq.store.check import is_cluster_node, too_old
from celery_dlq.store.scripts import script_text
from celery_dlq.transport.held import WatchedFetch
from celery_dlq.transport.redis.broker import SCRIPTS, broker_of, refuses_for_now
from celery_dlq.transport.redis.channel import reliable
from celery_dlq.transport.redis.keeper import LeaseKeeper
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


class ReliableFetch(WatchedFetch):
    """Turns reliable fetch on for the connections of one worker's consumer."""

    def __init__(self, settings: Settings, options: Mapping[str, Any] | None) -> None:
        super().__init__()
        self._wanted = settings.reliable_fetch
        self.leases = Leases(settings.lease_for(visibility_timeout("redis", options)))
        self._keeper = LeaseKeeper(self.leases)
        self._emulates = bool((options or {}).get("ack_emulation", True))
        self._refusal: str | None = None

    def _connect(self, connection: Any, ensure_connected: Callable[[Any], Any]) -> Any:
        base = connection.get_transport_cls()
        reason = self._unsupported(base)
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

    def _totals(self) -> Mapping[Metric, int]:
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
            name = f"{transport.__module__}.{transport.__qualname__}"
            return f"expected a Redis transport of kombu, got {name}"
        if not self._emulates:
            return "expected broker_transport_options['ack_emulation'] to be True, got False"
        return None


def refusal(channel: Any) -> str | None:
    """The reason why a Redis cannot be used; ``None`` if it can, or cannot be asked now.

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
        _probe(client.execute_command, broker_of(channel).keys)
    except ResponseError as exc:
        if refuses_for_now(exc):  # no reason to fall back
            return None
        if is_cluster_node(server):
            return f"expected a broker that is no Redis Cluster, or all its keys in one slot: {exc}"
        return f"expected Redis to allow what it needs, got {exc}"
    except (RedisError, OSError) as exc:
        logger.debug("Reliable fetch could not be tried: %r", exc)
    return None


def _probe(run: Callable[..., Any], names: Sequence[str]) -> None:
    unacked, index, leases = (f"{name}_probe:{uuid4().hex}" for name in names)
    entries, restored = f"{unacked}:list", f"{unacked}:restored"
    keys, all_keys = (unacked, index, leases, entries), (unacked, index, leases, restored, entries)
    fetch = script_text("fetch", SCRIPTS)
    run("LPUSH", entries, "{}")
    run("EVAL", fetch.text, 4, *keys, "probe", 60, '"probe"')
    run("EVALSHA", fetch.digest, 4, *keys, "probe", 60, '"probe"')
    run("EVAL", script_text("renew", SCRIPTS).text, 4, *all_keys[:4], 60, "probe")
    run("EVAL", script_text("expired", SCRIPTS).text, 3, *keys[:3], 1)
    run("HGET", unacked, "probe")
    run("EVAL", script_text("restore", SCRIPTS).text, 5, *all_keys, "probe", "{}", 1, 0)
    run("ZREMRANGEBYSCORE", restored, 0, 0)
    run("HDEL", unacked, "probe")
    run("ZREM", index, "probe")
    run("DEL", *keys)
