"""What wakes an idle worker, and waiting for several channels at once.

Of all idle workers that consume the same lists, one is on duty. Redis tells it when a list changes
(client-side caching, RESP3): ``EXISTS`` arms its wake connection and looks in one step; after that,
Redis sends one message when any of the lists is written. Nothing is popped, and the message means
no more than "look".

The others wait in ``BRPOP`` for a bell, a list of at most four tokens that carry no message. The
first fetch after a wake-up rings it if it leaves more in the lists, or if its worker gives up its
duty; so a message costs the same with two idle workers and with a thousand, and a flood wakes four
times as many in each step. A duty lapses after two seconds, and those who wait look every second
and a half: whoever dies with a duty or a token delays messages, and loses none.

Source: https://redis.io/docs/latest/develop/reference/client-side-caching/ and
``MultiChannelPoller`` in https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from ssl import SSLWantReadError
from typing import Any

from kombu.transport import redis as kombu_redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

try:
    import hiredis
except ImportError:  # optional, as for redis-py
    hiredis = None  # type: ignore[assignment]

LOOK_SECONDS = 1.0
"""An idle worker looks this often, or half as often, even if nothing woke it.

Servers and proxies that close idle connections do so after five seconds or more.
"""

_CHUNK = 65536


class WakeConnection:
    """A connection that only arms and listens.

    redis-py connects and authenticates; its versions differ in how they read messages that are
    no replies, so these are read here.
    """

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self.connection: Any = None
        self._reader: Any = None

    def open(self) -> Any:
        """Connect and return the socket."""
        if hiredis is None:
            raise RedisError("hiredis is not installed")
        connection = self._make()
        try:
            connection.connect()
            connection.send_command("CLIENT", "TRACKING", "ON")
            connection.read_response()
        except BaseException:
            connection.disconnect()
            raise
        self._reader = hiredis.Reader(protocolError=RedisError, replyError=RedisError)
        self.connection = connection
        return connection._sock  # noqa: SLF001 - as kombu registers its own

    def ask(self, *command: object) -> None:
        """Send a command; the reply comes with `read`."""
        # Not redis-py's health check: it would read what is read here, and connect again unseen.
        self.connection.send_command(*command, check_health=False)

    def read(self) -> Iterator[bool | None]:
        """What has arrived: if a reply to `ask` says yes; ``None`` means "look"."""
        sock = self.connection._sock  # noqa: SLF001
        timeout = sock.gettimeout()
        try:
            sock.settimeout(0)  # TLS may have something to read that is nothing for us
            while True:
                data = sock.recv(_CHUNK)
                if not data:
                    raise RedisConnectionError("closed by Redis")
                self._reader.feed(data)
        except (BlockingIOError, SSLWantReadError):
            pass
        except OSError as exc:
            raise RedisConnectionError(str(exc)) from exc
        finally:
            sock.settimeout(timeout)
        while (reply := self._reader.gets()) is not False:
            if isinstance(reply, Exception):
                raise reply
            is_push = isinstance(reply, list) and reply[0] == b"invalidate"
            yield None if is_push else bool(reply)

    def close(self) -> None:
        """Disconnect."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()


class ReliablePoller(kombu_redis.MultiChannelPoller):
    """Fetches by script while there are messages, else waits to be woken."""

    loop: Any = None  # The worker's event loop; `None` without one, e.g. in gevent
    on_ready: Any = None  # What the loop calls when a socket can be read
    send_acknowledgements: Any = None  # What a turn of the loop ends with

    def on_poll_start(self) -> None:
        """Send a fetch if it is time for one, and what was acknowledged in this turn."""
        try:
            super().on_poll_start()
        finally:
            if self.send_acknowledgements is not None:
                self.send_acknowledgements()

    @property
    def fds(self) -> Any:
        """The sockets that the loop does not watch yet: kombu adds all again at each turn."""
        fds = super().fds
        if self.loop is None:
            return fds
        watched, call = self.loop.readers, self.on_ready
        return fds and (fd for fd in fds if watched.get(fd) != (call, (fd,)))

    def _register_BRPOP(self, channel: Any) -> None:  # noqa: N802 - kombu's name
        if not channel.is_asleep() and not _is_open(channel._in_poll):  # noqa: SLF001
            if channel.may_be_closed():
                channel.look_at_idle_connection()
            super()._register_BRPOP(channel)

    def _register_LISTEN(self, channel: Any) -> None:  # noqa: N802 - kombu's name
        if not _is_open(channel._in_listen):  # noqa: SLF001
            super()._register_LISTEN(channel)

    def on_readable(self, fileno: int) -> Any:
        """Call the channel whose socket can be read."""
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        if channel is None:  # kombu before 5.7 raises KeyError
            return None
        if kind == "WAKE":
            return channel.wake_read()  # whether it may consume or not
        if kind == "BRPOP" and not channel.qos.can_consume():
            if not channel._in_poll:  # noqa: SLF001
                return channel.look_at_idle_connection()
            if not hasattr(self, "_paused_brpop"):  # kombu before 5.7 reads nothing, and spins
                return channel.handlers[kind]()
        return super().on_readable(fileno)

    def handle_event(self, fileno: int, event: int) -> Any:
        """Call the channel; after waking nothing was received yet, so `get` goes on."""
        channel, kind = self._fd_to_chan.get(fileno, (None, None))
        return channel.wake_read() if kind == "WAKE" else super().handle_event(fileno, event)

    def get(self, callback: Any, timeout: float | None = None) -> Any:
        """Wait for an event, without an event loop."""
        due = min((channel.tick() for channel in tuple(self._channels)), default=LOOK_SECONDS)
        return super().get(callback, timeout=due if timeout is None else min(due, timeout))

    def tick(self) -> None:
        """Let all channels do what is due; called by the event loop's timer."""
        for channel in tuple(self._channels):
            channel.tick()

    def listen(self, channel: Any, wake: WakeConnection, sock: Any) -> None:
        """Call the channel when its wake connection can be read."""
        fileno = sock.fileno()
        self._fd_to_chan[fileno] = (channel, "WAKE")
        self._chan_to_sock[channel, wake, "WAKE"] = sock
        self.poller.register(sock, self.eventflags)
        if self.loop is not None:
            self.loop.add_reader(fileno, self.on_readable, fileno)

    def forget(self, channel: Any, client: Any, kind: str = "WAKE") -> None:
        """Watch a socket no longer; it may be closed already."""
        self._chan_to_sock.pop((channel, client, kind), None)
        for fileno, listener in list(self._fd_to_chan.items()):
            if listener == (channel, kind):
                del self._fd_to_chan[fileno]
                with suppress(KeyError, ValueError, OSError):
                    remove = self.poller.unregister if self.loop is None else self.loop.remove
                    remove(fileno)


def _is_open(connection: Any) -> bool:
    """True for the open connection of a fetch, or of a subscription, that goes on."""
    return bool(connection) and connection._sock is not None  # noqa: SLF001
