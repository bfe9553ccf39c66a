"""Workers and operators adopt what RabbitMQ dead-lettered: real processes, real queues."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType

import command_line
import pytest
from command_line import Dlq
from kombu import Connection, Queue
from rabbit import RabbitServer
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter, Reason

Letters = Callable[..., list[DeadLetter]]
DEAD, EXPIRED = "orders.dead", "orders.brief"


@pytest.fixture
def rabbit(rabbit_server: RabbitServer) -> Iterator[str]:
    """Give the URL of a broker where what expires in one queue goes to another."""
    rabbit_server.delete_queues(DEAD, EXPIRED, "orders", "slow", "patient", "unguarded")
    with Connection(rabbit_server.url) as connection:
        arguments = {
            "x-message-ttl": 1,
            "x-dead-letter-exchange": "",
            "x-dead-letter-routing-key": DEAD,
        }
        for queue in (Queue(DEAD), Queue(EXPIRED, queue_arguments=arguments)):
            queue(connection.default_channel).declare()
    yield rabbit_server.url
    rabbit_server.delete_queues(DEAD, EXPIRED)


def expire(url: str, *names: str, x_death: object = None) -> None:
    """Publish tasks into a queue where they expire at once."""
    with Connection(url) as connection:
        for name in names:
            headers = {"task": f"poison_app.{name}", "id": f"id-{name}", "lang": "py"}
            if x_death is not None:
                headers["x-death"] = x_death  # type: ignore[assignment]
            target = EXPIRED if x_death is None else DEAD
            connection.Producer().publish([[name], {}, {}], routing_key=target, headers=headers)


def test_a_worker_adopts_beside_its_tasks(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Letters,
    rabbit: str,
    ran: Callable[[str], int],
) -> None:
    """With a queue that is not there, and a history that nobody can read, it goes on."""
    conf = {"dlq_adopt": {DEAD: "orders-DLQ", "nowhere": None}}
    worker = start_worker(conf, env={"POISON_BROKER": rabbit})
    expire(rabbit, "fails", "healthy")
    expire(rabbit, "drops", x_death="malformed")

    found = {letter.task_id: letter for letter in letters(count=3)}

    assert sorted(found) == ["id-drops", "id-fails", "id-healthy"], worker.output
    assert {letter.reason for letter in found.values()} == {Reason.ADOPTED}
    assert found["id-fails"].source_queue == EXPIRED
    assert found["id-fails"].worker_hostname is not None
    assert "@" in (found["id-fails"].worker_hostname or "")
    assert "cannot be read" in found["id-drops"].description
    poll(lambda: "no queue 'nowhere'" in worker.output, timeout_seconds=30)
    assert "Traceback" not in worker.output
    # New pool processes are forked beside the thread; they must not end its connection.
    with Connection(rabbit) as connection:
        for name in ("killed", "healthy"):
            headers = {"task": f"poison_app.{name}", "id": f"live-{name}", "lang": "py"}
            connection.Producer().publish([[name], {}, {}], routing_key="orders", headers=headers)
    letters(count=4)
    assert (ran("killed"), poll(lambda: ran("healthy"), timeout_seconds=30)) == (3, 1)
    expire(rabbit, "retries")
    letters(count=5)
    assert f"adopt {DEAD} is put off" not in worker.output
    worker.process.terminate()
    assert worker.process.wait(30) == 0


def test_a_worker_refuses_to_adopt_what_it_consumes(
    start_worker: Callable[..., Worker], rabbit: str
) -> None:
    """Its tasks are alive."""
    worker = start_worker(
        {"dlq_adopt": {DEAD: None}},
        arguments=("-Q", DEAD),
        env={"POISON_BROKER": rabbit},
        wait=False,
    )
    assert worker.process.wait(60) == 1, worker.output
    assert f"Error: expected dlq_adopt to name a queue of messages that are dead, got '{DEAD}'" in (
        worker.output
    )
    assert "Traceback" not in worker.output


def test_the_command_adopts_and_says_what_it_did(
    poison: ModuleType, dlq: Dlq, rabbit: str, letters: Letters
) -> None:
    """Once, as a table or as JSON; mistakes are one line."""
    expire(rabbit, "fails", "drops")
    with Connection(rabbit) as connection:
        dead = connection.default_channel
        poll(lambda: dead.queue_declare(DEAD, passive=True).message_count == 2)
    adopt = partial(dlq, "import", POISON_BROKER=rabbit)
    assert adopt(DEAD, "--to", "orders-DLQ", "--json").lines == [
        {"queue": DEAD, "adopted": 2, "known": 0, "maybe_twice": 0, "by_queue": {"orders-DLQ": 2}}
    ]
    assert [letter.task_id for letter in letters(count=2)] == ["id-fails", "id-drops"]
    assert poison.dlq.registry.changes(limit=1)[0].letters == 2
    assert "nothing to adopt" in adopt(DEAD).stdout
    for arguments, code, text in (
        (("orders",), 1, "guarded by dlq_queues['orders']"),
        ((DEAD, "--limit", "1", "--follow"), 2, "do not go together"),
    ):
        failed = adopt(*arguments)
        assert (failed.exit_code, text in failed.stderr) == (code, True), failed.stderr
        assert "guest:guest" not in failed.stderr


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_following_goes_on_until_it_is_interrupted(
    poison: ModuleType, redis_url: str, rabbit: str, letters: Letters, end: signal.Signals
) -> None:
    """Later deaths are adopted too; the audit has the sum."""
    command = ("import", DEAD, "--follow", "--json")
    with command_line.process(*command, redis_url=redis_url, POISON_BROKER=rabbit) as process:
        for count, name in enumerate(("fails", "drops"), start=1):
            expire(rabbit, name)
            letters(f"{EXPIRED}-DLQ", count=count)
        process.send_signal(end)
        output = process.communicate(timeout=30)[0]
    assert process.returncode == 0
    assert json.loads(output)["adopted"] == 2
    assert poison.dlq.registry.changes(limit=1)[0].letters == 2
