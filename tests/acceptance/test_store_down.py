"""The store fails in every way; healthy tasks go on, dying ones wait, and none is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import redis
from rabbit import RabbitServer
from servers import RedisServer
from test_lost_connections import publish
from waiting import poll
from workers import Place, Worker

from celery_dlq import DeadLetter, DeadLetters

Ran = Callable[[str], int]
Start = Callable[..., Worker]


@pytest.fixture
def dlq_server() -> Iterator[RedisServer]:
    """A Redis for counters and letters alone, to be broken; the broker has its own."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def letters_of(poison: ModuleType) -> Iterator[Callable[[RedisServer], list[DeadLetter]]]:
    """The letters in a server, empty while it does not answer."""
    from celery import Celery

    apps: dict[str, Any] = {}

    def read(server: RedisServer) -> list[DeadLetter]:
        if server.url not in apps:
            app = Celery(f"reader-{len(apps)}", broker=server.url)
            apps[server.url] = DeadLetters(app)
        dlq = apps[server.url]
        return list(dlq.letters("orders-DLQ")) if "orders-DLQ" in dlq.store.names() else []

    yield read
    for dlq in apps.values():
        dlq.close()
        dlq.app.close()


def conf(server: RedisServer, **more: Any) -> dict[str, Any]:
    return {"dlq_url": server.url, "dlq_transport_options": {"socket_timeout": 0.5}, **more}


def kill(server: RedisServer) -> None:
    server.kill()


def pause(server: RedisServer) -> None:
    server.pause()


def fill(server: RedisServer) -> None:
    server.client().config_set("maxmemory", "1mb")


def make_replica(server: RedisServer) -> None:
    server.client().replicaof("127.0.0.1", 1)


def change_password(server: RedisServer) -> None:
    client = server.client()  # one connection, which stays logged in
    client.config_set("requirepass", "changed")
    client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def cut(server: RedisServer) -> None:
    server.client().execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")


def leave(server: RedisServer) -> None:
    """Nothing is broken any more."""


def start_again(server: RedisServer) -> None:
    server.start()


def resume(server: RedisServer) -> None:
    server.resume()


def empty(server: RedisServer) -> None:
    server.client().config_set("maxmemory", "0")


def make_master(server: RedisServer) -> None:
    server.client().replicaof("NO", "ONE")


def change_password_back(server: RedisServer) -> None:
    with redis.Redis(port=server.port, password="changed") as client:
        client.config_set("requirepass", "")


FAULTS = [
    pytest.param(kill, start_again, id="killed-and-restarted-empty"),
    pytest.param(pause, resume, id="paused"),
    pytest.param(fill, empty, id="out-of-memory"),
    pytest.param(make_replica, make_master, id="read-only-replica"),
    pytest.param(cut, leave, id="connections-cut"),
    pytest.param(change_password, change_password_back, id="wrong-password"),
]


@pytest.mark.parametrize(("break_it", "mend_it"), FAULTS)
def test_while_the_store_is_down_healthy_tasks_run_and_dying_ones_wait(
    poison: ModuleType,
    start_worker: Start,
    dlq_server: RedisServer,
    ran: Ran,
    letters_of: Callable[[RedisServer], list[DeadLetter]],
    redis_url: str,
    break_it: Callable[[RedisServer], None],
    mend_it: Callable[[RedisServer], None],
) -> None:
    """And once it is back, each of those that died is in the dead-letter queue once."""
    worker = start_worker(conf(dlq_server, worker_prefetch_multiplier=8))
    assert poison.healthy.delay("before").get(timeout=10) == "before"
    break_it(dlq_server)

    late = [poison.fails.delay(f"late-{n}") for n in range(3)]
    early = poison.fails_early.delay("early")
    poll(lambda: all(ran(f"late-{n}") for n in range(3)) and ran("early"), timeout_seconds=30)
    begun = time.monotonic()
    healthy = [poison.healthy.delay(f"healthy-{n}") for n in range(100)]
    assert [r.get(timeout=60) for r in healthy] == [f"healthy-{n}" for n in range(100)]
    assert time.monotonic() - begun < 30  # no time-out for each task
    assert {ran(f"healthy-{n}") for n in range(100)} == {1}

    mend_it(dlq_server)
    dead = {r.id for r in [*late, early]}
    poll(
        lambda: {x.task_id for x in letters_of(dlq_server)} == dead,
        timeout_seconds=60,
        every_seconds=0.2,
    )
    assert sorted(x.task_id for x in letters_of(dlq_server)) == sorted(dead)
    poll(lambda: _unacked(redis_url) == 0, timeout_seconds=30)
    assert {ran(f"late-{n}") for n in range(3)} == {1}
    assert "changed" not in worker.output


def test_a_store_that_is_down_does_not_hold_up_the_workers_shutdown(
    poison: ModuleType, start_worker: Start, dlq_server: RedisServer, ran: Ran
) -> None:
    """SIGTERM ends the worker within seconds although letters wait."""
    worker = start_worker(conf(dlq_server))
    dlq_server.pause()
    poison.fails.delay("waits")
    poll(lambda: ran("waits") and "not dead-lettered yet" in worker.output, timeout_seconds=30)

    os.kill(worker.process.pid, signal.SIGTERM)
    worker.process.wait(20)
    dlq_server.resume()


def test_letters_of_acknowledged_messages_survive_their_worker_in_the_spool(
    poison: ModuleType,
    start_worker: Start,
    dlq_server: RedisServer,
    ran: Ran,
    tmp_path: Any,
    letters_of: Callable[[RedisServer], list[DeadLetter]],
) -> None:
    """The broker no longer has the message; the next worker on the host stores its letter."""
    settings = conf(dlq_server, dlq_spool_dir=str(tmp_path / "spool"))
    worker = start_worker(settings)
    dlq_server.kill()
    sent = poison.fails_early.delay("early")
    poll(lambda: "to the spool" in worker.output, timeout_seconds=30)
    worker.kill()
    dlq_server.start()

    start_worker(settings)

    poll(lambda: [x.task_id for x in letters_of(dlq_server)] == [sent.id], timeout_seconds=30)
    poll(lambda: not list((tmp_path / "spool").rglob("*.json")))
    assert ran("early") == 1


@pytest.mark.parametrize("place", ["classic"], indirect=True)
def test_a_letter_that_waits_is_dropped_with_the_connection_of_its_message(
    poison: ModuleType,
    start_worker: Start,
    dlq_server: RedisServer,
    rabbit_server: RabbitServer,
    place: Place,
    ran: Ran,
    redis_url: str,
    letters_of: Callable[[RedisServer], list[DeadLetter]],
) -> None:
    """The broker delivers it again, and this time it succeeds: a letter would be redriven."""
    worker = start_worker(conf(dlq_server), env=place.env)
    dlq_server.kill()
    publish(place.env["POISON_BROKER"], {"comes-back": "fails"})
    poll(lambda: "is not dead-lettered yet" in worker.output, timeout_seconds=30)
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("fixed", 1)
    rabbit_server.close_connections()
    poll(lambda: "comes-back] succeeded" in worker.output, timeout_seconds=30)
    dlq_server.start()
    publish(place.env["POISON_BROKER"], {"dies": "to_dlq"})
    poll(lambda: "dies" in {x.task_id for x in letters_of(dlq_server)}, timeout_seconds=60)
    assert [x.task_id for x in letters_of(dlq_server)] == ["dies"]
    assert ran("comes-back") == 2


def test_counting_goes_on_after_an_outage(
    poison: ModuleType,
    start_worker: Start,
    dlq_server: RedisServer,
    ran: Ran,
    letters_of: Callable[[RedisServer], list[DeadLetter]],
) -> None:
    """A restarted, empty Redis does not know our scripts; it gets them again."""
    start_worker(conf(dlq_server))
    assert poison.healthy.delay("before").get(timeout=10) == "before"
    dlq_server.kill()
    dlq_server.start()

    sent = poison.requeues.delay("poison")

    poll(lambda: letters_of(dlq_server), timeout_seconds=30)
    (letter,) = letters_of(dlq_server)
    assert (letter.task_id, letter.deliveries) == (sent.id, 3)
    assert ran("poison") == 3


def _unacked(redis_url: str) -> int:
    with redis.Redis.from_url(redis_url) as client:
        return int(client.hlen("unacked"))
