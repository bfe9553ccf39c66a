"""Reliable fetch with real workers: every way to connect, what cannot be used, what is lost."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import Celery
from servers import RedisServer
from tls import TlsServer
from waiting import poll
from watched import WatchedServers
from workers import HERE, Worker

Start = Callable[..., Worker]
Ran = Callable[[str], int]
ON = "Reliable fetch is on for "
OFF = "Reliable fetch is off: "
NOT_WOKEN = "Redis cannot wake this worker now"


@pytest.fixture
def broker() -> Iterator[RedisServer]:
    """A broker of its own; results, letters and traces are elsewhere."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def send(poison: ModuleType) -> Callable[..., None]:
    """Return a function that sends healthy tasks to a broker."""

    def healthy(server: RedisServer, *keys: str, prefix: str = "") -> None:
        options = {"global_keyprefix": prefix}
        with (
            poison.app.connection_for_write(server.url, transport_options=options) as connection,
            connection.Producer() as producer,
        ):
            for key in keys:
                poison.healthy.apply_async((key,), producer=producer, queue="orders")

    return healthy


def at(url: str) -> dict[str, str]:
    return {"POISON_BROKER": url}


def cpu_seconds(worker: Worker) -> float:
    """CPU time of the worker's main process so far."""
    fields = Path(f"/proc/{worker.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def works(worker: Worker, ran: Ran, *keys: str, timeout_seconds: float = 20) -> None:
    poll(lambda: all(ran(key) == 1 for key in keys), timeout_seconds=timeout_seconds)
    assert worker.process.poll() is None


def acknowledged(client: redis.Redis, prefix: str = "") -> None:
    names = ("unacked", "unacked_index", "unacked_leases")
    poll(lambda: not client.exists(*(prefix + name for name in names)), timeout_seconds=20)


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_a_worker_fetches_over_tls(
    start_worker: Start, send: Callable[..., None], ran: Ran, tmp_path: Path, pool: str
) -> None:
    """The connection that wakes it, too, has what TLS has decrypted and nobody has read."""
    with TlsServer(tmp_path) as server:
        url = f"{server.tls_url}?ssl_cert_reqs=required&ssl_ca_certs={server.certificate}"
        worker = start_worker(env=at(url), pool=pool)
        for n in range(3):
            send(server, f"tls-{n}-a", f"tls-{n}-b")
            works(worker, ran, f"tls-{n}-a", f"tls-{n}-b")
        acknowledged(server.client())
        assert f"{ON}rediss://" in worker.output
        assert NOT_WOKEN not in worker.output


def test_a_worker_fetches_over_a_unix_socket(
    start_worker: Start, send: Callable[..., None], ran: Ran, tmp_path: Path
) -> None:
    """Celery spells it ``redis+socket://``."""
    path = tmp_path / "redis.sock"
    with RedisServer("--unixsocket", str(path)) as server:
        worker = start_worker(env=at(f"redis+socket://{path}"))
        send(server, "unix")
        works(worker, ran, "unix")
        acknowledged(server.client())
        assert ON in worker.output


def test_the_keys_have_the_users_prefix(
    broker: RedisServer, start_worker: Start, send: Callable[..., None], ran: Ran
) -> None:
    """All of them; and a pool of few connections is enough."""
    options = {"global_keyprefix": "shop:", "max_connections": 2, "visibility_timeout": 3600}
    worker = start_worker({"broker_transport_options": options}, env=at(broker.url))
    send(broker, "prefixed", prefix="shop:")
    works(worker, ran, "prefixed")
    acknowledged(broker.client(), "shop:")
    assert {key for key in broker.client().scan_iter() if not key.startswith(b"shop:")} == set()


def test_a_worker_goes_to_the_broker_that_is_alive(
    broker: RedisServer, start_worker: Start, send: Callable[..., None], ran: Ran
) -> None:
    """Reliable fetch is for the URL that answers."""
    worker = start_worker(env=at(f"redis://127.0.0.1:1/0;{broker.url}"))
    send(broker, "failover")
    works(worker, ran, "failover")
    acknowledged(broker.client())
    assert f"{ON}{broker.url}" in worker.output


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_a_worker_follows_sentinel_to_the_new_master(
    start_worker: Start, send: Callable[..., None], ran: Ran, pool: str
) -> None:
    """Acknowledgements and leases go there, too."""
    with WatchedServers() as servers:
        options = {**servers.options, "visibility_timeout": 3600}
        worker = start_worker({"broker_transport_options": options}, env=at(servers.url), pool=pool)
        send(servers.master, "before")
        works(worker, ran, "before")
        acknowledged(servers.master.client())
        servers.fail_over()
        send(servers.replica, "after")
        works(worker, ran, "after", timeout_seconds=60)
        acknowledged(servers.replica.client())
        assert ON in worker.output
        assert "localhost:6379" not in worker.output


def test_a_user_who_may_not_use_client_is_served_by_polling(
    broker: RedisServer, start_worker: Start, send: Callable[..., None], ran: Ran
) -> None:
    """As in Redis 6.2, where all of CLIENT is in @admin; one line says so, and acks get replies."""
    rules = ("on", ">pw", "~*", "&*", "+@all", "-client")
    broker.client().execute_command("ACL", "SETUSER", "worker", *rules)
    worker = start_worker(env=at(broker.url.replace("redis://", "redis://worker:pw@")))
    send(broker, "polled")
    works(worker, ran, "polled")
    acknowledged(broker.client())
    poll(lambda: NOT_WOKEN in worker.output)
    assert worker.output.count(NOT_WOKEN) == 1
    assert ON in worker.output
    assert OFF not in worker.output


@pytest.mark.parametrize(
    ("conf", "acl", "expected"),
    [
        ({"dlq_reliable_fetch": False}, "", "dlq_reliable_fetch is False"),
        (
            {"broker_transport_options": {"ack_emulation": False}},
            "",
            "expected broker_transport_options['ack_emulation'] to be True, got False",
        ),
        ({}, "-eval", "expected Redis to allow what it needs, got "),
        (
            {"broker_transport": "own_transport:Transport"},
            "",
            "expected a Redis transport of kombu, got own_transport.Transport",
        ),
    ],
)
def test_what_cannot_be_used_is_said_once_and_kombus_fetch_is_used(
    broker: RedisServer,
    start_worker: Start,
    send: Callable[..., None],
    ran: Ran,
    tmp_path: Path,
    conf: dict[str, Any],
    acl: str,
    expected: str,
) -> None:
    """At the start, and not again after a lost connection; the worker works."""
    url, env = broker.url, {}
    if acl:
        rules = ("on", ">pw", "~*", "&*", "+@all", acl)
        broker.client().execute_command("ACL", "SETUSER", "worker", *rules)
        url = url.replace("redis://", "redis://worker:pw@")
    if "broker_transport" in conf:
        (tmp_path / "own_transport.py").write_text(
            "from kombu.transport.redis import Transport as Base\nclass Transport(Base): pass\n"
        )
        here = str(Path(__file__).parent)
        env = {"PYTHONPATH": f"{here}{os.pathsep}{tmp_path}"}
    worker = start_worker(conf, env={**at(url), **env})
    send(broker, "first")
    works(worker, ran, "first")
    broker.close_connections()
    send(broker, "second")
    works(worker, ran, "second")
    assert worker.output.count(f"{OFF}{expected}") == 1, worker.output
    assert ON not in worker.output


@pytest.mark.parametrize("pool", ["prefork", "gevent", "eventlet"])
def test_connections_that_redis_closes_cost_no_message_and_no_cpu(
    broker: RedisServer, start_worker: Start, send: Callable[..., None], ran: Ran, pool: str
) -> None:
    """While the worker is idle, and while its window is full."""
    worker = start_worker(env=at(broker.url), pool=pool, arguments=("--concurrency", "1"))
    for key in ("one", "two"):
        time.sleep(0.3)  # asleep again
        broker.close_connections()
        begun, used = time.monotonic(), cpu_seconds(worker)
        time.sleep(1)
        share = (cpu_seconds(worker) - used) / (time.monotonic() - begun)
        assert share < 0.5
        send(broker, key)
        works(worker, ran, key)
    acknowledged(broker.client())


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent"])
def test_a_worker_lives_below_the_idle_timeout_of_redis(
    poison: ModuleType, start_worker: Start, ran: Ran, pool: str
) -> None:
    """It loses no connection, which would cancel tasks, while idle or while its window is full."""
    conf = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    with RedisServer("--timeout", "5") as server:
        client = server.client()
        worker = start_worker(conf, env=at(server.url), pool=pool)
        with poison.app.connection_for_write(server.url) as connection:
            for keys in (["one of two"], ["first", "second"], ["last"]):
                for key in keys:
                    seconds = 0.1 if key == "last" else 7
                    poison.sleeps.apply_async((key, seconds), connection=connection, queue="orders")
                poll(lambda keys=keys: all(ran(key) for key in keys), timeout_seconds=20)
                poll(lambda: not client.exists("unacked", "orders"), timeout_seconds=40)

        assert [ran(key) for key in ("one of two", "first", "second", "last")] == [1] * 4
        assert "Connection to broker lost" not in worker.output
        assert NOT_WOKEN not in worker.output
        assert "Leases are not renewed" not in worker.output


def test_a_flush_does_not_leave_a_worker_asleep(
    broker: RedisServer, start_worker: Start, send: Callable[..., None], ran: Ran
) -> None:
    """Redis then says that everything was written, and names no key."""
    worker = start_worker(env=at(broker.url))
    broker.client().flushall()
    send(broker, "flushed")
    works(worker, ran, "flushed")
    assert NOT_WOKEN not in worker.output


MANY = """
import os
from celery import Celery
from kombu import Queue
from celery_dlq import DeadLetters

url, queues, steps = os.environ["POISON_REDIS"], *map(int, os.environ["MANY"].split())
app = Celery("many", broker=f"{url}/0", backend=f"{url}/1", set_as_current=False)
app.conf.task_queues = [Queue(f"tenant-{number:04d}") for number in range(queues)]
app.conf.broker_transport_options = {"priority_steps": list(range(steps))}
app.conf.dlq_queues = {"*": {"max_deliveries": 3}}
app.conf.broker_connection_retry_on_startup = True
DeadLetters(app)

@app.task(name="many.echo")
def echo(text):
    return text
"""


@pytest.mark.parametrize(("queues", "steps"), [(2100, 4), (800, 10)])
def test_a_worker_of_thousands_of_queues_runs_their_tasks(
    start_worker: Start, tmp_path: Path, redis_url: str, queues: int, steps: int
) -> None:
    """With 8,400 and 8,000 lists: when it starts, and each time that it is woken."""
    (tmp_path / "many_app.py").write_text(MANY)
    path, names = f"{HERE}{os.pathsep}{tmp_path}", [f"tenant-{n:04d}" for n in range(queues)]
    worker = start_worker(
        env={"PYTHONPATH": path, "MANY": f"{queues} {steps}"},
        arguments=("--queues", ",".join(names)),
        app="many_app",
        pool="threads",
        wait=False,
    )
    poll(lambda: "ready." in worker.output, timeout_seconds=120)
    base = redis_url.rpartition("/")[0]
    with Celery("sends", broker=f"{base}/0", backend=f"{base}/1", set_as_current=False) as app:
        app.conf.broker_transport_options = {"priority_steps": list(range(steps))}
        for chosen in (names[-1:], names[:: queues // 20], names[:1] * 3):
            sent = [
                app.send_task("many.echo", (name,), queue=name, priority=steps - 1)
                for name in chosen
            ]
            assert [one.get(timeout=60) for one in sent] == list(chosen), worker.output
    assert worker.process.poll() is None
