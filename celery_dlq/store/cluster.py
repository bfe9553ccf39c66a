"""The client of a cluster of Redis."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.cluster import ClusterNode, RedisCluster
from redis.exceptions import RedisClusterException, RedisError
from redis.retry import Retry

from celery_dlq.store.connect import Translating, check_format, translated
from celery_dlq.store.keys import Keys

_MORE_ATTEMPTS = 3  # after each, redis-py asks the cluster for its slots again
_BETWEEN_ATTEMPTS_SECONDS = 0.1


class _Cluster(Translating, RedisCluster):
    pass


class LazyCluster:
    """A `redis.cluster.RedisCluster`, made when its first method is called.

    redis-py's own asks the cluster for its slots as soon as it is made, so that a cluster which is
    away would be an error where nothing is stored yet.
    """

    connection_pool = None  # each node has its own

    def __init__(
        self,
        connections: list[dict[str, Any]],
        place: str,
        keys: Keys | None = None,
    ) -> None:
        self._place = place
        self._keys = keys
        self._nodes = [(one["host"], one["port"]) for one in connections]
        left_out = ("host", "port", "db")  # a cluster has one database
        self._options = {k: v for k, v in connections[0].items() if k not in left_out}
        self._made: Any = None
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        with translated(self._place):
            return getattr(self._cluster(), name)

    def __del__(self) -> None:
        """Not redis-py's: it would connect in order to disconnect."""

    def time(self) -> Any:
        """Ask one node for its time, always the same one: clocks of machines differ."""
        with translated(self._place):
            return self.client_for("{app}").time()

    def client_for(self, key: str) -> Any:
        """A client of the master that holds a key, as far as is known."""
        cluster = self._cluster()
        try:
            return cluster.get_redis_connection(cluster.get_node_from_key(key))
        except (RedisClusterException, AttributeError) as exc:  # no node
            raise redis.ConnectionError(f"no node of the cluster holds the key {key!r}") from exc

    def close(self) -> None:
        """Disconnect."""
        made, self._made = self._made, None
        if made is not None:
            with suppress(Exception):
                made.close()

    def _cluster(self) -> Any:
        with self._lock:
            if self._made is None:
                try:
                    made = _Cluster(
                        startup_nodes=[ClusterNode(*node) for node in self._nodes],
                        # A master that is gone must not stop the work on the others.
                        require_full_coverage=False,
                        retry=Retry(ConstantBackoff(_BETWEEN_ATTEMPTS_SECONDS), _MORE_ATTEMPTS),
                        **self._options,
                    )
                except RedisClusterException as exc:
                    raise redis.ConnectionError(str(exc)) from exc
                try:
                    if self._keys is not None:
                        _check_cluster(self._keys, made)
                except Exception:
                    made.close()
                    raise
                made.place = self._place
                self._made = made
            return self._made


def _check_cluster(keys: Keys, cluster: Any) -> None:
    try:
        found = cluster.get(keys.format())
    except (RedisError, RedisClusterException, OSError):  # a master that is away stops no other
        return
    check_format(found)
