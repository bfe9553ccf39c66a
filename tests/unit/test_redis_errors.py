"""What the errors of redis-py mean for a worker that starts; its versions differ in classes."""

from __future__ import annotations

import re
from importlib.resources import files
from types import SimpleNamespace

import pytest
import redis
from redis import exceptions
from redis.sentinel import MasterNotFoundError

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.letters.printable import error_without_secrets
from celery_dlq.store import check as redis_check
from celery_dlq.store.check import error_of, is_cluster_node, too_old
from celery_dlq.store.keys import Keys
from celery_dlq.store.scripts import script_text

URL = "redis://user:hush@redis.example:6379/0"
SHOWN = "redis://redis.example:6379/0"


def text_of(exc: Exception) -> str:
    """The line for an error: one line, without a password."""
    line = str(error_of(exc, URL, "shop"))
    assert SHOWN in line
    assert "hush" not in line
    assert "\n" not in line
    return line


AWAY = [
    redis.ConnectionError("Error 111 connecting to redis.example:6379. Connection refused."),
    redis.ConnectionError("Error -2 connecting to redis.example:6379. Name or service not known."),
    redis.ConnectionError("Connection closed by server."),
    redis.ConnectionError("max number of clients reached"),
    redis.ConnectionError("The previous master is now a slave"),
    exceptions.MaxConnectionsError("Too many connections"),
    redis.TimeoutError("Timeout reading from socket"),
    OSError(113, "No route to host"),
    redis.BusyLoadingError("Redis is loading the dataset in memory"),
    MasterNotFoundError("No master found for 'shop'"),
    exceptions.ClusterDownError("The cluster is down"),
    exceptions.MasterDownError("Link with MASTER is down and replica-serve-stale-data is no"),
    exceptions.TryAgainError("Multiple keys request during rehashing of slot"),
    redis.ResponseError("BUSY Redis is busy running a script."),
    redis.ResponseError("something new"),
    exceptions.RedisClusterException("Redis Cluster cannot be connected. Connection refused."),
    RuntimeError("the token of the credential provider could not be fetched"),
]


@pytest.mark.parametrize("exc", AWAY, ids=repr)
def test_no_connection_and_unknown_errors_are_an_outage(exc: Exception) -> None:
    """They stop no worker."""
    assert isinstance(error_of(exc, URL, "shop"), StoreUnavailable)
    assert "check that Redis runs there" in text_of(exc)


MENDED_BY_AN_OPERATOR = [
    (exceptions.ReadOnlyError("You can't write against a read only replica."), "to be a master"),
    (redis.ResponseError("READONLY You can't write against a read only replica"), "a master"),
    (exceptions.OutOfMemoryError("command not allowed when used memory > 'maxmemory'."), "memory"),
    (redis.ResponseError("HSET: OOM command not allowed"), "to have memory left"),
    (redis.ResponseError("MISCONF Redis is configured to save RDB snapshots"), "accept writes"),
    (redis.ResponseError("NOREPLICAS Not enough good replicas to write."), "accept writes"),
]


@pytest.mark.parametrize(("exc", "expected"), MENDED_BY_AN_OPERATOR, ids=repr)
def test_a_redis_that_refuses_writes_is_away_too(exc: Exception, expected: str) -> None:
    """A failover or an operator mends it, and no worker has to be started again."""
    assert isinstance(error_of(exc, URL, "shop"), StoreUnavailable)
    assert expected in text_of(exc)


WRONG = [
    (redis.AuthenticationError("invalid username-password pair or user is disabled."), "password"),
    (redis.AuthenticationError("Authentication required."), "password"),
    (redis.ResponseError("WRONGPASS invalid username-password pair"), "password"),
    (
        exceptions.AuthenticationWrongNumberOfArgsError("wrong number of arguments for 'auth'"),
        "password",
    ),
    (
        MasterNotFoundError(
            "No master found for 'shop' : <Redis(host=a,password=hush)> - "
            "AuthenticationError('invalid username-password pair or user is disabled.')"
        ),
        "password",
    ),
    (
        exceptions.RedisClusterException(
            "Redis Cluster cannot be connected. Please provide at least one reachable node: "
            "invalid username-password pair or user is disabled."
        ),
        "password",
    ),
    (
        exceptions.NoPermissionError("this user has no permissions to run the 'eval' command"),
        "ACL SETUSER, on the keys ~shop:*",
    ),
    (redis.ResponseError("NOPERM this user has no permissions"), "ACL SETUSER"),
    (
        redis.ResponseError("HSET: ERR The user executing the script can't run this command"),
        "ACL SETUSER",
    ),
    (redis.ResponseError("EXEC without MULTI"), "ACL SETUSER"),
    (redis.ResponseError("MOVED 5061 10.0.0.7:6379"), "redis+cluster://"),
    (exceptions.MovedError("5061 10.0.0.7:6379"), "redis+cluster://"),
    (redis.ResponseError("CROSSSLOT Keys in request don't hash to the same slot"), "+cluster://"),
    (redis.ResponseError("SELECT is not allowed in cluster mode"), "redis+cluster://"),
    (exceptions.RedisClusterException("Cluster mode is not enabled on this node"), "a Redis Clust"),
    (redis.ResponseError("DB index is out of range"), "to have the database"),
    (redis.InvalidResponse("Protocol Error: b'HTTP/1.1 400'"), "to be a Redis"),
    (redis.ResponseError("unknown command 'EVAL', with args beginning with: 'a'"), "Redis 6.2"),
    (
        redis.ResponseError("unknown command 'AUTH', with args beginning with: 'hush'"),
        "Redis 6.2",
    ),
    (redis.ResponseError("DENIED Redis is running in protected mode"), "protected-mode"),
    (
        redis.ConnectionError(
            "Error 1 connecting to redis.example:6379. [SSL: CERTIFICATE_VERIFY_FAILED]"
        ),
        "a certificate that is trusted",
    ),
]


@pytest.mark.parametrize(("exc", "expected"), WRONG, ids=repr)
def test_what_no_time_mends_is_a_wrong_setting(exc: Exception, expected: str) -> None:
    """Whatever its class: a refused password is a `ConnectionError` of redis-py."""
    assert isinstance(error_of(exc, URL, "shop"), SettingsError)
    line = text_of(exc)
    assert line.startswith(f"expected the store at {SHOWN} ")
    assert expected in line


@pytest.mark.parametrize(
    ("version", "old"), [("6.0.16", True), ("5.0.14", True), ("6.2.0", False), ("7.4", False)]
)
def test_the_oldest_redis_is_6_2(version: str, old: bool) -> None:
    """By what INFO says, if it is allowed and says a version."""
    assert too_old({"redis_version": version}) == (version if old else None)
    assert too_old({}) is None
    assert too_old({"redis_version": "255.255.255", "valkey_version": "9.0.0"}) is None
    assert too_old({"redis_version": "unstable"}) is None


class Server:
    """A client whose server says what INFO is told to say."""

    connection_pool = object()

    def __init__(self, **said: str) -> None:
        self._said = said

    def client_for(self, _key: str) -> Server:
        """The one server."""
        return self

    def info(self, _section: str) -> dict[str, str]:
        """What the server says of itself."""
        return self._said


class Silent:
    """A connection that has nothing to say."""

    def send_and_wait(self, *_: object) -> None:
        """Answer nothing."""

    def close(self) -> None:
        """Do nothing."""


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"redis_version": "5.0.14"}, "to be Redis 6.2 or later, got 5.0.14; upgrade it"),
        ({"redis_version": "7.2.4", "redis_mode": "cluster"}, "not a node of a Redis Cluster"),
        ({"redis_version": "7.2.4", "server_mode": "cluster"}, "not a node of a Redis Cluster"),
    ],
)
def test_a_server_of_the_wrong_kind_is_refused_before_anything_is_written(
    said: dict[str, str], expected: str
) -> None:
    """The client here can do nothing but ask."""
    with pytest.raises(SettingsError, match=re.escape(expected)):
        redis_check.check_redis(
            SimpleNamespace(client=Server(**said), url=URL, keys=Keys(), connection=Silent())  # type: ignore[arg-type]
        )


def test_both_spellings_of_a_cluster_are_known() -> None:
    """Redis says redis_mode, Valkey server_mode."""
    assert is_cluster_node({"redis_mode": "cluster"})
    assert is_cluster_node({"server_mode": "cluster"})
    assert not is_cluster_node({"redis_mode": "standalone"})


def test_secrets_are_cut_out_of_errors() -> None:
    """Redis repeats arguments, and some versions of redis-py print the settings of a client."""
    told = OSError("<Redis(username=a,password=hu,sh!)>, b,ssl=False)>\nsecond line")
    assert error_without_secrets(told) == (
        "OSError: <Redis(username=a,password=**)>, b,ssl=False)> second line"
    )


# -- the commands that are tried --------------------------------------------------------

REDRIVE_ONLY = {"LLEN", "LPUSH", "SELECT"}
"""On the lists of the broker, in its database, not on our keys."""

NO_COMMANDS = {
    "CLIENT_FOR",
    "CLOSE",
    "CONNECTION_POOL",
    "EVAL",
    "EVALSHA",
    "EXECUTE",
    "EXECUTE_COMMAND",
    "GET_CONNECTION_KWARGS",
}
NO_COMMANDS |= {"GET_PRIMARIES", "PIPELINE", "PING", "INFO", "PLACE", "SCRIPT_LOAD"}
"""Names in Python that are no command on a key; those of scripts are tried in Python."""


DONE_WITHOUT = {"MEMORY_USAGE"}
"""Where they are forbidden, an overview lacks the number."""


def sources(folder: str, ending: str) -> str:
    """The text of the Redis backend's modules or scripts."""
    root = files("celery_dlq.store").joinpath(folder)
    paths = [p for p in root.iterdir() if p.name.endswith(ending) and p.name != "check.lua"]
    return "\n".join(path.read_text("utf-8") for path in paths)


def test_every_command_is_tried_at_the_start() -> None:
    """A user who may not run one is refused then, not when the first letter is to be stored."""
    lua = sources("lua", ".lua") + sources("lua/parts", ".lua")
    used = set(re.findall(r"(?:redis\.p?call|for_all)\('([A-Z]+)'", lua)) - REDRIVE_ONLY
    python = sources("", ".py")
    for name in re.findall(r"(?:\b_client|\bclient|\bpipe)\.(\w+)\b", python):
        used.add(name.upper().removesuffix("_ITER").replace("XINFO_STREAM", "XINFO"))
    used |= set(re.findall(r'\("([A-Z]{3,})", self\._keys', python))
    used -= NO_COMMANDS | DONE_WITHOUT
    tried = set(re.findall(r"'([A-Z]{3,})'", script_text("check").text)) | {"DEL", "DELETE"}
    assert used - tried == set()
    assert {"HSET", "XADD", "XREVRANGE", "ZADD", "HSCAN", "SADD"} <= used
