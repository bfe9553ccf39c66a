"""A Redis user that may do what the page docs/how-to/redis-acl.md says, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import command_line
import pytest
import redis
from servers import RedisServer
from waiting import poll
from workers import Worker, run_python

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "redis-acl.md"
PASSWORD = ">a-long-password"


@pytest.fixture
def broker() -> Iterator[RedisServer]:
    """A broker of its own: users are the server's."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def user(broker: RedisServer) -> str:
    """The URL of the page's user."""
    text, name = PAGE.read_text("utf-8"), ["shop", "reset", "resetchannels", "on", PASSWORD]
    (given,) = re.findall(f"ACL SETUSER {' '.join(name)}\n(.*?)```", text, re.DOTALL)
    rules = given.split()
    if int(broker.client().info("server")["redis_version"].split(".")[0]) < 7:
        rules += re.findall(r"\+client\|\w+", text)
    broker.client().execute_command("ACL", "SETUSER", *name, *rules)
    return broker.url.replace("redis://", f"redis://shop:{PASSWORD[1:]}@")


def test_the_user_of_the_page_is_enough(
    broker: RedisServer,
    user: str,
    redis_url: str,
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    ran: Callable[[str], int],
    tmp_path: Path,
) -> None:
    """For a worker with all it does, and for all that operators do; ``INFO`` alone is refused."""
    conf: dict[str, Any] = {"dlq_url": None, "result_backend": user}

    def dlq(*arguments: str) -> command_line.Done:
        return command_line.run(*arguments, redis_url=redis_url, conf=conf, POISON_BROKER=user)

    code = (
        "import poison_app as p; [getattr(p, n).delay(n) for n in ('fails', 'killed', 'healthy')]"
    )
    published = run_python(redis_url, "-c", code, conf=conf, POISON_BROKER=user)
    assert published.returncode == 0, published.stderr
    worker = start_worker(
        conf, env={"POISON_BROKER": user}, arguments=("--queues", "orders", "--task-events")
    )
    letters = "dlq:{orders-DLQ}:letters"
    poll(lambda: ran("healthy") == 1, timeout_seconds=20)
    poll(lambda: broker.client().xlen(letters) == 2, timeout_seconds=40)
    assert "Reliable fetch is on" in worker.output
    assert "Redis cannot wake this worker" not in worker.output

    assert [line["letters"] for line in dlq("queues", "--json").lines] == [2]
    assert len(dlq("list", "orders-DLQ", "--json").lines) == 2
    with redis.Redis.from_url(f"{poison.URL}/2") as traces:
        traces.set("fixed", 1)
    (of_fails,) = [x for x in dlq("list", "orders-DLQ", "--json").lines if x["reason"] == "failed"]
    for arguments in (
        ("groups", "orders-DLQ"),
        ("show", of_fails["id"]),
        ("export", str(tmp_path / "letters")),
        ("redrive", "orders-DLQ", of_fails["id"]),
        ("discard", "orders-DLQ", "--all", "--yes"),
        ("trim",),
        ("jobs",),
        ("audit",),
        ("policies",),
    ):
        done = dlq(*arguments)
        assert done.exit_code == 0, (arguments, done.stderr)
    poll(lambda: ran("fails") == 2)
    poll(lambda: not broker.client().exists("unacked", "orders"))
    worker.stop()

    assert worker.process.poll() == 0
    refused = {(entry["reason"], entry["object"]) for entry in broker.client().acl_log()}
    assert refused <= {
        ("command", "info"),
        ("command", "client"),  # in Redis 6.2, CLIENT SETINFO, which redis-py may do without
    }
