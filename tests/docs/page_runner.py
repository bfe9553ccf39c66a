"""A page run as its reader follows it: its files are written, its code and commands run.

- Python that begins with ``# name.py`` is that file, in the reader's folder. Other Python runs,
  all of a page in one process and namespace; functions called ``test_…`` are called.
- Console blocks run in a shell, in the same folder. Output that the page shows must come, as
  far as it is the same on every machine. What only reads is asked again until it has come.
- ``celery … worker`` runs until the page is over, or until the page starts it once more.
- ``export NAME=VALUE`` is for all that follows on the page.
- JSON, TOML, INI and YAML are read.
- The id of a hold on the page stands for the one that ``dlq hold`` has printed last; the id of a
  letter for that in the same row of a list.

A page without a ``shop.py`` of its own has that of this folder, and some letters.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import page_python
import yaml
from fenced import Block
from fork_server import ForkedProcess
from java import QUICK_JAVA
from waiting import poll

HERE = Path(__file__).parent
SHOP = HERE / "shop.py"
APPS = ("shop.py", "proj/celery.py")

_PRELUDE = """
from datetime import timedelta
from celery_dlq import DeadLetters, RejectToDLQ, dead_letter_policy
from shop import app, charge, dlq
"""
_WORKER = re.compile(r"^celery .*\bworker\b")
_READS = re.compile(
    r"\bdlq (queues|list|show|groups|differences|tail|audit|policies|jobs)\b|\bresult\b"
)
_FILE = re.compile(r"# ([\w./-]+\.\w+)\n")
_HOLD = re.compile(r"\bhold-[0-9a-f]{8}\b")
_LETTER = re.compile(r"^ ([0-9a-f]{8})(?=  )")
_UUID = r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b"
_SECONDS = 40.0

# What differs from run to run, in the order in which it is looked for.
_VARIES = (
    (_LETTER.pattern, "LETTER"),
    (_UUID, "UUID"),
    (r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(\.\d+)?(Z|\+00:00)?", "TIME"),
    (r"\b\d\d-\d\d \d\d:\d\d:\d\d\b", "TIME"),
    (r"\b\d{8}-\d{9}-[0-9a-f]{6}\b", "JOB"),
    (_HOLD.pattern, "HOLD"),
    (r"\b\d+ (s|min|h|d) ago\b", "AGO"),
    (r"\b\d[\d.]* a minute\b", "PACE"),
    (r"\b\d+\.\d+ s\b", "SECONDS"),
    (r"\bpid \d+|\bgen\d+@[\w.-]+|\b\w+@[\w.-]+", "PROCESS"),
    (r"\b(?=[0-9a-f]*\d)[0-9a-f]{12,}\b", "HEX"),
    (r"\b\d{4,}\b", "NUMBER"),
    (r"\b\d+ KiB", "SIZE"),
    (r"[─━]+|\s+", " "),
)


class PageRunner:
    """One page.

    Args:
        folder: The reader's folder, empty.
        places: Text of the page and what stands for it, e.g. addresses of servers.
        exempt: Whether a command is not run, and why.
    """

    def __init__(
        self,
        folder: Path,
        places: Mapping[str, str],
        exempt: Callable[[str, str], str | None],
    ) -> None:
        self.folder = folder
        self._places = places
        self._exempt = exempt
        self._python_process: subprocess.Popen[str] | None = None
        self._workers: dict[str, ForkedProcess] = {}
        self._hold: str | None = None
        self._letters: dict[str, str] = {}
        # This Python's `celery`, also where it is not installed beside it.
        celery = folder / ".bin" / "celery"
        celery.parent.mkdir()
        celery.write_text(f'#!/bin/sh\nexec {sys.executable} -m celery "$@"\n')
        celery.chmod(0o755)
        self._env = {
            **os.environ,
            **QUICK_JAVA,
            "PATH": f"{celery.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": str(folder),
            "COLUMNS": "80",
            "NO_COLOR": "1",
            **{name: value for name, value in places.items() if name.isupper()},
        }

    def close(self) -> None:
        """End what runs."""
        for worker in self._workers.values():
            _end(worker)
        if self._python_process is not None:
            self._python_process.communicate(timeout=_SECONDS)  # nothing more comes: it ends

    def run_block(self, block: Block) -> None:
        """One block.

        Raises:
            AssertionError: It does not do what the page says; the message has page and line.
        """
        handler = getattr(self, f"_{block.language}", None)
        assert handler, f"{block.place}: no test knows the language {block.language!r}"
        try:
            handler(block)
        except AssertionError as exc:
            raise AssertionError(f"{block.place}: {exc}") from exc

    def worker(self, command: str) -> None:
        """Start a worker, or start it once more, and wait until it consumes."""
        command = command.rstrip("& ")
        if command in self._workers:
            _end(self._workers[command])
        log = self.folder / f"worker-{len(self._workers)}-{time.monotonic_ns()}.log"
        arguments = shlex.split(command)[1:]
        process = ForkedProcess(arguments, cwd=self.folder, env=self._env, log=log)
        self._workers[command] = process
        poll(
            lambda: b"ready." in log.read_bytes() or process.poll() is not None,
            timeout_seconds=_SECONDS,
        )
        assert process.poll() is None, log.read_text("utf-8", "replace")

    def run(self, page: str, line: int, code: str) -> None:
        """Run Python in the page's own process."""
        if self._python_process is None:
            self._python_process = subprocess.Popen(
                [sys.executable, page_python.__file__],
                cwd=self.folder,
                env=self._env,
                text=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        process = self._python_process
        assert process.stdin is not None
        assert process.stdout is not None
        print(
            json.dumps({"page": page, "line": line, "text": code}), file=process.stdin, flush=True
        )
        problem = json.loads(process.stdout.readline() or '"its process ended"')
        assert not problem, problem

    def _python(self, block: Block) -> None:
        code = self._placed(block.text)
        named = _FILE.match(code)
        if named:
            path = self.folder / named[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(code, "utf-8")
            return
        self.run(block.page, block.line, code)

    def _console(self, block: Block) -> None:
        for line, expected in block.commands:
            command = self._placed(re.sub(r"\s+# .*", "", line))
            if self._hold is not None:
                command = _HOLD.sub(self._hold, command)
            command = re.sub(r"(?<= )[0-9a-f]{6,8}\b", self._letter, command)
            if self._exempt(block.page, command):
                continue
            if command.startswith("export "):
                name, _, value = shlex.split(command)[1].partition("=")
                self._env[name] = value
            elif _WORKER.match(command):
                self.worker(command)
            else:
                self._command(command, [self._placed(text) for text in expected])

    def _command(self, command: str, expected: list[str]) -> None:
        wanted = [_plain(line) for line in expected if _plain(line) not in ("", "…")]
        code, printed = 1, ""

        def as_expected() -> bool:
            nonlocal code, printed
            code, printed = self._shell(command)
            return code == 0 and not _missing(wanted, printed)

        deadline = time.monotonic() + (_SECONDS if _READS.search(command) else 0)
        while not as_expected() and time.monotonic() < deadline:
            time.sleep(0.2)
        assert code == 0, f"{command}\nended with {code}:\n{printed}"
        if " dlq hold " in command and (hold := _HOLD.search(printed)):
            self._hold = hold[0]
        missing = _missing(wanted, printed)
        assert not missing, f"{command}\nexpected {missing!r} in\n{printed}"
        for row in filter(_LETTER.match, expected):
            came = next(line for line in printed.splitlines() if _plain(row) in _plain(line))
            self._letters[row.split()[0]] = came.split()[0]

    def _letter(self, shown: re.Match[str]) -> str:
        """The beginning of a letter's id, which the page shows as another."""
        ids = (own for page, own in self._letters.items() if page.startswith(shown[0]))
        return next(ids, shown[0])[: len(shown[0])]

    def _shell(self, command: str) -> tuple[int, str]:
        if (arguments := _of_celery(command)) is not None:
            return self._forked(arguments)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=240,
            check=False,
        )
        return done.returncode, done.stdout.decode("utf-8", "replace")

    def _forked(self, arguments: list[str]) -> tuple[int, str]:
        """As the shell runs it, without a second of imports."""
        log = self.folder / f".command-{time.monotonic_ns()}.log"
        process = ForkedProcess(arguments, cwd=self.folder, env=self._env, log=log)
        try:
            code = process.wait(240)
        finally:
            process.kill()
        return code, log.read_text("utf-8", "replace")

    def _json(self, block: Block) -> None:
        json.loads(block.text)

    def _yaml(self, block: Block) -> None:
        assert yaml.safe_load(block.text)

    def _ini(self, block: Block) -> None:
        parser = configparser.ConfigParser()
        parser.read_string(block.text)
        assert parser.sections()

    def _placed(self, text: str) -> str:
        for here, there in self._places.items():
            text = text.replace(here, there)
        return text


def own_shop(page_blocks: list[Block]) -> bool:
    """True if a page brings its app along."""
    files = [_FILE.match(block.text) for block in page_blocks if block.language == "python"]
    return any(named and named[1] in APPS for named in files)


def lend_shop(page: PageRunner) -> None:
    """Give a page the app of this folder."""
    shutil.copy(SHOP, page.folder / "shop.py")
    page.run("its hidden beginning", 1, _PRELUDE)


def _missing(wanted: list[str], printed: str) -> str | None:
    """The first expected line that does not come, in their order."""
    lines = iter(_plain(line) for line in printed.splitlines())
    return next((line for line in wanted if not any(line in shown for shown in lines)), None)


def _plain(line: str) -> str:
    for pattern, replacement in _VARIES:
        line = re.sub(pattern, replacement, line)
    return line.strip()


def _of_celery(command: str) -> list[str] | None:
    """The arguments of a ``celery …`` that needs nothing else of a shell."""
    words = shlex.split(command)
    plain = not re.search(r"[|&;<>$`*?(){}~\n]", command)
    return words[1:] if plain and words[0] == "celery" else None


def _end(process: ForkedProcess) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
