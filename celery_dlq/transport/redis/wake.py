"""What wakes an idle worker: a channel's connection, and waiting for several at once.

Of all idle workers that consume the same lists, one is on duty. Redis tells it when a list changes
(client-side caching, RESP3): ``EXISTS`` arms its connection and looks in one step; after that,
Redis sends one message when any of the lists is written. Nothing is popped, and the message means
no more than "look".

The others wait in ``BRPOP`` for a bell, a list of at most four tokens that carry no message. The
first fetch after a wake-up rings it if it leaves more in the lists; else its worker is on duty, if
nobody is. It stays so without room for another: told of one, it gives the duty up, and rings; at
once where tasks run in the event loop, which cannot look meanwhile. So a message costs the same
with two idle workers and with a thousand, and a flood wakes up to four times as many in each step.
Each second, the thread of a worker that waits looks, and rings a bell of its own if nobody fetches
a message, or is on duty: whoever hangs or dies delays messages by a second, and loses none. The
connection tells of changes to other keys, too, see `Watch`.

Source: https://redis.io/docs/latest/develop/reference/client-side-caching/ and
``MultiChannelPoller`` in https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from queue import Empty
from ssl import SSLWantReadError
from typing import Any

import hiredis
from kombu.transport import redis as kombu_redis
from redis.exceptions import (
    AuthenticationError,
    BusyLoadingError,
    NoScriptError,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError

LOOK_SECONDS = 1.0
"""Between two calls of the timer; an idle connection, which others may close, asks every two."""

TRACKED = ("CLIENT", "CACHING", "YES"), b"OK"
"""Asks that Redis tells when a key of the next command is written."""

FETCH = "fetch"
"""Stands for the command that fetches, whose reply is for the channel."""

_CHUNK = 65536


class Watch:
    """Keys of the store, on the broker's server, of whose changes a fetch connection tells."""

    def __init__(self, keys: Sequence[str] = ()) -> None:
        self.keys = tuple(keys)
        self.tells = False
        self._news = True

    def was_unchanged(self) -> bool:
        """True if a change since the last call would have been told, and there was none."""
        news, self._news = self._news, not self.tells
        return not news

    def set_told(self, *, tells: bool) -> None:
        """Something changed, or may have until now."""
        self.tells, self._news = tells, True


_ERRORS: dict[str, type[RedisError]] = {
    "NOSCRIPT": NoScriptError,
    # kombu connects anew
    "LOADING": BusyLoadingError,
    "NOAUTH": AuthenticationError,
}


def reply_error(text: str) -> Exception:
    """The exception of redis-py for an error of Redis, whose first word says which it is."""
    return _ERRORS.get(text.partition(" ")[0], ResponseError)(text)


class FetchConnection:
    """A channel's connection that fetches, waits and listens.

    redis-py connects; its versions differ in how they read messages that are no replies.
    """

    def __init__(self, make: Callable[..., Any], watch: Watch) -> None:
        self._make = make
        self._watch = watch
        self._asked: deque[tuple[str, object]] = deque()
        self._reader: Any = None
        self.connection: Any = None
        self.tracks = False  # Redis tells of what is written

    def open(self, *, tracks: bool) -> Any:
        """Connect and return the socket."""
        connection = self._make(**({"protocol": 3} if tracks else {}))
        try:
            connection.connect()
            if tracks:
                connection.send_command("CLIENT", "TRACKING", "ON", "OPTIN")
                connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        self._reader = hiredis.Reader(protocolError=RedisConnectionError, replyError=reply_error)
        self.connection, self.tracks = connection, tracks
        return connection._sock  # noqa: SLF001 - as kombu registers its own

    def awaits_reply(self, name: str | None = None) -> bool:
        """True until all replies, or those to one command, are read."""
        return any(name in (None, asked) for asked, _ in self._asked)

    def send(self, *questions: Any, fetch: Sequence[bytes] = ()) -> None:
        """Send the command that fetches, and others, each with the reply that is no news."""
        if questions and self._watch.keys and not self._watch.tells and not self._asked:
            questions = (TRACKED, (("EXISTS", *self._watch.keys), self._watch), *questions)
        packed = self.connection.pack_commands([command for command, _ in questions])
        packed = [b"".join((*fetch, *packed))] if fetch else packed  # redis-py writes each
        self._asked += [(FETCH, None)] if fetch else []
        self._asked += ((str(command[0]), expected) for command, expected in questions)
        # Not redis-py's health check: it would read what is read here, and connect again unseen.
        self.connection.send_packed_command(packed, check_health=False)

    def read_replies(self, wait_seconds: float = 0.0) -> Iterator[tuple[str, Any, bool]]:
        """What has arrived: a command, its reply, and if that is news; "" if a list was written."""
        sock = self.connection._sock  # noqa: SLF001
        timeout = sock.gettimeout()
        try:
            sock.settimeout(wait_seconds)
            while True:
                data = sock.recv(_CHUNK)
                if not data:
                    raise RedisConnectionError("closed by Redis")
                self._reader.feed(data)
                sock.settimeout(0)  # TLS may have something to read that is nothing for us
        except (BlockingIOError, SSLWantReadError, TimeoutError):
            pass
        except OSError as exc:
            raise RedisConnectionError(str(exc)) from exc
        finally:
            sock.settimeout(timeout)
        while (reply := self._reader.gets()) is not False:
            if isinstance(reply, list) and reply[:1] == [b"invalidate"]:
                yield from self._changes_of(reply[1])
                continue
            name, expected = self._asked.popleft()
            if isinstance(reply, Exception) and name != FETCH:
                raise reply
            if expected is self._watch:
                self._watch.set_told(tells=True)
            else:
                yield name, reply, reply != expected

    def _changes_of(self, keys: Iterable[bytes] | None) -> Iterator[tuple[str, Any, bool]]:
        """Redis tells of keys once, or of all."""
        names = None if keys is None else {key.decode() for key in keys}
        if names is None or names.intersection(self._watch.keys):
            self._watch.set_told(tells=False)
        if names is None or names.difference(self._watch.keys):
            yield "", None, True

    def close(self) -> None:
        """Close the connection; changes are not told any more."""
        self._watch.set_told(tells=False)
        self.connection.disconnect()


class ReliablePoller(kombu_redis.MultiChannelPoller):
    """kombu's, which waits for fanout; beside it, channels fetch by script, or wait to be woken."""

    loop: Any = None  # The worker's event loop; `None` without one, e.g. in gevent
    on_ready: Any = None  # What the loop calls when a socket of kombu's can be read
    send_acknowledgements: Any = None  # What a turn of the loop ends with

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Any] = []  # the transport's channels
        self._listening: dict[int, Any] = {}  # file number to the channel whose fetch reads there

    def turn(self) -> None:
        """Send a fetch if it is time for one, and what was acknowledged if none soon takes it."""
        try:
            for channel in tuple(self.open):
                channel.fetch()
        finally:
            if self.send_acknowledgements and not any(one.fetching for one in self.open):
                self.send_acknowledgements()

    @property
    def fds(self) -> Any:
        """Kombu's sockets that the loop does not watch yet: it adds all again at each turn."""
        fds = super().fds
        if self.loop is None:
            return fds
        watched, call = self.loop.readers, self.on_ready
        # Not an empty set: before 5.7 kombu looks whether there is any when a connection ends.
        return fds and (fd for fd in fds if watched.get(fd) != (call, (fd,)))

    def restore_visible(self) -> None:
        """Restore what plain workers held, in every tenth call; the next repeats what fails."""
        for channel in tuple(self.open):
            if channel.queues:
                calls = getattr(channel, "unacked_restore_throttle", 10)
                with suppress(*channel.connection_errors):
                    channel.qos.restore_visible(num=channel.unacked_restore_limit, interval=calls)
                return

    def handle_event(self, fileno: int, event: int) -> Any:
        """Call the channel, without an event loop; `get` goes on if no message was received."""
        channel = self._listening.get(fileno)
        if channel is not None:
            return channel.read()
        return super().handle_event(fileno, event) if fileno in self.fds else None

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        """Wait for an event, without an event loop."""
        due = self.tick()
        self.turn()
        try:
            return super().get(callback, timeout=due if timeout is None else min(due, timeout))
        except Empty:
            self.restore_visible()
            raise
        finally:
            for channel in tuple(self.open):
                channel.look_at_queues()

    def tick(self) -> float:
        """Let all channels do what is due; return the seconds until the next call."""
        return min((channel.tick() for channel in tuple(self.open)), default=LOOK_SECONDS)

    def listen(self, channel: Any, sock: Any) -> None:
        """Call the channel when the connection of its fetch can be read."""
        fileno = sock.fileno()
        self._listening[fileno] = channel
        self.poller.register(sock, self.eventflags)
        if self.loop is not None:
            self.loop.add_reader(fileno, channel.read)

    def unwatch(self, channel: Any) -> None:
        """Watch its socket no longer; it may be closed already."""
        for fileno in [fd for fd, listening in self._listening.items() if listening is channel]:
            del self._listening[fileno]
            with suppress(KeyError, ValueError, OSError):
                remove = self.poller.unregister if self.loop is None else self.loop.remove
                remove(fileno)
