"""A program that is killed again and again, and started again, until it ends by itself."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fork_server import TESTS, ForkedProcess
from waiting import poll

KILLED = -signal.SIGKILL


def ends_of(
    program: str,
    *args: str,
    wait: Callable[[ForkedProcess], object],
    kills: int,
    step_seconds: float,
) -> Iterator[int]:
    """Give the exit code of each run; ``wait`` returns once a run may be killed.

    The program says "ready", and may import what is in the folder of the tests.
    """
    ends: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        while not ends or ends[-1] != 0:
            log = Path(folder) / f"{len(ends)}.log"
            process = ForkedProcess(["-c", program, *args], cwd=TESTS, env=os.environ, log=log)
            try:
                _wait_until_ready(process, log)
                if len(ends) < kills:
                    wait(process)
                    time.sleep(len(ends) * step_seconds)  # another instant each time
                    process.kill()
                ends.append(process.wait(60))
            finally:
                process.kill()
            yield ends[-1]


def _wait_until_ready(process: ForkedProcess, log: Path) -> None:
    poll(
        lambda: "ready\n" in log.read_text("utf-8") or process.poll() is not None,
        timeout_seconds=60,
        every_seconds=0.002,
    )
    assert "ready\n" in log.read_text("utf-8"), log.read_text("utf-8")
