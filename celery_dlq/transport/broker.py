"""The Redis of a channel, and what is sent to it about unacknowledged messages."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import OutOfMemoryError, ReadOnlyError

from celery_dlq.backends.redis.scripts import script_text
from celery_dlq.transport.entries import recorded, redelivered

SCRIPTS = "celery_dlq.transport"
"""The package whose Lua scripts these are."""


_FOR_NOW = (OutOfMemoryError, ReadOnlyError)
_FOR_NOW_TEXTS = ("BUSY ", "MASTERDOWN", "MISCONF", "NOREPLICAS", "OOM", "READONLY")


@dataclass(frozen=True, slots=True, kw_only=True)
class Broker:
    """A Redis as kombu's channel uses it.

    Attributes:
        client: A client with the channel's settings and no prefix.
        url: Shown in messages; without a password.
        unacked: Full name of kombu's hash of unacknowledged messages.
        index: Full name of kombu's sorted set of them.
        prefix: The setting ``global_keyprefix``.
        sep: Separates a queue's name from its priority.
        steps: The priorities that have a list.
        priority_of: Returns the priority of an envelope.
    """

    client: Any
    url: str
    unacked: str
    index: str
    prefix: str
    sep: str
    steps: Sequence[int]
    priority_of: Callable[[Any], int]

    @property
    def leases(self) -> str:
        """ZSET: tag to the time its lease ends, in seconds since 1970 by the server's clock."""
        return f"{self.unacked}_leases"

    @property
    def keys(self) -> tuple[str, str, str]:
        """The keys of unacknowledged messages, in the order of the scripts."""
        return (self.unacked, self.index, self.leases)

    def list_of(self, queue: str, envelope: Any) -> str:
        """The list to which a message belongs; ``envelope`` is ``None`` if it is unreadable."""
        priority = 0 if envelope is None else self.priority_of(envelope)
        step = self.steps[bisect(self.steps, priority) - 1]
        return f"{self.prefix}{queue}{self.sep}{step}" if step else f"{self.prefix}{queue}"


def restore(
    call: Callable[..., Any],
    broker: Broker,
    tag: str,
    *,
    first: bool = True,
    expired: bool = False,
) -> bool:
    """Return one message to its queue, marked as redelivered.

    Args:
        call: Sends a command and returns its reply.
        broker: The Redis.
        tag: The message's.
        first: True to make it the next that is fetched.
        expired: True to leave it if its lease was renewed.

    Returns:
        True if it was there.
    """
    record = call("HGET", broker.unacked, tag)
    found = recorded(record) if record is not None else None
    if found is None:
        return False
    entry, envelope = redelivered(found[0])
    script = script_text("restore", SCRIPTS)
    keys = (*broker.keys, broker.list_of(found[1], envelope))
    args = (tag, entry, int(first), int(expired))
    return bool(call("EVAL", script.text, len(keys), *keys, *args))


def renewal(broker: Broker, lease: float, tags: Iterable[str]) -> tuple[Any, ...]:
    """The command that renews leases; its reply has the tags that have none any more."""
    script = script_text("renew", SCRIPTS)
    return ("EVAL", script.text, 2, broker.index, broker.leases, lease, *tags)


def removals(broker: Broker, tags: Sequence[str]) -> list[tuple[Any, ...]]:
    """The commands that acknowledge; the hash first, which is what makes it so."""
    if not tags:
        return []
    return [
        ("HDEL", broker.unacked, *tags),
        ("ZREM", broker.index, *tags),
        ("ZREM", broker.leases, *tags),
    ]


def refuses_for_now(exc: Exception) -> bool:
    """True if Redis refuses writes in its present state: a replica, a full disk, a long script."""
    return isinstance(exc, _FOR_NOW) or str(exc).startswith(_FOR_NOW_TEXTS)
