"""Reading Redis streams in bounded pages, with read-ahead."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.packed import fields_of
from celery_dlq.store.connect import new_connection, translated
from celery_dlq.store.records import RawPage
from celery_dlq.store.slots import client_for, pipelined

PAGE_BYTES = 8 * 1024 * 1024
"""A larger page is followed by pages of fewer entries."""

_FIRST_PAGE_ENTRIES = 1  # nothing is known yet of the size of entries
_SAMPLED_ENTRIES = 32  # entries of a page whose size is measured
_MAX_GROWTH = 5  # a page has at most this many times the entries of the one before


class StreamReader:
    """Reads streams without redis-py's reply callback, which costs more than Redis itself."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection = pipelined(client, url)

    def at(self, stream: str, entry: str) -> RawPage:
        """Return the entry of an id, or an empty page."""
        return self.some(stream, entry, entry, 1)

    def some(self, stream: str, low: str, high: str, count: int) -> RawPage:
        """Return the first entries of a range in one page."""
        return _page(self._read(*_xrange(stream, low, high, count, newest_first=False)))

    def pages(
        self, stream: str, after: str | None, until: str, page_size: int, *, newest_first: bool
    ) -> Iterator[RawPage]:
        """Iterate over the entries of a range, page by page."""
        low, high = (f"({after}" if after else "-"), until
        count = min(_FIRST_PAGE_ENTRIES, page_size)
        ahead = ReadAhead(self._client, self._url)
        try:
            while True:
                command = _xrange(stream, low, high, count, newest_first=newest_first)
                reply = self._answer(ahead, command)
                if len(reply) == count:
                    last = reply[-1][0].decode()
                    low, high = (low, f"({last}") if newest_first else (f"({last}", high)
                    following = _next_count(reply, page_size)
                    if page_size == following == count:  # the caller reads much, so ask ahead
                        with suppress(StoreUnavailable):  # it is asked for again when needed
                            ahead.ask(
                                *_xrange(stream, low, high, following, newest_first=newest_first)
                            )
                if reply:
                    yield _page(reply)
                if len(reply) < count:
                    return
                count = following
        finally:
            ahead.close()

    def close(self) -> None:
        """Disconnect."""
        self._connection.close()

    def _answer(self, ahead: ReadAhead, command: Sequence[Any]) -> Any:
        """Return the reply that was read ahead, or ask now."""
        if ahead.command == command:
            try:
                return ahead.answer()
            except StoreUnavailable:  # Redis may have closed the idle connection
                ahead.close()
        return self._read(*command)

    def _read(self, *command: Any) -> Any:
        """Ask, and once more over a new connection if that fails."""
        try:
            return self._connection.call(*command)
        except StoreUnavailable:
            self._connection.close()
            self._connection = pipelined(self._client, self._url)
            return self._connection.call(*command)


class ReadAhead:
    """Lets Redis work on a command while the caller does something else.

    It has a connection of its own, because a reply may be left unread.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection: Any = None
        self.command: tuple[Any, ...] | None = None

    def ask(self, *command: Any) -> None:
        """Send a command."""
        with translated(self._url):
            if self._connection is None:
                client = client_for(self._client, command[1])
                self._connection = new_connection(client.connection_pool)
                self._connection.connect()
            self._connection.send_command(*command, check_health=False)
        self.command = command

    def answer(self) -> Any:
        """Wait for the reply to the command."""
        self.command = None
        with translated(self._url):
            return self._connection.read_response()

    def close(self) -> None:
        """Disconnect without waiting for a reply."""
        self.command = None
        if self._connection is not None:
            with suppress(Exception):
                self._connection.disconnect()
            self._connection = None


def _xrange(stream: str, low: str, high: str, count: int, *, newest_first: bool) -> tuple[Any, ...]:
    order = ("XREVRANGE", stream, high, low) if newest_first else ("XRANGE", stream, low, high)
    return (*order, "COUNT", count)


def _page(reply: Sequence[Any]) -> RawPage:
    return [(entry.decode(), fields_of(parts)) for entry, parts in reply]


def _next_count(reply: Sequence[Any], page_size: int) -> int:
    """Return the number of entries to read next, so that the page does not become too large."""
    some = reply[:: max(1, len(reply) // _SAMPLED_ENTRIES)]  # measuring all costs like reading
    size = sum(sum(map(len, parts)) for _entry, parts in some)
    fitting = PAGE_BYTES * len(some) // (size + 1)
    return max(1, min(page_size, fitting, _MAX_GROWTH * len(reply)))
