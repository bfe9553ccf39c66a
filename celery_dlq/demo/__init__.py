"""The demo: Redis, a worker, tasks that die, and the commands that an operator types then.

The commands run as they are printed: ``celery -A celery_dlq.demo.shop dlq …``. An error names the
step in which it happened.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from types import FrameType, ModuleType

from rich.console import Console
from rich.rule import Rule

from celery_dlq.cli.table import say
from celery_dlq.errors import DemoError, DLQError, MissingExtra
from celery_dlq.store.embedded import child_process, redis_server

_APP = "celery_dlq.demo.shop"
_WAIT_SECONDS = 120.0
_POLL_SECONDS = 0.2
_PACKAGES = ["pyarrow", "pyspark", "pandas", "matplotlib", "starlette", "uvicorn", "itsdangerous"]


def run_demo(folder: str, *, web: bool = False) -> None:
    """Run the demo; its files stay in a new folder below this one."""
    for package in _PACKAGES:
        if find_spec(package) is None:  # reported at the start, not after a minute
            feature = "the demo"
            if package == "pyspark" and sys.version_info < (3, 11):
                feature = "the demo (on Python 3.11 or later, which PySpark needs)"
            raise MissingExtra(feature, package, "demo")
    demo = _Demo(Path(folder) / f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S}")
    try:
        with _quick_goodbye(), ExitStack() as stack:
            demo.run(stack, web=web)
    except MissingExtra:
        raise
    except Exception as exc:
        error = str(exc) if isinstance(exc, DLQError) else f"{type(exc).__name__}: {exc}"
        raise DemoError(f"the demo failed at step {demo.step}: {error}") from exc


@contextmanager
def worker(app: str, queues: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a real ``celery worker`` with two pool processes."""
    options = "--pool prefork --concurrency 2 --loglevel INFO --without-gossip --without-mingle"
    command = [sys.executable, "-m", "celery", "-A", app, "worker", *options.split()]
    with child_process([*command, "--queues", ",".join(queues)], log) as process:
        yield process


class _Demo:
    """The steps of the demo."""

    def __init__(self, folder: Path) -> None:
        self.console = Console(highlight=False)
        self.folder = folder
        self.log = folder / "worker.log"
        self.step = "0, start"
        self._number = 0
        self._worker: subprocess.Popen[bytes] | None = None

    def run(self, stack: ExitStack, *, web: bool) -> None:
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        shop = self._start(stack)
        self._begin("Send tasks such as this one: some fail, some kill their process")
        self._typed("call", "shop.charge", "--args '[1, 19.9, 0]'")
        healthy, dying = shop.publish()
        self._watch(shop, healthy, sum(map(len, dying.values())))
        self._begin("Save the letters as Parquet; PySpark reads them during the next steps")
        letters, successes = (str(self.folder / name) for name in ("letters", "successes"))
        report = self.folder / "report.html"
        command = self._typed("dlq", "export", successes, "--successes")
        with child_process(command, self.folder / "successes.log") as saving:
            self._run_dlq("export", letters)
            self._wait_until("the successes to be saved", lambda: saving.poll() is not None)
        options = ("--successes", successes, "--html", str(report))
        command = self._typed("dlq", "triage", letters, *options)
        triage = stack.enter_context(child_process(command, self.folder / "triage.log"))
        self._begin("See how many letters there are, and why")
        self._run_dlq("queues")
        self._run_dlq("groups", "orders-DLQ")
        self._run_dlq("differences", "orders-DLQ", "--task", "shop.charge", most=3)
        self._begin("Mend the bug in charge, and redrive its letters: 3 first, then the rest")
        shop.FIXED.touch()
        self._run_dlq("redrive", "orders-DLQ", "--task", "shop.charge", "--canary", "3", "--yes")
        charges = dying["charge"]
        self._wait_until(
            "redriven tasks to succeed", lambda: shop.succeeded(charges) == len(charges)
        )
        say(self.console, f"All {len(charges)} succeeded, under their old ids.")
        if self._worker is not None and not web:  # it ends while the triage goes on
            self._worker.terminate()
            self._worker = None
        self._begin("Read what PySpark found")
        self._wait_until("the triage to end", lambda: triage.poll() is not None)
        self._show(self.folder.joinpath("triage.log").read_text("utf-8"), triage.returncode, 8)
        took = time.monotonic() - started
        say(self.console, f"Done in {took:.0f} s. Files: {self.folder}", "bold green")
        say(self.console, f"Report: {report.resolve().as_uri()}")
        if web:
            self._begin("Look at the letters in a browser, until Ctrl-C")
            subprocess.run(self._typed("dlq", "web", "--allow-changes"), check=True)  # noqa: S603 - our own
        else:
            say(self.console, "Page:   http://127.0.0.1:9809/ with celery-dlq demo --web")

    def _start(self, stack: ExitStack) -> ModuleType:
        self._begin("Start Redis and a worker")
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="celery-dlq-")))
        url = stack.enter_context(redis_server(temporary))
        os.environ |= {
            "CELERY_DLQ_DEMO_REDIS": url,
            "CELERY_DLQ_DEMO_FLAG": str(temporary / "bug-is-fixed"),
            "COLUMNS": str(self.console.width),
            "TMPDIR": str(temporary),  # what children leave there goes, too
        }
        from celery_dlq.demo import shop  # noqa: PLC0415 - reads the environment set above

        self._typed("worker", "--queues", ",".join(shop.QUEUES))
        self._worker = stack.enter_context(worker(_APP, shop.QUEUES, self.log))
        say(self.console, f"Redis at {url}, worker pid {self._worker.pid}")
        return shop

    def _watch(self, shop: ModuleType, healthy: Sequence[str], dying: int) -> None:
        """Wait until all tasks have ended, each as it should."""

        def all_ended() -> bool:
            letters = sum(queue.letters for queue in shop.dlq.queues())
            if letters > dying:
                raise DemoError(f"expected {dying} dead letters, got {letters}")
            if letters < dying or shop.succeeded(healthy) < len(healthy):
                return False
            return bool(shop.samples() >= len(healthy))

        self._wait_until("all tasks to end", all_ended)
        say(self.console, f"{len(healthy)} tasks succeeded, {dying} are letters now")

    def _begin(self, title: str) -> None:
        self._number += 1
        self.step = f"{self._number}, {title}"
        self.console.print(Rule(f"{self._number}. {title}", align="left", style="cyan"))

    def _typed(self, *command: str) -> list[str]:
        """Show a command as a user types it, and return it for this Python."""
        shown = " ".join(["celery", "-A", _APP, *command])
        say(self.console, f"$ {shown}", "bold")
        return [sys.executable, "-m", "celery", "-A", _APP, *command]

    def _run_dlq(self, *arguments: str, most: int = 20) -> None:
        """Run a command as an operator would, and show it with what it prints."""
        command = self._typed("dlq", *arguments)
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=-1, text=True, check=False)  # noqa: S603 - our own
        self._show(done.stdout, done.returncode, most)

    def _show(self, printed: str, returncode: int | None, most: int) -> None:
        lines = [text.rstrip() for text in printed.splitlines() if text.strip()]
        hidden = len(lines) - most
        for text in lines[:most] + [f"… {hidden} more lines"] * (hidden > 0):
            say(self.console, text)
        if returncode:
            raise DemoError(f"the command ended with {returncode}")

    def _wait_until(self, what: str, done: Callable[[], bool]) -> None:
        """Wait until something is so; fails if the worker exits or time runs out."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while not done():
            if self._worker is not None and self._worker.poll() is not None:
                code = self._worker.returncode
                raise DemoError(f"the worker exited with code {code}; see {self.log}")
            if time.monotonic() > deadline:
                raise DemoError(f"expected {what} within {_WAIT_SECONDS:.0f} s; see {self.log}")
            time.sleep(_POLL_SECONDS)


@contextmanager
def _quick_goodbye() -> Iterator[None]:
    """Clean up on SIGTERM as on Ctrl-C."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
