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
from celery_dlq.store.embedded import child, redis_server

_APP = "celery_dlq.demo.shop"
_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.2


def run_demo(folder: str, *, web: bool = False) -> None:
    """Run the demo; its files stay in a new folder below this one."""
    for package in ("pyarrow", "pyspark", "matplotlib", "starlette", "uvicorn", "itsdangerous"):
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
    with child([*command, "--queues", ",".join(queues)], log) as process:
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
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise DemoError(
                f"expected a folder that can be written, got {self.folder}: {exc.strerror}"
            ) from exc
        shop = self._start(stack)
        self._begin("publish healthy tasks, and tasks that will die")
        healthy, dying = shop.publish()
        say(self.console, f"{len(healthy)} healthy, {sum(map(len, dying.values()))} will die")
        self._begin("the worker survives them")
        self._watch(shop, healthy, sum(map(len, dying.values())))
        self._begin("look at the dead-letter queues")
        self._dlq("queues")
        self._dlq("groups", "orders-DLQ")
        self._dlq("list", "orders-DLQ", "--limit", "3")
        self._begin("export to Parquet, triage with PySpark")
        letters = str(self.folder / "letters")
        self._dlq("export", letters)
        self._dlq("triage", letters, "--picture", str(self.folder / "triage.png"))
        self._begin("fix the bug in charge and redrive its letters")
        shop.FIXED.touch()
        self._dlq("redrive", "orders-DLQ", "--task", shop.charge.name, "--yes")
        charges = dying["charge"]
        self._until(
            f"the {len(charges)} redriven tasks to succeed",
            lambda: shop.succeeded(charges) == len(charges),
        )
        say(self.console, f"All {len(charges)} succeeded under their old ids.")
        self._dlq("queues")
        self.console.print(Rule(style="green"))
        took = time.monotonic() - started
        say(self.console, f"Done in {took:.0f} s. Kept in {self.folder}", "bold green")
        if not web:
            say(self.console, "To look at such letters in a browser: celery-dlq demo --web")
            return
        self._begin("look at the letters in a browser, until Ctrl-C")
        self._dlq("web", "--allow-changes", "--port", "0", "--title", "demo")

    def _start(self, stack: ExitStack) -> ModuleType:
        self._begin("start Redis and a Celery worker")
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="celery-dlq-")))
        url = stack.enter_context(redis_server(temporary))
        os.environ["CELERY_DLQ_DEMO_REDIS"] = url
        os.environ["CELERY_DLQ_DEMO_FLAG"] = str(temporary / "bug-is-fixed")
        from celery_dlq.demo import shop  # noqa: PLC0415 - reads the environment set above

        self._worker = stack.enter_context(worker(_APP, shop.QUEUES, self.log))
        kind = "prefork, acks_late, reject_on_worker_lost"
        say(self.console, f"Redis at {url}, worker pid {self._worker.pid} ({kind})")
        return shop

    def _watch(self, shop: ModuleType, healthy: Sequence[str], dying: int) -> None:
        """Wait until all tasks have ended, each as it should."""

        def all_ended() -> bool:
            letters = sum(queue.letters for queue in shop.dlq.queues())
            if letters > dying:
                raise DemoError(f"expected {dying} dead letters, got {letters}")
            return bool(letters == dying and shop.succeeded(healthy) == len(healthy))

        with self.console.status("tasks run, die and are dead-lettered"):
            self._until("all tasks to end", all_ended)
        say(self.console, f"{len(healthy)} succeeded, {dying} are dead letters")

    def _begin(self, title: str) -> None:
        self._number += 1
        self.step = f"{self._number}, {title}"
        self.console.print(Rule(f"{self._number}. {title}", align="left", style="cyan"))

    def _dlq(self, *arguments: str) -> None:
        """Run a command as an operator would, below its text."""
        shown = " ".join(["celery", "-A", _APP, "dlq", *arguments])
        say(self.console, f"$ {shown}", "bold")
        command = [sys.executable, "-m", "celery", "-A", _APP, "dlq", *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, check=False)  # noqa: S603 - our own
        if done.returncode:
            raise DemoError(f"`{shown}` ended with {done.returncode}")

    def _until(self, what: str, done: Callable[[], bool]) -> None:
        """Wait until something is so; fails if the worker exits or time runs out."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            if self._worker is not None and self._worker.poll() is not None:
                code = self._worker.returncode
                raise DemoError(f"the worker exited with code {code}; see {self.log}")
            if done():
                return
            time.sleep(_POLL_SECONDS)
        raise DemoError(f"expected {what} within {_WAIT_SECONDS:.0f} s; see {self.log}")


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
