"""Dying messages in other systems, in one run: ``python -m benchmarks peers``.

Every system gets messages with the same argument of 900 random letters, two processes, and a
task that fails at its first and only try. What is measured is the way to where each keeps its
dead, and then the way back to the queue, as far as the system has one.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import amqp
import redis
from benchmarks.celery_contestant import HERE, CeleryContestant
from benchmarks.contest import Contest, Contestant, Sample, median, python
from benchmarks.dying import BODY
from benchmarks.node import PLAIN, QUEUE, charge
from benchmarks.processes import Tree
from celery import Celery
from rabbit import RabbitServer
from servers import RedisServer

from celery_dlq import DeadLetters

OURS, OURS_RABBIT = "celery_dlq, Redis broker", "celery_dlq, RabbitMQ broker"
NATIVE, DRAMATIQ, RQ = "Celery, RabbitMQ's own DLX", "Dramatiq, Redis", "RQ, Redis"


@dataclass(frozen=True)
class Size:
    """The amount of work."""

    failing: int
    rounds: int


FULL = Size(failing=200, rounds=9)
QUICK = Size(failing=10, rounds=1)


class Peer(Contestant):
    """A contestant that dead messages leave behind something."""

    store: redis.Redis
    kept_bytes: list[float]

    def dead(self) -> int:
        """Number of letters now."""
        raise NotImplementedError

    def settled(self, messages: int) -> bool:
        """All are kept."""
        return self.dead() - self._before == messages

    def turn(self, messages: int, executions: int = 1) -> Sample:
        """Note also what Redis keeps for them."""
        self._before, used = self.dead(), self._used()
        sample = super().turn(messages, executions)
        self.kept_bytes = [*getattr(self, "kept_bytes", []), (self._used() - used) / messages]
        return sample

    def warm_up(self, messages: int, executions: int = 1) -> None:
        """As others do."""
        self._before = self.dead()
        super().warm_up(messages, executions)

    def redrive(self) -> int | None:
        """Give all back to the queue; ``None`` if the system has no way."""
        return None

    def _used(self) -> int:
        return int(self.store.info("memory")["used_memory"])


class CeleryPeer(Peer, CeleryContestant):
    """Celery with the plugin."""

    def dead(self) -> int:
        """Letters."""
        return self.stored_letters()

    def redrive(self) -> int | None:
        """The plugin's."""
        app = Celery("redrive", broker=self._options["broker"], set_as_current=False)
        app.conf.dlq_url = self.letters
        app.conf.dlq_queues = {self.queue: {"max_deliveries": 3}}
        app.task(name=self._task)(charge)
        dlq = DeadLetters(app)
        try:
            return dlq.redrive(f"{self.queue}-DLQ").published
        finally:
            dlq.close()
            app.close()


class NativePeer(Peer, CeleryContestant):
    """Celery, rejecting to RabbitMQ's dead-letter exchange."""

    port = 0

    def dead(self) -> int:
        """Messages of the dead queue."""
        with amqp.Connection(f"127.0.0.1:{self.port}") as connection:
            return int(connection.channel().queue_declare(f"{self.queue}.dead", durable=True)[1])

    def redrive(self) -> int | None:
        """A redrive written by hand: get, publish with confirmation, acknowledge."""
        done = 0
        with amqp.Connection(f"127.0.0.1:{self.port}", confirm_publish=True) as connection:
            channel = connection.channel()
            while (message := channel.basic_get(f"{self.queue}.dead")) is not None:
                tag = message.delivery_tag
                channel.basic_publish_confirm(message, routing_key=self.queue)
                channel.basic_ack(tag)
                done += 1
        return done


class DramatiqPeer(Peer):
    """Dramatiq with two processes of one thread."""

    url = ""

    def command(self) -> tuple[list[str], dict[str, str]]:
        """Its own command line."""
        command = python(
            "dramatiq", "benchmarks.dramatiq_node", "--processes", "2", "--threads", "1"
        )
        return command, _environment(BENCH_URL=self.url, BENCH_TALLY=str(self.tally))

    def publish(self, messages: int) -> None:
        """Through its broker."""
        os.environ.update(BENCH_URL=self.url, BENCH_TALLY=str(self.tally))
        from benchmarks import dramatiq_node

        for _ in range(messages):
            dramatiq_node.fails.send(BODY)

    def dead(self) -> int:
        """Messages in its ``XQ``."""
        return int(self.store.zcard("dramatiq:default.XQ"))


class RQPeer(Peer):
    """RQ with two workers; each job has a process of its own, which is its default."""

    url = ""

    def command(self) -> tuple[list[str], dict[str, str]]:
        """Its own command line."""
        command = python(
            "rq.cli",
            "worker-pool",
            "default",
            "--num-workers",
            "2",
            "--url",
            self.url,
            "--logging-level",
            "WARNING",
        )
        return command, _environment(BENCH_TALLY=str(self.tally))

    def publish(self, messages: int) -> None:
        """Through its queue."""
        from rq import Queue

        queue = Queue("default", connection=self.store)
        for _ in range(messages):
            queue.enqueue("benchmarks.rq_node.fails", BODY)

    def dead(self) -> int:
        """Jobs of its registry of failed ones."""
        return int(self.store.zcard("rq:failed:default"))

    def redrive(self) -> int | None:
        """As ``rq requeue --all`` does."""
        from rq.registry import FailedJobRegistry

        registry = FailedJobRegistry("default", connection=self.store)
        ids = registry.get_job_ids()
        for job_id in ids:
            registry.requeue(job_id)
        return len(ids)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """The way to the dead and back."""
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer())
        rabbit = stack.enter_context(RabbitServer())
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = _peers(server, rabbit, folder)
        contest = Contest(peers, size.failing, size.rounds, paired=False)
        rows = contest.run(lambda text: tell(f"peers: {text}"))
        for row, peer in zip(rows, peers, strict=True):
            row["kept_bytes"] = None if isinstance(peer, NativePeer) else median(peer.kept_bytes)
            row.update(_redriven(peer, server, rabbit))
        yield {"cell": "dead messages, and back", "rows": rows}


def _peers(server: RedisServer, rabbit: RabbitServer, folder: Path) -> list[Peer]:
    base = server.url.rpartition("/")[0]
    common: dict[str, Any] = {"task": "fails", "args": (BODY,)}
    ours = CeleryPeer(
        OURS, folder / "0", Tree(server.pid), broker=f"{base}/0", variant=QUEUE, **common
    )
    on_rabbit = CeleryPeer(
        OURS_RABBIT,
        folder / "1",
        Tree(rabbit.pid),
        broker=rabbit.url,
        letters=f"{base}/1",
        variant=QUEUE,
        **common,
    )
    native = NativePeer(
        NATIVE,
        folder / "2",
        Tree(rabbit.pid),
        broker=rabbit.url,
        letters=f"{base}/2",
        variant=PLAIN,
        conf={"task_acks_on_failure_or_timeout": False},
        **common,
    )
    native.dead_letter_to(f"{native.queue}.dead")
    native.port = rabbit.port
    dramatiq = DramatiqPeer(DRAMATIQ, folder / "3", Tree(server.pid))
    dramatiq.url = f"{base}/3"
    rq = RQPeer(RQ, folder / "4", Tree(server.pid))
    rq.url = f"{base}/4"
    peers: list[Peer] = [ours, on_rabbit, native, dramatiq, rq]
    for number, peer in enumerate(peers):
        peer.store = redis.Redis.from_url(f"{base}/{number}")
    return peers


def _redriven(peer: Peer, server: RedisServer, rabbit: RabbitServer) -> dict[str, Any]:
    trees = Tree(server.pid), Tree(rabbit.pid)
    begun, cpu = time.perf_counter(), time.process_time()
    before = sum(tree.cpu_seconds() for tree in trees)
    done = peer.redrive()
    if not done:
        return {"redriven": done, "redriven_per_second": None, "redrive_cpu_us": None}
    return {
        "redriven": done,
        "redriven_per_second": done / (time.perf_counter() - begun),
        "redrive_cpu_us": (time.process_time() - cpu) / done * 1e6,
        "redrive_server_cpu_us": (sum(tree.cpu_seconds() for tree in trees) - before) / done * 1e6,
    }


def _environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": f"{HERE}{os.pathsep}{HERE.parent}{os.pathsep}{HERE.parents[1]}",
        **more,
    }
