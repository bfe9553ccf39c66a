"""The check of a Redis when a worker starts: it writes, reads back, and runs scripts.

Its errors are those of `celery_dlq.store.faults`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from redis.exceptions import ResponseError

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.store.connect import is_cluster, is_refusal, unavailable
from celery_dlq.store.keys import FORMAT, Keys
from celery_dlq.store.scripts import script_text

if TYPE_CHECKING:
    from celery_dlq.store.store import Store

OLDEST = (6, 2)
_TYPES = ("hash", "zset", "stream", "set", "string")
_MOST_QUEUES = 100


def check_redis(store: Store, dead_letter_queues: Iterable[str] = ()) -> None:
    """Check that a Redis does all that is asked of it; leaves nothing behind but its format."""
    try:
        _check_connection(store)
        _check_kind(store)
        _check_commands(store.client, store.keys, dict.fromkeys(dead_letter_queues))
    except SettingsError:
        raise
    except Exception as exc:  # a credential provider, for one, may raise anything
        cause = exc.__cause__ if isinstance(exc, StoreUnavailable) else exc
        shown = cause if isinstance(cause, Exception) else exc
        raise error_of(shown, store.url, store.keys.prefix) from exc


def error_of(exc: Exception, url: str, prefix: str) -> SettingsError | StoreUnavailable:
    """Return the error to raise for one of redis-py's; it shows no password."""
    from celery_dlq.store.faults import known_fault  # noqa: PLC0415 - a good store needs none

    return known_fault(exc, url, prefix) or unavailable(exc, url)


def too_old(server: Mapping[str, Any]) -> str | None:
    """The version that ``INFO`` tells, if that is below `OLDEST`."""
    version = str(server.get("redis_version", ""))
    with suppress(ValueError):
        if version and tuple(map(int, version.split(".")[:2])) < OLDEST:
            return version
    return None


def is_cluster_node(server: Mapping[str, Any]) -> bool:
    """True if ``INFO`` tells of a node of a cluster, of Redis or of Valkey."""
    return "cluster" in (server.get("redis_mode"), server.get("server_mode"))


def reply_of_server(store: Store, command: str, *args: str) -> Mapping[str, Any]:
    """What one server of a store replies; empty if it forbids the command, as managed ones do."""
    try:
        reply = getattr(store.client.client_for(store.keys.nodes()), command)(*args)
    except (StoreUnavailable, ResponseError) as exc:
        if isinstance(exc, StoreUnavailable) and not is_refusal(exc):
            raise
        return {}
    return dict(reply)


def _check_connection(store: Store) -> None:
    try:
        store.connection.send_and_wait("EXISTS", store.keys.queues())
    except StoreUnavailable as exc:
        if not is_refusal(exc):
            raise
        # It answers. The client will be told why it refuses.
    finally:
        store.connection.close()  # processes of a pool must not inherit it


def _check_kind(store: Store) -> None:
    server = reply_of_server(store, "info", "server")
    version = too_old(server)
    if version is None and (is_cluster(store.client) or not is_cluster_node(server)):
        return
    from celery_dlq.store.faults import CLUSTER, fault_line  # noqa: PLC0415 - as above

    expected, got, remedy = (
        "to be one server, not a node of a Redis Cluster",
        "redis_mode:cluster",
        CLUSTER,
    )
    if version is not None:
        expected, got, remedy = "to be Redis 6.2 or later", version, "upgrade it, or name another"
    raise SettingsError(fault_line(store.url, expected, got, remedy))


def _check_commands(client: Any, keys: Keys, dead_letter_queues: Iterable[str]) -> None:
    """Run all commands on keys like the real ones; the keys of one script share a hash tag."""
    script, token = script_text("check"), uuid4().hex
    names = [*dead_letter_queues][:_MOST_QUEUES] or ["check"]
    of_queue, of_app = (
        [keys.check(name, f"{token}:{kind}") for kind in _TYPES] for name in (names[0], "app")
    )
    client.delete(of_app[0])  # first, because the scripts end with it
    for key in (keys.queues(), *map(keys.letters, names)):
        client.eval("return 0", 1, key)
    client.script_load(script.text)
    refusals = client.evalsha(script.digest, len(of_app), *of_app)
    refusals = refusals or client.eval(script.text, len(of_queue), *of_queue)
    if refusals:
        pairs = [refusal.decode(errors="replace").partition(" ") for refusal in refusals]
        raise ResponseError(f"{', '.join(command for command, _, _ in pairs)}: {pairs[0][2]}")
    client.set(keys.format(), FORMAT, nx=True)
