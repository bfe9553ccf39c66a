"""A TCP proxy before a server: closed, it refuses connections and cuts those that it has."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Any

from servers import _free_port


class TcpProxy:
    """A port that leads to another one while the proxy is open; a context manager.

    Args:
        port: The server's port on this machine.
    """

    def __init__(self, port: int) -> None:
        self.port = _free_port()
        self._to = port
        self._listener: socket.socket | None = None
        self._inside: list[socket.socket] = []

    def __enter__(self) -> TcpProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def open(self) -> None:
        """Accept connections."""
        listener = socket.create_server(("127.0.0.1", self.port))
        self._listener = listener
        threading.Thread(target=self._admit, args=(listener,), daemon=True).start()

    def shut(self) -> None:
        """Refuse connections, and cut all."""
        for one in (self._listener, *self._inside):
            if one is not None:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
                one.close()
        self._listener = None
        self._inside.clear()

    def _admit(self, listener: socket.socket) -> None:
        while True:
            try:
                guest, _address = listener.accept()
                host = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                return
            self._inside += [guest, host]
            for pair in ((guest, host), (host, guest)):
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()


def _pass_on(source: Any, target: Any) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for one in (source, target):
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
