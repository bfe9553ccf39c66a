"""The check of a Redis when a worker starts: it writes, reads back, and runs scripts.

What heals by itself or by an operator (no connection, a replica, a full disk) is
`StoreUnavailable`. What stays until a setting, a permission or the server is changed is
`SettingsError`. An error that is not known is taken for the first kind, which stops no worker.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from redis.exceptions import ResponseError

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.letters.printable import error_without_secrets, url_without_secrets
from celery_dlq.store.connect import LazyCluster, is_refusal, unavailable
from celery_dlq.store.keys import FORMAT, Keys
from celery_dlq.store.scripts import script_text
from celery_dlq.store.slots import client_for

if TYPE_CHECKING:
    from celery_dlq.store.store import Store

OLDEST = (6, 2)
_TYPES = ("hash", "zset", "stream", "set", "string")
_MOST_QUEUES = 100
_CLUSTER = "begin its URL with redis+cluster:// (with TLS: rediss+cluster://)"


class _Fault(NamedTuple):
    """What an error of Redis means."""

    # Matches the class and the text of such an error; redis-py has cut the error's code off the
    # text if it has a class for it, and each version has others
    signs: str
    expected: str  # What was expected of the store
    remedy: str  # What to do
    error: type[SettingsError | StoreUnavailable] = SettingsError  # What is raised


_FAULTS = (
    _Fault(
        r"\bREADONLY\b|ReadOnlyError|read only replica",
        "to be a master",
        "after a failover it will be one; else name the master in its URL",
        StoreUnavailable,
    ),
    _Fault(
        r"\bOOM\b|OutOfMemoryError|used memory > 'maxmemory'",
        "to have memory left",
        "export and trim letters, or raise its maxmemory",
        StoreUnavailable,
    ),
    _Fault(
        r"\b(MISCONF|NOREPLICAS)\b",
        "to accept writes",
        "free its disk, or bring its replicas back",
        StoreUnavailable,
    ),
    _Fault(
        r"AuthenticationError|\b(WRONGPASS|NOAUTH)\b|invalid username-password|invalid password"
        r"|Authentication required|(?i:arguments for 'auth')",
        "to accept the user and password of its URL",
        "correct them there, in dlq_url or broker_url",
    ),
    _Fault(
        r"\bNOPERM\b|NoPermissionError|ACL failure|no permissions|can't (run this|access at least)"
        r"|EXEC without MULTI",
        "to allow its user what celery_dlq needs",
        "allow it with ACL SETUSER, on the keys ~{prefix}:*",
    ),
    _Fault(
        r"\b(MOVED|ASK|CROSSSLOT)\b|MovedError|AskError|CrossSlot|in cluster mode",
        "to be one server, not a node of a Redis Cluster",
        _CLUSTER,
    ),
    _Fault(
        r"cluster support disabled|[Cc]luster mode is not enabled",
        "to be a Redis Cluster",
        "begin its URL with redis:// (with TLS: rediss://)",
    ),
    _Fault(
        r"DB index|invalid DB",
        "to have the database that its URL names",
        "take another number, or raise the server's setting 'databases'",
    ),
    _Fault(
        r"(?i)(unknown|unsupported) (redis )?command",
        "to know the commands of Redis 6.2",
        "rename none, and connect to it without a proxy that leaves some out",
    ),
    _Fault(r"InvalidResponse", "to be a Redis", "correct the host and port of its URL"),
    _Fault(
        r"\bDENIED\b",
        "to accept connections from here",
        "give it a password, or set its protected-mode to no",
    ),
    _Fault(
        r"CERTIFICATE_VERIFY_FAILED|WRONG_VERSION_NUMBER",
        "to speak TLS with a certificate that is trusted here",
        "begin its URL with redis:// if it has no TLS, or set its CA and host name",
    ),
)


def check(store: Store, dead_letter_queues: Iterable[str] = ()) -> None:
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
        raise fault(shown, store.url, store.keys.prefix) from exc


def fault(exc: Exception, url: str, prefix: str) -> SettingsError | StoreUnavailable:
    """Return the error to raise for one of redis-py's; it shows no password."""
    got = error_without_secrets(exc).removesuffix(".")
    for known in _FAULTS:
        if re.search(known.signs, got):
            return known.error(_line(url, known.expected, got, known.remedy.format(prefix=prefix)))
    return unavailable(exc, url)


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


def ask(store: Store, command: str, *args: str) -> Mapping[str, Any]:
    """What one server of a store replies; empty if it forbids the command, as managed ones do."""
    try:
        reply = getattr(client_for(store.client, store.keys.nodes()), command)(*args)
    except (StoreUnavailable, ResponseError) as exc:
        if isinstance(exc, StoreUnavailable) and not is_refusal(exc):
            raise
        return {}
    return dict(reply)


def _check_connection(store: Store) -> None:
    try:
        store.connection.call("EXISTS", store.keys.queues())
    except StoreUnavailable as exc:
        if not is_refusal(exc):
            raise
        # It answers. The client will be told why it refuses.
    finally:
        store.connection.close()  # processes of a pool must not inherit it


def _check_kind(store: Store) -> None:
    server = ask(store, "info", "server")
    version = too_old(server)
    if version is not None:
        remedy = "upgrade it, or name another"
        raise SettingsError(_line(store.url, "to be Redis 6.2 or later", version, remedy))
    if is_cluster_node(server) and not isinstance(store.client, LazyCluster):
        expected = "to be one server, not a node of a Redis Cluster"
        raise SettingsError(_line(store.url, expected, "redis_mode:cluster", _CLUSTER))


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


def _line(url: str, expected: str, got: str, remedy: str) -> str:
    return f"expected the store at {url_without_secrets(url)} {expected}, got {got}; {remedy}"
