"""A program that is killed again and again, and started again, until it ends by itself."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

KILLED = -signal.SIGKILL


def ends_of(
    program: str,
    *args: str,
    wait: Callable[[subprocess.Popen[bytes]], object],
    kills: int,
    step_seconds: float,
) -> Iterator[int]:
    """Give the exit code of each run; ``wait`` returns once a run may be killed.

    The program gets the first argument, the folder of the tests, and the others. It says "ready".
    """
    first, *others = args
    command = [sys.executable, "-c", program, first, str(Path(__file__).parent), *others]
    ends: list[int] = []
    while not ends or ends[-1] != 0:
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if len(ends) < kills:
            wait(process)
            time.sleep(len(ends) * step_seconds)  # to be killed at another instant each time
            process.kill()
        ends.append(process.wait(60))
        process.stdout.close()
        yield ends[-1]
