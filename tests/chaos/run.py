"""The chaos test: thousands of tasks, everything is killed at random, and the books must balance.

``python -m chaos.run --seed 7 --tasks 2000 --broker redis``, with this folder's parent on
``PYTHONPATH``. One seed gives one mix of tasks and one list of misfortunes; what meets what
is up to the machine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import UUID

import amqp
import redis
from chaos.aof import traffic
from chaos.books import Balance, Books, Facts, Published, read_marks
from chaos.odd import odd
from chaos.stage import Said, Slot, environment, said, until
from kombu.exceptions import OperationalError
from rabbit import RabbitServer, rabbitmq_executable
from rich.console import Console
from rich.table import Table
from servers import RedisServer, redis_executable

from celery_dlq import DeadLetter

WEIGHTS = {
    "quick": 520,
    "slow": 100,
    "retries": 50,
    "killed": 60,
    "segfault": 20,
    "exits": 20,
    "requeues": 50,
    "fails": 60,
    "autoretries": 30,
    "to_dlq": 40,
    "too_long": 10,
    "unknown": 20,
    "undecodable": 18,
    "kills_worker": 2,
    "odd": 40,
    "poison": 10,
}
MISFORTUNES = {
    "kill": 5,
    "behead": 2,
    "pause": 4,
    "cold": 3,
    "warm": 3,
    "redis hangs": 3,
    "redis dies": 3,
    "redis drops": 4,
    "broker drops": 6,
}
REDIS_ARGUMENTS = (
    "--appendonly",
    "yes",
    "--appendfsync",
    "always",
    "--auto-aof-rewrite-percentage",
    "0",
)
MEAN_GAP_SECONDS = 2.5
KILL_GAP_SECONDS = 4.0  # between those of --kills
AGAIN_SECONDS = 0.2  # after a misfortune that had to be left out
MOST_OUTSTANDING = 100  # more would only wait in the queue, where nothing happens
DRAIN_SECONDS = 120.0
QUIET_SECONDS = 15.0
LETTERS_SECONDS = 1800.0  # less than a clock is wrong; a longer run keeps them longer


class Publisher(threading.Thread):
    """Publishes the seeded mix, as fast as it is consumed, again where it is not confirmed.

    Args:
        app: The module of the app.
        rng: Decides on the mix.
        tasks: How many.
        settled: How many tasks have come to an end so far.
        without: Kinds that are left out.
    """

    def __init__(
        self,
        app: ModuleType,
        rng: random.Random,
        tasks: int,
        settled: Callable[[], int],
        without: Sequence[str],
    ) -> None:
        super().__init__(name="publisher", daemon=True)
        self._app = app
        self._settled = settled
        self._plan = self._mix(rng, tasks, {k: w for k, w in WEIGHTS.items() if k not in without})
        self._slow = [rng.uniform(0.2, 1.0) for _ in range(tasks)]
        self.published: dict[str, Published] = {}
        self.stopped = threading.Event()
        self.problem: BaseException | None = None

    def run(self) -> None:
        """Publish all, or what is possible until asked to stop."""
        try:
            for (task_id, kind), seconds in zip(self._plan, self._slow, strict=True):
                while len(self.published) - self._settled() > MOST_OUTSTANDING:
                    if self.stopped.wait(0.05):
                        return
                self._publish(task_id, kind, seconds)
                if self.stopped.is_set():
                    return
        except BaseException as exc:  # shown by the runner
            self.problem = exc

    def _publish(self, task_id: str, kind: str, seconds: float) -> None:
        note = self.published[task_id] = Published(kind)
        while not note.confirmed:
            note.attempts += 1
            try:
                self._send(task_id, kind, seconds)
                note.confirmed = True
            except (redis.RedisError, amqp.AMQPError, OSError, OperationalError):
                if self.stopped.wait(0.2) and note.attempts > MOST_OUTSTANDING:
                    return

    def _send(self, task_id: str, kind: str, seconds: float) -> None:
        app = self._app.app
        if kind in ("odd", "poison"):
            # The same at each try; uuid4 is random enough to choose by.
            draft = odd(kind, UUID(task_id).fields[0] / 2**32, task_id, "chaos.app.quick")
            queue = app.amqp.queues[self._app.QUEUE]
            with app.producer_pool.acquire(block=True) as producer:
                producer.publish(
                    draft["body"],
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    headers=draft["headers"],
                    content_type=draft["content-type"],
                    content_encoding=draft["content-encoding"],
                    correlation_id=task_id,
                )
            return
        if kind == "undecodable":
            headers = {"task": "chaos.app.quick", "id": task_id, "lang": "py", "retries": 0}
            queue = app.amqp.queues[self._app.QUEUE]
            with app.producer_pool.acquire(block=True) as producer:
                producer.publish(
                    b'{"broken',
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    headers=headers,
                    content_type="application/json",
                    content_encoding="utf-8",
                )
            return
        name = "chaos.nobody.knows" if kind == "unknown" else f"chaos.app.{kind}"
        args = (seconds,) if kind == "slow" else ()
        app.send_task(name, args, task_id=task_id, retry=False)

    @staticmethod
    def _mix(rng: random.Random, tasks: int, weights: dict[str, int]) -> list[tuple[str, str]]:
        kinds = list(weights)[:tasks]  # each at least once
        kinds += rng.choices(list(weights), list(weights.values()), k=tasks - len(kinds))
        rng.shuffle(kinds)
        return [(str(UUID(int=rng.getrandbits(128), version=4)), kind) for kind in kinds]


class Chaos:
    """Makes things go wrong, one after the other and sometimes at once.

    Args:
        rng: Decides what and when.
        server: The Redis.
        rabbit: The RabbitMQ; ``None`` if Redis is the broker.
        slots: The workers.
        tell: Gets a line for everything that is done.
        deploy_seconds: How often one of the workers is deployed; 0 for never.
        kills: How many workers are killed besides, one every 4 s.
    """

    def __init__(
        self,
        rng: random.Random,
        server: RedisServer,
        rabbit: RabbitServer | None,
        slots: list[Slot],
        tell: Callable[[str], None],
        deploy_seconds: float,
        kills: int,
    ) -> None:
        self._rng = rng
        self._server = server
        self._rabbit = rabbit
        self._slots = slots
        self._tell = tell
        self._next_at = time.monotonic() + 4.0  # after the workers' start
        self._deploy_seconds = deploy_seconds
        self._deploy_at = self._next_at if deploy_seconds else math.inf
        self._kills = kills
        self._kill_at = self._next_at if kills else math.inf
        self._misfortunes = {
            what: weight for what, weight in MISFORTUNES.items() if rabbit or what != "broker drops"
        }
        names = list(self._misfortunes)
        self.owed = rng.sample(names, len(names))  # each happens once, at first
        self._later: list[tuple[float, Callable[[], None]]] = []
        self._redis_down_since: float | None = None
        self.outages: list[tuple[float, float]] = []
        self.done: dict[str, int] = dict.fromkeys(names, 0)
        self.deploys = 0
        self.kills = 0

    @property
    def goes_on(self) -> bool:
        """True until all has happened that must."""
        return bool(self.owed) or self.kills < self._kills

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for item in [item for item in self._later if item[0] <= now]:
            self._later.remove(item)
            item[1]()
        if now >= self._deploy_at:
            self._deploy_at = now + (self._deploy_seconds if self._deploy() else AGAIN_SECONDS)
        if now >= self._kill_at and self.kills < self._kills:
            self._kill_at = now + (KILL_GAP_SECONDS if self._kill() else AGAIN_SECONDS)
        if now >= self._next_at:
            gap = self._rng.expovariate(1 / MEAN_GAP_SECONDS)
            self._next_at = now + (gap if self._strike() else AGAIN_SECONDS)

    def end(self) -> None:
        """Let everything go on."""
        for _, undo in self._later:
            undo()
        self._later.clear()

    def _strike(self) -> bool:
        """Do something bad, unless the one it would befall is down already."""
        rng = self._rng
        chances = self._misfortunes
        anything = rng.choices(list(chances), list(chances.values()))[0]
        what = self.owed[-1] if self.owed else anything
        slot, seconds = rng.choice(self._slots), rng.random()
        if what == "broker drops" and self._rabbit is not None:
            self._rabbit.close_connections(wait=False)
        elif what == "redis drops":
            if self._redis_down_since is not None:
                return False
            self._server.close_connections()
        elif what.startswith("redis"):
            if self._redis_down_since is not None:
                return False
            self._redis_down_since = time.time()
            if what == "redis hangs":
                self._server.pause()
                self._after(0.3 + 3.0 * seconds, self._redis_resumes)
            else:
                self._server.kill()
                self._after(0.1 + 2.0 * seconds, self._redis_restarts)
        elif slot.process is None or slot.asked_at is not None or slot.paused:
            return False
        elif what == "pause":
            slot.pause()
            self._after(0.5 + 8.0 * seconds, slot.resume)
        else:
            {
                "kill": slot.kill,
                "behead": slot.behead,
                "cold": lambda: slot.ask(signal.SIGQUIT),
                "warm": lambda: slot.ask(signal.SIGTERM),
            }[what]()
        self.done[what] += 1
        del self.owed[-1:]
        self._tell(what if " " in what else f"{what} {slot.name}")
        return True

    def _deploy(self) -> bool:
        """End the worker whose turn it is in order; its slot starts it again."""
        slot = self._slots[self.deploys % len(self._slots)]
        if slot.process is None or slot.asked_at is not None or slot.paused:
            return False
        slot.ask(signal.SIGTERM)
        self.deploys += 1
        return True

    def _kill(self) -> bool:
        """Kill the whole worker whose turn it is, whatever else happens to it."""
        slot = self._slots[self.kills % len(self._slots)]
        if slot.process is None or slot.process.poll() is not None:
            return False
        slot.kill()
        self.kills += 1
        return True

    def _after(self, seconds: float, act: Callable[[], None]) -> None:
        self._later.append((time.monotonic() + seconds, act))

    def _redis_resumes(self) -> None:
        self._server.resume()
        self._redis_is_back()

    def _redis_restarts(self) -> None:
        self._server.start()
        self._redis_is_back()

    def _redis_is_back(self) -> None:
        assert self._redis_down_since is not None
        self.outages.append((self._redis_down_since, time.time()))
        self._redis_down_since = None
        self._tell("redis is back")


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

    def __call__(self) -> tuple[Books, dict[str, Any]]:
        """Publish, break, drain, balance."""
        with ExitStack() as stack:
            server = stack.enter_context(RedisServer(*REDIS_ARGUMENTS))
            data = Path(str(server.client().config_get("dir")["dir"]))
            rabbit = None
            if self._options.broker != "redis":
                rabbit = stack.enter_context(RabbitServer())
            env = environment(self._folder, server.url, rabbit and rabbit.url, self._options.broker)
            env["CHAOS_VISIBILITY"] = str(self._options.visibility)
            env["CHAOS_LIMIT"] = str(self._options.limit)
            env["CHAOS_TTL"] = str(max(LETTERS_SECONDS, 2 * self._options.duration))
            env["CHAOS_PLAIN_FETCH"] = "1" if self._options.plain_fetch else ""
            app = stack.enter_context(_app(env))
            skew = self._options.skew if rabbit else 0.0  # see README.md
            self._slots = [Slot("w1", self._folder, env), Slot("w2", self._folder, env, skew)]
            for slot in self._slots:
                stack.callback(slot.finish)
                slot.tend()
            publisher, chaos = self._storm(app, server, rabbit)
            self._tell(f"drain; {len(publisher.published)} published")
            rested = self._drain(app, server, publisher)
            for slot in self._slots:
                slot.finish()
            facts, logs = self._facts(app, server, publisher, chaos, data)
        self._tell("balance")
        books = Balance(facts)()
        if publisher.problem:
            books.faults["the publisher failed"].append(repr(publisher.problem))
        if rested:
            books.faults["did not come to rest"].append(rested)
        books.faults["never happened, so nothing is proved of it"] += chaos.owed
        return books, self._report(books, chaos, logs)

    # -- the storm ------------------------------------------------------------------

    def _storm(
        self, app: ModuleType, server: RedisServer, rabbit: RabbitServer | None
    ) -> tuple[Publisher, Chaos]:
        options = self._options
        mix, luck = (random.Random(f"{what} {options.seed}") for what in ("mix", "luck"))  # noqa: S311
        publisher = Publisher(app, mix, options.tasks, lambda: self._settled(app), options.without)
        chaos = Chaos(luck, server, rabbit, self._slots, self._tell, options.deploys, options.kills)
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
        """Number of tasks that have ended; it is read often, so refreshed twice a second."""
        at, count = self._settled_at
        if time.monotonic() - at > 0.5:
            with suppress(Exception):  # the store is down just now
                letters = sum(queue.letters for queue in app.dlq.queues())
                count = letters + len({m.task_id for m in self._marks("ends")})
            self._settled_at = (time.monotonic(), count)
        return count

    def _marks(self, name: str) -> list[Any]:
        path = self._folder / name
        return read_marks(path.read_text("ascii").splitlines()) if path.exists() else []

    # -- the calm after it ----------------------------------------------------------

    def _drain(self, app: ModuleType, server: RedisServer, publisher: Publisher) -> str:
        """Wait until nothing is queued or runs any more; what is left if that does not come."""
        state: dict[str, Any] = {"seen": None, "since": time.monotonic()}

        def at_rest() -> bool:
            left = self._left(app, server)
            seen = (left, len(self._marks("starts")), self._settled(app))
            if seen != state["seen"]:
                state.update(seen=seen, since=time.monotonic())
            quiet = time.monotonic() - state["since"]
            done = {m.task_id for m in self._marks("ends")} | {
                letter.task_id for letter in self._letters(app)
            }
            everything = publisher.published.keys() <= done
            return left == 0 and quiet > (3.0 if everything else QUIET_SECONDS)

        if not until(at_rest, DRAIN_SECONDS, tend=self._tend):
            return f"{self._left(app, server)} messages are left after {DRAIN_SECONDS:g} s"
        for slot in self._slots:  # RabbitMQ gives back what a worker had
            slot.finish()
        left = self._left(app, server)
        return f"{left} messages were unacknowledged when the workers ended" if left else ""

    def _left(self, app: ModuleType, server: RedisServer) -> int:
        if self._options.broker == "redis":
            with redis.Redis.from_url(server.url) as client:
                kept = client.hlen("unacked")
                if app.RELIABLE_FETCH:
                    kept = max(kept, client.zcard("unacked_index"), client.zcard("unacked_leases"))
                return int(client.llen(app.QUEUE)) + int(kept)
        with app.app.connection_for_read() as connection:
            queue = connection.default_channel.queue_declare(app.QUEUE, passive=True)
            return int(queue.message_count)

    def _letters(self, app: ModuleType) -> list[Any]:
        if not any(queue.name == app.DEAD_LETTER_QUEUE for queue in app.dlq.queues()):
            return []
        return list(app.dlq.letters(app.DEAD_LETTER_QUEUE))

    # -- the books ------------------------------------------------------------------

    def _facts(
        self, app: ModuleType, server: RedisServer, publisher: Publisher, chaos: Chaos, data: Path
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
            received=logs.received,
            doubles=logs.doubles,
            uncounted=logs.uncounted,
            stored=logs.stored,
            ended=[ended for slot in self._slots for ended in slot.ended],
            outages=chaos.outages,
        )
        if self._options.broker == "redis":
            seen = traffic(data, app.QUEUE)
            facts.copies = seen.copies
            if self._options.plain_fetch:
                facts.vanished = seen.vanished
                transport = app.app.conf.broker_transport_options
                facts.visibility_seconds = transport["visibility_timeout"]
        if self._options.keep:
            shutil.copytree(data, self._folder / "redis", dirs_exist_ok=True)
            lines = "\n".join(repr(letter) for letter in facts.letters)
            (self._folder / "letters").write_text(lines, "utf-8")
            left = sum(1 for _ in server.client().scan_iter("dlq:*:run:*"))
            self._tell(f"run hashes left: {left}")
        return facts, logs

    def _report(self, books: Books, chaos: Chaos, logs: Said) -> dict[str, Any]:
        return {
            "seed": self._options.seed,
            "broker": self._options.broker,
            "tasks": self._options.tasks,
            "seconds": round(time.monotonic() - self._begun, 1),
            "balanced": books.balanced,
            "plain fetch": self._options.plain_fetch,
            "deploys": chaos.deploys,
            "kills": chaos.kills,
            "misfortunes": chaos.done,
            "counts": books.counts,
            "faults": {name: found for name, found in books.faults.items() if found},
            "explained": {name: found for name, found in books.explained.items() if found},
            "complaints": dict(logs.complaints),
        }

    def _tell(self, text: str) -> None:
        self._console.log(f"{time.time():.2f} {text}", highlight=False)


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
        module.dlq.close()
        module.app.close()


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people."""
    table = Table(
        "",
        "",
        title=f"Chaos on {report['broker']}, seed {report['seed']}, {report['seconds']:g} s",
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
    parser.add_argument("--broker", choices=["redis", "classic", "quorum"], default="redis")
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
        choices=list(WEIGHTS),
        default=[],
        help="kinds of messages to leave out",
    )
    parser.add_argument("--report", type=Path, help="write the report to this JSON file")
    parser.add_argument("--keep", action="store_true", help="keep marks, logs and data")
    options = parser.parse_args(arguments)
    console = Console(stderr=False)
    if redis_executable() is None or (options.broker != "redis" and rabbitmq_executable() is None):
        parser.error("redis-server, and rabbitmq-server for its queues, must be installed")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        books, report = Run(options, folder, console)()
    finally:
        if options.keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    show(report, console)
    if options.report:
        options.report.write_text(json.dumps(report, indent=2), "utf-8")
    return 0 if books.balanced else 1


if __name__ == "__main__":
    sys.exit(main())
