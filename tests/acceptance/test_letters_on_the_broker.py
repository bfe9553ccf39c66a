"""Letters in real queues of the broker: a real worker, the command line, SIGKILL."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from builders import a_letter, a_request, key_of
from celery import Celery
from click.testing import CliRunner
from command_line import Dlq
from kombu.connection import Connection
from rabbit import RabbitServer
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands

CONF: dict[str, Any] = {"dlq_store": "broker"}
QUEUE = "orders-DLQ"
Start = Callable[..., Worker]
Cli = Callable[..., Any]


@pytest.fixture
def home(rabbit_server: RabbitServer, redis_url: str) -> Place:
    """RabbitMQ with classic queues of tasks."""
    rabbit_server.delete_queues("orders", "slow", "patient", "unguarded", QUEUE)
    return Place("classic", {"POISON_BROKER": rabbit_server.url})


@pytest.fixture
def operator(home: Place, redis_url: str) -> Iterator[DeadLetters]:
    """An operator's process."""
    app = Celery("operator", broker=broker_of(home, redis_url), set_as_current=False)
    app.conf.update(dlq_url=redis_url, task_default_queue="orders", **CONF)
    dead_letters = DeadLetters(app)
    yield dead_letters
    dead_letters.close()
    app.close()


@pytest.fixture
def cli(operator: DeadLetters) -> Cli:
    """Run a command in this process: the same code, without the start of an interpreter."""

    def run(*arguments: str) -> Any:
        obj = SimpleNamespace(app=operator.app, no_color=True)
        return CliRunner(env={"COLUMNS": "160"}).invoke(commands, [*arguments], obj=obj)

    return run


def broker_of(home: Place, redis_url: str) -> str:
    """The broker's URL."""
    return home.env.get("POISON_BROKER", redis_url)


def publish(url: str, *tasks: str) -> None:
    """Publish tasks as any client would."""
    with Connection(url) as connection:
        for name in tasks:
            headers = a_request(id=f"id-{name}", root_id=f"id-{name}", task=f"poison_app.{name}")
            connection.Producer().publish([[name], {}, {}], routing_key="orders", headers=headers)


def json_lines(done: Any) -> list[dict[str, Any]]:
    """The JSON lines of a command that must have worked."""
    assert done.exit_code == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]


def test_a_poison_task_becomes_a_letter_on_the_broker_and_goes_back(
    home: Place,
    cli: Cli,
    dlq: Dlq,
    operator: DeadLetters,
    redis_url: str,
    start_worker: Start,
    ran: Callable[[str], int],
) -> None:
    """The main job of an operator: list, show, groups, redrive, purge; and what is not there."""
    worker = start_worker(CONF, env=home.env)
    publish(broker_of(home, redis_url), "killed", "fails", "to_dlq")
    poll(lambda: operator.store.length(QUEUE) == 3, timeout_seconds=60)

    found = dlq("list", QUEUE, "--json", conf=CONF, **home.env).lines
    assert found[::-1] == json_lines(cli("list", QUEUE, "--oldest-first", "--json"))
    by_task = {letter["task_id"]: letter for letter in found}
    assert {task: letter["reason"] for task, letter in by_task.items()} == {
        "id-killed": "max_deliveries_exceeded",
        "id-fails": "failed",
        "id-to_dlq": "rejected",
    }, worker.output
    assert (ran("killed"), by_task["id-killed"]["deliveries"]) == (3, 3)
    assert json_lines(cli("show", by_task["id-fails"]["id"][:8], "--json")) == [by_task["id-fails"]]
    assert len(json_lines(cli("groups", QUEUE, "--json"))) == 3
    assert "does not tell reasons and ages" in cli("queues").stdout
    with redis.Redis.from_url(redis_url) as client:
        assert not client.exists(f"dlq:{{{QUEUE}}}:letters")
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("fixed", "yes")

    refused = cli("discard", QUEUE, "--all", "--yes")
    assert refused.exit_code == 1
    said = refused.stderr.strip().splitlines()[-1]
    assert said.startswith("Error: expected a store that keeps discarded letters")
    report = json_lines(cli("redrive", QUEUE, by_task["id-fails"]["id"], "--json"))[0]
    assert (report["published"], report["failed"]) == (1, {})
    poll(lambda: ran("fails") == 2, timeout_seconds=30)
    assert (
        json_lines(cli("purge", QUEUE, "--reason", "rejected", "--yes", "--json"))[0]["removed"]
        == 1
    )
    assert [letter["task_id"] for letter in json_lines(cli("list", QUEUE, "--json"))] == [
        "id-killed"
    ]
    assert "id-killed" in cli("tail", QUEUE, "--json").stdout
    assert {change["action"] for change in json_lines(cli("audit", "--json"))} == {
        "redriven",
        "purged",
    }


DIES = """
import os, signal, sys
from celery_dlq.store.broker import BrokerStore
from celery_dlq.operations.redrive.publisher import Publisher
import poison_app

name = sys.argv[1]
place = Publisher if name == "publish" else BrokerStore
inner, calls = getattr(place, name), []

def dying(self, *args, **kwargs):
    calls.append(1)
    result = inner(self, *args, **kwargs)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(place, name, dying)
poison_app.dlq.redrive("orders-DLQ", rate=50)
"""


@pytest.mark.parametrize("name", ["claim", "publish", "mark_published", "remove"])
def test_a_redrive_killed_anywhere_loses_nothing(
    home: Place, operator: DeadLetters, redis_url: str, name: str
) -> None:
    """The next one finishes; only what was published, not noted, goes out twice, as reported."""
    url, sent = broker_of(home, redis_url), set()
    assert waiting(url) == []  # which makes the queue
    for number in range(110):
        headers = a_request(id=f"t-{number}", root_id=f"t-{number}", task="poison_app.healthy")
        letter = a_letter(
            task_id=f"t-{number}", task_name="poison_app.healthy", headers=json.dumps(headers)
        )
        operator.store.dead_letter(letter, key_of(letter))
        sent.add(letter.id)
    done = run_python(redis_url, "-c", DIES, name, conf=CONF, **home.env)
    assert done.returncode == -signal.SIGKILL, done.stderr
    before = {letter.id for letter in operator.letters(QUEUE)}
    assert before | set(waiting(url, keep=True)) == sent
    (job,) = operator.jobs()
    report = operator.resume(job.id)
    assert (report.state, list(operator.letters(QUEUE))) == ("done", [])
    found = waiting(url)
    assert set(found) == sent
    assert report.to_json()["maybe_twice"] >= len(found) - len(sent)


def waiting(url: str, *, keep: bool = False) -> list[str]:
    """The letter ids on the messages that wait for a worker."""
    with Connection(url) as connection:
        channel = connection.channel()
        found = []
        queue = connection.SimpleQueue("orders", queue_opts={"durable": True})
        while True:
            try:
                message = queue.get(block=False)
            except queue.Empty:
                break
            found.append(message)
            if not keep:
                message.ack()
        ids = [message.headers["dlq_letter"] for message in found]
        for message in found if keep else ():
            message.requeue()
        queue.close()
        channel.close()
    return ids
