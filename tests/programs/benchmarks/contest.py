"""Contestants take turns on one machine: each round every one of them does the same work.

All processes live from the first round to the last, so that starting up is not measured.
All but the one whose turn it is are stopped by a signal, so that they cost nothing meanwhile.
While its own processes are stopped too its queue is filled; then they go on, and what is
measured is what they spend until the last message is done and they are quiet again.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.processes import Tree
from waiting import poll

_ROUND_SECONDS = 120.0
_START_SECONDS = 30.0


@dataclass(frozen=True)
class Sample:
    """The cost of one turn.

    Attributes:
        seconds: From the first message on until all was quiet.
        worker_cpu: CPU seconds of the workers' processes.
        server_cpu: CPU seconds of the server.
    """

    seconds: float
    worker_cpu: float
    server_cpu: float


class Contestant(ABC):
    """Workers with a queue of their own.

    Args:
        name: What tables call it.
        folder: For its tally and log.
        server: The broker's, or store's, processes.

    Attributes:
        exact: No message runs more often than it should.
    """

    exact = True

    def __init__(self, name: str, folder: Path, server: Tree) -> None:
        self.name = name
        self.tally = folder / "tally"
        self.log = folder / "log"
        self.server = server
        self.samples: list[Sample] = []
        self.beside: list[tuple[Sample, Sample]] = []
        folder.mkdir(parents=True, exist_ok=True)
        self.tally.touch()
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def command(self) -> tuple[list[str], dict[str, str]]:
        """The command that starts its workers, and the environment."""

    @abstractmethod
    def publish(self, messages: int) -> None:
        """Fill its queue."""

    def settled(self, messages: int) -> bool:
        """True if the consequences of this number of messages are all there, e.g. the letters."""
        return True

    @property
    def tree(self) -> Tree:
        """Its workers' processes."""
        assert self._process is not None, "expected a contestant that was started"
        return Tree(self._process.pid)

    def start(self) -> None:
        """Start its workers; they are ready after the first message, see `warm_up`."""
        command, env = self.command()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def warm_up(self, messages: int, executions: int = 1) -> None:
        """Connections, caches, pools."""
        self.publish(messages)
        self._wait_for(messages * executions, 0)
        poll(lambda: self.settled(messages), timeout_seconds=_ROUND_SECONDS)
        self.tree.wait_until_quiet()
        self.tree.stop()

    def turn(self, messages: int, executions: int = 1) -> Sample:
        """Run messages, each executed this often."""
        before = self.tally.stat().st_size
        self.publish(messages)
        tree = self.tree
        cpu, server, begun = tree.cpu_seconds(), self.server.cpu_seconds(), time.perf_counter()
        tree.go_on()
        self._wait_for(messages * executions, before)
        poll(lambda: self.settled(messages), timeout_seconds=_ROUND_SECONDS)
        quiet_at = tree.wait_until_quiet()
        tree.stop()
        sample = Sample(
            seconds=quiet_at - begun,
            worker_cpu=tree.cpu_seconds() - cpu,
            server_cpu=self.server.cpu_seconds() - server,
        )
        done = self.tally.stat().st_size - before
        wanted = messages * executions
        assert done == wanted or (done > wanted and not self.exact), (
            f"expected {self.name} to run {wanted} times, got {done}"
        )
        self.samples.append(sample)
        return sample

    def idle(self, seconds: float) -> float:
        """CPU seconds a second of workers without work."""
        tree = self.tree
        tree.go_on()
        tree.wait_until_quiet()
        before, begun = tree.cpu_seconds(), time.perf_counter()
        time.sleep(seconds)
        share = (tree.cpu_seconds() - before) / (time.perf_counter() - begun)
        tree.stop()
        return share

    def close(self) -> None:
        """End its workers."""
        if self._process is None:
            return
        tree = self.tree
        tree.go_on()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            for pid in tree.pids():
                subprocess.run(["kill", "-9", str(pid)], check=False)
            self._process.wait(10)

    def _wait_for(self, runs: int, before: int) -> None:
        def all_ran() -> bool:
            assert self._process is not None
            assert self._process.poll() is None, f"{self.name} ended: {self._tail()}"
            return self.tally.stat().st_size - before >= runs

        try:
            poll(all_ran, timeout_seconds=_ROUND_SECONDS, every_seconds=0.005)
        except AssertionError as exc:
            raise AssertionError(f"{self.name}: {exc}: {self._tail()}") from exc

    def _tail(self) -> str:
        return self.log.read_text("utf-8", "replace")[-2000:]


@dataclass
class Contest:
    """Contestants and their work.

    Attributes:
        contestants: The first one is what the others are compared with.
        messages: How many a turn.
        rounds: How many turns each has.
        paired: The first one has a turn before and after each of the others, so that a
            machine that gets slower meanwhile does so for both; else all take turns.
        executions: How often a message is run, where it is not once.
        after_start: Called before the first round; what it returns are the facts.
        facts: What it returned.
    """

    contestants: Sequence[Contestant]
    messages: int
    rounds: int
    paired: bool = True
    executions: Mapping[str, int] = field(default_factory=dict)
    after_start: Callable[[], Any] | None = None
    facts: Any = None

    def run(self, tell: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
        """All rounds; one row per contestant, compared with the first one."""
        try:
            for contestant in self.contestants:
                contestant.start()
            for contestant in self.contestants:
                few = max(2, min(50, self.messages // 4))
                contestant.warm_up(few, self.executions.get(contestant.name, 1))
            if self.after_start is not None:
                self.facts = self.after_start()
            for number in range(self.rounds):
                self._round(number)
                tell(f"round {number + 1} of {self.rounds}")
            memory = {c.name: c.tree.memory_bytes() for c in self.contestants}
        finally:
            for contestant in self.contestants:
                contestant.close()
        return [{**row, "memory_mib": memory[row["name"]] / 2**20} for row in self._rows()]

    def _round(self, number: int) -> None:
        base, *others = self.contestants
        if not self.paired:
            others, base = list(self.contestants), None  # type: ignore[assignment]
        elif not base.samples:
            self._turn(base)
        turned = number % len(others)
        for contestant in (*others[turned:], *others[:turned]):
            self._turn(contestant)
            if base is not None:
                contestant.beside.append((base.samples[-1], self._turn(base)))

    def _turn(self, contestant: Contestant) -> Sample:
        return contestant.turn(self.messages, self.executions.get(contestant.name, 1))

    def _ratio(self, contestant: Contestant) -> list[float]:
        """CPU of its workers, by what the first one spent just before and just after."""
        base = self.contestants[0].samples
        beside = contestant.beside or [(b, b) for b in base]
        return spread(
            2 * sample.worker_cpu / (before.worker_cpu + after.worker_cpu)
            for sample, (before, after) in zip(contestant.samples, beside, strict=True)
        )

    def _rows(self) -> Iterable[dict[str, Any]]:
        for contestant in self.contestants:
            samples, count = contestant.samples, self.messages
            yield {
                "name": contestant.name,
                "rounds": len(samples),
                "messages": count,
                "tasks_per_second": median(count / s.seconds for s in samples),
                "worker_cpu_ms": median(s.worker_cpu / count for s in samples) * 1e3,
                "server_cpu_ms": median(s.server_cpu / count for s in samples) * 1e3,
                "worker_cpu_ratio": self._ratio(contestant),
                "samples": [asdict(sample) for sample in samples],
            }


def median(values: Iterable[float]) -> float:
    """The middle one."""
    return statistics.median(values)


def spread(values: Iterable[float]) -> list[float]:
    """Lower quartile, median, upper quartile."""
    found = list(values)
    return statistics.quantiles(found, n=4) if len(found) > 1 else found * 3


def python(module: str, *arguments: str) -> list[str]:
    """The command of a module of these benchmarks."""
    return [sys.executable, "-m", module, *arguments]
