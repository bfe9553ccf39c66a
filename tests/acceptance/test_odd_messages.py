"""Messages that Celery cannot take apart, or cannot give to its pool, and ids that mean two."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from raw import BODY, JSON, headers, publish
from waiting import poll
from workers import Place, Worker

from celery_dlq import DeadLetter, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]

HEALTHY = "poison_app.healthy"
DEEP = b"[[" + b"[" * 900 + b"]" * 900 + b"], {}, {}]"
FATAL: dict[str, tuple[Reason, bytes, dict[str, Any], dict[str, Any]]] = {
    "no-list": (Reason.INVALID_MESSAGE, b'{"a": 1}', {}, JSON),
    "empty": (Reason.INVALID_MESSAGE, b"", {}, JSON),
    "null": (Reason.INVALID_MESSAGE, b"null", {}, JSON),
    "stamps": (Reason.INVALID_MESSAGE, BODY, {"stamped_headers": True}, JSON),
    "limits": (Reason.INVALID_MESSAGE, BODY, {"timelimit": True}, JSON),
    "text-limit": (Reason.INVALID_MESSAGE, BODY, {"timelimit": ["x", None]}, JSON),
    "eta": (Reason.INVALID_MESSAGE, BODY, {"eta": ""}, JSON),
    "far-eta": (Reason.INVALID_MESSAGE, BODY, {"eta": "0001-01-01T00:00:00+14:00"}, JSON),
    "expires": (Reason.EXPIRED, BODY, {"expires": "0001-01-01T00:00:00+14:00"}, JSON),
    "task": (Reason.INVALID_MESSAGE, BODY, {"task": ["x"]}, JSON),
}
"""What ends a plain worker at its receipt, and comes back to end the next one."""


def test_a_message_that_would_end_the_worker_at_its_receipt_is_a_letter_at_once(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    redis_url: str,
) -> None:
    """Nothing behind it waits, and the worker lives on."""
    broker = place.env.get("POISON_BROKER", redis_url)
    worker = start_worker(env=place.env)
    for task_id, (_reason, body, more, properties) in FATAL.items():
        publish(broker, body, headers={**headers(HEALTHY, task_id), **more}, **properties)
    publish(broker, BODY, headers={"task": HEALTHY, "lang": "py"}, correlation_id="no-id", **JSON)
    publish(broker, BODY, headers=headers(HEALTHY, "after"), **JSON)

    found = {letter.task_id: letter for letter in letters(count=len(FATAL) + 1)}

    assert found.pop("no-id").reason is Reason.INVALID_MESSAGE
    assert {task_id: letter.reason for task_id, letter in found.items()} == {
        task_id: reason for task_id, (reason, *_) in FATAL.items()
    }
    assert {task_id: letter.body for task_id, letter in found.items()} == {
        task_id: body for task_id, (_, body, *_) in FATAL.items()
    }
    poll(lambda: ran("x"))
    assert worker.process.poll() is None
    assert "Unrecoverable error" not in worker.output


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent", "eventlet"])
def test_odd_values_in_headers_are_taken_as_celery_takes_them(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    pool: str,
    redis_url: str,
) -> None:
    """It runs such messages and acknowledges them, and so do we."""
    odd: list[dict[str, Any]] = [
        {"id": 5, "ignore_result": True},
        {"retries": True},
        {"retries": 1.5},
        {"retries": "2"},
        {"dlq_redrives": True},
        {"dlq_redrive": []},
        {"replaced_task_nesting": {}},
        {"argsrepr": 5},
        {"group": []},
    ]
    for number, more in enumerate(odd):
        publish(redis_url, BODY, headers={**headers(HEALTHY, f"odd-{number}"), **more}, **JSON)
    worker = start_worker(arguments=("--concurrency", "1"), pool=pool)

    poll(lambda: ran("x") == len(odd), timeout_seconds=30)

    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.hlen("unacked") and not client.llen("orders"))
    assert ran("x") == len(odd)
    assert not poison.dlq.queues()
    assert "is not guarded this time" not in worker.output


def test_a_message_that_the_pool_cannot_take_is_a_letter_after_its_deliveries(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran, redis_url: str
) -> None:
    """A body too deep to be pickled: with a prefetch of one, nothing behind it would run."""
    publish(redis_url, DEEP, headers=headers(HEALTHY, "deep"), **JSON)
    behind = [poison.healthy.delay(f"behind-{n}") for n in range(5)]
    worker = start_worker(arguments=("--concurrency", "1"))

    (letter,) = letters()
    for result in behind:
        result.get(timeout=20)

    assert (letter.task_id, letter.reason) == ("deep", Reason.MAX_DELIVERIES_EXCEEDED)
    assert [d.outcome for d in letter.history] == [Outcome.FAILED] * 3
    assert letter.history[0].exception_type == "RecursionError"
    assert letter.body == DEEP
    worker.process.terminate()
    assert worker.process.wait(15) == 0, "a job that no process got keeps the pool open"


def test_a_task_that_replaces_another_has_its_own_deliveries(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """Both have one id; the clean-up of the first leaves the count of the second alone."""
    start_worker()
    sent = [poison.replaced_by_killed.delay(f"r-{n}") for n in range(4)]

    found = letters(count=4, timeout_seconds=60)

    assert {letter.task_id for letter in found} == {result.id for result in sent}
    for n in range(4):
        assert (ran(f"r-{n} before"), ran(f"r-{n}")) == (1, 3)
    assert {(letter.task_name, letter.deliveries) for letter in found} == {("poison_app.killed", 3)}


def test_tasks_that_a_running_worker_gets_to_know_are_guarded(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """With a task class of their own, after the pool was restarted with their module."""
    start_worker({"worker_pool_restarts": True}, arguments=("--concurrency", "1"))
    with poison.app.connection() as fresh:  # another test may have closed those of the pool
        control = poison.app.control
        inspect = control.inspect(timeout=1, limit=1, connection=fresh)

        def processes() -> set[int]:
            (stats,) = (inspect.stats() or {"": {"pool": {"processes": []}}}).values()
            return set(stats["pool"]["processes"])

        before = poll(processes)
        control.pool_restart(modules=["late_tasks"], connection=fresh)
        poll(lambda: "late.killed" in str(inspect.registered()))

        def all_new() -> bool:  # a process that was there before knows no such task
            poison.healthy.delay("turn").get(timeout=20)  # it ends after its next task
            now = processes()  # none, if the worker was too busy to say
            return len(now) == len(before) and not now & before

        poll(all_new, timeout_seconds=60)
    poison.app.send_task("late.killed", ("late",))

    (letter,) = letters(timeout_seconds=40)

    assert (letter.reason, letter.deliveries) == (Reason.MAX_DELIVERIES_EXCEEDED, 3)
    assert ran("late") == 3
