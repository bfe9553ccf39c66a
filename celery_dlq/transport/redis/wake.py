"""What wakes an idle worker: Redis says when a list changes (client-side caching, RESP3).

One connection for any number of lists. ``EXISTS`` arms it and looks in one step; after that, Redis
sends one message when any of the lists is written. Nothing is popped, and the message means no
more than "look".

Source: https://redis.io/docs/latest/develop/reference/client-side-caching/
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from ssl import SSLWantReadError
from typing import Any

from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError

try:
    import hiredis
except ImportError:  # optional, as for redis-py
    hiredis = None  # type: ignore[assignment]

LOOK_SECONDS = 2.0
"""An idle worker uses its connections this often even if nothing woke it.

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

    def ask(self, lists: Sequence[str]) -> None:
        """Send the question how many of the lists exist; the reply comes with `read`."""
        # Not redis-py's health check: it would read what is read here, and connect again unseen.
        self.connection.send_command("EXISTS", *lists, check_health=False)

    def read(self) -> Iterator[int | None]:
        """What has arrived: an ``int`` is the reply to `ask`, ``None`` means "look"."""
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
            yield reply if isinstance(reply, int) else None

    def close(self) -> None:
        """Disconnect."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.disconnect()
