"""CPU and memory of a tree of processes, read from /proc: nothing runs inside the measured ones."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_REAPED = slice(13, 15)  # cutime, cstime; counted from behind the name
_QUIET_SECONDS = 0.03
_QUIET_SHARE = 0.05


class Tree:
    """A process and all its descendants.

    Args:
        pid: The process.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def pids(self) -> list[int]:
        """The processes there are now, parents first."""
        found, at = [self.pid], 0
        while at < len(found):
            for children in Path(f"/proc/{found[at]}/task").glob("*/children"):
                with suppress(OSError):
                    found.extend(int(pid) for pid in children.read_text().split())
            at += 1
        return found

    def cpu_seconds(self) -> float:
        """CPU time of all threads, and of children that ended."""
        return sum(_cpu_seconds(pid) for pid in self.pids())

    def memory_bytes(self) -> int:
        """Memory in proportion: a page that three processes share counts a third for each."""
        return sum(_pss_bytes(pid) for pid in self.pids())

    def stop(self) -> None:
        """Let nothing of it run, not even a timer."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        """Let it run again."""
        self._signal(signal.SIGCONT)

    def wait_until_quiet(self, timeout_seconds: float = 5.0) -> float:
        """Wait until the tree does next to nothing; since when, in monotonic seconds."""
        deadline = time.perf_counter() + timeout_seconds
        while True:
            begun, before = time.perf_counter(), self.cpu_seconds()
            time.sleep(_QUIET_SECONDS)
            passed = time.perf_counter() - begun
            if self.cpu_seconds() - before < _QUIET_SHARE * passed or begun > deadline:
                return begun

    def _signal(self, number: int) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def peak_mib(pid: int | str = "self") -> float:
    """The most memory that a process had in use so far.

    Not ``ru_maxrss``: that begins with what the process had which started this one.
    """
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _cpu_seconds(pid: int) -> float:
    """Nanoseconds of the scheduler for what lives, clock ticks for children that were reaped."""
    total = 0.0
    try:
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                total += int((thread / "schedstat").read_text().split()[0]) / 1e9
        behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return total
    return total + sum(map(int, behind_name[_REAPED])) / _TICKS


def _pss_bytes(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0
