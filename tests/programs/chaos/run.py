"""The chaos test: thousands of tasks, everything is killed at random, and the books must balance.

``python -m chaos.run --seed 7 --tasks 2000 --broker redis``, with this folder's parent on
``PYTHONPATH``. One seed gives one mix of tasks and one list of misfortunes; what meets what
is up to the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

from chaos import brokers, misfortunes, publish
from chaos.aof import traffic
from chaos.books import Balance, Books
from chaos.facts import HEADER, Facts, read_marks
from chaos.misfortunes import Chaos
from chaos.publish import Publisher
from chaos.stage import Said, Slot, environment, said, until
from rabbit import rabbitmq_executable
from rich.console import Console
from rich.table import Table
from servers import RedisServer, redis_executable
from sqs import sqs_module
from tcp_proxy import TcpProxy

from celery_dlq import DeadLetter

REDIS_ARGUMENTS = (
    "--appendonly",
    "yes",
    "--appendfsync",
    "always",
    "--auto-aof-rewrite-percentage",
    "0",
)
CONCURRENCY = {"prefork": 2, "threads": 4, "gevent": 4, "solo": 1}
MOST_TASKS = 20  # of a process of the second worker's prefork pool
DRAIN_SECONDS = 400.0
QUIET_SECONDS = 15.0
STUCK_SECONDS = 60.0  # and something is left: it will not move any more
LETTERS_SECONDS = 1800.0  # less than a clock is wrong; a longer run keeps them longer


class Run:
    """One chaos run.

    Args:
        options: The command line.
        folder: For marks, logs and data.
        console: For people.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self._options = options
        self._folder = folder
        self._console = console
        self._begun = time.monotonic()
        self._slots: list[Slot] = []
        self._settled_at = (0.0, 0)
        self._ended_at: tuple[float, dict[str, str]] = (0.0, {})

    def __call__(self) -> tuple[Books, dict[str, Any]]:
        """Publish, break, drain, balance."""
        options = self._options
        with ExitStack() as stack:
            server = stack.enter_context(RedisServer(*REDIS_ARGUMENTS))
            data = Path(str(server.client().config_get("dir")["dir"]))
            broker = stack.enter_context(brokers.KINDS[options.broker](server))
            env = environment(
                self._folder,
                redis=server.url.rpartition("/")[0],
                broker=broker.url(None),
                options=json.dumps(dict(broker.options)),
                queue_type=options.broker,
                visibility=options.visibility,
                limit=options.limit,
                ttl=max(LETTERS_SECONDS, 2 * options.duration),
                plain_fetch="1" if options.plain_fetch else "",
                plain="1" if options.plain else "",
            )
            app = stack.enter_context(_app(env))
            for number in (1, 2):
                self._slots.append(self._slot(stack, number, server, broker, env))
                self._slots[-1].tend()
            publisher, chaos = self._storm(app, server, broker)
            self._tell(f"drain; {len(publisher.published)} published")
            rested = self._drain(app, broker, publisher)
            for slot in self._slots:
                slot.finish()
            facts, logs = self._facts(app, broker, publisher, chaos, data)
        self._tell("balance")
        books = Balance(facts)()
        if publisher.problem:
            books.faults["the publisher failed"].append(repr(publisher.problem))
        if rested:
            (books.explained if options.plain else books.faults)["did not come to rest"].append(
                rested
            )
        books.faults["never happened, so nothing is proved of it"] += chaos.owed
        return books, self._report(books, chaos, logs)

    def _slot(
        self,
        stack: ExitStack,
        number: int,
        server: RedisServer,
        broker: brokers.Broker,
        env: dict[str, str],
    ) -> Slot:
        """A worker behind proxies of its own.

        The first one's log raises; the second's clock is wrong, its processes retire.
        """
        lines = {"store": stack.enter_context(TcpProxy(server.port))}
        lines["broker"] = (
            stack.enter_context(TcpProxy(broker.port)) if broker.port else lines["store"]
        )
        for line in set(lines.values()):
            line.open()
        pool = self._options.pool
        slot = Slot(
            f"w{number}",
            self._folder,
            {
                **env,
                "CHAOS_REDIS": f"redis://127.0.0.1:{lines['store'].port}",
                "CHAOS_BROKER": broker.url(lines["broker"].port),
                "CHAOS_RAISING_LOG": "1" if self._options.raising_log and number == 1 else "",
            },
            self._options.skew if number == 2 and broker.may_have_wrong_clocks else 0.0,
            pool,
            CONCURRENCY[pool],
            MOST_TASKS if number == 2 and pool == "prefork" else 0,
            lines,
        )
        stack.callback(slot.finish)
        return slot

    # -- the storm ------------------------------------------------------------------

    def _storm(
        self, app: ModuleType, server: RedisServer, broker: brokers.Broker
    ) -> tuple[Publisher, Chaos]:
        options = self._options
        want = lambda number: setattr(publisher, "wanted", number)  # noqa: E731
        mix, luck = (random.Random(f"{what} {options.seed}") for what in ("mix", "luck"))  # noqa: S311
        chaos = Chaos(
            luck,
            misfortunes.possible(options.broker, options.pool, options.only),
            server,
            broker.rabbit,
            self._slots,
            self._tell,
            want,
            lease_seconds=options.visibility,
            gap_seconds=options.gap,
            deploy_seconds=options.deploys,
            kills=options.kills,
            times=options.times,
        )
        weights = publish.WEIGHTS | (publish.IN_PROCESS if options.pool != "prefork" else {})
        weights |= dict.fromkeys({*options.without, *broker.without}, 0)
        weights = {kind: weight for kind, weight in weights.items() if weight}
        publisher = Publisher(
            app,
            mix,
            options.tasks,
            lambda: self._settled(app),
            lambda name: self._ended(app).get(name, ""),
            chaos.share,
            weights,
            options.reuse,
        )
        publisher.start()
        deadline = time.monotonic() + options.duration
        while (publisher.is_alive() or chaos.goes_on) and time.monotonic() < deadline:
            chaos.tick()
            self._tend()
            time.sleep(0.02)
        publisher.stopped.set()
        chaos.end()
        publisher.join(30)
        return publisher, chaos

    def _tend(self) -> None:
        for slot in self._slots:
            slot.tend()

    def _settled(self, app: ModuleType) -> int:
        """Number of publications that have ended; read often, so refreshed twice a second."""
        at, count = self._settled_at
        if time.monotonic() - at > 0.5:
            with suppress(Exception):  # the store is down just now
                letters = sum(queue.letters for queue in app.dlq.queues()) if app.dlq else 0
                count = letters + len({m.task_id for m in self._marks("ends")})
            self._settled_at = (time.monotonic(), count)
        return count

    def _ended(self, app: ModuleType) -> dict[str, str]:
        """How publications ended; refreshed once in two seconds, for it reads every letter."""
        at, ended = self._ended_at
        if time.monotonic() - at > 2.0:
            with suppress(Exception):  # the store is down just now
                ended = {letter.task_id: "letter" for letter in self._letters(app)}
                ended |= {mark.task_id: "success" for mark in self._marks("ends")}
            self._ended_at = (time.monotonic(), ended)
        return ended

    def _marks(self, name: str) -> list[Any]:
        path = self._folder / name
        return read_marks(path.read_text("ascii").splitlines()) if path.exists() else []

    # -- the calm after it ----------------------------------------------------------

    def _drain(self, app: ModuleType, broker: brokers.Broker, publisher: Publisher) -> str:
        """Wait until nothing is queued or runs any more; what is left if that does not come."""
        state: dict[str, Any] = {"seen": None, "left": 0, "since": time.monotonic()}

        def ended() -> bool:
            left = state["left"] = self._left(app, broker)
            seen = (left, len(self._marks("starts")), self._settled(app))
            if seen != state["seen"]:
                state.update(seen=seen, since=time.monotonic())
            quiet = time.monotonic() - state["since"]
            done = {m.task_id for m in self._marks("ends")} | {
                letter.task_id for letter in self._letters(app)
            }
            everything = publisher.published.keys() <= done
            enough = 3.0 if everything else QUIET_SECONDS
            return quiet > (enough if left == 0 else STUCK_SECONDS)

        if not until(ended, DRAIN_SECONDS, tend=self._tend) or state["left"]:
            quiet = time.monotonic() - state["since"]
            left = self._left(app, broker)
            return f"{left} messages or spooled letters are left; quiet for {quiet:.0f} s"
        for slot in self._slots:  # RabbitMQ gives back what a worker had
            slot.finish()
        left = self._left(app, broker)
        return (
            f"{left} messages were unacknowledged, or letters spooled, when the workers ended"
            if left
            else ""
        )

    def _left(self, app: ModuleType, broker: brokers.Broker) -> int:
        """Messages on the broker, and letters that wait in a spool."""
        return broker.left(app) + len([*(self._folder / "spool").rglob("*.json")])

    def _letters(self, app: ModuleType) -> list[Any]:
        if app.dlq is None or not any(
            queue.name == app.DEAD_LETTER_QUEUE for queue in app.dlq.queues()
        ):
            return []
        return [_named(letter) for letter in app.dlq.letters(app.DEAD_LETTER_QUEUE)]

    # -- the books ------------------------------------------------------------------

    def _facts(
        self,
        app: ModuleType,
        broker: brokers.Broker,
        publisher: Publisher,
        chaos: Chaos,
        data: Path,
    ) -> tuple[Facts, Said]:
        logs = said(self._slots)
        facts = Facts(
            max_deliveries=app.MAX_DELIVERIES,
            published=publisher.published,
            starts=self._marks("starts"),
            ends=self._marks("ends"),
            letters=[
                _on_time(letter, self._slots[1].skew_seconds) for letter in self._letters(app)
            ],
            broker=self._options.broker,
            pool=self._options.pool,
            lease_seconds=self._options.visibility,
            plain=self._options.plain,
            left=broker.ids(app),
            received=logs.received,
            succeeded=logs.succeeded,
            doubles=logs.doubles,
            uncounted=logs.uncounted,
            stored=logs.stored,
            not_settled=logs.not_settled,
            ended=[ended for slot in self._slots for ended in slot.ended],
            spells=chaos.spells,
            slots={pid: slot.name for slot in self._slots for pid in slot.logs},
        )
        if self._options.broker == "redis":
            seen = traffic(data, app.QUEUE)
            facts.copies = seen.copies
            if self._options.plain_fetch:
                facts.vanished = seen.vanished
                transport = app.app.conf.broker_transport_options
                facts.visibility_seconds = transport["visibility_timeout"]
        shutil.copytree(data, self._folder / "redis", dirs_exist_ok=True)
        lines = "\n".join(repr(letter) for letter in facts.letters)
        (self._folder / "letters").write_text(lines, "utf-8")
        return facts, logs

    def _report(self, books: Books, chaos: Chaos, logs: Said) -> dict[str, Any]:
        return {
            "seed": self._options.seed,
            "broker": self._options.broker,
            "pool": self._options.pool,
            "limit": self._options.limit,
            "plain": self._options.plain,
            "tasks": self._options.tasks,
            "seconds": round(time.monotonic() - self._begun, 1),
            "balanced": books.balanced,
            "plain fetch": self._options.plain_fetch,
            "deploys": chaos.deploys,
            "kills": chaos.kills,
            "misfortunes": chaos.done,
            "spells": [
                [spell.what, spell.slot, round(spell.begin, 2), round(spell.end, 2)]
                for spell in chaos.spells
            ],
            "counts": books.counts,
            "faults": {name: found for name, found in books.faults.items() if found},
            "explained": {name: found for name, found in books.explained.items() if found},
            "complaints": dict(logs.complaints),
        }

    def _tell(self, text: str) -> None:
        self._console.log(f"{time.time():.2f} {text}", highlight=False)


def _named(letter: DeadLetter) -> DeadLetter:
    """The letter with its publication's name for a task id, as all the books have it."""
    headers = letter.decoded("headers")
    name = headers.get(HEADER) if isinstance(headers, dict) else None
    return replace(letter, task_id=name) if isinstance(name, str) else letter


def _on_time(letter: DeadLetter, skew_seconds: float) -> DeadLetter:
    """The letter as clocks that are right would have it: no run takes half of an hour."""

    def right(at: datetime | None) -> datetime | None:
        off = 0.0 if at is None else at.timestamp() - time.time()
        wrong = abs(off - skew_seconds) < abs(off)
        return at - timedelta(seconds=skew_seconds) if at is not None and wrong else at

    history = tuple(
        replace(d, started_at=right(d.started_at), ended_at=right(d.ended_at))
        for d in letter.history
    )
    return replace(letter, dead_lettered_at=right(letter.dead_lettered_at), history=history)


@contextmanager
def _app(env: dict[str, str]) -> Iterator[ModuleType]:
    """The app, in this process, with the environment of the workers."""
    os.environ.update({name: value for name, value in env.items() if name.startswith("CHAOS_")})
    module = importlib.import_module("chaos.app")
    try:
        yield module
    finally:
        if module.dlq is not None:
            module.dlq.close()
        module.app.close()


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people."""
    table = Table(
        "",
        "",
        title=f"Chaos on {report['broker']}, {report['pool']}, limit {report['limit']}, "
        f"seed {report['seed']}, {report['seconds']:g} s",
        show_header=False,
    )
    for name, count in [
        *report["counts"].items(),
        *report["misfortunes"].items(),
        ("deploys", report["deploys"]),
        ("kills besides", report["kills"]),
    ]:
        table.add_row(name, str(count))
    table.add_section()
    for name, found in report["explained"].items():
        table.add_row(f"explained: {name}", str(len(found)))
    for name, found in report["faults"].items():
        table.add_row(f"[red]FAULT: {name}[/red]", str(len(found)))
    for name, count in report["complaints"].items():
        table.add_row(f"log: {name}", str(count))
    console.print(table)
    for kind in ("explained", "faults"):
        for name, found in report[kind].items():
            for line in found[: None if kind == "faults" else 5]:
                text = f"{kind}: {name}: {line}"
                console.print(text, markup=False, highlight=False, soft_wrap=True)
    console.print("The books balance." if report["balanced"] else "The books do not balance.")


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 when the books balance."""
    parser = argparse.ArgumentParser(prog="chaos.run", description=__doc__)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--tasks", type=int, default=2000)
    parser.add_argument("--broker", choices=list(brokers.KINDS), default="redis")
    parser.add_argument("--pool", choices=list(CONCURRENCY), default="prefork")
    parser.add_argument(
        "--plain",
        action="store_true",
        help="Celery alone: what it runs twice and loses is counted, and is no fault",
    )
    parser.add_argument(
        "--gap", type=float, default=2.5, help="mean seconds between two misfortunes"
    )
    parser.add_argument("--duration", type=float, default=600.0, help="most seconds of publishing")
    parser.add_argument(
        "--visibility",
        type=float,
        default=8.0,
        help="visibility_timeout of the Redis broker and longest lease, in seconds",
    )
    parser.add_argument("--limit", type=int, default=3, help="max_deliveries")
    parser.add_argument(
        "--deploys",
        type=float,
        default=6.0,
        help="every so many seconds a worker is ended in order and started again; 0 for never",
    )
    parser.add_argument(
        "--skew",
        type=float,
        default=3600.0,
        help="how many seconds the clock of one worker is ahead, or behind with a "
        "minus; only on RabbitMQ",
    )
    parser.add_argument(
        "--kills", type=int, default=0, help="kill so many workers besides, one every 4 s"
    )
    parser.add_argument(
        "--plain-fetch",
        action="store_true",
        help="let the Redis broker's workers fetch as kombu does",
    )
    parser.add_argument(
        "--without",
        nargs="+",
        choices=list(publish.WEIGHTS),
        default=[],
        help="kinds of messages to leave out",
    )
    parser.add_argument(
        "--only",
        nargs="*",
        choices=list(misfortunes.WEIGHTS),
        help="misfortunes that happen; none at all if none is named",
    )
    parser.add_argument(
        "--times", type=int, default=1, help="how often each misfortune happens at least"
    )
    parser.add_argument(
        "--reuse", type=float, default=0.1, help="how many task ids are used again, as a share of 1"
    )
    parser.add_argument(
        "--raising-log",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="let one worker's log handler raise outside of the main thread",
    )
    parser.add_argument("--report", type=Path, help="write the report to this JSON file")
    parser.add_argument(
        "--keep", action="store_true", help="keep marks, logs and data when all is well, too"
    )
    options = parser.parse_args(arguments)
    console = Console(stderr=False)
    needed = {"redis": redis_executable, "sqs": sqs_module}
    if not (redis_executable() and needed.get(options.broker, rabbitmq_executable)()):
        parser.error("redis-server, and rabbitmq-server or moto for its queues, must be installed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    keep = True
    try:
        books, report = Run(options, folder, console)()
        keep = options.keep or not books.balanced
    finally:
        if keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    show(report, console)
    if options.report:
        options.report.write_text(json.dumps(report, indent=2), "utf-8")
    return 0 if books.balanced else 1


if __name__ == "__main__":
    sys.exit(main())
