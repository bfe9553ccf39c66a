"""A proxy before a Redis that reads what clients command, and cuts or holds at one of them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from servers import _free_port

from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.broker import SCRIPTS

Command = Sequence[bytes]
Matches = Callable[[Command], bool]


def sends(*words: str) -> Matches:
    """Match the commands that begin with these words."""
    begin = [word.encode() for word in words]
    return lambda command: list(command[: len(begin)]) == begin


def runs(name: str) -> Matches:
    """Match the calls of one of the transport's scripts, by text or by digest."""
    script = script_text(name, SCRIPTS)
    calls = [sends("EVAL", script.text), sends("EVALSHA", script.digest)]
    return lambda command: any(call(command) for call in calls)


@dataclass(slots=True)
class Fault:
    """What happens at a command.

    Attributes:
        matches: Whether it is this command.
        kind: ``before``: the connection is cut and Redis never sees the command; ``after``: Redis
            executes it and the connection is cut instead of the reply; ``hold``: Redis executes
            it, and the reply waits in the proxy.
        left: How often it still happens.
        last: The proxy is shut then, as if the client's process were killed.
        met: Set when it has happened.
    """

    matches: Matches
    kind: str
    left: int
    last: bool = False
    met: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def release(self) -> None:
        """Let held replies go."""
        self.left = 0
        self.released.set()


class CommandProxy:
    """A port that leads to a Redis; a context manager.

    Args:
        port: The server's port on this machine.

    Attributes:
        port: Its own.
        leads_to: Where new connections lead; another port is a failover.
        ports: Those from which it connected to Redis, as ``CLIENT LIST`` shows them.
    """

    def __init__(self, port: int) -> None:
        self.port = _free_port()
        self.leads_to = port
        self._listener: socket.socket | None = None
        self._sockets: list[socket.socket] = []
        self._faults: list[Fault] = []
        self.ports: set[int] = set()

    @property
    def url(self) -> str:
        """The URL of database 0."""
        return f"redis://127.0.0.1:{self.port}/0"

    def __enter__(self) -> CommandProxy:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._admit, args=(self._listener,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def fault(self, kind: str, matches: Matches, times: int = 1, *, last: bool = False) -> Fault:
        """Let something happen at a command, so many times; see `Fault`."""
        fault = Fault(matches, kind, times, last)
        self._faults.append(fault)
        return fault

    def cut(self) -> None:
        """Cut all connections; new ones are accepted."""
        sockets, self._sockets = self._sockets, []
        for one in sockets:
            _end(one)

    def shut(self) -> None:
        """Cut all connections, and refuse new ones."""
        for fault in self._faults:
            fault.release()
        if self._listener is not None:
            _end(self._listener)
            self._listener.close()
            self._listener = None
        self.cut()

    def _admit(self, listener: socket.socket) -> None:
        while True:
            try:
                guest, _address = listener.accept()
                host = socket.create_connection(("127.0.0.1", self.leads_to))
            except OSError:
                return
            self._sockets += [guest, host]
            self.ports.add(host.getsockname()[1])
            threading.Thread(target=_Way(self, guest, host).run, daemon=True).start()

    def meet(self, command: Command) -> Fault | None:
        """The fault that happens at a command, if one does."""
        for fault in self._faults:
            if fault.left > 0 and fault.matches(command):
                fault.left -= 1
                return fault
        return None


class _Way:
    """One client's connection."""

    def __init__(self, proxy: CommandProxy, guest: socket.socket, host: socket.socket) -> None:
        self._proxy = proxy
        self._guest = guest
        self._host = host
        self._held: Fault | None = None
        self._silent = False

    def run(self) -> None:
        """Pass on until one of the two ends."""
        replies = threading.Thread(target=self._replies, daemon=True)
        replies.start()
        with self._guest, self._host:
            with contextlib.suppress(OSError), self._guest.makefile("rb") as reader:
                while (read := _read_command(reader)) is not None and self._pass_on(*read):
                    pass
            if not self._silent:
                _end(self._host)
            replies.join()

    def _pass_on(self, raw: bytes, command: Command) -> bool:
        """Pass one command on; whether another may follow."""
        fault = self._proxy.meet(command)
        kind = "" if fault is None else fault.kind
        if kind == "hold":
            self._held = fault
        self._silent = kind == "after"
        if kind != "before":
            self._host.sendall(raw)
        if self._silent:  # Redis executes what it has read, and then sees that nothing follows
            self._host.shutdown(socket.SHUT_WR)
        if fault is None or kind == "hold":
            return True
        if fault.last:
            self._proxy.shut()
        fault.met.set()
        return False

    def _replies(self) -> None:
        with contextlib.suppress(OSError):
            while data := self._host.recv(65536):
                if self._held is not None:
                    held, self._held = self._held, None
                    held.met.set()
                    held.released.wait(60)
                if not self._silent:
                    self._guest.sendall(data)
        _end(self._guest)
        _end(self._host)


def _read_command(reader: object) -> tuple[bytes, Command] | None:
    head = reader.readline()  # type: ignore[attr-defined]
    if not head.startswith(b"*"):
        return None
    raw, parts = [head], []
    for _ in range(int(head[1:])):
        size = reader.readline()  # type: ignore[attr-defined]
        text = reader.read(int(size[1:]) + 2)  # type: ignore[attr-defined]
        raw += [size, text]
        parts.append(text[:-2])
    return b"".join(raw), parts


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
