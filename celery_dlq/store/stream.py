"""Reading Redis streams in pages that are bounded in bytes, with read-ahead.

Nobody knows the size of an entry before it is read, and the next one may be a thousand times
larger. So Redis itself ends a page (``lua/page.lua``). That costs five times what sending it does:
who reads many letters asks for the position of the last large one (``lua/parts/entry.lua``), and
reads behind it by ``XRANGE``. A page that does not arrive in time is asked for again by single
entries: the connection may be slow, and the letters large.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.packed import fields_of
from celery_dlq.store.connect import new_connection, translated
from celery_dlq.store.pipelined import Command, pipelined
from celery_dlq.store.records import FIRST_POSITION, Choice, RawPage, ordered
from celery_dlq.store.scripts import script_text
from celery_dlq.store.slots import first_key

PAGE_BYTES = 2 * 1024 * 1024
"""The entry with which a page reaches this size is its last one."""

_LOOKED_AT_BYTES = 4 * PAGE_BYTES  # of entries that Redis may leave out
_FIRST_PAGE_ENTRIES = 25  # the caller may need few
_MAX_GROWTH = 5  # a page has at most this many times the entries of the one before


class StreamReader:
    """Reads streams without redis-py's reply callback, which costs more than Redis itself."""

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection = pipelined(client, url)

    def entry_at(self, stream: str, entry: str) -> RawPage:
        """Return the entry of an id, or an empty page."""
        return self.first_page(stream, entry, entry, 1)

    def first_page(self, stream: str, low: str, high: str, count: int) -> RawPage:
        """Return the first entries of a range in one page; empty only if there are none."""
        try:
            _more, reply = self._connection.send_and_wait(*_command(stream, low, high, count))
        except StoreUnavailable:
            _more, reply = self._asked_again(_command(stream, low, high, 1))
        return _parsed_page(reply)

    def pages(
        self,
        stream: str,
        after: str | None,
        until: str,
        page_size: int,
        tally: str = "",
        *,
        newest_first: bool = False,
        choice: Choice | None = None,
    ) -> Iterator[RawPage]:
        """Iterate over the entries of a range, page by page; with a choice, oldest first.

        Large entries of the range are noted in the tally, if there is one, already.
        """
        low = f"({after}" if after else "-"
        begin, end = (until, low) if newest_first else (low, until)
        most, more, all_small = min(_FIRST_PAGE_ENTRIES, page_size), 1, False

        def command() -> Command:
            if choice is not None:
                return _choosing(choice, stream, begin, end, most)
            if all_small:
                read = "XREVRANGE" if newest_first else "XRANGE"
                return (read, stream, begin, end, "COUNT", most)
            return _command(stream, begin, end, most, newest_first=newest_first)

        ahead = ReadAhead(self._client, self._url)
        try:
            while more:
                try:
                    more, reply, *last = self._reply_of(ahead, command())
                except StoreUnavailable:
                    ahead.close()
                    most, all_small = 1, False
                    more, reply, *last = self._asked_again(command())
                if reply or last:
                    begin, before = f"({(last or reply[-1])[0].decode()}", most
                    most = min(page_size, _MAX_GROWTH * most)
                    if more and most == before:  # the caller reads much, so ask ahead
                        with suppress(StoreUnavailable):  # it is asked for again when needed
                            if tally and not all_small:
                                oldest = after if newest_first else begin[1:]
                                all_small = self._is_behind_large(tally, oldest or FIRST_POSITION)
                            ahead.send_ahead(*command())
                if reply:
                    yield _parsed_page(reply)
        finally:
            ahead.close()

    def close(self) -> None:
        """Close the connection that reads ahead."""
        self._connection.close()

    def _reply_of(self, ahead: ReadAhead, command: Command) -> Any:
        """Return the reply that was read ahead, or ask now."""
        if ahead.command != command:
            reply = self._connection.send_and_wait(*command)
        else:
            reply = ahead.wait_for_reply()
        return reply if command[0] == "EVAL" else (len(reply) == command[-1], reply)

    def _is_behind_large(self, tally: str, position: str) -> bool:
        found = self._connection.send_and_wait("HGET", tally, "large") or b"0-0"
        return ordered(found.decode()) <= ordered(position)

    def _asked_again(self, command: Command) -> Any:
        """Ask over a new connection."""
        self._connection.close()
        self._connection = pipelined(self._client, self._url)
        return self._connection.send_and_wait(*command)


class ReadAhead:
    """Lets Redis work on a command while the caller does something else.

    It has a connection of its own, because a reply may be left unread.
    """

    def __init__(self, client: Any, url: str) -> None:
        self._client = client
        self._url = url
        self._connection: Any = None
        self.command: tuple[Any, ...] | None = None

    def send_ahead(self, *command: Any) -> None:
        """Send a command."""
        with translated(self._url):
            if self._connection is None:
                client = self._client.client_for(first_key(command))
                self._connection = new_connection(client.connection_pool)
                self._connection.connect()
            self._connection.send_packed_command([_packed(command)], check_health=False)
        self.command = command

    def wait_for_reply(self) -> Any:
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


def _command(
    stream: str, begin: str, end: str, most: int, *, newest_first: bool = False
) -> Command:
    """Ask for entries from one end of a range to the other."""
    args = (begin, end, int(newest_first), most, PAGE_BYTES)
    return script_text("page").command([stream], *args)


def _choosing(choice: Choice, stream: str, begin: str, end: str, most: int) -> Command:
    """Ask for the chosen letters of a range, oldest first."""
    times = ("" if micros is None else micros for micros in (choice.since, choice.until))
    args = (begin, end, most, _LOOKED_AT_BYTES, choice.codes, *times, choice.reason)
    return script_text("select").command([stream], *args, *choice.fingerprints)


def _packed(command: Command) -> bytes:
    """A command as it is sent; of long values, in a quarter of the time that hiredis takes."""
    parts = [one if isinstance(one, bytes) else str(one).encode() for one in command]
    return b"".join([b"*%d\r\n" % len(parts), *(b"$%d\r\n%b\r\n" % (len(p), p) for p in parts)])


def _parsed_page(reply: Sequence[Any]) -> RawPage:
    return [(entry.decode(), fields_of(parts)) for entry, parts in reply]
