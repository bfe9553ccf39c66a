"""Tasks whose end Celery never reports, and starts that a lost connection meets: Redis as broker.

What Celery does not report, its pool knows: nothing is held for ever, and nothing runs twice.
"""

from __future__ import annotations

import inspect
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from celery.concurrency import gevent
from command_proxy import CommandProxy, sends
from servers import RedisServer
from waiting import poll
from workers import Worker, run_python

from celery_dlq.store.scripts import script_text
from celery_dlq.transport.redis.entries import redelivered

Start = Callable[..., Worker]
Ran = Callable[[str], int]

LEASE = {"dlq_lease": 5}
LOST = "Connection to broker lost"
MISSING = "did not report how task"


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the broker."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


@pytest.fixture
def all_done(broker: redis.Redis) -> Callable[[], bool]:
    """Whether the broker has no message any more, waiting or held."""
    return lambda: (
        not any((broker.llen("orders"), broker.llen("unguarded"), broker.hlen("unacked")))
    )


CHORD = """
from celery import chord
from poison_app import healthy, sleeps
member = sleeps.s("one", 2).set(queue={queue!r})
chord([member], healthy.si("body").set(queue={queue!r})).delay()
"""


@pytest.mark.parametrize(("pool", "queue"), [("solo", "orders"), ("threads", "unguarded")])
def test_a_task_whose_result_cannot_be_stored_runs_again(
    tmp_path: Path, pool: str, queue: str
) -> None:
    """Redis is killed while it runs: the error passes Celery by. The chord that it is in ends."""
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        client = server.client()
        traces = redis.Redis.from_url(server.url.rpartition("/")[0] + "/2")
        with Worker(server.url, tmp_path / "a.log", LEASE, pool=pool) as worker:
            run_python(server.url, "-c", CHORD.format(queue=queue)).check_returncode()
            poll(lambda: traces.exists("ran:one"))
            server.kill()
            away_until = time.monotonic() + 6  # the task ends meanwhile, after 2 s
            poll(lambda: time.monotonic() > away_until)
            server.start()
            poll(lambda: traces.exists("ran:body"), timeout_seconds=30)
            poll(lambda: not client.hlen("unacked"))
            assert traces.llen("ran:one") == 2
            assert worker.output.count(MISSING) == 1


def test_a_result_that_was_half_read_at_a_lost_connection_is_read_to_its_end(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    redis_server: RedisServer,
    broker: redis.Redis,
    all_done: Callable[[], bool],
) -> None:
    """The event loop forgets its first half; what the process reports later is read, too."""
    worker = start_worker({"worker_prefetch_multiplier": 4}, arguments=("-c", "1"))
    poison.returns_much.delay("one")
    poll(lambda: ran("one") == 1)
    with redis.Redis.from_url(f"{poison.URL}/2") as traces:
        child = int(traces.lindex("ran:one", 0))
    poll(lambda: state_of(worker.process.pid) == state_of(child) == "T")
    os.kill(worker.process.pid, signal.SIGCONT)
    poll(lambda: state_of(worker.process.pid) == "S")  # it has read what there is
    redis_server.close_connections()
    poll(lambda: worker.output.count("Connected to ") == 2)
    os.kill(child, signal.SIGCONT)
    poison.healthy.delay("two")

    poll(all_done, timeout_seconds=20)
    assert (ran("one"), ran("two")) == (1, 1)


def state_of(pid: int) -> str:
    """The letter that ``ps`` shows: T for one that is stopped."""
    return Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]


@pytest.mark.parametrize("queue", ["orders", "unguarded"])
def test_a_job_that_went_to_a_process_that_retires_runs_once(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    redis_server: RedisServer,
    all_done: Callable[[], bool],
    queue: str,
) -> None:
    """The connection is lost before another process has the job: neither held nor doubled."""
    conf = {"worker_max_tasks_per_child": 1, "worker_prefetch_multiplier": 4}
    worker = start_worker(conf, arguments=("-c", "1"))
    poison.retires_slowly.apply_async(("first", 3), queue=queue)
    poison.retires_slowly.apply_async(("second", 0), queue=queue)
    with redis.Redis.from_url(f"{poison.URL}/2") as traces:
        poll(lambda: traces.exists("retires:first"))
    redis_server.close_connections()
    poll(lambda: LOST in worker.output)

    poll(all_done, timeout_seconds=25)
    assert (ran("first"), ran("second")) == (1, 1)


@contextmanager
def a_worker_whose_count_waits(
    redis_url: str, log: Path, pool: str
) -> Iterator[tuple[Worker, Any]]:
    """A worker whose store is a Redis of its own, which does not answer to a count."""
    with RedisServer() as store, CommandProxy(store.port) as proxy:
        fault = proxy.fault("hold", sends("EVALSHA", script_text("count").digest))
        by_text = proxy.fault("hold", sends("EVAL", script_text("count").text))
        with Worker(redis_url, log, {"dlq_url": proxy.url}, pool=pool) as worker:
            yield worker, (fault, by_text)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_a_connection_that_is_lost_while_a_start_waits_for_its_count_doubles_nothing(
    poison: ModuleType,
    redis_url: str,
    tmp_path: Path,
    ran: Ran,
    broker: redis.Redis,
    redis_server: RedisServer,
    all_done: Callable[[], bool],
    pool: str,
) -> None:
    """The message is not back in its queue when the task starts."""
    poison.sleeps.delay("one", 2)
    decode = poison.app.connection_for_write().default_channel.decode_body
    entry, _ = redelivered(broker.rpop("orders"), decode)
    with a_worker_whose_count_waits(redis_url, tmp_path / "a.log", pool) as (worker, faults):
        broker.lpush("orders", entry)
        poll(lambda: any(fault.met.is_set() for fault in faults), timeout_seconds=15)
        redis_server.close_connections()
        if pool != "prefork":  # there, the event loop waits for the count
            poll(lambda: LOST in worker.output)
        for fault in faults:
            fault.release()
        poll(lambda: ran("one") and all_done(), timeout_seconds=25)
        assert LOST in worker.output
        assert ran("one") == 1, worker.output[-3000:]


@pytest.mark.skipif(
    "_make_killable_target" not in inspect.getsource(gevent), reason="Celery 5.4 cancels none"
)
@pytest.mark.parametrize("queue", ["orders", "unguarded"])
def test_a_greenlet_that_a_lost_connection_cancels_is_not_acknowledged(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    redis_server: RedisServer,
    all_done: Callable[[], bool],
    queue: str,
) -> None:
    """Celery takes the end of a killed greenlet for a success."""
    conf = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    worker = start_worker(conf, pool="gevent")
    poison.sleeps.apply_async(("cancelled", 4), queue=queue)
    poll(lambda: ran("cancelled") == 1)

    redis_server.close_connections()
    poll(lambda: ran("cancelled") == 2, timeout_seconds=20)

    poll(all_done, timeout_seconds=20)
    assert ran("cancelled") == 2
    assert MISSING not in worker.output
    assert not poison.dlq.queues()
