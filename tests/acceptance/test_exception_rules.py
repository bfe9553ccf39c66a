"""What a policy says about an exception, with real workers on every broker and in every pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import redis
from waiting import poll
from workers import Place, Worker, diagonals, run_python

from celery_dlq import DeadLetter, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]

RETRY = {"action": "retry", "max_retries": 2}
RULES: dict[str, Any] = {
    "json.JSONDecodeError": RETRY,
    "exceptions_app.StubbornError": {**RETRY, "countdown": 0.1},
    "exceptions_app.FatalError": {"action": "dead_letter", "dead_letter_queue": "fatal-DLQ"},
    "exceptions_app.KnownError": {"action": "ignore"},
    "celery.exceptions.SoftTimeLimitExceeded": {"action": "ignore"},
}
CONF = {"dlq_queues": {"orders": {"max_deliveries": 3, "exceptions": RULES}}}
FAILED, RETRIED = Outcome.FAILED, Outcome.RETRIED
SPENT = Reason.MAX_RETRIES_EXCEEDED


def publish(redis_url: str, place: Place, names: list[str]) -> dict[str, str]:
    """Publish one task of each name from a process of its own; ids by name."""
    code = (
        "import json, sys, exceptions_app as p\n"
        "names = json.loads(sys.argv[1])\n"
        "print(json.dumps({n: p.app.send_task(f'exceptions_app.{n}', (n,)).id for n in names}))"
    )
    done = run_python(redis_url, "-c", code, json.dumps(names), **place.env)
    assert done.returncode == 0, done.stderr
    ids: dict[str, str] = json.loads(done.stdout)
    return ids


@diagonals("prefork", "threads", "solo", "gevent")
def test_each_exception_ends_as_its_policy_says(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
    place: Place,
    pool: str,
) -> None:
    """Retried until it works or nothing is left; dead-lettered elsewhere; or ignored."""
    in_orders = {
        "stubborn": (SPENT, [RETRIED, RETRIED, FAILED]),
        "stubborn_early": (SPENT, [RETRIED, RETRIED, FAILED]),
        "gives_up": (SPENT, [RETRIED, FAILED]),
        "autoretried": (SPENT, [RETRIED, FAILED]),
    }
    in_fatal = {
        "worse": (Reason.FAILED, [FAILED]),
        "worse_autoretried": (Reason.FAILED, [FAILED]),
        "thrown": (Reason.FAILED, [FAILED]),
    }
    worker = start_worker(CONF, env=place.env, pool=pool, app="exceptions_app")
    ids = publish(redis_url, place, [*in_orders, *in_fatal, "known", "slow", "runs_chain"])
    names = {task_id: name for name, task_id in ids.items()}

    for queue, expected in (("orders-DLQ", in_orders), ("fatal-DLQ", in_fatal)):
        found = letters(queue, count=len(expected), timeout_seconds=60)
        ends = {names.get(x.task_id): (x.reason, [d.outcome for d in x.history]) for x in found}
        assert ends == expected, worker.output[-3000:]
        assert {x.source_queue for x in found} == {"orders"}
        assert {x.dead_letter_queue for x in found} == {queue}
        if queue == "fatal-DLQ":
            assert {x.exception_type for x in found} == {
                "exceptions_app.WorseError",
                "exceptions_app.FatalError",
            }
    poll(lambda: ran("runs_chain runs_chain") == 1, timeout_seconds=30)
    assert ran("runs_chain") == 1 + 3
    for name in ("known", "slow"):
        poll(lambda name=name: poison.app.AsyncResult(ids[name]).state == "FAILURE")
        assert ran(name) == 1
    assert sum(queue.letters for queue in poison.dlq.queues()) == len(in_orders) + len(in_fatal)
    assert "please report" not in worker.output
    assert "guard failed" not in worker.output


def test_a_worker_killed_right_after_storing_elsewhere_leaves_one_letter(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
    grown_old: Callable[[], None],
) -> None:
    """The counts are on another hash slot, so they cannot say yet that the message is dead."""
    rules = {"orders": {"max_deliveries": 1, "exceptions": RULES}}
    conf = {"dlq_queues": rules, "broker_transport_options": {"visibility_timeout": 1}}
    ids = publish(redis_url, Place("redis"), ["worse"])
    env = {"POISON_DIE_AFTER_STORING": "1"}
    first = start_worker(conf, env=env, app="exceptions_app")
    first.process.wait(30)
    first.kill()
    assert [x.task_id for x in letters("fatal-DLQ")] == [ids["worse"]]
    grown_old()

    start_worker(conf, app="exceptions_app")

    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.llen("orders") and not client.hlen("unacked"), timeout_seconds=30)
    assert [(q.name, q.letters) for q in poison.dlq.queues() if q.letters] == [("fatal-DLQ", 1)]
    assert ran("worse") == 1
    assert poison.app.AsyncResult(ids["worse"]).state == "FAILURE"


def test_a_letter_elsewhere_goes_back_to_where_its_message_came_from(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
) -> None:
    """A canary sees that it dies again, although its counts are beside other letters."""
    worker = start_worker(CONF, app="exceptions_app")
    ids = publish(redis_url, Place("redis"), ["worse"])
    letters("fatal-DLQ")

    code = (
        "import json, exceptions_app as p\n"
        "r = p.dlq.redrive('fatal-DLQ', canary=1, canary_wait=20)\n"
        "print(json.dumps(r.canary))"
    )
    done = run_python(redis_url, "-c", code, conf=CONF)

    assert done.returncode == 0, done.stderr
    canary = json.loads(done.stdout)
    assert (canary["died"], canary["succeeded"]) == (1, 0), worker.output[-2000:]
    (letter,) = letters("fatal-DLQ")
    assert (letter.task_id, letter.redrives, letter.deliveries) == (ids["worse"], 1, 1)
    assert letter.source_queue == "orders"
    assert ran("worse") == 2


def test_a_message_that_crashes_too_often_dies_before_its_deliveries_are_used_up(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Letters,
    ran: Ran,
    place: Place,
) -> None:
    """A message that is requeued without a crash goes on."""
    policy = {"max_deliveries": 6, "max_crashes": {"times": 2, "within": 60}}
    worker = start_worker({"dlq_queues": {"orders": policy}}, env=place.env)
    code = "import poison_app as p; p.killed.delay('killed'); p.requeues.delay('requeues')"
    assert run_python(redis_url, "-c", code, **place.env).returncode == 0

    found = {x.task_name.rpartition(".")[2]: x for x in letters(count=2, timeout_seconds=60)}

    killed, requeued = found["killed"], found["requeues"]
    assert (killed.reason, killed.deliveries) == (Reason.WORKER_LOST, 2), worker.output[-3000:]
    assert [d.outcome for d in killed.history] == [Outcome.WORKER_LOST] * 2
    assert "max_crashes is 2 within 60 s" in killed.description
    assert (requeued.reason, requeued.deliveries) == (Reason.MAX_DELIVERIES_EXCEEDED, 6)
    assert (ran("killed"), ran("requeues")) == (2, 6)
