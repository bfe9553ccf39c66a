"""A TCP proxy before a server that answers late, or whose answers to some requests are lost."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

from tcp_proxy import TcpProxy


class SlowProxy(TcpProxy):
    """A proxy that delays each answer, and cuts the connection instead of some.

    Args:
        port: The server's port on this machine.
        delay: Seconds by which each answer is late.
        asked: Part of the requests whose answers are lost; the server gets these requests.
        lost: Number of the answers that are lost.
    """

    def __init__(self, port: int, *, delay: float = 0.0, asked: bytes = b"", lost: int = 0) -> None:
        super().__init__(port)
        self.delay = delay
        self.asked = asked
        self.lost = lost

    def _serve(self, guest: socket.socket, host: socket.socket) -> None:
        cut = threading.Event()
        answers = threading.Thread(target=self._answer, args=(guest, host, cut), daemon=True)
        with guest, host:
            answers.start()
            self._ask(guest, host, cut)
            answers.join()

    def _ask(self, guest: socket.socket, host: socket.socket, cut: threading.Event) -> None:
        with _ending(guest, host):
            while data := guest.recv(65536):
                if self.lost and self.asked in data:
                    self.lost -= 1
                    cut.set()
                host.sendall(data)

    def _answer(self, guest: socket.socket, host: socket.socket, cut: threading.Event) -> None:
        with _ending(guest, host):
            while data := host.recv(65536):
                time.sleep(self.delay)
                if cut.is_set():
                    return
                guest.sendall(data)


@contextlib.contextmanager
def _ending(*sockets: socket.socket) -> Iterator[None]:
    """End both sides of a connection with one of them."""
    with contextlib.suppress(OSError):
        yield
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
