"""Workers whose store is away or wrong when they start."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from kombu import VERSION as KOMBU
from servers import RedisServer
from tcp_proxy import TcpProxy
from waiting import poll
from workers import HERE, Worker

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import StoreUnavailable

Start = Callable[..., Worker]
Ran = Callable[[str], int]

WITHOUT = "this worker starts without it"
BACK = "The dead-letter store is back"


@pytest.fixture
def store() -> Iterator[RedisServer]:
    """A Redis for counters and letters alone; the broker has its own."""
    with RedisServer() as server:
        yield server


class Operator:
    """Another process that looks into the store, from time to time in vain."""

    def __init__(self, url: str, broker: str, **conf: Any) -> None:
        self._app = Celery("operator", broker=broker, set_as_current=False)
        self._app.conf.update(dlq_url=url, dlq_transport_options={"socket_timeout": 0.5}, **conf)
        self.dlq = DeadLetters(self._app)

    def letters(self) -> list[DeadLetter]:
        """The letters of the queue of all these tasks; none while the store is away."""
        with suppress(StoreUnavailable):
            if "orders-DLQ" in self.dlq.store.names():
                return list(self.dlq.letters("orders-DLQ"))
        return []

    def workers(self) -> int:
        """The number of workers that are registered."""
        with suppress(StoreUnavailable):
            return len(self.dlq.registry.workers())
        return 0

    def counted(self, metric: str, label: str) -> int:
        """A count of all workers."""
        with suppress(StoreUnavailable):
            return self.dlq.assembly.backend.metrics.read_all().counts.get((metric, label), 0)
        return 0

    def close(self) -> None:
        """Disconnect."""
        self.dlq.close()
        self._app.close()


@pytest.fixture
def operator_of(redis_url: str) -> Iterator[Callable[..., Operator]]:
    """Make operators."""
    made: list[Operator] = []

    def make(url: str, broker: str = redis_url, **conf: Any) -> Operator:
        made.append(Operator(url, broker, **conf))
        return made[-1]

    yield make
    for operator in made:
        operator.close()


def conf_of(url: str, **more: Any) -> dict[str, Any]:
    """Settings of a worker whose prefetch outlasts what waits for the store."""
    return {
        "dlq_url": url,
        "dlq_transport_options": {"socket_timeout": 0.5},
        "worker_prefetch_multiplier": 8,
        **more,
    }


def stop(server: RedisServer) -> None:
    server.kill()


def start(server: RedisServer) -> None:
    server.start()


def pause(server: RedisServer) -> None:
    server.pause()


def resume(server: RedisServer) -> None:
    server.resume()


def fill(server: RedisServer) -> None:
    server.client().config_set("maxmemory", "1")


def empty(server: RedisServer) -> None:
    server.client().config_set("maxmemory", "0")


def make_replica(server: RedisServer) -> None:
    server.client().replicaof("127.0.0.1", 1)


def make_master(server: RedisServer) -> None:
    server.client().replicaof("NO", "ONE")


AWAY = [
    pytest.param(stop, start, id="refused"),
    pytest.param(pause, resume, id="hangs"),
    pytest.param(fill, empty, id="full"),
    pytest.param(make_replica, make_master, id="read-only"),
]


@pytest.mark.parametrize(("go", "come_back"), AWAY)
def test_a_worker_starts_without_its_store_and_is_whole_when_it_comes_back(
    poison: ModuleType,
    start_worker: Start,
    store: RedisServer,
    ran: Ran,
    operator_of: Callable[..., Operator],
    tmp_path: Path,
    go: Callable[[RedisServer], None],
    come_back: Callable[[RedisServer], None],
) -> None:
    """Healthy tasks run once, dying ones become letters, the next poison message is counted."""
    go(store)
    worker = start_worker(conf_of(store.url, dlq_spool_dir=str(tmp_path / "spool")))
    assert worker.output.count(WITHOUT) == 1
    late, early = poison.fails.delay("late"), poison.fails_early.delay("early")
    healthy = [poison.healthy.delay(f"healthy-{n}") for n in range(100)]
    assert [r.get(timeout=60) for r in healthy] == [f"healthy-{n}" for n in range(100)]
    assert {ran(f"healthy-{n}") for n in range(100)} == {1}
    poll(lambda: "to the spool" in worker.output, timeout_seconds=30)
    assert BACK not in worker.output

    come_back(store)
    operator = operator_of(store.url)
    dead = {late.id, early.id}
    poll(lambda: {x.task_id for x in operator.letters()} == dead, timeout_seconds=60)
    poll(lambda: operator.workers() == 1, timeout_seconds=60)
    poll(lambda: not list((tmp_path / "spool").rglob("*.json")))
    poll(lambda: worker.output.count(BACK) == 1)
    sent = poison.requeues.delay("poison")
    poll(lambda: len(operator.letters()) == 3, timeout_seconds=60)
    (letter,) = [x for x in operator.letters() if x.task_id == sent.id]
    assert (letter.deliveries, ran("poison")) == (3, 3)
    assert (ran("late"), ran("early")) == (1, 1)
    poll(
        lambda: operator.counted("celery_dlq_store_errors_total", "start") == 1, timeout_seconds=30
    )
    assert "failed in the background" not in worker.output


def test_overrides_reach_a_worker_that_started_without_its_store(
    poison: ModuleType,
    start_worker: Start,
    store: RedisServer,
    ran: Ran,
    operator_of: Callable[..., Operator],
) -> None:
    """They are read when it is back, not only at the start."""
    operator = operator_of(store.url, dlq_queues={"orders": {"max_deliveries": 3}})
    operator.dlq.override_policy("orders", timedelta(hours=1), max_deliveries=2)
    store.pause()
    worker = start_worker(conf_of(store.url))
    store.resume()
    poll(lambda: "overridden by" in worker.output, timeout_seconds=60)
    poison.requeues.delay("poison")
    poll(operator.letters, timeout_seconds=30)
    assert ran("poison") == 2


@pytest.mark.parametrize("go", [stop, pause])
def test_a_worker_whose_store_never_came_ends_at_once(
    poison: ModuleType,
    start_worker: Start,
    store: RedisServer,
    ran: Ran,
    go: Callable[[RedisServer], None],
) -> None:
    """SIGTERM, while a letter waits; its message stays at the broker."""
    go(store)
    worker = start_worker(conf_of(store.url))
    poison.fails.delay("waits")
    poll(lambda: ran("waits") and "not dead-lettered yet" in worker.output, timeout_seconds=30)
    worker.process.send_signal(signal.SIGTERM)
    assert worker.process.wait(30) == 0


def test_a_store_on_the_brokers_redis_may_come_after_the_worker(
    poison: ModuleType,
    start_worker: Start,
    store: RedisServer,
    ran: Ran,
    operator_of: Callable[..., Operator],
) -> None:
    """Celery waits for its broker, as it does without us."""
    with TcpProxy(store.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        worker = start_worker(conf_of(url), wait=False, env={"POISON_BROKER": url})
        poll(lambda: "Cannot connect to" in worker.output, timeout_seconds=30)
        assert worker.output.count(WITHOUT) == 1
        proxy.open()
        operator = operator_of(store.url, store.url)
        poll(lambda: operator.workers() == 1, timeout_seconds=60)
        sender = Celery("sender", broker=store.url, set_as_current=False)
        sender.conf.task_default_queue = "orders"
        sender.send_task("poison_app.requeues", ["poison"])
        sender.close()
        poll(operator.letters, timeout_seconds=60)
        assert (operator.letters()[0].deliveries, ran("poison")) == (3, 3)
        worker.stop()


def test_the_start_says_first_what_weakens_a_guarantee(
    start_worker: Start, store: RedisServer, tmp_path: Path
) -> None:
    """Before remarks on memory: early acknowledgement, no limit, and a folder for no letter."""
    (tmp_path / "file").touch()
    conf = {
        "task_acks_late": False,
        "dlq_queues": {"orders": {"default_delay": 0}},
        "dlq_spool_dir": str(tmp_path / "file" / "spool"),
    }
    worker = start_worker(conf_of(store.url, **conf))
    poll(lambda: "has no maxmemory" in worker.output, timeout_seconds=30)
    said = [
        worker.output.index(text)
        for text in (
            "Tasks of 'orders' are acknowledged before they run: poison_app.",
            "Set task_acks_late = True",
            "No policy limits the starts of tasks of 'orders': poison_app.",
            "Set max_deliveries",
            f"this user cannot write to {tmp_path}/file/spool",
            "has no maxmemory",
        )
    ]
    assert said == sorted(said)
    worker.stop()


# -- what is wrong ----------------------------------------------------------------------


def refuses(worker: Worker) -> str:
    """The one line with which a worker refuses to start."""
    assert worker.process.wait(60) == 1, worker.output
    assert "Traceback" not in worker.output
    assert "hush" not in worker.output
    assert "ready." not in worker.output
    (line,) = [x for x in worker.output.splitlines() if x.startswith("Error: ")]
    return line


@pytest.mark.parametrize("wait_seconds", [0, 600])
def test_a_wrong_password_ends_the_start_at_once(
    start_worker: Start, store: RedisServer, wait_seconds: int
) -> None:
    """Whether it would wait or not; time does not mend it."""
    store.client().config_set("requirepass", "other")
    url = store.url.replace("redis://", "redis://:hush@")
    worker = start_worker(conf_of(url, dlq_start_timeout=wait_seconds), wait=False)
    assert "to accept the user and password" in refuses(worker)


def test_a_missing_permission_ends_the_start(start_worker: Start, store: RedisServer) -> None:
    """The line names it."""
    store.client().execute_command(
        "ACL", "SETUSER", "worker", "on", ">hush", "~dlq:*", "&*", "+@all", "-xadd"
    )
    url = store.url.replace("redis://", "redis://worker:hush@")
    line = refuses(start_worker(conf_of(url), wait=False))
    assert "XADD" in line
    assert "ACL SETUSER" in line


def test_a_node_of_a_cluster_ends_the_start(start_worker: Start) -> None:
    """A plain URL reaches one node of it, where no letter could be stored."""
    with RedisServer("--cluster-enabled", "yes") as node:
        worker = start_worker(conf_of(node.url), wait=False)
        assert "redis+cluster://" in refuses(worker)


@pytest.mark.skipif(KOMBU < (5, 7), reason="kombu before 5.7 works with older ones")
def test_a_redis_py_that_is_too_old_for_kombu_ends_the_start(
    start_worker: Start, tmp_path: Path
) -> None:
    """One line, not a traceback of kombu's; pip allows the pair: no package excludes it."""
    (tmp_path / "old_redis_py.py").write_text(
        "import redis\nredis.VERSION = (6, 3, 0)\nfrom poison_app import app\n"
    )
    env = {"PYTHONPATH": f"{HERE}{os.pathsep}{tmp_path}"}
    line = refuses(start_worker(app="old_redis_py", env=env, wait=False))
    assert "expected redis-py 6.4 or later beside kombu" in line
    assert "pip install --upgrade redis" in line


def test_a_worker_that_must_have_its_store_waits_and_then_ends(
    start_worker: Start, store: RedisServer
) -> None:
    """`dlq_start_timeout`; within it the store may come."""
    store.kill()
    patient = start_worker(conf_of(store.url, dlq_start_timeout=10), wait=False)
    hasty = conf_of(store.url, dlq_start_timeout=0.1)
    assert "check that Redis runs" in refuses(start_worker(hasty, wait=False))
    poll(lambda: "Waiting for the dead-letter store" in patient.output, timeout_seconds=30)
    store.start()
    poll(lambda: "ready." in patient.output, timeout_seconds=30)
    assert WITHOUT not in patient.output


def test_a_user_who_may_not_skip_replies_is_counted_all_the_same(
    poison: ModuleType,
    start_worker: Start,
    store: RedisServer,
    ran: Ran,
    operator_of: Callable[..., Operator],
) -> None:
    """As in Redis 6, where all of CLIENT is an admin's; a line says what it costs."""
    rules = ("on", ">hush", "~dlq:*", "&*", "+@all", "-client", "+client|setname")
    store.client().execute_command("ACL", "SETUSER", "worker", *rules)
    worker = start_worker(conf_of(store.url.replace("redis://", "redis://worker:hush@")))
    healthy = [poison.healthy.delay(f"healthy-{n}") for n in range(20)]
    sent = poison.requeues.delay("poison")
    assert [r.get(timeout=30) for r in healthy] == [f"healthy-{n}" for n in range(20)]
    operator = operator_of(store.url)
    poll(operator.letters, timeout_seconds=30)
    (letter,) = operator.letters()
    assert (letter.task_id, letter.deliveries, ran("poison")) == (sent.id, 3, 3)
    assert "CLIENT REPLY is refused" in worker.output
    poll(lambda: not list(store.client().scan_iter("dlq:*:run:*healthy*")))
    assert "failed in the background" not in worker.output
