"""A TCP proxy before a server: shut, it refuses connections and cuts those that it has.

Open, it can be slow, and it can lose replies: the server does what it reads, nobody hears of it.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from servers import _free_port


class TcpProxy:
    """A port that leads to another one while the proxy is open; a context manager.

    Args:
        port: The server's port on this machine.

    Attributes:
        delay_seconds: How late each piece of data arrives, there and back.
        loses_replies: What the server says is thrown away; to be followed by `cut`.
    """

    def __init__(self, port: int) -> None:
        self.port = _free_port()
        self.delay_seconds = 0.0
        self.loses_replies = False
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
        listener, self._listener = self._listener, None
        if listener is not None:
            _end(listener)
            listener.close()
        self.cut()

    def cut(self) -> None:
        """Cut all connections; new ones are accepted, and hear replies again."""
        self._end_all()
        if self.loses_replies:
            self.loses_replies = False
            self._end_all()  # those that came meanwhile and have lost something

    def _end_all(self) -> None:
        inside, self._inside = self._inside, []
        for one in inside:
            _end(one)

    def _admit(self, listener: socket.socket) -> None:
        while True:
            try:
                guest, _address = listener.accept()
            except OSError:
                return
            try:
                host = socket.create_connection(("127.0.0.1", self._to))
            except OSError:
                guest.close()  # the server is down, not the proxy
                continue
            self._inside = [one for one in self._inside if one.fileno() >= 0] + [guest, host]
            threading.Thread(target=self._serve, args=(guest, host), daemon=True).start()

    def _serve(self, guest: socket.socket, host: socket.socket) -> None:
        replies = threading.Thread(target=self._pass_on, args=(host, guest, True), daemon=True)
        with guest, host:
            replies.start()
            self._pass_on(guest, host)
            replies.join()

    def _pass_on(self, source: socket.socket, target: socket.socket, back: bool = False) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self.delay_seconds:
                    time.sleep(self.delay_seconds)
                if not (back and self.loses_replies):
                    target.sendall(data)
        _end(source)
        _end(target)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
