"""The cost of the plugin, counted and not timed: a regression fails without noise."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from celery import Celery
from celery.contrib.testing.worker import start_worker
from celery.utils import uuid
from celery.worker import state as worker_state
from kombu import Queue
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.letters.headers import PUBLICATION_HEADER, publication
from celery_dlq.policies.decisions import Run
from celery_dlq.store.counter import SCRIPTS
from celery_dlq.store.scripts import script_text
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.wiring import guard_of

TASKS = 96
DYING = 20


TEXTS = {name: script_text(name).text.replace("\n", "\\n") for name in (*SCRIPTS, "measure")}
"""Scripts that are sent as their texts, as MONITOR shows them."""


def script(name: str) -> str:
    """The name of this script's calls in `Seen`."""
    if name in TEXTS:
        return f"EVAL {name}"
    return f"EVALSHA {script_text(name).digest}"


def name_of(command: str) -> str:
    """The name of a command in `Seen`: for a script also which one."""
    name, _, rest = command.partition(" ")
    if name == "EVAL":
        return f"EVAL {next((one for one, text in TEXTS.items() if rest.startswith(text)), '?')}"
    if name == "EVALSHA" or rest.startswith("REPLY"):
        return f"{name} {rest.partition(' ')[0]}"
    return name


FIRST, LETTER, FORGET = (script(name) for name in ("count_first", "dead_letter", "forget"))
BACKGROUND = {
    script("heartbeat"),
    script("node"),
    script("measure"),
    "SMEMBERS",
    "ZRANGE",
    "SCRIPT",
    "CLIENT",
    "SELECT",
}
"""What workers do once in a while, whatever they work on."""


class Seen:
    """The commands that the plugin's connections sent meanwhile; scripts by their digests."""

    def __init__(self, url: str, others: frozenset[str]) -> None:
        self.commands: Counter[str] = Counter()
        self._url = url
        self._others = others
        self._lines: list[dict[str, Any]] = []
        self._ours: set[str] = set()

    def __enter__(self) -> Seen:
        self._control = redis.Redis.from_url(self._url)
        self._monitor = redis.Redis.from_url(self._url)
        begun: list[bool] = []

        def listen() -> None:
            with self._monitor.monitor() as monitor:
                begun.append(True)
                for line in monitor.listen():
                    self._lines.append(line)
                    if line["command"] == "ECHO over":
                        return

        self._thread = Thread(target=listen, daemon=True)
        self._thread.start()
        poll(lambda: begun)
        self.connections()
        return self

    def __exit__(self, *_: object) -> None:
        self.connections()
        self._control.echo("over")
        self._thread.join(10)
        for line in self._lines:
            place = f"{line['client_address']}:{line['client_port']}"
            if place in self._ours and line["client_type"] != "lua":
                self.commands[name_of(line["command"])] += 1
        self._control.close()
        self._monitor.close()

    def connections(self) -> int:
        """Number of connections that the plugin has now."""
        ours = named(self._control) - self._others
        self._ours |= ours
        return len(ours)

    @property
    def of_tasks(self) -> dict[str, int]:
        """Without those of the background."""
        return {name: n for name, n in self.commands.items() if name not in BACKGROUND}


def named(client: redis.Redis) -> frozenset[str]:
    """The connections of this plugin."""
    return frozenset(c["addr"] for c in client.client_list() if c["name"] == "celery_dlq")


@pytest.fixture
def others(redis_url: str) -> frozenset[str]:
    """Connections that earlier tests left open in this process."""
    with redis.Redis.from_url(redis_url) as client:
        return named(client)


@pytest.fixture
def app(others: frozenset[str], redis_url: str, tmp_path: Path) -> Iterator[Celery]:
    """An app with a guarded queue."""
    made = Celery("cost", broker=redis_url, set_as_current=False)
    made.conf.task_queues = [Queue("orders")]
    made.conf.task_default_queue = "orders"
    made.conf.task_ignore_result = True
    made.conf.task_acks_late = True
    made.conf.dlq_queues = {"orders": {"max_deliveries": 3}}
    made.conf.dlq_spool_dir = str(tmp_path)
    yield made
    made.close()


@pytest.fixture
def dlq(app: Celery) -> Iterator[DeadLetters]:
    """The plugin on that app."""
    made = DeadLetters(app)
    yield made
    made.close()


@pytest.fixture
def guard(app: Celery, dlq: DeadLetters) -> Iterator[Guard]:
    """The guard of a worker of that app, with its periodic work."""
    made: Guard = guard_of(dlq.assembly, hostname="celery@web-1", pid=4711, flags_redelivery=True)
    yield made
    made.close()


@contextmanager
def working(app: Celery) -> Iterator[Any]:
    """A worker in this process; runs a task so often, until all is acknowledged."""
    ran: list[str] = []

    @app.task(name="cost.noop")
    def noop() -> None:
        ran.append("noop")

    @app.task(name="cost.fails")
    def fails() -> None:
        ran.append("fails")
        raise ValueError("no such order")

    def run(name: str, count: int) -> None:
        wanted = len(ran) + count
        for _ in range(count):
            app.tasks[name].delay()
        poll(lambda: len(ran) == wanted, timeout_seconds=30)
        with redis.Redis.from_url(app.conf.broker_url) as client:
            poll(lambda: not client.hlen("unacked"))

    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=30) as worker:
        run.parts = worker.dead_letter_guard.parts
        yield run
        # It looks for these only between two events, or every two seconds.
        worker_state.should_terminate = 0
        for _ in range(2):
            app.control.broadcast("clock")


def test_a_task_adds_one_command_and_a_letter_two_more(
    app: Celery, dlq: DeadLetters, redis_url: str, others: frozenset[str]
) -> None:
    """On two connections, whatever the worker does."""
    with working(app) as run:
        run("cost.noop", 2)
        run("cost.fails", 2)  # the first letter of a queue takes the long way
        with Seen(redis_url, others) as healthy:
            run("cost.noop", TASKS)
        with Seen(redis_url, others) as dying:
            run("cost.fails", DYING)
            run.parts.counts.flush(run.parts.backend.metrics.add_counts)
            assert dying.connections() <= 2
    found = healthy.of_tasks
    assert found.pop(FIRST) == TASKS
    assert found.pop("HDEL") <= TASKS  # acknowledgements, on the same connection
    # One before each script that nobody waits for: starts, clean-ups, heartbeats.
    # Redis 6.2 does not show them to MONITOR.
    assert found.pop("CLIENT REPLY", 0) <= 2 * TASKS + TASKS // 32 + 15
    assert found.pop("INFO", 0) + found.pop("HGET", 0) <= 2  # as below
    # A clean-up with every 32nd, and with a tick of the background.
    assert set(found) <= {FORGET}, found
    assert found.get(FORGET, 0) <= TASKS // 32 + 5
    letters = dying.of_tasks
    letters.pop(FORGET, None)
    assert letters.pop("HDEL") <= DYING
    assert letters.pop("CLIENT REPLY", 0) <= 2 * DYING + 15
    assert letters.pop("INFO", 0) + letters.pop("HGET", 0) <= 2  # the memory, once in a while
    assert letters == {FIRST: DYING, "SADD": DYING, LETTER: DYING}


def test_a_worker_without_work_sends_less_than_two_commands_a_second(
    guard: Guard, redis_url: str, others: frozenset[str]
) -> None:
    """Periodic work every third second; beside its counters it gives no heartbeat."""
    worker_state.reset_state()  # requests of other tests that this process has run
    finish(guard, 3)
    guard.tick()
    with Seen(redis_url, others) as seen:
        for _ in range(30):
            guard.tick()
    assert sum(seen.commands.values()) < 60, seen.commands
    assert seen.commands[script("heartbeat")] == 0


def test_a_worker_with_a_task_now_and_then_sends_one_heartbeat_for_each(
    guard: Guard, redis_url: str, others: frozenset[str]
) -> None:
    """What a tick sends to see if Redis takes writes also counts for the next start."""
    finish(guard, 1)
    guard.tick()
    with Seen(redis_url, others) as seen:
        for _ in range(5):
            finish(guard, 1)
            guard.tick()
    assert seen.commands[FIRST] == 5
    assert seen.commands[script("heartbeat")] == 5


def test_a_first_delivery_waits_for_nothing(guard: Guard) -> None:
    """Redis does not even reply."""
    finish(guard, 1)
    guard.tick()
    reads: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(guard.counter.connection, "replies", reads.append)
        finish(guard, TASKS)
    assert reads == []


def test_a_guarded_task_makes_a_bounded_number_of_calls(guard: Guard) -> None:
    """Calls of Python functions, ours and the client's, writes and reads included."""
    finish(guard, 64)
    messages = [a_message(guard) for _ in range(TASKS)]
    calls = 0

    def profile(_frame: object, event: str, _arg: object) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        for message in messages:
            guard.count_start(message)
            guard.record_success(message)
    finally:
        sys.setprofile(before)
    assert calls / TASKS <= MOST_CALLS


def test_a_guarded_task_holds_little_memory_while_it_runs_and_none_afterwards(
    guard: Guard,
) -> None:
    """Blocks of the allocator; the third round, when caches and buffers are full."""
    held, kept = 0, 0
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            messages = [a_message(guard) for _ in range(TASKS)]
            before = sys.getallocatedblocks()
            for message in messages:
                assert guard.count_start(message) == Run()
            guard.counter.flush()
            held = sys.getallocatedblocks() - before
            for message in messages:
                guard.record_success(message)
                message.dlq_in_flight = None
            guard.counter.flush()
            kept = sys.getallocatedblocks() - before
    finally:
        gc.enable()
    assert held / TASKS <= MOST_BLOCKS
    assert kept / TASKS < 1


MOST_CALLS = 50
MOST_BLOCKS = 16

APP = Celery("cost", broker="memory://", set_as_current=False)


def a_message(guard: Guard) -> Any:
    """The part of Celery's request that the guard uses."""
    task_id = uuid()
    return SimpleNamespace(
        id=task_id,
        task=SimpleNamespace(name="cost.noop", max_retries=3, app=APP),
        delivery_info={"exchange": "", "routing_key": "orders", "redelivered": False},
        request_dict={"id": task_id, "retries": 0},
        message=SimpleNamespace(headers={PUBLICATION_HEADER: publication(0x6414F7A3D3A7C, 7)}),
        dlq_in_flight=None,
    )


def finish(guard: Guard, count: int) -> None:
    """Healthy tasks, from their start to their end."""
    for _ in range(count):
        message = a_message(guard)
        assert guard.count_start(message) == Run()
        guard.record_success(message)
