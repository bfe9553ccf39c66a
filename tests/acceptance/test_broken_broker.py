"""The Redis broker fails in every way; workers go on, and no task is lost or runs twice."""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import celery
import kombu
import pytest
import redis
from command_proxy import CommandProxy, Fault, runs
from servers import RedisServer
from waiting import poll
from workers import Worker

Ran = Callable[[str], int]
Start = Callable[..., Worker]

LEASE_SECONDS = 5
CONF = {"dlq_lease": LEASE_SECONDS, "worker_prefetch_multiplier": 4}
AOF = ("--appendonly", "yes", "--appendfsync", "always")


class Broker:
    """A Redis that is nothing but the broker, and may be broken.

    Args:
        app: The module of the app.
        server: The Redis.
        start: Starts a worker.
    """

    def __init__(self, app: ModuleType, server: RedisServer, start: Start) -> None:
        self._app = app
        self.server = server
        self._start = start

    def worker(self, url: str | None = None, conf: dict[str, Any] | None = None) -> Worker:
        """Start a worker."""
        env = {"POISON_BROKER": url or self.server.url}
        worker = self._start({**CONF, **(conf or {})}, env=env)
        assert "Reliable fetch is on" in worker.output
        return worker

    def publish(self, task: str, *args: Any, server: RedisServer | None = None) -> None:
        """Publish a message."""
        with kombu.Connection((server or self.server).url) as connection:
            getattr(self._app, task).apply_async(args, connection=connection, retry=False)

    def is_clean(self, server: RedisServer | None = None) -> bool:
        """True if it has no message any more."""
        keys = ("orders", "unacked", "unacked_index", "unacked_leases")
        with suppress(redis.RedisError):
            return not (server or self.server).client().exists(*keys)
        return False


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """A Redis of the test's own, with the arguments of its parameter."""
    with RedisServer(*getattr(request, "param", AOF)) as server:
        yield server


@pytest.fixture
def broker(poison: ModuleType, server: RedisServer, start_worker: Start) -> Broker:
    """The broker of the test."""
    return Broker(poison, server, start_worker)


def _client_ids(server: RedisServer, which: Callable[[dict[str, str]], bool]) -> list[str]:
    own = str(server.client().client_id())
    return [c["id"] for c in server.client().client_list() if c["id"] != own and which(c)]


def _kill(server: RedisServer, which: Callable[[dict[str, str]], bool]) -> None:
    for one in _client_ids(server, which):
        with suppress(redis.ResponseError):  # it has ended
            server.client().client_kill_filter(_id=one)


def cut_all(server: RedisServer) -> None:
    _kill(server, lambda _client: True)


def cut_fetch(server: RedisServer) -> None:
    _kill(server, lambda client: client["cmd"] == "evalsha")


def cut_acknowledgements(server: RedisServer) -> None:
    _kill(server, lambda client: client["cmd"] == "hdel")


def cut_keeper(server: RedisServer) -> None:
    _kill(server, lambda client: client["cmd"] in ("eval", "zrem"))


def cut_wake(server: RedisServer) -> None:
    _kill(server, lambda client: "t" in client["flags"])


def forget_scripts(server: RedisServer) -> None:
    server.client().script_flush()


def restart(server: RedisServer) -> None:
    server.kill()
    time.sleep(1.0)  # an outage
    server.start()


def hang(server: RedisServer) -> None:
    server.pause()
    time.sleep(3.0)  # an outage
    server.resume()


def be_busy(server: RedisServer) -> None:
    client = server.client()
    client.config_set("lua-time-limit", 50)
    with redis.Redis(port=server.port) as busy:
        loop = threading.Thread(target=_forever, args=(busy,), daemon=True)
        loop.start()
        time.sleep(1.5)  # an outage
        client.script_kill()
        loop.join(10)


def _forever(client: redis.Redis) -> None:
    with suppress(redis.RedisError):
        client.eval("while true do end", 0)


def refuse_writes(server: RedisServer) -> None:
    """MISCONF, as on a full disk."""
    client = server.client()
    folder = Path(client.config_get("dir")["dir"])
    (folder / "dump.rdb" / "in the way").mkdir(parents=True, exist_ok=True)
    client.config_set("save", "3600 1")
    client.bgsave()
    poll(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
    time.sleep(2.0)  # an outage
    client.config_set("save", "")


def be_a_replica(server: RedisServer) -> None:
    client = server.client()
    client.config_set("replica-serve-stale-data", "yes")
    client.replicaof("127.0.0.1", 1)
    time.sleep(2.0)  # an outage
    client.replicaof("NO", "ONE")


FAULTS = [
    cut_all,
    cut_fetch,
    cut_acknowledgements,
    cut_keeper,
    cut_wake,
    forget_scripts,
    restart,
    hang,
    be_busy,
    refuse_writes,
    be_a_replica,
]


@pytest.mark.parametrize("break_and_mend", FAULTS)
def test_after_a_fault_of_the_broker_the_worker_goes_on_and_each_task_runs_once(
    broker: Broker, ran: Ran, break_and_mend: Callable[[RedisServer], None]
) -> None:
    """One task runs, more wait in the worker and in the queue; then the worker is idle."""
    worker = broker.worker()
    broker.publish("healthy", "first")
    poll(lambda: ran("first") and broker.is_clean())
    broker.publish("sleeps", "long", 6)
    poll(lambda: ran("long"))
    for n in range(10):
        broker.publish("sleeps", f"short-{n}", 0.3)
    poll(lambda: ran("short-1"))
    break_and_mend(broker.server)
    poll(broker.is_clean, timeout_seconds=60, every_seconds=0.1)
    assert {ran(name) for name in ("long", *(f"short-{n}" for n in range(10)))} == {1}
    break_and_mend(broker.server)
    broker.publish("healthy", "later")
    poll(lambda: ran("later") == 1 and broker.is_clean(), timeout_seconds=30)
    assert worker.process.poll() is None


@pytest.mark.parametrize("server", [()], ids=["no persistence"], indirect=True)
def test_a_broker_that_forgets_all_costs_its_messages_and_no_worker(
    broker: Broker, ran: Ran
) -> None:
    """Redis without persistence is killed; the running task ends, and new ones run."""
    worker = broker.worker()
    broker.publish("sleeps", "runs", 4)
    poll(lambda: ran("runs"))
    restart(broker.server)
    broker.publish("healthy", "later")
    poll(lambda: ran("later") and broker.is_clean(), timeout_seconds=30)
    assert ran("runs") == 1
    assert worker.process.poll() is None


def test_an_idle_worker_finds_the_new_master(broker: Broker, ran: Ran) -> None:
    """Its connections to the old one stay open, which is a read-only replica now."""
    with RedisServer(*AOF) as other, CommandProxy(broker.server.port) as proxy:
        worker = broker.worker(proxy.url)
        broker.publish("healthy", "first")
        poll(lambda: ran("first") and broker.is_clean())
        old, new = broker.server.client(), other.client()
        new.replicaof("127.0.0.1", broker.server.port)
        poll(lambda: new.info("replication").get("master_link_status") == "up")
        new.replicaof("NO", "ONE")
        old.replicaof("127.0.0.1", other.port)
        proxy.leads_to = other.port
        broker.publish("healthy", "later", server=other)
        poll(lambda: ran("later") and broker.is_clean(other), timeout_seconds=25)
        assert worker.process.poll() is None


def test_a_full_broker_gives_messages_and_takes_them_back(broker: Broker, ran: Ran) -> None:
    """With `noeviction`: fetch, acknowledgement and restoring need no free memory."""
    worker, other = broker.worker(), broker.worker()
    for n in range(8):
        broker.publish("sleeps", f"{n}", 1)
    poll(lambda: ran("0"))
    broker.server.client().config_set("maxmemory", "1mb")
    with pytest.raises(redis.OutOfMemoryError):
        broker.server.client().set("key", "value")
    worker.kill()
    poll(broker.is_clean, timeout_seconds=40, every_seconds=0.1)
    assert {bool(ran(f"{n}")) for n in range(8)} == {True}
    assert sum(ran(f"{n}") for n in range(8)) <= 8 + 2  # those that ran in the one that died
    assert other.process.poll() is None


def fetched_and_held(broker: Broker, proxy: CommandProxy) -> Fault:
    """Publish a task; the reply of its fetch waits in the proxy."""
    poll(lambda: _client_ids(broker.server, lambda client: "t" in client["flags"]))  # it is idle
    fault = proxy.fault("hold", runs("fetch"))
    broker.publish("healthy", "fetched")
    assert fault.met.wait(10)
    assert broker.server.client().hlen("unacked") == 1
    return fault


SIGNALS = {"warm": signal.SIGTERM, "cold": signal.SIGQUIT, "soft": signal.SIGQUIT}


@pytest.mark.parametrize("how", SIGNALS)
def test_a_message_in_the_socket_is_back_when_the_worker_has_ended(
    broker: Broker, how: str, ran: Ran
) -> None:
    """The reply of the fetch arrives after the shutdown has begun."""
    if how == "soft" and celery.VERSION < (5, 5):
        pytest.skip("soft shutdown came with Celery 5.5")
    conf = {"worker_soft_shutdown_timeout": 1.0} if how == "soft" else {}
    with CommandProxy(broker.server.port) as proxy:
        worker = broker.worker(proxy.url, conf)
        fault = fetched_and_held(broker, proxy)
        worker.process.send_signal(SIGNALS[how])
        poll(lambda: "hutdown" in worker.output)
        fault.release()
        worker.process.wait(20)
    assert broker.server.client().llen("orders") == 1
    assert not broker.server.client().exists("unacked", "unacked_index", "unacked_leases")
    assert not ran("fetched")


def test_a_message_whose_reply_never_comes_is_back_after_its_lease(
    broker: Broker, ran: Ran
) -> None:
    """The worker ends nevertheless, and another one runs the task."""
    with CommandProxy(broker.server.port) as proxy:
        worker = broker.worker(proxy.url)
        fetched_and_held(broker, proxy)
        worker.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            worker.process.wait(20)
        ended = worker.process.poll() is not None
        worker.kill()
    broker.worker()
    poll(lambda: ran("fetched") and broker.is_clean(), timeout_seconds=LEASE_SECONDS + 15)
    assert ran("fetched") == 1
    assert ended


def test_a_new_worker_after_an_outage_leaves_messages_to_those_that_live(
    broker: Broker, ran: Ran
) -> None:
    """The outage outlasts the lease; the task goes on running and runs once."""
    broker.worker()
    broker.publish("sleeps", "long", 14)
    poll(lambda: ran("long"))
    broker.server.kill()
    time.sleep(LEASE_SECONDS + 1)  # an outage
    broker.server.start()
    broker.worker()
    poll(broker.is_clean, timeout_seconds=40, every_seconds=0.1)
    assert ran("long") == 1
