"""``dlq web``: the pages, served by uvicorn in this process."""

from __future__ import annotations

import resource
import signal
import socket
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import uvicorn
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware
from uvicorn.protocols.http.h11_impl import H11Protocol

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
    """Listen."""
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


class _Proxies(ProxyHeadersMiddleware):
    """Believes the headers of proxies; notes where a connection comes from before that."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope[PEER] = (scope.get("client") or ("",))[0]
        await super().__call__(scope, receive, send)


class _Connection(H11Protocol):
    """A connection that is closed while it is idle: for its age, or to make room for another.

    uvicorn has no time limit for a first request. Once no file is left, asyncio logs each
    connection that it cannot accept.
    """

    most = MAX_CONNECTIONS

    def connection_made(self, transport: Any) -> None:
        """Make room for it, or refuse it."""
        super().connection_made(transport)
        # asyncio leaves it out for a socket that was given to it; a body then waits 40 ms for the
        # browser to acknowledge the head.
        connection = transport.get_extra_info("socket")
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if len(self.connections) > self.most:
            others: Any = self.connections
            idle = (one for one in others if one is not self and one.is_idle())
            next(idle, self).transport.abort()
        self.loop.call_later(IDLE_SECONDS, self._look, None)

    def is_idle(self) -> bool:
        """True while it is open and no request is being answered."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self.transport.is_closing()

    def _look(self, before: Any) -> None:
        """Close it if no request began since the look before."""
        if self.is_idle() and self.cycle is before:
            self.transport.abort()
        elif not self.transport.is_closing():
            self.loop.call_later(IDLE_SECONDS, self._look, self.cycle)


def _most_connections() -> int:
    """`MAX_CONNECTIONS`, or fewer where the process may have few open files."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(1, min(MAX_CONNECTIONS, files - 2 * _BACKLOG - _OTHER_FILES))


def serve(
    app: DeadLettersApp,
    sock: socket.socket,
    ready: Callable[[], None],
    proxies: Sequence[str] = (),
) -> None:
    """Serve until SIGINT or SIGTERM; then requests are answered.

    Of the proxies, by address or network, the headers are believed.
    """
    _Connection.most = _most_connections()
    pages: Any = app
    config = uvicorn.Config(
        _Proxies(pages, [*proxies]),
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        proxy_headers=False,  # they stand in `_Proxies` already
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        http=_Connection,
        backlog=_BACKLOG,
    )
    # uvicorn raises the signal again once it has ended: that is no error.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ready()
        uvicorn.Server(config).run(sockets=[sock])
    finally:
        app.site.close()
        sock.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: Any) -> None:
    """Do nothing."""
