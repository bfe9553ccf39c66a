"""``dlq web``: the pages, served by uvicorn in this process."""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable
from ipaddress import ip_address
from typing import TYPE_CHECKING, Any

import uvicorn

from celery_dlq.errors import DLQError

if TYPE_CHECKING:
    from celery_dlq.web.asgi import DeadLettersApp

GRACE_SECONDS = 5
"""Longest wait at the end for requests that are being answered."""


def listening(host: str, port: int) -> socket.socket:
    """Listen.

    Raises:
        DLQError: The port is taken, or the address is not one of this machine.
    """
    try:
        family, kind, protocol, _, address = _resolved(host, port)[0]
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(128)
        except BaseException:
            found.close()
            raise
    except (OSError, OverflowError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise DLQError(
            f"expected {host}:{port} to be free for the pages, got: {why}; stop the process that "
            f"listens there or choose another --port"
        ) from exc
    return found


def is_loopback(host: str) -> bool:
    """True if only this machine reaches an address.

    Raises:
        DLQError: The name is unknown.
    """
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


def serve(app: DeadLettersApp, sock: socket.socket, ready: Callable[[], None]) -> None:
    """Serve until SIGINT or SIGTERM; then requests are answered, and streams end."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="on",
        ws="none",
        # The app decides itself whose headers it believes.
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    # uvicorn raises the signal again once it has ended: that is no error.
    before = {number: signal.signal(number, _ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        ready()
        uvicorn.Server(config).run(sockets=[sock])
    finally:
        app.web.close()
        sock.close()
        for number, handler in before.items():
            signal.signal(number, handler)


def _ignore(number: int, frame: Any) -> None:
    """Do nothing."""
