"""The steps of the demo, each shown on the screen; an error names its step."""

from __future__ import annotations

import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.rule import Rule

from celery_dlq.cli import letter_tables, operation_tables, triage_tables
from celery_dlq.cli.terminal import say
from celery_dlq.demo.processes import worker
from celery_dlq.errors import DemoError, DLQError, MissingExtra
from celery_dlq.testing.server import redis_server

if TYPE_CHECKING:
    import subprocess

    from celery_dlq.plugin import DeadLetters

_WAIT_SECONDS = 60.0
_POLL_SECONDS = 0.2
_WEB_PORT = 9809

HEALTHY = 60
INVOICES = 5
# Task, number of messages, and a function from a counter to the positional arguments.
POISON: tuple[tuple[str, int, Any], ...] = (
    ("charge", 12, lambda n: (n, 19.9 + n, 0)),
    ("ship", 8, lambda n: (n, ("GB", "US", "BR", "JP")[n % 4])),
    ("reserve", 5, lambda n: (n,)),
    ("render", 5, lambda n: (n,)),
    ("thumbnail", 3, lambda n: (n,)),
)


@dataclass(slots=True)
class Published:
    """Ids of the published messages, by task."""

    ids: dict[str, list[str]] = field(default_factory=dict)

    @property
    def poison(self) -> int:
        """Number of messages that will die."""
        return sum(len(self.ids[name]) for name, _count, _args in POISON)

    @property
    def healthy(self) -> list[str]:
        """Ids of the messages that will succeed."""
        return [*self.ids["pack"], *self.ids["invoice"]]


def run_demo(folder: str, *, web: bool = False) -> None:
    """Run the demo."""
    _check_extras()
    demo = _Demo(Path(folder), web=web)
    with _quick_goodbye():
        demo.run()


class _Demo:
    """The demo's steps, and their shared state."""

    def __init__(self, folder: Path, *, web: bool) -> None:
        self.web = web
        self.console = Console(highlight=False)
        self.folder = folder / f"{datetime.now(timezone.utc):%Y-%m-%dT%H-%M-%S}"
        self.started = time.monotonic()
        self.number = 0
        self.step_title = "start"
        self.worker: subprocess.Popen[bytes] | None = None

    def run(self) -> None:
        try:
            with ExitStack() as stack:
                self._run(stack)
        except MissingExtra:
            raise
        except Exception as exc:
            error = str(exc) if isinstance(exc, DLQError) else f"{type(exc).__name__}: {exc}"
            raise DemoError(
                f"the demo failed at step {self.number}, {self.step_title}: {error}"
            ) from exc

    def _run(self, stack: ExitStack) -> None:
        self._make_folder()
        temporary = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="celery-dlq-")))
        self._step("start Redis and a Celery worker")
        url = stack.enter_context(redis_server(temporary))
        os.environ["CELERY_DLQ_DEMO_REDIS"] = url
        os.environ["CELERY_DLQ_DEMO_FLAG"] = str(temporary / "bug-is-fixed")
        from celery_dlq.demo import shop  # noqa: PLC0415 - reads the environment set above

        self.worker = stack.enter_context(
            worker("celery_dlq.demo.shop", shop.QUEUES, self.folder / "worker.log")
        )
        say(
            self.console,
            f"Redis at {url}, worker pid {self.worker.pid} (prefork, acks_late, "
            f"reject_on_worker_lost)",
        )
        published = self._publish(shop)
        self._watch(shop, published)
        self._inspect(shop.dlq)
        self._triage(shop.dlq)
        self._fix_and_redrive(shop, published)
        took = time.monotonic() - self.started
        self.console.print(Rule(style="green"))
        say(self.console, f"Done in {took:.0f} s. Kept in {self.folder}", "bold green")
        if self.web:
            self._serve(shop.dlq)
        else:
            say(self.console, "To look at such letters in a browser: celery-dlq demo --web")

    def _publish(self, shop: Any) -> Published:
        self._step("publish healthy and poison tasks")
        published = Published()
        orders = range(1, HEALTHY + 1)
        published.ids["pack"] = [shop.pack.delay(n).id for n in orders]
        for name, count, args in POISON:
            task = getattr(shop, name)
            published.ids[name] = [task.delay(*args(n)).id for n in range(count)]
        published.ids["invoice"] = [shop.invoice.delay(n).id for n in range(INVOICES)]
        say(
            self.console,
            f"{len(published.healthy)} healthy, {published.poison} poison: "
            + ", ".join(f"{len(published.ids[name])} {name}" for name, _c, _a in POISON),
        )
        return published

    def _watch(self, shop: Any, published: Published) -> None:
        self._step("the worker survives them")
        columns = (
            TextColumn("{task.description:<14}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console) as progress:
            healthy = progress.add_task("succeeded", total=len(published.healthy))
            dead = progress.add_task("dead-lettered", total=published.poison)
            for _ in self._polling("all tasks to end"):
                done = _succeeded(shop.app, published.healthy)
                letters = sum(queue.letters for queue in shop.dlq.queues())
                progress.update(healthy, completed=done)
                progress.update(dead, completed=letters)
                if done == len(published.healthy) and letters >= published.poison:
                    break
        if letters != published.poison:
            raise DemoError(f"expected {published.poison} dead letters, got {letters}")

    def _inspect(self, dlq: DeadLetters) -> None:
        self._step("look at the dead-letter queues")
        letter_tables.queues(self.console, dlq.queues())
        for queue in dlq.queues():
            # One letter of each kind: the newest of every group.
            examples = [dlq.get(group.example_id, queue.name) for group in dlq.groups(queue.name)]
            letter_tables.letters(
                self.console, f"{queue.name}: the newest letter of each group", examples
            )
            letter_tables.groups(self.console, queue.name, dlq.groups(queue.name))

    def _triage(self, dlq: DeadLetters) -> None:
        self._step("export to Parquet")
        files = self.folder / "letters"
        operation_tables.exported(self.console, dlq.export(files))
        self._step("triage with PySpark")
        from celery_dlq.spark.render.charts import draw  # noqa: PLC0415 - PySpark takes its time
        from celery_dlq.spark.triage.rows import triage  # noqa: PLC0415

        with self.console.status("Spark is starting"):
            result = triage(files)
        result = replace(result, picture=draw(result, self.folder / "triage.png"))
        triage_tables.triage(self.console, result)

    def _fix_and_redrive(self, shop: Any, published: Published) -> None:
        self._step("fix the bug in charge and redrive its group")
        queue, ids = "orders-DLQ", published.ids["charge"]
        name = shop.charge.name
        group = next((g for g in shop.dlq.groups(queue) if g.task_name == name), None)
        if group is None or group.letters != len(ids):
            raise DemoError(f"expected one group of {len(ids)} letters of {name}, got {group}")
        shop.FIXED.touch()
        operation_tables.redriven(
            self.console, queue, shop.dlq.redrive(queue, fingerprint=group.fingerprint)
        )
        for _ in self._polling(f"the {len(ids)} redriven tasks to succeed"):
            if _succeeded(shop.app, ids) == len(ids):
                break
        left = [letter for letter in shop.dlq.letters(queue) if letter.task_id in set(ids)]
        if left:
            raise DemoError(f"expected the redriven letters to be gone, got {len(left)} of them")
        say(
            self.console,
            f"All {len(ids)} {name} tasks succeeded under their old ids; their letters are gone:",
        )
        letter_tables.queues(self.console, shop.dlq.queues())

    def _serve(self, dlq: DeadLetters) -> None:
        """Show the letters that are left, until Ctrl-C."""
        self._step("look at the letters in a browser")
        from celery_dlq.web.asgi import DeadLettersApp  # noqa: PLC0415 - an extra
        from celery_dlq.web.forms import SignedForms  # noqa: PLC0415
        from celery_dlq.web.http import Permission, User  # noqa: PLC0415
        from celery_dlq.web.server import listening, serve, url_of  # noqa: PLC0415

        user = User(permissions=frozenset(Permission))
        pages = dlq.web(
            access=lambda _: user,
            forms=SignedForms(secrets.token_urlsafe(32)),
            hosts=frozenset({"localhost", "127.0.0.1"}),
            title="demo",
            runs_jobs=True,
        )
        try:
            sock = listening("127.0.0.1", _WEB_PORT)
        except DLQError:  # somebody listens there
            sock = listening("127.0.0.1", 0)
        text = f"Open {url_of(sock, '')} in a browser; Ctrl-C ends it."
        serve(DeadLettersApp(pages), sock, lambda: say(self.console, text, "bold"))

    def _step(self, title: str) -> None:
        self.number += 1
        self.step_title = title
        self.console.print(Rule(f"{self.number}. {title}", align="left", style="cyan"))

    def _polling(self, what: str) -> Iterator[None]:
        """Poll until the caller stops; fails if the worker exits or time runs out."""
        deadline = time.monotonic() + _WAIT_SECONDS
        while time.monotonic() < deadline:
            if self.worker is not None and self.worker.poll() is not None:
                raise DemoError(
                    f"the worker exited with code {self.worker.returncode}; see "
                    f"{self.folder / 'worker.log'}"
                )
            yield
            time.sleep(_POLL_SECONDS)
        raise DemoError(
            f"expected {what} within {_WAIT_SECONDS:.0f} s; see {self.folder / 'worker.log'}"
        )

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise DemoError(
                f"expected a folder that can be written, got {self.folder}: {exc.strerror}"
            ) from exc


def _succeeded(app: Any, ids: Sequence[str]) -> int:
    metas = app.backend.client.mget([app.backend.get_key_for_task(task_id) for task_id in ids])
    return sum(b'"SUCCESS"' in meta for meta in metas if meta)


def _check_extras() -> None:
    """Report a missing package at the start, not after a minute."""
    for package in ("pyarrow", "pyspark", "matplotlib", "starlette", "uvicorn", "itsdangerous"):
        if find_spec(package) is None:
            feature = "the demo"
            if package == "pyspark" and sys.version_info < (3, 11):
                feature = "the demo (on Python 3.11 or later, which PySpark needs)"
            raise MissingExtra(feature, package, "demo")


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
