"""Warns of letters and counts that nothing bounds, and that the server may delete by itself."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

from celery_dlq.config import Settings
from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.address import SCHEMES, SOCKETS
from celery_dlq.store.records import ServerMemory

_MAX_NAMES_SHOWN = 5
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
        if memory is None:
            return []
        if not (self._table.queues or self._table.tasks):
            return []
        found = []
        unbounded = self._table.unbounded(self._queues)
        if unbounded and self._is_brokers():
            found.append(
                f"The letters of {_names(unbounded)} are kept for ever in the broker's Redis: set "
                f"dead_letter_ttl or dead_letter_max_length, or give them a Redis of their own "
                f"(dlq_url)"
            )
        if not memory.maximum:
            found.append(
                "The Redis of the letters has no maxmemory, so they may take all memory of its "
                "machine, and dlq_memory_limit does nothing: set maxmemory"
            )
        if memory.maximum and memory.policy.startswith("allkeys"):
            found.append(
                f"At its maxmemory Redis may delete letters and counts of deliveries "
                f"(maxmemory-policy is {memory.policy}): set noeviction"
            )
        elif memory.maximum and memory.policy.startswith("volatile"):
            found.append(
                f"At its maxmemory Redis may delete counts of deliveries, and a message is then "
                f"counted from 1 again (maxmemory-policy is {memory.policy}): set noeviction"
            )
        return found

    def _is_brokers(self) -> bool:
        """True if a server keeps letters and messages, in whichever of its databases."""
        address, _prefix = self._settings.store_at(self._conf)
        urls = self._conf.broker_write_url
        broker = urls.split(";") if isinstance(urls, str) else urls or ()
        servers = {_server(url) for url in broker if str(url).partition("://")[0] in SCHEMES}
        return not servers.isdisjoint(map(_server, address.urls))


def _server(url: object) -> tuple[str, str]:
    """Host and port, or the path of a socket; databases of one server share its memory."""
    parts = urlsplit(url_without_secrets(str(url)))
    if parts.scheme in SOCKETS:
        return ("", parts.path)
    host = parts.hostname or "localhost"
    return ("localhost" if host in _LOOPBACK else host, str(parts.port or _REDIS_PORT))


def _names(names: Sequence[str]) -> str:
    more = len(names) - _MAX_NAMES_SHOWN
    shown = ", ".join(names[:_MAX_NAMES_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
