"""What a Redis broker loses and doubles: ``python -m chaos.transport``.

Each case runs with plain Celery, and with celery_dlq, on a Redis of its own:

- **killed**: two prefork workers with a prefetch of 16, 200 healthy tasks, and six messages each of
  which kills the main process of its worker with SIGKILL when it starts. A worker that dies is
  started again.
- **long**: 5 tasks that run, and 5 messages that wait (a countdown), for three times the visibility
  timeout; two workers.
- **entry**: a list entry that is no JSON, in front of 20 healthy messages; one worker.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import redis
from celery import Celery
from kombu import Queue
from servers import RedisServer

QUEUE = "orders"
GUARDED = "celery_dlq"
VARIANTS = ("plain", GUARDED)
KILLERS, HEALTHY, LONG, BEHIND = 6, 200, 5, 20
VISIBILITY_SECONDS = 3
_MARKS_DB = 9


def make_app(url: str, variant: str, visibility: float) -> Any:
    """The app of a variant; tasks mark their starts in a database of their own."""
    app = Celery("transport", broker=url)
    app.conf.update(
        task_queues=[Queue(QUEUE)],
        task_default_queue=QUEUE,
        task_ignore_result=True,
        task_acks_late=True,
        worker_prefetch_multiplier=8,
        broker_transport_options={
            "visibility_timeout": visibility,
            "unacked_restore_interval": 1,
            "unacked_restore_throttle": 1,
        },
        broker_connection_retry_on_startup=True,
    )
    if variant == GUARDED:
        from celery_dlq import DeadLetters

        app.conf.dlq_queues = {QUEUE: {"max_deliveries": 3}}
        if visibility > 60:
            app.conf.dlq_lease = 5
        DeadLetters(app)
    marks = redis.Redis.from_url(f"{url.rpartition('/')[0]}/{_MARKS_DB}")

    @app.task(name="run", shared=False)
    def run(number: int, seconds: float = 0.0) -> None:
        marks.hincrby("starts", number, 1)
        time.sleep(seconds)

    @app.task(name="kill", shared=False)
    def kill(number: int) -> None:
        marks.hincrby("kills", number, 1)
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    return app


class Workers:
    """Workers of one variant; those that die are started again.

    Args:
        url: URL of the broker.
        variant: See `VARIANTS`.
        count: Number of workers.
        visibility: The visibility timeout in seconds.
        log: File for their output.
    """

    def __init__(self, url: str, variant: str, count: int, visibility: float, log: Path) -> None:
        self._command = [
            *(sys.executable, "-m", "chaos.transport"),
            *("--worker", url, variant, str(visibility)),
        ]
        self._log = log.open("ab")
        self._processes = [self._start() for _ in range(count)]
        self.deaths = 0

    def _start(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self._command, stdout=self._log, stderr=self._log, start_new_session=True
        )

    def revive(self) -> None:
        """Start those again that died."""
        for at, process in enumerate(self._processes):
            if process.poll() is not None:
                self.deaths += 1
                self._processes[at] = self._start()

    def close(self) -> None:
        """Kill all, with their pool processes."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._log.close()


def killed(url: str, variant: str, log: Path) -> dict[str, Any]:
    """See the module's docstring."""
    app, client = make_app(url, variant, 3600), redis.Redis.from_url(url)
    for number in range(HEALTHY):
        if number % (HEALTHY // KILLERS) == 0 and number // (HEALTHY // KILLERS) < KILLERS:
            app.send_task("kill", (number,))
        app.send_task("run", (number, 0.02))
    marks = redis.Redis.from_url(f"{url.rpartition('/')[0]}/{_MARKS_DB}")
    workers = Workers(url, variant, 2, 3600, log)
    quiet, before, deadline = time.monotonic(), "", time.monotonic() + 150
    try:
        # Plain Celery leaves what dead workers held for an hour; so quiet is the end.
        while time.monotonic() < min(quiet + 25, deadline):
            time.sleep(0.2)
            workers.revive()
            state = f"{marks.hgetall('starts')}{marks.hgetall('kills')}{workers.deaths}"
            if state != before:
                quiet, before = time.monotonic(), state
    finally:
        workers.close()
    ran = {int(number) for number in marks.hkeys("starts")}
    held, letters = _held(client), _letters(client, variant)
    healthy = [n for n in range(HEALTHY) if n not in ran and ("run", n) not in held]
    killers = sum(task == "kill" for task, _ in held)
    return {
        "worker deaths": workers.deaths,
        "healthy messages that are nowhere": len(healthy),
        "killers that are nowhere": KILLERS - killers - letters,
        "still unacknowledged": len(held),
        "letters": letters,
    }


def _held(client: Any) -> set[tuple[str, int]]:
    """The task and number of each message in the list or among the unacknowledged ones."""
    entries = [json.loads(entry) for entry in client.lrange(QUEUE, 0, -1)]
    entries += [json.loads(record)[0] for record in client.hvals("unacked")]
    return {
        (entry["headers"]["task"], json.loads(base64.b64decode(entry["body"]))[0][0])
        for entry in entries
    }


def _letters(client: Any, variant: str) -> int:
    return int(client.xlen(f"dlq:{{{QUEUE}-DLQ}}:letters")) if variant == GUARDED else 0


def long(url: str, variant: str, log: Path) -> dict[str, Any]:
    """See the module's docstring."""
    app, client = make_app(url, variant, VISIBILITY_SECONDS), redis.Redis.from_url(url)
    seconds = 3 * VISIBILITY_SECONDS
    for number in range(LONG):
        app.send_task("run", (number, seconds))
        app.send_task("run", (LONG + number,), countdown=seconds)
    marks = redis.Redis.from_url(f"{url.rpartition('/')[0]}/{_MARKS_DB}")
    workers = Workers(url, variant, 2, VISIBILITY_SECONDS, log)
    deadline = time.monotonic() + 12 * VISIBILITY_SECONDS
    try:
        while time.monotonic() < deadline and (
            marks.hlen("starts") < 2 * LONG or client.hlen("unacked") or client.llen(QUEUE)
        ):
            time.sleep(0.2)
    finally:
        workers.close()
    starts = [int(value) for value in marks.hvals("starts")]
    return {
        "messages": 2 * LONG,
        "starts": sum(starts),
        "most starts of one": max(starts, default=0),
    }


def entry(url: str, variant: str, log: Path) -> dict[str, Any]:
    """See the module's docstring."""
    app, client = make_app(url, variant, 3600), redis.Redis.from_url(url)
    client.lpush(QUEUE, b"\xff not JSON")
    for number in range(BEHIND):
        app.send_task("run", (number,))
    marks = redis.Redis.from_url(f"{url.rpartition('/')[0]}/{_MARKS_DB}")
    workers = Workers(url, variant, 1, 3600, log)
    deadline = time.monotonic() + 15
    try:
        while time.monotonic() < deadline and marks.hlen("starts") < BEHIND:
            time.sleep(0.2)
            workers.revive()
    finally:
        workers.close()
    letters = _letters(client, variant)
    return {
        "worker deaths": workers.deaths,
        "ran behind it": marks.hlen("starts"),
        "letters": letters,
    }


CASES = {"killed": killed, "long": long, "entry": entry}


def main() -> None:
    """Run the cases and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m chaos.transport", description=__doc__)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}; none for all")
    options = parser.parse_args()
    if options.worker:
        url, variant, visibility = options.worker
        app = make_app(url, variant, float(visibility))
        app.Worker(hostname=f"{os.getpid()}@chaos", concurrency=2, loglevel="INFO").start()
        return
    for name in options.cases or CASES:
        for variant in VARIANTS:
            with RedisServer() as server, tempfile.TemporaryDirectory() as folder:
                result = CASES[name](server.url, variant, Path(folder) / "log")
            print(f"{name:8} {variant:12}", result, flush=True)


if __name__ == "__main__":
    main()
