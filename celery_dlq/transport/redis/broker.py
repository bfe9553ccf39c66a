"""The Redis of a channel, and what is sent to it about unacknowledged messages."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import kombu
import redis
from kombu.transport import redis as kombu_redis
from redis import Redis
from redis.exceptions import OutOfMemoryError, ReadOnlyError

from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.store.connect import new_connection
from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.entries import lists_of, priority_of, recorded, redelivered, tag_end

SCRIPTS = "celery_dlq.transport.redis"
"""The package whose Lua scripts these are."""

CONNECT_SECONDS = 5.0
REPLY_SECONDS = 5.0
"""Maximum waits where the user has set none."""

UPGRADE = "pip install --upgrade redis"
"""The mend of a `mismatch`."""

_FOR_NOW = (OutOfMemoryError, ReadOnlyError)
_FOR_NOW_TEXTS = ("BUSY ", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A Redis as kombu's channel uses it."""

    client: Any  # A client with the channel's settings and no prefix
    url: str  # Shown in messages; without a password
    unacked: str  # Full name of kombu's hash of unacknowledged messages
    index: str  # Full name of kombu's sorted set of them
    prefix: str  # The setting `global_keyprefix`
    sep: str  # Separates a queue's name from its priority
    steps: Sequence[int]  # The priorities that have a list
    priority_of: Callable[[Any], int]  # Returns the priority of an envelope
    decode_body: Callable[..., Any]  # Decodes the body of an envelope, given its encoding

    @property
    def leases(self) -> str:
        """ZSET: tag to the time its lease ends, in seconds since 1970 by the server's clock."""
        return f"{self.unacked}_leases"

    @property
    def restored(self) -> str:
        """ZSET: tag whose lease ended to the time its message was given to others, for a day."""
        return f"{self.unacked}_restored"

    @property
    def look(self) -> str:
        """String: some worker looks for messages whose lease ended; it expires."""
        return f"{self.unacked}_look"

    @property
    def keys(self) -> tuple[str, str, str]:
        """The keys of unacknowledged messages, in the order of the scripts."""
        return (self.unacked, self.index, self.leases)

    def list_of(self, queue: str, envelope: Any, tag: str) -> str:
        """The list to which a message belongs."""
        try:
            priority = 0 if envelope is None else self.priority_of(envelope)
        except OverflowError:  # Infinity
            priority = 0
        sep, steps = lists_of(tag)
        step = steps[bisect(steps, priority) - 1]
        return f"{self.prefix}{queue}{sep}{step}" if step else f"{self.prefix}{queue}"

    @property
    def tag_end(self) -> str:
        """The end of the delivery tags of this app's workers."""
        return tag_end(self.sep, self.steps)


class Connections:
    """A channel's connections to Redis, with bounded waits."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def make_connection(self, most_seconds: float = float("inf")) -> Any:
        """A new connection, connected: redis-py 8 asks Sentinel in ``connect`` only.

        It waits at most so long for a reply; what is set afterwards changes nothing.
        """
        connection = new_connection(self._pool)
        asked = getattr(connection, "connection_pool", None)
        if asked is not None:  # Sentinel, on sockets of our own: gevent's belong to one thread
            asked, manager = copy(asked), copy(asked.sentinel_manager)
            asked.sentinel_manager, asked.connection_pool_ref = manager, lambda: None
            sentinels = []
            for one in manager.sentinels:
                pool, given = one.connection_pool, one.get_connection_kwargs()
                pool = type(pool)(pool.connection_class, **given)
                sentinels.append(Redis(connection_pool=pool))
            manager.sentinels = sentinels
            connection.connection_pool = asked
        own, connects = connection.socket_timeout, connection.socket_connect_timeout
        connection.socket_timeout = min(most_seconds, own or REPLY_SECONDS)
        connection.socket_connect_timeout = min(most_seconds, connects or CONNECT_SECONDS)
        connection.connect()
        return connection


@dataclass(frozen=True, slots=True)
class _Client:
    connection_pool: Connections


def broker_of(channel: Any) -> Broker:
    """The Redis of a channel, as the worker's leases use it; see `Broker`."""
    prefix = channel.global_keyprefix
    return Broker(
        client=_Client(Connections(channel.pool)),
        url=url_without_secrets(str(channel.connection.client.as_uri())),
        unacked=prefix + channel.unacked_key,
        index=prefix + channel.unacked_index_key,
        prefix=prefix,
        sep=channel.sep,
        steps=channel.priority_steps,
        priority_of=partial(priority_of, channel),
        decode_body=channel.decode_body,
    )


def restore(
    call: Callable[..., Any],
    broker: Broker,
    tag: str,
    *,
    first: bool = True,
    expired: bool = False,
) -> bool | None:
    """Return one message to its queue, marked as redelivered."""
    record = call("HGET", broker.unacked, tag)
    found = recorded(record) if record is not None else None
    if found is None:
        if record is not None:  # not ours: it returns by kombu's visibility timeout
            call("ZREM", broker.leases, tag)
        return None
    entry, envelope = redelivered(found[0], broker.decode_body)
    script = script_text("restore", SCRIPTS)
    keys = (*broker.keys, broker.restored, broker.list_of(found[1], envelope, tag))
    args = (tag, entry, int(first), int(expired))
    return bool(call("EVAL", script.text, len(keys), *keys, *args))


def renewal(broker: Broker, lease: float, tags: Iterable[str]) -> tuple[Any, ...]:
    """The command that renews leases; see the script for its reply."""
    script = script_text("renew", SCRIPTS)
    return ("EVAL", script.text, 4, *broker.keys, broker.restored, lease, *tags)


def removals(broker: Broker, tags: Sequence[str]) -> list[tuple[Any, ...]]:
    """The commands that acknowledge; the hash first, which is what makes it so."""
    if not tags:
        return []
    return [
        ("HDEL", broker.unacked, *tags),
        ("ZREM", broker.index, *tags),
        ("ZREM", broker.leases, *tags),
    ]


def mismatch(transport: type) -> str | None:
    """Why kombu does not work with the installed redis-py; ``None`` if it does.

    kombu 5.7 refuses redis-py below 6.1, with a traceback. Up to 6.3, a lost subscription that
    connects again waits for its own lock for ever; kombu 5.7 asks for 6.4 in its extra.
    """
    fails = kombu.VERSION >= (5, 7) and redis.VERSION < (6, 4)
    if not fails or not issubclass(transport, kombu_redis.Transport):
        return None
    return (
        f"expected redis-py 6.4 or later beside kombu {kombu.__version__}, "
        f"got {redis.__version__}: older ones are refused by kombu, or hang after a lost connection"
    )


def refuses_for_now(exc: Exception) -> bool:
    """True if Redis refuses writes in its present state: a replica, a full disk, a long script."""
    return isinstance(exc, _FOR_NOW) or str(exc).startswith(_FOR_NOW_TEXTS)
