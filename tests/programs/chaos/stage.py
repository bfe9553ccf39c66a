"""The stage: servers and workers that the runner starts, breaks, starts again and ends."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from itertools import count
from pathlib import Path

from chaos.facts import Ended, Logged
from tcp_proxy import TcpProxy

TESTS = Path(__file__).parents[1]
CLOCK = Path(__file__).with_name("clock")
PATIENCE_SECONDS = 15.0  # for a worker that was asked to end
MOST_FALSE_STARTS = 10  # in a row
MOST_DESCRIPTORS = 1024  # the usual limit

_RECEIVED = re.compile(
    r"^\[([\d-]+ [\d:]+,\d+): INFO/\w+\] Task \S+\[([0-9a-f-]{36})\] received$", re.MULTILINE
)
_STORED = re.compile(
    r"^\[([\d-]+ [\d:]+,\d+): WARNING/\w+\] Task \S+\[([0-9a-f-]{36})\] dead-lettered to",
    re.MULTILINE,
)
_SUCCEEDED = re.compile(
    r"^\[([\d-]+ [\d:]+,\d+): INFO/\w+\] Task \S+\[([0-9a-f-]{36})\] succeeded in", re.MULTILINE
)
_NOT_SETTLED = re.compile(
    r"^\[([\d-]+ [\d:]+,\d+): \w+/\w+\] "
    r"(?:Couldn't (?:ack|reject)|consumer: Connection to broker lost)",
    re.MULTILINE,
)
_DOUBLE = re.compile(r"Task ([0-9a-f-]{36}) is delivered again while delivery \d+ of it still runs")
_UNCOUNTED = re.compile(r"Delivery of ([0-9a-f-]{36}) is not counted, it runs")


def _as_a_shell_would() -> None:
    """No core files; and what a job in the background ignores is not ignored by its workers."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def _limit(pid: int, descriptors: int) -> None:
    _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (descriptors, hard))


READING = "in _flush_outqueue"
"""In the stack of a worker whose pool, at its end, reads a result that a child did not finish."""


@dataclass(slots=True)
class Slot:
    """A place for a worker; processes come and go.

    Args:
        name: Node name.
        folder: Where the logs go.
        env: The workers' environment.
        skew_seconds: How far its clock is ahead.
        pool: Celery's name of the pool.
        concurrency: How many tasks at once.
        most_tasks: After how many tasks a process of the prefork pool retires; 0 for never.
        lines: The proxies before the servers, by ``broker`` and ``store``.
    """

    name: str
    folder: Path
    env: dict[str, str]
    skew_seconds: float = 0.0
    pool: str = "prefork"
    concurrency: int = 2
    most_tasks: int = 0
    lines: dict[str, TcpProxy] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    asked_at: float | None = None  # when it was asked to end
    cold: bool = False
    hung: bool = False
    group: bool = False  # its whole group was asked
    asked_to_end: bool = False  # and not killed
    paused: bool = False
    false_starts: int = 0
    ended: list[Ended] = field(default_factory=list)
    logs: dict[int, Path] = field(default_factory=dict)
    _started_at: float = 0.0

    def tend(self) -> None:
        """Start a process where there is none; note the end of one, and hurry one that hangs."""
        if self.process is not None and self.process.poll() is None:
            if self.asked_at and time.time() - self.asked_at > PATIENCE_SECONDS:
                self._give_up()
            return
        self.clear()
        self._start()

    def clear(self) -> None:
        """Note the end of a process that is gone, with what is left of its group."""
        if self.process is None:
            return
        self._signal_group(signal.SIGKILL)
        self.process.wait(PATIENCE_SECONDS)
        if self.asked_at is None and self.process.returncode > 0:
            self._ended_by_itself()
        now = time.time()
        asked, how = self.asked_at, self.process.returncode
        self.ended.append(
            Ended(
                self.process.pid,
                asked or now,
                now,
                self.cold,
                how,
                asked is None,
                self.asked_to_end,
                self.hung,
                self.group,
                self.hung and READING in self.logs[self.process.pid].read_text("utf-8", "replace"),
            )
        )
        self.process, self.asked_at = None, None
        self.cold = self.hung = self.asked_to_end = self.paused = self.group = False

    def _ended_by_itself(self) -> None:
        """It ended by itself: an error of the worker, which may come again at every start."""
        assert self.process is not None
        soon = time.time() - self._started_at < PATIENCE_SECONDS
        self.false_starts = self.false_starts + 1 if soon else 1
        if self.false_starts > MOST_FALSE_STARTS:
            log = self.logs[self.process.pid].read_text("utf-8", "replace")
            raise RuntimeError(f"workers end by themselves; the last one said: {log[-2000:]}")

    def _give_up(self) -> None:
        """It does not end: let Celery write the stacks of its threads to the log, and kill it."""
        if self.process is not None and not self.hung and self.asked_to_end:
            self.hung = True
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGUSR1)
            time.sleep(1.0)
        self.kill()

    def kill(self) -> None:
        """SIGKILL the whole worker."""
        self.asked_at = self.asked_at or time.time()
        self._signal_group(signal.SIGKILL)

    def behead(self) -> None:
        """SIGKILL the main process only; its children find out by themselves."""
        if self.process is not None:
            self.asked_at = self.asked_at or time.time()
            self.process.kill()

    def pause(self) -> None:
        """SIGSTOP the whole worker."""
        self.paused = True
        self._signal_group(signal.SIGSTOP)

    def resume(self) -> None:
        """Let a paused worker go on."""
        if self.paused:
            self.paused = False
            self._signal_group(signal.SIGCONT)

    def ask(self, number: signal.Signals, *, group: bool = False) -> None:
        """SIGTERM: a warm shutdown; SIGQUIT: a cold one; to its whole group, as some deploys do."""
        if self.process is not None and self.asked_at is None:
            self.asked_at = time.time()
            self.cold = number is signal.SIGQUIT
            self.asked_to_end = True
            self.group = group
            if group:
                self._signal_group(number)
                return
            with suppress(ProcessLookupError):
                self.process.send_signal(number)

    @property
    def is_ready(self) -> bool:
        """True once its process takes messages."""
        return self.process is not None and b"ready." in self.logs[self.process.pid].read_bytes()

    def use_up_descriptors(self) -> None:
        """Leave the main process no file descriptor: those that it has go on."""
        if self.process is not None:
            with suppress(ProcessLookupError, FileNotFoundError):
                used = {int(name.name) for name in Path(f"/proc/{self.process.pid}/fd").iterdir()}
                _limit(self.process.pid, next(n for n in count() if n not in used))

    def free_descriptors(self) -> None:
        """Let it open files again, and the children that it made meanwhile."""
        if self.process is not None:
            pid = self.process.pid
            with suppress(ProcessLookupError, FileNotFoundError):
                children = Path(f"/proc/{pid}/task/{pid}/children").read_text("ascii")
                for each in (pid, *map(int, children.split())):
                    _limit(each, MOST_DESCRIPTORS)

    def finish(self) -> None:
        """End it in order, the hard way if that takes too long."""
        if self.process is None:
            return
        self.resume()
        self.ask(signal.SIGTERM)
        try:
            self.process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            self._give_up()
        self.clear()

    def _start(self) -> None:
        log = self.folder / f"{self.name}-{len(self.logs)}.log"
        command = [
            sys.executable,
            "-m",
            "celery",
            "-A",
            "chaos.app",
            "worker",
            "--pool",
            self.pool,
            "--concurrency",
            str(self.concurrency),
            "--hostname",
            f"{self.name}@chaos",
            "--loglevel",
            "INFO",
            "--queues",
            "work",
            "--without-gossip",
            "--without-mingle",
        ]
        if self.most_tasks:
            command += ["--max-tasks-per-child", str(self.most_tasks)]
        env = dict(self.env)
        if self.skew_seconds:
            env |= {
                "CHAOS_SKEW": str(self.skew_seconds),
                "PYTHONPATH": f"{CLOCK}{os.pathsep}{env['PYTHONPATH']}",
            }
        self._started_at = time.time()
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                command,
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_as_a_shell_would,  # noqa: PLW1509
            )
        self.logs[self.process.pid] = log

    def _signal_group(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


@dataclass(slots=True)
class Said:
    """Facts from the logs of all workers."""

    received: list[Logged] = field(default_factory=list)
    succeeded: list[Logged] = field(default_factory=list)
    stored: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    not_settled: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    doubles: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    complaints: Counter[str] = field(default_factory=Counter)


_COMPLAINTS = (
    "The dead-letter guard failed",
    "could not be dead-lettered",
    "could not be made",
    "is not guarded this time",
    "by an error of celery_dlq",
    "but not settled",
    "but its result is not stored",
    "Deliveries are not counted now",
    "not dead-lettered yet",
    "Unrecoverable error",
)


def said(slots: Sequence[Slot]) -> Said:
    """Read the logs of all workers."""
    result = Said()
    for slot, worker, path in [(s, w, path) for s in slots for w, path in s.logs.items()]:
        text = path.read_text("utf-8", "replace")
        for at, task_id in _RECEIVED.findall(text):
            result.received.append(Logged(task_id, worker, _logged(at) - slot.skew_seconds))
        for at, task_id in _SUCCEEDED.findall(text):
            result.succeeded.append(Logged(task_id, worker, _logged(at) - slot.skew_seconds))
        for at, task_id in _STORED.findall(text):
            result.stored[task_id].append(_logged(at) - slot.skew_seconds)
        for at in _NOT_SETTLED.findall(text):
            result.not_settled[worker].append(_logged(at) - slot.skew_seconds)
        result.doubles.update(_DOUBLE.findall(text))
        result.uncounted.update(_UNCOUNTED.findall(text))
        result.complaints.update({what: n for what in _COMPLAINTS if (n := text.count(what))})
    return result


def _logged(at: str) -> float:
    return datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp()  # noqa: DTZ007 - local time, as Celery logs it


def until(question: Callable[[], bool], seconds: float, *, tend: Callable[[], None]) -> bool:
    """Ask again and again while somebody looks after the workers; whether it came true."""
    deadline = time.monotonic() + seconds
    while not question():
        if time.monotonic() > deadline:
            return False
        tend()
        time.sleep(0.1)
    return True


def environment(folder: Path, **chaos: object) -> dict[str, str]:
    """The environment in which the app runs: ``CHAOS_*`` with what is given."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            filter(None, (str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")))
        ),
        "CHAOS_FOLDER": str(folder),
        "COLUMNS": "120",
        **{f"CHAOS_{name.upper()}": str(value) for name, value in chaos.items()},
    }
