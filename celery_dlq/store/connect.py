"""Reaching Redis: the one place that makes clients, whose errors are `StoreUnavailable`."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import redis
from redis.backoff import NoBackoff
from redis.exceptions import NoScriptError, RedisClusterException, RedisError, ResponseError
from redis.retry import Retry

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import error_without_secrets, url_without_secrets
from celery_dlq.store.address import Address, AddressKind, address_of
from celery_dlq.store.keys import FORMAT, Keys

_CLIENT_NAME = "celery_dlq"


class Translating:
    """Mixed in front of a client of redis-py: its errors become `StoreUnavailable`."""

    place: str | None = None  # shown in the errors; `None` while the client is being made

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Translate the errors of one command."""
        with translated(self.place):
            return super().execute_command(*args, **options)  # type: ignore[misc]

    def pipeline(self, *args: Any, **options: Any) -> Any:
        """Translate the errors of many commands."""
        pipe = super().pipeline(*args, **options)  # type: ignore[misc]
        pipe.execute = translated(self.place)(pipe.execute)
        return pipe


class DirectClient(Translating, redis.Redis):
    """The client of one server."""

    def client_for(self, _key: str) -> Any:
        """The client of the server that holds a key: this one."""
        return self


class LaterFormatError(redis.ConnectionError):
    """The store has a format that this version does not know; it counts as away."""


def connect(
    where: Address | str,
    timeout_seconds: float | None,
    *,
    retries: int = 1,
    keys: Keys | None = None,
) -> Any:
    """Return a client; nothing is sent yet. No other module makes one."""
    address = address_of(where) if isinstance(where, str) else where
    common: dict[str, Any] = {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": timeout_seconds,
        "protocol": 2,
    }
    clustered = address.kind is AddressKind.CLUSTER  # where redis-py has greeted the server already
    common["redis_connect_func"] = name_connection if clustered else partial(_on_connect, keys)
    found = [{**common, **one} for one in address.connections()]
    if clustered:
        from celery_dlq.store.cluster import LazyCluster  # noqa: PLC0415 - few have one

        return LazyCluster(found, str(address), keys)
    # Before version 6, redis-py retries only what is named.
    errors = [redis.ConnectionError, redis.TimeoutError]
    retry: dict[str, Any] = {"retry": Retry(NoBackoff(), retries), "retry_on_error": errors}
    if address.kind is AddressKind.SENTINELS:
        from celery_dlq.store.failover import master_named_by  # noqa: PLC0415 - as above

        client = master_named_by(address, [{**one, **retry} for one in found], DirectClient)
    else:
        client = DirectClient.from_pool(redis.ConnectionPool(**retry, **_of_servers(found)))
    client.place = str(address)
    return client


def name_connection(connection: Any) -> None:
    """Name a connection in ``CLIENT LIST``; redis-py would refuse a user who may not."""
    connection.send_command("CLIENT", "SETNAME", _CLIENT_NAME)
    with suppress(ResponseError):
        connection.read_response()


def _on_connect(keys: Keys | None, connection: Any) -> None:
    connection.on_connect()
    name_connection(connection)
    if keys is None:
        return
    connection.send_command("GET", keys.format())
    try:
        check_format(connection.read_response())
    except ResponseError:  # what is done next is refused, too, and says why
        return


def check_format(found: Any) -> None:
    """Refuse a format that this version does not know."""
    if found is not None and found != b"%d" % FORMAT:
        raise LaterFormatError(found.decode("utf-8", "backslashreplace")[:20])


def _of_servers(connections: list[dict[str, Any]]) -> dict[str, Any]:
    """The arguments of a pool whose connections go to the first server that answers."""
    first = dict(connections[0])
    if "path" in first:
        first.pop("socket_connect_timeout")
        return {**first, "connection_class": redis.UnixDomainSocketConnection}
    kind = redis.SSLConnection if first.pop("ssl", False) else redis.Connection
    if len(connections) == 1:
        return {**first, "connection_class": kind}
    from celery_dlq.store.failover import with_failover  # noqa: PLC0415 - most name one server

    return {**first, "connection_class": with_failover(kind), "servers": deque(connections)}


def is_cluster(client: Any) -> bool:
    """True for the client of a cluster: each of its nodes has a pool."""
    return client.connection_pool is None


def new_connection(pool: Any) -> Any:
    """Return a connection like those of a pool, but not of it; who asked for it closes it.

    The pool's own method counts each towards ``max_connections``, for ever. That is 100 if it
    is not set, since redis-py 8: then a process could reconnect, or read ahead, 100 times.
    """
    if isinstance(pool, redis.ConnectionPool):
        return pool.connection_class(**redis.Redis(connection_pool=pool).get_connection_kwargs())
    return pool.make_connection()  # a broker's, see `celery_dlq.transport.redis.broker`


def unavailable(exc: Exception, url: str) -> StoreUnavailable:
    """Return the error for a failure of Redis; it shows no password."""
    if isinstance(exc, LaterFormatError):
        return StoreUnavailable(
            f"expected the store at {url_without_secrets(url)} to have the format {FORMAT}, got "
            f"{str(exc)!r}, which a later celery_dlq wrote; install that version here"
        )
    with suppress(ImportError):  # where the package was replaced below a process; it only advises
        from celery_dlq.store.faults import known_fault  # noqa: PLC0415 - most stores have none

        if (known := known_fault(exc, url)) is not None:
            return StoreUnavailable(str(known))
    error = error_without_secrets(exc).rstrip(".")
    return StoreUnavailable(
        f"the store at {url_without_secrets(url)} failed with {error}; check that Redis runs there "
        f"and accepts writes, and that dlq_url is right"
    )


def is_refusal(exc: StoreUnavailable) -> bool:
    """True if Redis answered, but did not do it."""
    return isinstance(exc.__cause__, ResponseError)


@contextmanager
def translated(url: str | None) -> Iterator[None]:
    """Translate the errors of redis-py to `StoreUnavailable`.

    A refusal (read-only, full, loading, no permission, a key of another type) is treated like
    silence: nothing was stored, and a later attempt may succeed.
    """
    try:
        yield
    except NoScriptError:
        raise
    except (RedisError, RedisClusterException, OSError) as exc:
        if url is None:
            raise
        raise unavailable(exc, url) from exc
