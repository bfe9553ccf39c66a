"""Clients of a store with several servers: one after the other, or as Sentinels name them."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

from redis.exceptions import RedisError
from redis.sentinel import Sentinel

from celery_dlq.store.address import Address


@cache
def with_failover(kind: type) -> type:
    """A connection class that goes to the next server when one does not answer, as kombu."""

    class WithFailover(kind):  # type: ignore[misc]
        def __init__(self, *, servers: deque[dict[str, Any]], **options: Any) -> None:
            super().__init__(**options)
            self._servers = servers  # of the whole pool: the one that answered comes first

        def _connect(self) -> Any:
            for last in range(len(self._servers) - 1, -1, -1):
                for name in ("host", "port", "username", "password", "db", "credential_provider"):
                    setattr(self, name, self._servers[0].get(name))
                try:
                    return super()._connect()
                except (RedisError, OSError):
                    self._servers.rotate(-1)
                    if not last:
                        raise
            return None

    return WithFailover


def master_named_by(address: Address, connections: list[dict[str, Any]], kind: type) -> Any:
    """A client of the server that the Sentinels name whenever a connection is made."""
    known = [(one["host"], one["port"]) for one in connections]
    options = {k: v for k, v in connections[0].items() if k not in ("host", "port")}
    waits = {name: options[name] for name in ("socket_timeout", "socket_connect_timeout")}
    sentinels = Sentinel(
        known,
        min_other_sentinels=int(address.options.get("min_other_sentinels") or 0),
        sentinel_kwargs={**waits, **(address.options.get("sentinel_kwargs") or {})},
        **options,
    )
    return sentinels.master_for(address.options["master_name"], kind)
