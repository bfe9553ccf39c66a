"""``celery …`` as people type it, and the Python of pages, without a second of imports each.

One process has loaded Celery and forks for every command; on the PATH of a page, or run by a
test, is a small ``celery`` that hands its arguments, folder, environment and terminal over to
it. So each command still is a process of its own. ``page-python`` beside it is what runs the
Python of one page. Workers are forked in the same way, see `CeleryDoor.fork`.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, NoReturn

import page_python

PAGE_PYTHON = "page-python"

_MOST_BYTES = 1_000_000
_NUMBER_BYTES = 4
_SHIM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as door:
    door.connect({path!r})
    wish = {{"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}}
    socket.send_fds(door, [json.dumps(wish).encode()], [0, 1, 2])
    sys.exit(int(door.recv(16) or b"70"))
"""


class Forked:
    """A process that the door forked; it can what tests need of `subprocess.Popen`.

    Args:
        line: Brings its process id, and when it has ended how.
    """

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self.pid = self._number()
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit code, or minus the signal; ``None`` while it runs."""
        with suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, for so many seconds."""
        if self.returncode is None:
            news = select.poll()  # `select.select` takes no number above 1,023
            news.register(self._line, select.POLLIN)
            if not news.poll(None if timeout is None else timeout * 1000):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.returncode = self._number()
            self._line.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it still runs."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _number(self) -> int:
        told = self._line.recv(_NUMBER_BYTES, socket.MSG_WAITALL)
        assert len(told) == _NUMBER_BYTES, "the process that watches it has gone"
        return int.from_bytes(told, "big", signed=True)


class CeleryDoor:
    """The process that forks; a context manager.

    Args:
        folder: Gets the socket and ``bin/celery``.
    """

    def __init__(self, folder: Path) -> None:
        self.bin = folder / "bin"
        self._socket = folder / "door"
        self._process: subprocess.Popen[bytes]

    def __enter__(self) -> CeleryDoor:
        self.bin.mkdir()
        for name in ("celery", PAGE_PYTHON):
            shim = self.bin / name
            shim.write_text(_SHIM.format(python=sys.executable, path=str(self._socket)))
            shim.chmod(0o755)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(self._socket)], stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(10)
        if self._process.stdout is not None:
            self._process.stdout.close()

    def fork(
        self, arguments: list[str], *, cwd: Path, env: Mapping[str, str], output: IO[bytes]
    ) -> Forked:
        """Begin ``celery …`` in a process group of its own, as ``python -m celery`` would go on.

        Not for pools that patch Python (gevent): they must come before all other imports.

        Args:
            arguments: What follows ``celery``.
            cwd: Its folder, the first where Python looks for modules; PYTHONPATH is not looked at.
            env: All of its environment.
            output: Gets what it prints.
        """
        line = socket.socket(socket.AF_UNIX)
        line.connect(str(self._socket))
        wish = {"argv": ["celery", *arguments], "cwd": str(cwd), "env": dict(env), "stays": True}
        with Path(os.devnull).open("rb") as nothing:
            terminal = [nothing.fileno(), output.fileno(), output.fileno()]
            socket.send_fds(line, [json.dumps(wish).encode()], terminal)
            return Forked(line)


def serve(path: str) -> None:
    """Fork for everyone who comes through the door."""
    import celery.apps.worker
    import celery.backends.redis
    import celery.bin.celery
    import celery.concurrency.prefork
    import celery.worker.consumer  # noqa: F401 - loaded once for all
    import kombu.transport.pyamqp
    import kombu.transport.redis  # noqa: F401

    import celery_dlq.cli.policies
    import celery_dlq.cli.reading
    import celery_dlq.cli.redrive
    import celery_dlq.export.exporter
    import celery_dlq.operations
    import celery_dlq.plugin
    import celery_dlq.worker.bootsteps  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those who answer
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(path)
        door.listen()
        print("ready", flush=True)
        while True:
            visitor, _ = door.accept()
            wish, terminal, *_ = socket.recv_fds(visitor, _MOST_BYTES, 3)
            if os.fork() == 0:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                door.close()
                _answer(visitor, json.loads(wish), terminal)
            visitor.close()
            for number in terminal:
                os.close(number)


def _answer(visitor: socket.socket, wish: dict[str, Any], terminal: list[int]) -> None:
    process = os.fork()
    if process == 0:
        visitor.close()
        _run(wish, terminal)
    for number in terminal:
        os.close(number)
    if "stays" in wish:
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(process, process)  # before anybody knows it: it can be killed as a group
        visitor.sendall(process.to_bytes(_NUMBER_BYTES, "big", signed=True))
    _, status = os.waitpid(process, 0)
    code = os.waitstatus_to_exitcode(status)
    told = code.to_bytes(_NUMBER_BYTES, "big", signed=True) if "stays" in wish else b"%d" % code
    with suppress(BrokenPipeError):
        visitor.sendall(told)
    os._exit(0)


def _run(wish: dict[str, Any], terminal: list[int]) -> NoReturn:
    from celery.__main__ import main

    name = Path(wish["argv"][0]).name
    for target, number in enumerate(terminal):
        os.dup2(number, target)
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["env"])
    sys.argv = [name, *wish["argv"][1:]]
    sys.path.insert(0, wish["cwd"])
    if "stays" in wish:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # many of them are meant to crash
        sys.exit(main())  # ends as every Python does: its threads are waited for
    code: object = 0
    try:
        page_python.serve() if name == PAGE_PYTHON else main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
