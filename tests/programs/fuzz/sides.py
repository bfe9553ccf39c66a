"""One side of the fuzz: real workers, plain or guarded, and what they made of each message."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGKILL
from typing import Any

from fork_server import ForkedProcess
from fuzz.cases import Case, sound
from fuzz.places import RabbitPlace, RedisPlace

TESTS = Path(__file__).parents[1]
BATCH = 100
SOUND_EVERY = 25
MOST_DEATHS = {"plain": 1, "guarded": 3}  # of one message, alone; once among others before
QUIET_SECONDS = 3.0
QUIET_ALONE_SECONDS = 8.0  # one that publishes a retry which cannot be sent tries for seconds
QUIET_AFTER_DEATH_SECONDS = 12.0
START_SECONDS = 30.0
MOST_SECONDS = 60.0  # of one batch
MOST_RECEIPTS = 6  # of one message, in a worker that does not die

_AT_RECEIPT = f'{Path(__file__).with_name("app.py")}", line '
"""In the traceback of what ended the main process: it was about the message received last."""

_ERROR = re.compile(r"^[\w.]*(?:Error|Exception|Disallowed|Reject)\b.*", re.MULTILINE)


@dataclass
class Outcome:
    """The outcome of one message.

    Attributes:
        starts: How often its task began.
        succeeded: Celery called one of these a success.
        outside: Celery failed beside the task's body.
        acknowledged: It is neither queued nor unacknowledged.
        deaths: How often the worker's main process died of it, when it was alone.
        healthy: The sound messages behind it ran.
        letters: Their reasons.
        said: The last error in the worker's log; only if the message was tried alone.
    """

    starts: int = 0
    succeeded: bool = False
    outside: bool = False
    acknowledged: bool = False
    deaths: int = 0
    healthy: bool = True
    letters: list[str] = field(default_factory=list)
    said: str = ""
    token: str = ""

    def __str__(self) -> str:
        parts = [
            f"main process died {self.deaths} times" if self.deaths else "",
            f"ran {self.starts} times" if self.starts != 1 else "ran once",
            "acknowledged" if self.acknowledged else "NOT ACKNOWLEDGED",
            "" if self.healthy else "HEALTHY BEHIND IT DID NOT RUN",
            "failed" if self.starts and not self.succeeded else "",
            f"letters {self.letters}" if self.letters else "",
        ]
        return ", ".join(part for part in parts if part)


class Side:
    """Runs messages through workers.

    Args:
        name: ``plain`` or ``guarded``.
        place: Its broker.
        env: The workers' environment.
        folder: For marks and logs.
    """

    def __init__(
        self, name: str, place: RedisPlace | RabbitPlace, env: dict[str, str], folder: Path
    ) -> None:
        self.name = name
        self.place = place
        self.outcomes: dict[int, Outcome] = {}
        self.starts_of_workers = 0
        self._env = env
        self._folder = folder
        self._worker: ForkedProcess | None = None
        self._tries: Counter[int] = Counter()
        self._marks = _Marks(folder / "marks")
        self._log = folder / "log"

    def __call__(self, cases: Sequence[Case]) -> None:
        """Run all messages in batches, and those of which the worker died alone."""
        todo, alone = list(cases), []
        while todo:
            done, suspects = self._batch(todo[:BATCH])
            alone += suspects
            finished = done | {case.number for case in suspects}
            todo = [case for case in todo if case.number not in finished]
        for case in alone:
            self.alone(case)
        self.end()

    def alone(self, case: Case) -> Outcome:
        """Run one message with sound ones behind it; a worker that died is started again."""
        self._fresh()
        begun, deaths = self._log_size(), 0
        token = self._publish(case)
        behind = [self._publish(sound(-1)) for _ in range(2)]
        self._start(FUZZ_VISIBILITY="4")
        quiet = QUIET_ALONE_SECONDS
        while not self._rest({token, *behind}, quiet):
            deaths, quiet = deaths + 1, QUIET_AFTER_DEATH_SECONDS
            self._kill()
            if deaths >= MOST_DEATHS[self.name]:
                break
            self._start(FUZZ_VISIBILITY="4")
        outcome = self._outcome(case, token, set(self._left()))
        outcome.deaths = deaths
        outcome.healthy = all(self._marks.of("start", one) for one in behind)
        errors = _ERROR.findall(self._log_from(begun))
        outcome.said = errors[-1][:160] if errors else ""
        self._fresh()
        return outcome

    def end(self) -> None:
        """End the worker."""
        self._kill()

    def _batch(self, cases: Sequence[Case]) -> tuple[set[int], list[Case]]:
        """The numbers of those whose end is known, and those to be tried alone."""
        if self._worker is None:
            self.place.clear()
        tokens, behind = {}, []
        for n, case in enumerate(cases):
            tokens[self._publish(case)] = case
            if n % SOUND_EVERY == SOUND_EVERY - 1 or n == len(cases) - 1:
                behind.append(self._publish(sound(-1)))
        if self._worker is None:
            self._start()
        lives = self._rest({*tokens, *behind})
        if lives and not self.place.sees_unacknowledged:
            self._kill()
        left = set(self._left())
        came = [token for token in self._marks.received if token in tokens]
        if self._worker is None or self._worker.poll() is None:
            # It goes round and round: in the order of first receipts the last is the obstacle.
            came = list(dict.fromkeys(came))
        # One that the worker never came to says nothing: another one ended or stopped the worker.
        if lives and left.isdisjoint(tokens.keys() - {*came}):
            healthy = all(self._marks.of("start", one) for one in behind)
            for token, case in tokens.items():
                self._outcome(case, token, left).healthy = healthy
            settled, suspects = {case.number for case in cases}, []
        else:
            settled, suspects = self._settle(tokens, came, left)
        if left or not lives:
            self._fresh()
        return settled, suspects

    def _settle(
        self, tokens: dict[str, Case], came: list[str], left: set[str]
    ) -> tuple[set[int], list[Case]]:
        """The outcomes known although the worker died or stopped, and messages to try alone."""
        last = came[-1] if came else ""
        for token, case in tokens.items():
            if token not in left and token != last:
                self._outcome(case, token, left)
        settled = {case.number for token, case in tokens.items() if token not in {*left, last}}
        if not last:
            return settled, [case for case in tokens.values() if case.number not in settled]
        killer = tokens[last]
        if self.name == "plain" and _AT_RECEIPT in self._log_from(self._begun):
            # Plain Celery would die of it again, and forever; the guarded worker may not.
            self._outcome(killer, last, left).deaths = 1
            return settled | {killer.number}, []
        return settled, [killer]

    def _outcome(self, case: Case, token: str, left: set[str]) -> Outcome:
        outcome = self.outcomes[case.number] = Outcome(
            starts=self._marks.of("start", token),
            token=token,
            acknowledged=token not in left,
            succeeded=self._marks.of("SUCCESS", token) > 0,
            outside=self._marks.of("OUTSIDE", token) > 0,
        )
        return outcome

    def _publish(self, case: Case) -> str:
        """Each try has a token of its own: nothing is known of the one before."""
        self._tries[case.number] += 1
        number = case.number if case.number >= 0 else 999_999_999
        token = f"case-{number}-{self._tries[case.number]}"
        self.place.publish(case.draft(token))
        return token

    def _rest(self, tokens: set[str], quiet_seconds: float = QUIET_SECONDS) -> bool:
        """Wait until nothing is left or nothing happens any more; not if the worker dies."""
        assert self._worker is not None
        self._marks.forget_received()
        end = time.monotonic() + MOST_SECONDS
        seen: Any = None
        since = time.monotonic()
        while time.monotonic() < end:
            if self._worker.poll() is not None:
                self._marks.read()
                return False
            self._marks.read()
            waiting = self.place.waiting()
            now = (waiting, self._marks.lines)
            if now != seen:
                seen, since = now, time.monotonic()
            if waiting == 0 and self.place.sees_unacknowledged:
                return True
            often = Counter(t for t in self._marks.received if t in tokens)
            if often and max(often.values()) > MOST_RECEIPTS:
                return False  # again and again, without an end
            if time.monotonic() - since > quiet_seconds and self._ready():
                return True
            time.sleep(0.05)
        return False

    def _left(self) -> list[str]:
        return self.place.left()

    def _ready(self) -> bool:
        return b"ready." in self._log.read_bytes()[self._begun :]

    def _start(self, **more: str) -> None:
        self.starts_of_workers += 1
        self._begun = self._log_size()
        arguments = [
            "-A",
            "fuzz.app",
            "worker",
            "--concurrency",
            "1",
            "--loglevel",
            "INFO",
            "--queues",
            "work",
            "--hostname",
            f"{self.name}@fuzz",
            "--without-gossip",
            "--without-mingle",
            "--without-heartbeat",
        ]
        self._worker = ForkedProcess(arguments, cwd=TESTS, env={**self._env, **more}, log=self._log)

    def _kill(self) -> None:
        if self._worker is None:
            return
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._worker.pid, SIGKILL)
        with suppress(Exception):
            self._worker.wait(START_SECONDS)
        self._worker = None

    def _fresh(self) -> None:
        self._kill()
        if not self.place.sees_unacknowledged:
            time.sleep(0.3)  # the broker sees the connection's end
        self.place.clear()

    def _log_size(self) -> int:
        return self._log.stat().st_size if self._log.exists() else 0

    def _log_from(self, begun: int) -> str:
        return self._log.read_bytes()[begun:].decode("utf-8", "replace")


class _Marks:
    """The notes of the tasks and workers of one side, read on as they grow."""

    def __init__(self, path: Path) -> None:
        self.received: list[str] = []
        self.lines = 0
        self._path = path
        self._at = 0
        self._counts: Counter[tuple[str, str]] = Counter()

    def of(self, what: str, token: str) -> int:
        """Number of times that something happened to a message."""
        self.read()
        return self._counts[what, token]

    def forget_received(self) -> None:
        self.read()
        self.received.clear()

    def read(self) -> None:
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._at)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._at += len(whole)
        for line in whole.decode().splitlines():
            what, token = line.split()
            self._counts[what, token] += 1
            self.lines += 1
            if what == "received":
                self.received.append(token)
