"""``dlq dead-letter``: a message becomes a letter wherever it is, and never twice."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from celery.exceptions import TaskRevokedError
from command_line import Dlq
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, Outcome, Reason

Start = Callable[..., Worker]
Ran = Callable[[str], int]
Letters = Callable[..., list[DeadLetter]]


def held_by_workers(redis_url: str) -> int:
    """The number of messages that are not acknowledged."""
    with redis.Redis.from_url(redis_url) as client:
        return int(client.hlen("unacked"))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["one Redis", "another database"])
def test_a_waiting_message_becomes_a_letter_before_it_starts(
    dlq: Dlq,
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    redis_url: str,
    elsewhere: bool,
) -> None:
    """Its body stays as it was, its task fails, its neighbours run, and a redrive runs it."""
    conf = {"dlq_url": f"{redis_url.rpartition('/')[0]}/3"} if elsewhere else None
    before = poison.healthy.delay("before")
    sent = poison.healthy.apply_async(("x",), headers={"tenant": 42})
    after = poison.healthy.delay("after")
    with redis.Redis.from_url(redis_url) as client:
        bodies = [json.loads(entry)["body"] for entry in client.lrange("orders", 0, -1)]

    (line,) = dlq("dead-letter", sent.id, "--reason", "wrong tenant", "--json", conf=conf).lines
    assert (line["state"], line["worker"]) == ("demanded", None)
    start_worker(conf)

    assert [before.get(timeout=20), after.get(timeout=10)] == ["before", "after"]
    with pytest.raises(TaskRevokedError, match="wrong tenant"):
        sent.get(timeout=10)
    (shown,) = dlq("list", "orders-DLQ", "--json", conf=conf).lines
    assert (shown["task_id"], shown["reason"]) == (sent.id, "operator")
    assert shown["description"].startswith("wrong tenant (dead-lettered by ")
    assert shown["args_json"] == '["x"]'
    assert shown["deliveries"] == 0
    assert shown["headers"]["tenant"] == 42
    assert shown["body"] in bodies
    poll(lambda: held_by_workers(redis_url) == 0, timeout_seconds=10)
    (change, *_) = dlq("audit", "--json", conf=conf).lines
    assert (change["action"], change["target"], change["detail"]) == (
        "demanded",
        sent.id,
        {"reason": "wrong tenant"},
    )
    assert ran("x") == 0
    assert dlq("redrive", "orders-DLQ", "--yes", "--all", conf=conf).exit_code == 0
    poll(lambda: ran("x") == 1, timeout_seconds=20)


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_message_that_waits_for_its_eta_becomes_a_letter_at_once(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str, pool: str
) -> None:
    """Its worker learns it within two seconds, and acknowledges it; unguarded ones, too."""
    worker = start_worker(pool=pool)
    sent = [
        poison.healthy.apply_async(("x",), countdown=3600),
        poison.healthy.apply_async(("y",), countdown=3600, queue="unguarded"),
    ]
    poll(lambda: held_by_workers(redis_url) == 2, timeout_seconds=10)

    for one, queue in zip(sent, ("orders-DLQ", "unguarded-DLQ"), strict=True):
        (line,) = dlq("dead-letter", one.id, "--json").lines
        assert line["state"] == "dead_lettered", worker.output
        (letter,) = letters(queue)
        assert (letter.task_id, letter.reason, letter.deliveries) == (one.id, Reason.OPERATOR, 0)
        with pytest.raises(TaskRevokedError):
            one.get(timeout=10)
    poll(lambda: held_by_workers(redis_url) == 0, timeout_seconds=10)
    assert poison.healthy.delay("z").get(timeout=10) == "z"


@pytest.mark.parametrize("task", ["sleeps", "sleeps_early"])
def test_a_running_task_is_terminated(
    dlq: Dlq,
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    redis_url: str,
    task: str,
) -> None:
    """Its letter has the delivery that was cut off; the worker goes on."""
    worker = start_worker()
    sent = getattr(poison, task).delay("x", 60)
    poll(lambda: ran("x") == 1, timeout_seconds=20)
    # The process may begin the task before the worker has read that it took it.
    poll(lambda: any((poison.app.control.inspect().active() or {}).values()), timeout_seconds=20)

    done = dlq("dead-letter", sent.id)

    assert done.exit_code == 0, done.stderr
    assert "is a letter now. It ran on celery@" in " ".join(done.stdout.split()), worker.output
    (letter,) = letters()
    assert (letter.task_id, letter.reason, letter.deliveries) == (sent.id, Reason.OPERATOR, 1)
    assert [one.outcome for one in letter.history] == [Outcome.WORKER_LOST]
    with pytest.raises(TaskRevokedError):
        sent.get(timeout=10)
    assert poison.healthy.delay("y").get(timeout=20) == "y"
    poll(lambda: held_by_workers(redis_url) == 0, timeout_seconds=10)
    assert ran("x") == 1
    assert len(letters()) == 1


def test_a_running_task_in_a_thread_is_dead_lettered_when_it_fails(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """A thread cannot be ended; the answer says so."""
    start_worker(pool="threads")
    sent = poison.fails_late.delay("x", 12)
    poll(lambda: ran("x") == 1, timeout_seconds=20)

    done = dlq("dead-letter", sent.id)

    assert done.exit_code == 0, done.stderr
    assert "only a prefork pool can end it" in " ".join(done.stdout.split())
    (letter,) = letters()
    assert (letter.reason, letter.exception_type) == (Reason.OPERATOR, "LookupError")
    assert letter.deliveries == 1


def test_a_message_that_is_nowhere_is_dead_lettered_when_it_comes(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """Unless the demand is withdrawn; a redrive of the letter runs."""
    start_worker()
    for task_id in ("spared", "x"):
        (line,) = dlq("dead-letter", task_id, "--json").lines
        assert (line["state"], line["worker"]) == ("demanded", None)
    assert dlq("dead-letter", "spared", "--withdraw").exit_code == 0
    again = dlq("dead-letter", "spared", "--withdraw")
    assert (again.exit_code, again.stdout) == (1, "")

    assert poison.healthy.apply_async(("spared",), task_id="spared").get(timeout=10) == "spared"
    poison.healthy.apply_async(("x",), task_id="x")
    (letter,) = letters()
    assert (letter.task_id, letter.reason, ran("x")) == ("x", Reason.OPERATOR, 0)

    assert dlq("redrive", "orders-DLQ", "--yes", "--all").exit_code == 0
    poll(lambda: ran("x") == 1, timeout_seconds=20)

    refused = dlq("dead-letter", "spared")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "which has succeeded" in " ".join(refused.stderr.split())


def test_what_is_a_letter_leaves_no_demand(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, redis_url: str
) -> None:
    """The letter is named; a message in a worker that gives no answer is demanded."""
    worker = start_worker()
    poison.fails.apply_async(("x",), task_id="failed-one")
    (letter,) = letters()
    instructions = poison.dlq.assembly.backend.instructions
    for wanted in ("failed-one", letter.id):
        refused = dlq("dead-letter", wanted)
        assert (refused.exit_code, refused.stdout) == (1, "")
        said = " ".join(refused.stderr.split())
        assert f"which is letter {letter.id} of orders-DLQ; nothing was done" in said
    assert instructions.all() == []
    assert [change.action.value for change in poison.dlq.changes()] == []

    poison.healthy.apply_async(("late",), task_id="late", countdown=3600)
    poll(lambda: held_by_workers(redis_url) == 1)
    worker.process.send_signal(signal.SIGSTOP)
    assert dlq("dead-letter", "late", "--json").lines[0]["state"] == "demanded", "a worker has it"


@pytest.mark.parametrize("place", ["classic", "quorum"], indirect=True)
def test_on_rabbitmq_the_worker_that_is_given_the_message_dead_letters_it(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    redis_url: str,
) -> None:
    """Also one that waits in RabbitMQ for its delay, and one that was not guarded."""
    call = (
        "import poison_app as p;"
        "one = p.healthy.delay('one');"
        "two = p.healthy.apply_async(('two',), countdown=5);"
        "three = p.healthy.apply_async(('three',), queue='unguarded');"
        "[print(p.dlq.dead_letter(x.id, 'no').state) for x in (one, two, three)]"
    )
    if place.name == "quorum":  # makes the queues of delays
        start_worker(env=place.env).stop()
    done = run_python(redis_url, "-c", call, **place.env)
    assert done.stdout.split() == ["demanded"] * 3, done.stderr

    start_worker(env=place.env)

    assert [letter.reason for letter in letters(count=2)] == [Reason.OPERATOR] * 2
    assert [letter.args_json for letter in letters("unguarded-DLQ")] == ['["three"]']
    assert [ran(key) for key in ("one", "two", "three")] == [0, 0, 0]


def test_a_worker_that_is_killed_makes_one_letter(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran, redis_url: str
) -> None:
    """Killed between storing the letter and acknowledging an unguarded message."""
    assert dlq("dead-letter", "x", "--json").lines[0]["state"] == "demanded"
    conf: dict[str, Any] = {"dlq_lease": 5}
    first = start_worker(conf, env={"POISON_DIE_AFTER_STORING": "1"})
    sent = poison.healthy.apply_async(("x",), task_id="x", queue="unguarded")
    first.process.wait(30)
    first.kill()
    assert held_by_workers(redis_url) == 1

    start_worker(conf)

    poll(lambda: held_by_workers(redis_url) == 0, timeout_seconds=30)
    assert ran("x") == 0
    assert [letter.task_id for letter in letters("unguarded-DLQ")] == [sent.id]
