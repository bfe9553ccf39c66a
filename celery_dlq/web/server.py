"""``dlq web``: the pages, served by uvicorn in this process."""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

from celery_dlq.errors import DLQError
from celery_dlq.web.access import PEER

if TYPE_CHECKING:
    from celery_dlq.web.asgi import DeadLettersApp

GRACE_SECONDS = 5
"""Longest wait at the end for requests that are being answered."""

IDLE_SECONDS = 10.0
"""A connection that sends no whole request for this long is closed."""

MAX_CONNECTIONS = 300
"""Most connections at the same time."""

_BACKLOG = 32  # accepted at once, before any of them can be closed
_OTHER_FILES = 64  # of Redis, the log, and Python itself


def listening(host: str, port: int) -> socket.socket:
    """Open the sockets on which the pages are served."""
    try:
        family, *_, address = _resolved(host, port)[0]
        return socket.create_server(address[:2], family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise DLQError(
            f"expected {host}:{port} to be free for the pages, got: {why}; stop the process that "
            f"listens there or choose another --port"
        ) from exc


def is_loopback(host: str) -> bool:
    """True if only this machine reaches an address."""
    try:
        return all(
            ip_address(str(address[0]).partition("%")[0]).is_loopback
            for *_, address in _resolved(host, 0)
        )
    except OSError as exc:
        raise DLQError(f"expected --host to be an address of this machine, got {host!r}") from exc


def _resolved(host: str, port: int) -> list[Any]:
    flags = socket.AI_PASSIVE
    return socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=flags)


def url_of(sock: socket.socket, root_path: str) -> str:
    """The address of a listening socket, as one types it."""
    host, port = sock.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}{root_path.rstrip('/')}/"


class _Connection:
    """A connection that was accepted: how many requests are being answered, and since when none."""

    def __init__(self, sock: socket.socket) -> None:
        self._endpoint = sock
        self._answering = 0
        self._idle_since = time.monotonic()

    def is_open(self) -> bool:
        """True until asyncio has closed it."""
        return self._endpoint.fileno() != -1

    def is_idle(self, seconds: float = 0.0) -> bool:
        """True if no request has been answered for so long."""
        return not self._answering and time.monotonic() - self._idle_since >= seconds

    def end(self) -> None:
        """Let asyncio, which owns it, read its end and close it."""
        with suppress(OSError):  # the other side was first
            self._endpoint.shutdown(socket.SHUT_RDWR)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Keep it open while a request is answered."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._idle_since = time.monotonic()


class _Listener(socket.socket):
    """Accepts connections, and closes idle ones: for their age, or to make room for another.

    uvicorn has no time limit for a first request. Once no file is left, asyncio logs each
    connection that it cannot accept.
    """

    def __init__(self, sock: socket.socket) -> None:
        super().__init__(fileno=sock.detach())
        self._most = _most_connections()
        self._connections: dict[Any, _Connection] = {}  # by the address of the other side

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and make room for it, or refuse it; asyncio's loop calls this."""
        sock, address = super().accept()
        # asyncio leaves it out for a socket that was given to it; a body then waits 40 ms for the
        # browser to acknowledge the head.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = _Connection(sock)
        if self._has_room():
            self._connections[address[:2]] = connection
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look, connection)
        else:
            connection.end()
        return sock, address

    def answering(self, client: tuple[str, int] | None) -> AbstractContextManager[None]:
        """Keep a client's connection open while a request is answered."""
        connection = self._connections.get(client)
        return connection.answering() if connection else nullcontext()

    def _has_room(self) -> bool:
        """True if another connection may be kept; an idle one is ended for it."""
        if len(self._connections) < self._most:
            return True
        found = self._connections.items()
        self._connections = {client: one for client, one in found if one.is_open()}
        if len(self._connections) < self._most:
            return True
        idle = next((client for client, one in self._connections.items() if one.is_idle()), None)
        if idle is not None:
            self._connections.pop(idle).end()
        return idle is not None

    def _look(self, connection: _Connection) -> None:
        """Close a connection if it has been idle for long; look again later if it has not."""
        if connection.is_idle(IDLE_SECONDS):
            connection.end()
        elif connection.is_open():
            asyncio.get_running_loop().call_later(IDLE_SECONDS, self._look, connection)


class _Proxies(ProxyHeadersMiddleware):
    """Believes the headers of proxies; notes where a connection comes from before that."""

    def __init__(self, app: Any, proxies: list[str], listener: _Listener) -> None:
        super().__init__(app, proxies)
        self._listener = listener

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        client = scope.get("client")
        scope[PEER] = (client or ("",))[0]
        with self._listener.answering(client):
            await super().__call__(scope, receive, send)


def _most_connections() -> int:
    """`MAX_CONNECTIONS`, or fewer where the process may have few open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - 2 * _BACKLOG - _OTHER_FILES))


def serve(
    app: DeadLettersApp, sock: socket.socket, ready: Callable[[], None], proxies: Sequence[str] = ()
) -> None:
    """Serve until SIGINT or SIGTERM; then requests are answered.

    Of the proxies, by address or network, the headers are believed.
    """
    listener = _Listener(sock)
    pages: Any = app
    config = uvicorn.Config(
        _Proxies(pages, [*proxies], listener),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,  # they stand in `_Proxies` already
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        http="h11",
        loop="asyncio",  # another one accepts below Python
        backlog=_BACKLOG,
    )
    # uvicorn raises the signal again once it has ended: that is no error.
    before = {
        number: signal.signal(number, _ignore_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        app.site.prepare()
        # What is there now stays: to look at it for garbage takes 30 ms, in one request of ten.
        gc.collect()
        gc.freeze()
        ready()
        uvicorn.Server(config).run(sockets=[listener])
    finally:
        app.site.close()
        listener.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore_signal(number: int, frame: Any) -> None:
    """Ignore a signal that the server handles itself."""
