"""Reading streams of Redis in pages: each bounded, the next one asked for before it is needed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery_dlq.backends.base import RawPage
from celery_dlq.backends.redis.connect import PipelinedConnection, translated
from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.packed import fields_of

PAGE_BYTES = 8 * 1024 * 1024
"""A page that turned out larger is followed by pages of fewer entries."""

_FIRST_PAGE = 1  # nothing is known of the entries' size yet
_WEIGHED = 64  # entries of a page whose size is looked at
_GROWTH = 5  # a page has at most so many times the entries of the one before


class StreamReader:
    """Reads entries without redis-py's reply callback, which costs more than Redis itself.

    Args:
        client: Gives the settings of the connections, which are the reader's own.
        url: For messages; its password is never shown.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection = PipelinedConnection(client, url)

    def at(self, stream: str, entry: str) -> RawPage:
        """The entry of an id, if there is one."""
        return self.some(stream, entry, entry, 1)

    def some(self, stream: str, low: str, high: str, count: int) -> RawPage:
        """The first entries of a range, in one page."""
        return _page(self._read(*_xrange(stream, low, high, count, newest_first=False)))

    def pages(
        self, stream: str, after: str | None, until: str, page_size: int, *, newest_first: bool
    ) -> Iterator[RawPage]:
        """The entries after one id up to another, page by page.

        Args:
            stream: Its key.
            after: Leave out everything up to here; ``None`` for nothing.
            until: The last id; ``+`` for the end.
            page_size: Most entries a page.
            newest_first: The order.
        """
        low, high = (f"({after}" if after else "-"), until
        count = min(_FIRST_PAGE, page_size)
        ahead = ReadAhead(self._client, self._url)
        try:
            while True:
                command = _xrange(stream, low, high, count, newest_first=newest_first)
                reply = self._answer(ahead, command)
                if len(reply) == count:
                    last = reply[-1][0].decode()
                    low, high = (low, f"({last}") if newest_first else (f"({last}", high)
                    following = _next_count(reply, page_size)
                    if page_size == following == count:  # many were wanted, so more will be
                        with suppress(StoreUnavailable):  # it is asked again when it is needed
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
        """The answer to what was asked before; else it is asked now."""
        if ahead.asked == command:
            try:
                return ahead.answer()
            except StoreUnavailable:  # the connection may have been idle for too long
                ahead.close()
        return self._read(*command)

    def _read(self, *command: Any) -> Any:
        """Ask; once more if the connection turns out to be a stale one."""
        try:
            return self._connection.call(*command)
        except StoreUnavailable:
            self._connection.close()
            self._connection = PipelinedConnection(self._client, self._url)
            return self._connection.call(*command)


class ReadAhead:
    """Lets Redis work on the next page while the last one is worked on here.

    It has a connection of its own, because an answer may be left unread.

    Args:
        client: Gives the connection's settings.
        url: For messages; its password is never shown.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection: Any = None
        self.asked: tuple[Any, ...] | None = None

    def ask(self, *command: Any) -> None:
        """Send a command.

        Raises:
            StoreUnavailable: Redis does not take it.
        """
        with translated(self._url):
            if self._connection is None:
                self._connection = self._client.connection_pool.make_connection()
                self._connection.connect()
            self._connection.send_command(*command, check_health=False)
        self.asked = command

    def answer(self) -> Any:
        """Wait for the answer to what was asked.

        Raises:
            StoreUnavailable: Redis does not answer or refuses.
        """
        self.asked = None
        with translated(self._url):
            return self._connection.read_response()

    def close(self) -> None:
        """Disconnect; an answer that is on its way is not waited for."""
        self.asked = None
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
    """How many entries to read after a page, so that the next one is not too large."""
    some = reply[:: max(1, len(reply) // _WEIGHED)]  # to weigh all would cost as much as to read
    size = sum(sum(map(len, parts)) for _entry, parts in some)
    fitting = PAGE_BYTES * len(some) // (size + 1)
    return max(1, min(page_size, fitting, _GROWTH * len(reply)))
