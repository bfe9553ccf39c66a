"""A flood of letters into a small Redis: nothing is evicted, and the broker goes on publishing.

``python -m chaos.memory --policy allkeys-lru --letters 200000``, with this folder's parent on
``PYTHONPATH``. Messages are published by plain kombu and die on real workers; half of them are
acknowledged late. Then the books are balanced: each message is a letter in Redis, a letter on a
worker's disk, or still with the broker.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import redis
from celery import Celery
from kombu import Connection, Queue
from kombu.exceptions import OperationalError
from servers import RedisServer

from celery_dlq import DeadLetters
from celery_dlq.letters.headers import PUBLICATION_HEADER, named_after
from celery_dlq.letters.record import letter_id

TESTS = Path(__file__).parents[1]
QUEUE, DEAD_LETTER_QUEUE = "flood", "flood-DLQ"
IDS = f"dlq:{{{DEAD_LETTER_QUEUE}}}:ids"
POLICIES = (
    "noeviction",
    "allkeys-lru",
    "allkeys-lfu",
    "allkeys-random",
    "volatile-lru",
    "volatile-lfu",
    "volatile-random",
    "volatile-ttl",
)
QUEUE_SHARE = 0.02  # of the memory: what the broker holds is not what is tried here
LOOK_SECONDS = 0.1
QUIET_SECONDS = 10.0


@dataclass(slots=True)
class Report:
    """What came of one flood.

    Attributes:
        policy: The ``maxmemory-policy``.
        published: Messages that kombu published.
        refused: Publications that failed.
        slowest_publish: The longest publication, in seconds.
        in_redis: Letters in Redis.
        in_spool: Letters on the workers' disks and not in Redis.
        with_broker: Messages that are still queued or unacknowledged.
        missing: Messages that are nowhere.
        most_used: Highest share of ``maxmemory`` seen.
        evicted: Keys that Redis deleted by itself.
        drained: Letters that reached Redis after room was made; -1 if that was not tried.
        disorder: Letters of a spool that reached Redis before an older one of the same spool.
        seconds: How long the flood took.
    """

    policy: str
    published: int = 0
    refused: int = 0
    slowest_publish: float = 0.0
    in_redis: int = 0
    in_spool: int = 0
    with_broker: int = 0
    missing: int = 0
    most_used: float = 0.0
    evicted: int = 0
    drained: int = -1
    disorder: int = 0
    seconds: float = 0.0

    @property
    def balanced(self) -> bool:
        """True if nothing is missing, and publishing never failed."""
        return not (self.missing or self.refused or self.evicted or self.disorder)


@dataclass(slots=True)
class Flood:
    """One flood.

    Args:
        server: The Redis.
        folder: Logs and spools.
        options: The options of the command line.
        report: Gets what came of it.
    """

    server: RedisServer
    folder: Path
    options: argparse.Namespace
    report: Report
    client: redis.Redis = field(init=False)
    expected: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.client = self.server.client()

    def run(self) -> None:
        """Publish, let it rest, balance the books, and drain if asked."""
        begun = time.monotonic()
        with self.workers(), self.watched():
            self.publish()
            self.rest()
        self.report.seconds = round(time.monotonic() - begun, 1)
        self.balance()
        if self.options.drain:
            spools = [self.spooled(n) for n in range(self.options.workers)]
            with self.workers():
                self.drain(spools)

    @contextmanager
    def workers(self) -> Iterator[None]:
        """Workers, each with a spool of its own, as if on different hosts."""
        started = [self.worker(number) for number in range(self.options.workers)]
        try:
            yield
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(120)

    def worker(self, number: int) -> subprocess.Popen[bytes]:
        env = {
            **os.environ,
            "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS.parent}",
            "FLOOD_REDIS": self.server.url,
            "FLOOD_LIMIT": str(self.options.limit),
            "FLOOD_SPOOL": str(self.folder / f"spool-{number}"),
        }
        name = f"w{number}@flood"
        command = ["-A", "chaos.flood", "worker", "--pool", "solo", "--hostname", name]
        command += ["--loglevel", "CRITICAL", "--without-gossip", "--without-mingle"]
        with (self.folder / f"worker-{number}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "celery", *command],
                env=env,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look at the memory of Redis all the time."""
        over = threading.Event()

        def look() -> None:
            with redis.Redis.from_url(self.server.url) as client:
                while not over.wait(LOOK_SECONDS):
                    info = client.info("memory")
                    share = info["used_memory"] / info["maxmemory"]
                    self.report.most_used = max(self.report.most_used, round(share, 4))

        thread = threading.Thread(target=look, daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self.report.evicted = int(self.client.info("stats")["evicted_keys"])

    def publish(self) -> None:
        """Publish with kombu as any service would, as fast as the workers take the messages."""
        allowed = int(self.client.info("memory")["maxmemory"] * QUEUE_SHARE)
        most_waiting = allowed // (1400 * self.options.kilobytes)  # in base64
        rng = random.Random(self.options.seed)  # noqa: S311 - no secrets
        with Connection(self.server.url) as connection:
            producer = connection.Producer()
            for _ in range(self.options.letters):
                while self.client.llen(QUEUE) > most_waiting:
                    time.sleep(0.01)
                task_id = str(UUID(int=rng.getrandbits(128), version=4))
                payload = rng.randbytes(self.options.kilobytes * 500).hex()
                begun = time.monotonic()
                try:
                    producer.publish(
                        [[payload], {}, {}],
                        routing_key=QUEUE,
                        exchange="",
                        declare=[Queue(QUEUE)],
                        serializer="json",
                        headers={
                            # Tells the id of the message's letter beforehand.
                            PUBLICATION_HEADER: _publication(task_id),
                            "lang": "py",
                            "task": f"chaos.flood.{rng.choice(('late', 'early'))}",
                            "id": task_id,
                            "retries": 0,
                        },
                        retry=False,
                    )
                except (redis.RedisError, OperationalError, OSError) as exc:
                    self.report.refused += 1
                    print(f"refused: {exc!r}"[:200], file=sys.stderr)
                    continue
                took = round(time.monotonic() - begun, 3)
                self.report.slowest_publish = max(self.report.slowest_publish, took)
                self.report.published += 1
                self.expected.add(_letter_of(task_id))

    def rest(self) -> None:
        """Wait until nothing changes any more."""
        before, since = None, time.monotonic()
        while time.monotonic() - since < QUIET_SECONDS:
            now = (self.client.llen(QUEUE), self.client.hlen("unacked"), self.client.hlen(IDS))
            if now != before:
                before, since = now, time.monotonic()
            if now[:2] == (0, 0):
                return
            time.sleep(0.2)

    def balance(self) -> None:
        """Find every message."""
        stored = {name.decode() for name in self.client.hkeys(IDS)}
        spooled = {name for n in range(self.options.workers) for name in self.spooled(n)} - stored
        waiting = [json.loads(text) for text in self.client.lrange(QUEUE, 0, -1)]
        waiting += [json.loads(text)[0] for text in self.client.hvals("unacked")]
        queued = {_letter_of(message["headers"]["id"]) for message in waiting}
        self.report.in_redis = len(stored & self.expected)
        self.report.in_spool = len(spooled & self.expected)
        self.report.with_broker = len((queued & self.expected) - stored - spooled)
        self.report.missing = len(self.expected - stored - spooled - queued)

    def spooled(self, number: int) -> list[str]:
        """The ids of the letters in the spool of a worker, oldest first."""
        files = (self.folder / f"spool-{number}").rglob("*.json")
        return [path.stem.partition("-")[2] for path in sorted(files)]

    def drain(self, spools: Sequence[Sequence[str]]) -> None:
        """Take letters away as they come, until each spool is empty; see in which order."""
        places: dict[str, tuple[int, ...]] = {}
        dead_letters = DeadLetters(Celery("drain", broker=self.server.url))
        at_first = {name.decode() for name in self.client.hkeys(IDS)}
        deadline = time.monotonic() + self.options.drain
        while len(places) < len(self.expected) and time.monotonic() < deadline:
            found = {i.decode(): entry.decode() for i, entry in self.client.hgetall(IDS).items()}
            places |= {i: tuple(map(int, entry.split("-"))) for i, entry in found.items()}
            dead_letters.store.remove(DEAD_LETTER_QUEUE, found)
            time.sleep(0.5)
        dead_letters.close()
        self.report.drained = len(places)
        self.report.missing = len(self.expected - set(places))
        for spool in spools:
            order = [places[name] for name in spool if name in places and name not in at_first]
            self.report.disorder += sum(a > b for a, b in pairwise(order))


def _publication(task_id: str) -> str:
    return named_after(task_id.encode())


def _letter_of(task_id: str) -> str:
    return letter_id(DEAD_LETTER_QUEUE, task_id, 0, 0, publication=_publication(task_id))


def flood(options: argparse.Namespace) -> Report:
    """Run one flood in a Redis of its own."""
    report = Report(options.policy)
    folder = Path(tempfile.mkdtemp(prefix="flood-"))
    arguments = ("--maxmemory", options.maxmemory, "--maxmemory-policy", options.policy)
    try:
        with RedisServer(*arguments) as server:
            Flood(server, folder, options, report).run()
    finally:
        if options.keep:
            print(folder, file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return report


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="chaos.memory", description=__doc__)
    parser.add_argument("--policy", choices=[*POLICIES, "all"], default="noeviction")
    parser.add_argument("--letters", type=int, default=200_000)
    parser.add_argument("--kilobytes", type=int, default=20, help="size of a message's body")
    parser.add_argument("--maxmemory", default="256mb")
    parser.add_argument("--limit", type=float, default=0.8, help="dlq_memory_limit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--drain", type=float, default=0.0, help="empty spools for so long")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--report", type=Path, help="write what came of it as JSON")
    parser.add_argument("--keep", action="store_true", help="keep logs and spools")
    parser.add_argument("--broker", choices=["redis"], default="redis")
    return parser.parse_args()


def main() -> int:
    """Run a flood under one policy or under each; 0 if the books balance."""
    options, reports = _options(), []
    for policy in POLICIES if options.policy == "all" else [options.policy]:
        reports.append(flood(argparse.Namespace(**{**vars(options), "policy": policy})))
        print(json.dumps(asdict(reports[-1])), flush=True)
    balanced = all(report.balanced for report in reports)
    if options.report:
        floods = [asdict(report) for report in reports]
        options.report.write_text(json.dumps({"balanced": balanced, "floods": floods}), "utf-8")
    return 0 if balanced else 1


if __name__ == "__main__":
    sys.exit(main())
