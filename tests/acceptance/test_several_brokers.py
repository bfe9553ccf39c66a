"""Several apps on one Redis, and one app that reads and writes at different brokers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import command_line
import pytest
import redis
from waiting import poll
from workers import Worker, run_python

Start = Callable[..., Worker]
Ran = Callable[[str], int]
App = tuple[dict[str, Any], dict[str, str]]


@pytest.fixture
def server(redis_url: str) -> str:
    """The URL of the Redis, without a database."""
    return redis_url.rpartition("/")[0]


@pytest.fixture
def fixed(server: str) -> Iterator[Callable[[], object]]:
    """Return a function that lets the failing task succeed from now on."""
    with redis.Redis.from_url(f"{server}/2") as traces:
        yield lambda: traces.set("fixed", 1)


def fail(redis_url: str, app: App, key: str) -> str:
    """Publish a task that fails; its id."""
    conf, env = app
    code = f"import poison_app as p; print(p.fails.delay({key!r}).id)"
    done = run_python(redis_url, "-c", code, conf=conf, **env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def two_apps(server: str, apart_by: str) -> tuple[App, App]:
    """Settings and environment of two apps with the same names of queues."""
    two: tuple[App, App] = ({"dlq_url": None}, {}), ({"dlq_url": None}, {})
    for number, (conf, env) in enumerate(two):
        if apart_by == "global_keyprefix":
            options = {"global_keyprefix": f"app{number}:", "visibility_timeout": 3600}
            conf["broker_transport_options"] = options
        else:
            env["POISON_BROKER"] = f"{server}/{3 * number}"
        if apart_by == "dlq_key_prefix":
            conf |= {"dlq_url": f"{server}/4", "dlq_key_prefix": f"app{number}"}
    return two


@pytest.mark.parametrize("apart_by", ["database", "global_keyprefix", "dlq_key_prefix"])
def test_apps_on_one_redis_do_not_mix(
    poison: ModuleType,
    redis_url: str,
    server: str,
    start_worker: Start,
    ran: Ran,
    fixed: Callable[[], object],
    apart_by: str,
) -> None:
    """Each has its own messages, counts and letters, and redrives them to its own workers."""
    apps = two_apps(server, apart_by)
    workers = [start_worker(conf, env=env) for conf, env in apps]
    ids = [fail(redis_url, app, f"app{number}") for number, app in enumerate(apps)]
    commands = [
        partial(command_line.run, redis_url=redis_url, conf=conf, **env) for conf, env in apps
    ]

    for run, task_id in zip(commands, ids, strict=True):
        poll(lambda run=run: [x["letters"] for x in run("queues", "--json").lines] == [1])
        assert [x["task_id"] for x in run("list", "orders-DLQ", "--json").lines] == [task_id]
    fixed()
    assert commands[0]("redrive", "orders-DLQ", "--yes", "--all").exit_code == 0
    poll(lambda: ran("app0") == 2)
    poll(lambda: "succeeded" in workers[0].output)

    assert ran("app1") == 1
    assert "succeeded" not in workers[1].output
    assert [x["letters"] for x in commands[1]("queues", "--json").lines] == [1]
    assert [len(run("policies", "--json").lines) > 0 for run in commands] == [True, True]


def test_letters_are_where_messages_are_written_to(
    poison: ModuleType,
    redis_url: str,
    server: str,
    start_worker: Start,
    ran: Ran,
    fixed: Callable[[], object],
) -> None:
    """With broker_read_url and broker_write_url; a redrive is written there, too."""
    read, write = f"{server}/0", f"{server}/3"
    conf = {"dlq_url": None, "broker_read_url": read, "broker_write_url": write}
    worker = start_worker(conf)
    run = partial(command_line.run, redis_url=redis_url, conf=conf)
    with redis.Redis.from_url(write) as written:
        task_id = fail(redis_url, (conf, {}), "apart")
        assert written.move("orders", 0)
        poll(lambda: written.xlen("dlq:{orders-DLQ}:letters") == 1)
        assert [x["task_id"] for x in run("list", "orders-DLQ", "--json").lines] == [task_id]

        fixed()
        assert run("redrive", "orders-DLQ", "--yes", "--all").exit_code == 0
        (entry,) = written.lrange("orders", 0, -1)
        assert json.loads(entry)["headers"]["id"] == task_id
        assert written.xlen("dlq:{orders-DLQ}:letters") == 0
        assert written.move("orders", 0)
    poll(lambda: ran("apart") == 2)
    assert f"Reliable fetch is on for {read}" in worker.output
