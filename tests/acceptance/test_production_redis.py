"""Workers and operators whose store is where production has it: a cluster, Sentinel, TLS."""

from __future__ import annotations

import re
from functools import partial
from typing import TYPE_CHECKING, Any

import command_line
import pytest
import redis
from tls import TlsServer
from waiting import poll
from watched import WatchedServers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from workers import Worker

    Ran = Callable[[str], int]
    Start = Callable[..., Worker]

QUICK = {"dlq_queues": {"orders": {"max_deliveries": 2}}}


def rows(dlq: command_line.Dlq, count: int, *arguments: str) -> list[dict[str, Any]]:
    """Wait for as many lines of a command as expected."""

    def enough() -> list[dict[str, Any]]:
        done = dlq(*arguments, "--json")  # the queue is unknown before its first letter
        return done.lines if not done.exit_code and len(done.lines) >= count else []

    return poll(enough, timeout_seconds=60, every_seconds=0.5)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_cluster_keeps_counts_and_letters(
    cluster_url: str,
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    redis_url: str,
    tmp_path: Path,
    pool: str,
) -> None:
    """Deaths, every operation, policies, metrics and the export, with real workers."""
    conf = {**QUICK, "dlq_url": cluster_url}
    dlq: command_line.Dlq = partial(command_line.run, redis_url=redis_url, conf=conf)
    worker = start_worker(conf, pool=pool)
    for n in range(20):
        poison.healthy.delay(f"healthy-{n}")
    if pool == "prefork":
        poison.killed.delay("killed")
    else:
        poison.requeues.delay("killed")
    for n in range(3):
        poison.fails.delay(f"order-{n}")
    found = rows(dlq, 4, "list", "orders-DLQ")
    poll(lambda: all(ran(f"healthy-{n}") == 1 for n in range(20)))
    assert sorted(row["reason"] for row in found) == [*["failed"] * 3, "max_deliveries_exceeded"]
    assert ran("killed") == 2
    (row,) = (row for row in found if row["reason"] == "max_deliveries_exceeded")
    assert [one["number"] for one in row["history"]] == [1, 2]

    (queue,) = rows(dlq, 1, "queues")
    assert (queue["name"], queue["letters"]) == ("orders-DLQ", 4)
    groups = rows(dlq, 2, "groups", "orders-DLQ")
    assert sorted(group["letters"] for group in groups) == [1, 3]

    done = dlq("policies", "set", "orders", "max_deliveries=1", "--for", "1h")
    assert done.exit_code == 0, done.stderr
    poll(lambda: "max_deliveries" in worker.output, timeout_seconds=30)
    done = dlq("export", str(tmp_path / "letters"), "--queue", "orders-DLQ")
    assert done.exit_code == 0, done.stderr

    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("fixed", "yes")
    done = dlq("redrive", "orders-DLQ", "--yes", "--reason", "failed")
    assert done.exit_code == 0, done.stderr
    poll(lambda: all(ran(f"order-{n}") == 2 for n in range(3)), timeout_seconds=30)
    done = dlq("discard", "orders-DLQ", row["id"])
    assert done.exit_code == 0, done.stderr
    assert dlq("list", "orders-DLQ", "--json").lines == []
    assert dlq("restore", row["id"]).exit_code == 0
    assert [one["id"] for one in rows(dlq, 1, "list", "orders-DLQ")] == [row["id"]]
    jobs = {job["kind"]: job["counts"] for job in rows(dlq, 2, "jobs")}
    assert jobs["redrive"]["published"] == 3
    kinds = {one["action"] for one in rows(dlq, 4, "audit")}
    assert {"discarded", "restored"} <= kinds


def test_everything_follows_the_brokers_sentinel(
    poison: ModuleType, start_worker: Start, ran: Ran, redis_url: str
) -> None:
    """Counts and letters too: nothing else is set; a failover while messages die loses none."""
    with WatchedServers() as servers:
        options = {**servers.options, "visibility_timeout": 3600}
        conf = {**QUICK, "dlq_url": None, "broker_transport_options": options}
        env = {"POISON_BROKER": servers.url}
        dlq: command_line.Dlq = partial(command_line.run, redis_url=redis_url, conf=conf, **env)
        start_worker(conf, env=env)
        send(poison, servers.master.url, "before")
        rows(dlq, 1, "list", "orders-DLQ")
        servers.master.kill()
        servers.wait_for_takeover()
        send(poison, servers.replica.url, "after")
        found = rows(dlq, 2, "list", "orders-DLQ")
        assert sorted(row["args_json"] for row in found) == ['["after"]', '["before"]']


def test_everything_follows_the_brokers_tls(
    poison: ModuleType, start_worker: Start, redis_url: str, tmp_path: Path
) -> None:
    """A private certificate is named once."""
    with TlsServer(tmp_path) as server:
        tls = {"ssl_ca_certs": str(server.certificate), "ssl_cert_reqs": "required"}
        conf = {**QUICK, "dlq_url": None, "broker_use_ssl": tls}
        env = {"POISON_BROKER": server.tls_url}
        dlq: command_line.Dlq = partial(command_line.run, redis_url=redis_url, conf=conf, **env)
        start_worker(conf, env=env)
        send(poison, server.url, "dies")
        assert len(rows(dlq, 1, "list", "orders-DLQ")) == 1


@pytest.mark.parametrize(
    ("url", "options", "expected"),
    [
        ("sentinel://:s3cret@127.0.0.1:1", {}, r"\['master_name'\] to be the name of the server"),
        ("redis+cluster://:s3cret@127.0.0.1:1", {}, "none for Redis Cluster"),
    ],
)
def test_a_broker_that_cannot_work_is_refused_in_one_line(
    start_worker: Start, url: str, options: dict[str, Any], expected: str
) -> None:
    """It says what to do, without the password, and the worker ends with 1."""
    conf = {**QUICK, "dlq_url": None, "broker_transport_options": options}
    worker = start_worker(conf, env={"POISON_BROKER": url}, wait=False)
    assert worker.process.wait(60) == 1
    assert re.search(expected, worker.output)
    assert "Traceback" not in worker.output
    assert "s3cret" not in worker.output


def send(poison: ModuleType, url: str, key: str) -> None:
    """Publish to another broker than the app's."""
    with (
        poison.app.connection_for_write(url) as connection,
        connection.Producer() as producer,
    ):
        poison.to_dlq.apply_async((key,), producer=producer, queue="orders")
