"""Processes without a second of imports each: one that has loaded Celery forks them.

It is the fork server of `multiprocessing`; a worker, a command or a program that it forks is a
process of its own, in a group of its own, as ``python`` would have made it.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["fork_server_preload"])


TESTS = Path(__file__).parent


def run_forked(
    *arguments: str, cwd: Path = TESTS, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a `ForkedProcess` to its end, a minute at most."""
    with tempfile.TemporaryDirectory() as folder:
        log, errors = Path(folder) / "log", Path(folder) / "errors"
        process = ForkedProcess(
            arguments, cwd=cwd, env=os.environ if env is None else env, log=log, errors=errors
        )
        try:
            code = process.wait(60)
        finally:
            process.kill()
        return subprocess.CompletedProcess(
            arguments, code, log.read_text("utf-8"), errors.read_text("utf-8")
        )


def _start_server() -> None:
    """Start the process that forks, unless it runs.

    Python before 3.13 looks in PYTHONPATH for what it preloads, and is silent if that is not there.
    """
    import pytest  # not in the processes that it forks, which import this file

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
        forkserver.ensure_running()


class ForkedProcess:
    """A forked ``celery …`` or ``python -c …``, with the part of `subprocess.Popen` that tests use.

    Not for pools that patch Python (gevent): they must come before all other imports.

    Args:
        arguments: What follows ``celery``; or ``-c``, a program and its arguments.
        cwd: Its folder, the first where Python looks for modules; PYTHONPATH is not looked at.
        env: All of its environment.
        log: Gets what it prints, at its end.
        errors: Gets what it prints as errors; by default the log does.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        log: Path,
        errors: Path | None = None,
    ) -> None:
        log.touch()
        outputs = (str(log), str(errors or log))
        _start_server()
        self._process = _FORKS.Process(
            target=_run, args=([*arguments], str(cwd), dict(env), outputs), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self.pid, self.pid)  # it does so, too; now it can be killed as a group

    @property
    def returncode(self) -> int | None:
        """Its exit code, or minus the signal; ``None`` while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The same."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end, up to a timeout in seconds."""
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
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


def _run(arguments: list[str], cwd: str, env: dict[str, str], outputs: tuple[str, str]) -> None:
    with suppress(PermissionError):
        os.setpgid(0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # many of them are meant to crash
    for number, path in enumerate(outputs, 1):
        output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, number)
        os.close(output)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.path.insert(0, cwd)
    assert "fork_server_preload" in sys.modules, "the server has loaded nothing"
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(arguments[1], {"__name__": "__main__"})  # noqa: S102 - as Python does
        else:
            from celery.__main__ import main

            sys.argv = ["celery", *arguments]
            sys.exit(main())
    finally:
        atexit._run_exitfuncs()  # type: ignore[attr-defined]  # multiprocessing leaves them out
