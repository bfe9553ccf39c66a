"""What a policy says about an exception, with real workers on every broker and in every pool."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]

RETRY = {"action": "retry", "max_retries": 2, "countdown": 0.1}
RULES: dict[str, Any] = {
    "json.JSONDecodeError": {**RETRY, "retry_jitter": False},
    "exceptions_app.StubbornError": {**RETRY, "backoff": "fixed"},
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


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo", "gevent"])
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
