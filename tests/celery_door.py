"""``celery …`` as pages show it, and the Python of pages, without a second of imports each.

One process has loaded Celery and forks for every command; on the PATH of a page stands a
small ``celery`` that hands its arguments, folder, environment and terminal over to it. So
each command still is a process of its own, begun by a shell. ``page-python`` beside it is
what runs the Python of one page.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import page_python

PAGE_PYTHON = "page-python"

_MOST_BYTES = 1_000_000
_SHIM = """#!{python} -IS
import json, os, socket, sys
with socket.socket(socket.AF_UNIX) as door:
    door.connect({path!r})
    wish = {{"argv": sys.argv, "cwd": os.getcwd(), "env": dict(os.environ)}}
    socket.send_fds(door, [json.dumps(wish).encode()], [0, 1, 2])
    sys.exit(int(door.recv(16) or b"70"))
"""


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


def serve(path: str) -> None:
    """Fork for everyone who comes through the door."""
    import celery.bin.celery  # noqa: F401 - loaded once for all

    import celery_dlq.cli.render_policies
    import celery_dlq.cli.reports
    import celery_dlq.export.parquet
    import celery_dlq.operations
    import celery_dlq.plugin  # noqa: F401

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
    worker = os.fork()
    if worker == 0:
        visitor.close()
        _run(wish, terminal)
    _, status = os.waitpid(worker, 0)
    visitor.sendall(str(os.waitstatus_to_exitcode(status)).encode())
    os._exit(0)


def _run(wish: dict[str, Any], terminal: list[int]) -> None:
    from celery.__main__ import main

    name = Path(wish["argv"][0]).name
    for target, number in enumerate(terminal):
        os.dup2(number, target)
    os.chdir(wish["cwd"])
    os.environ.clear()
    os.environ.update(wish["env"])
    sys.argv = [name, *wish["argv"][1:]]
    sys.path.insert(0, wish["cwd"])
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
