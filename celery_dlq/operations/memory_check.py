"""What endangers letters and counts in the memory of Redis.

What nothing bounds, the server may delete by itself, or it may be full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import urlsplit

from celery_dlq.config import Settings
from celery_dlq.letters.printable import some_of, url_without_secrets
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.address import SCHEMES, SOCKETS
from celery_dlq.store.worker_records import ServerMemory

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_REDIS_PORT = 6379


class MemoryCheck:
    """Finds what endangers an app's letters in the memory of Redis."""

    def __init__(
        self,
        settings: Settings,
        table: PolicyTable,
        queues: Iterable[str],
        conf: Any,
        read: Callable[[], ServerMemory | None],
    ) -> None:
        self._settings = settings
        self._table = table
        self._queues = queues
        self._conf = conf
        self._read = read

    def memory(self) -> ServerMemory | None:
        """The memory of the Redis that keeps counts and letters; ``None`` if unknown."""
        return self._read()

    def warnings(self, memory: ServerMemory | None = None) -> list[str]:
        """What endangers letters or counts, a line each with what to do; empty if unknown.

        ``memory`` is what was read before, if it was.
        """
        memory = memory or self._read()
        if memory is None or not (self._table.queues or self._table.tasks):
            return []
        unbounded, found = self._table.unbounded(self._queues), memory_faults(memory)
        if unbounded and is_brokers(self._settings, self._conf):
            text = f"The letters of {some_of(unbounded)} are kept for ever in the broker's Redis"
            mend = (
                "set dead_letter_ttl or dead_letter_max_length, or give them a Redis of their own"
            )
            found = [(text, f"{mend} (dlq_url)"), *found]
        return [f"{text}: {mend}" for text, mend in found]


def is_brokers(settings: Settings, conf: Any) -> bool:
    """True if letters and the broker's messages are on one server."""
    address, _prefix = settings.store_at(conf)
    urls = conf.broker_write_url
    broker = urls.split(";") if isinstance(urls, str) else urls or ()
    servers = {server_of(url) for url in broker if str(url).partition("://")[0] in SCHEMES}
    return not servers.isdisjoint(map(server_of, address.urls))


def memory_faults(memory: ServerMemory) -> list[tuple[str, str]]:
    """What endangers letters or counts in a server's memory, each with what to do."""
    if not memory.maximum:
        text = (
            "The Redis of the letters has no maxmemory, so they may take all memory of its "
            "machine, and dlq_memory_limit does nothing"
        )
        return [(text, "set maxmemory")]
    policy = f"(maxmemory-policy is {memory.policy})"
    if memory.policy.startswith("allkeys"):
        text = f"At its maxmemory Redis may delete letters and counts of deliveries {policy}"
        return [(text, "set noeviction")]
    if memory.policy.startswith("volatile"):
        text = "At its maxmemory Redis may delete counts of deliveries, and a message is then"
        return [(f"{text} counted from 1 again {policy}", "set noeviction")]
    return []


def server_of(url: object) -> tuple[str, str]:
    """Host and port, or the path of a socket; databases of one server share its memory."""
    parts = urlsplit(url_without_secrets(str(url)))
    if parts.scheme in SOCKETS:
        return ("", parts.path)
    host = parts.hostname or "localhost"
    return ("localhost" if host in _LOOPBACK else host, str(parts.port or _REDIS_PORT))
