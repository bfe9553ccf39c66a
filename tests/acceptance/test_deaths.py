"""Every kind of poison ends as exactly one letter; healthy work is left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import redis
from celery import VERSION
from celery.exceptions import MaxRetriesExceededError
from waiting import poll
from workers import GREEN, Worker

from celery_dlq import DeadLetter, Outcome, Reason
from celery_dlq.errors import MaxDeliveriesExceeded

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]

LOST, REQUEUED, RETRIED = Outcome.WORKER_LOST, Outcome.REQUEUED, Outcome.RETRIED
FAILED, REJECTED = Outcome.FAILED, Outcome.REJECTED

ACKNOWLEDGES_AT_ONCE = VERSION >= (5, 7)
"""True if pools of greenlets do not wait for the next turn of the loop, as older ones do."""

DEATHS = [
    # task, reason, executions, outcomes, part of the description
    ("killed", Reason.MAX_DELIVERIES_EXCEEDED, 3, [LOST] * 3, "SIGKILL"),
    ("segfault", Reason.MAX_DELIVERIES_EXCEEDED, 3, [LOST] * 3, "SIGSEGV"),
    ("exits", Reason.MAX_DELIVERIES_EXCEEDED, 3, [LOST] * 3, "exitcode 7"),
    ("requeues", Reason.MAX_DELIVERIES_EXCEEDED, 3, [REQUEUED] * 3, "not now"),
    ("drops", Reason.REJECTED, 1, [REJECTED], "not mine"),
    ("to_dlq", Reason.REJECTED, 1, [REJECTED], "no such order"),
    ("fails", Reason.FAILED, 1, [FAILED], "no price"),
    ("fails_early", Reason.FAILED, 1, [FAILED], "no price"),
    ("autoretries", Reason.MAX_RETRIES_EXCEEDED, 3, [RETRIED, RETRIED, FAILED], "partner is down"),
    ("retries", Reason.MAX_RETRIES_EXCEEDED, 2, [RETRIED, FAILED], "Can't retry"),
    ("once", Reason.MAX_DELIVERIES_EXCEEDED, 1, [LOST], "SIGKILL"),
]


def test_every_kind_of_poison_ends_as_one_letter_beside_healthy_work(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """One worker lives through all of them; each dies once, with its reason and history."""
    start_worker()
    sent = {name: getattr(poison, name).delay(name) for name, *_ in DEATHS}
    healthy = [poison.healthy.delay(f"healthy-{n}") for n in range(20)]
    assert [result.get(timeout=30) for result in healthy] == [f"healthy-{n}" for n in range(20)]

    found = {letter.task_id: letter for letter in letters(count=len(DEATHS))}

    assert len(found) == len(DEATHS)
    for name, reason, executions, outcomes, description in DEATHS:
        letter = found[sent[name].id]
        assert (name, letter.reason) == (name, reason)
        assert (name, ran(name)) == (name, executions)
        assert (name, [d.outcome for d in letter.history]) == (name, outcomes)
        assert description in letter.description
        assert letter.source_queue == "orders"
        assert json.loads(letter.args_json or "") == [name]
    assert [ran(f"healthy-{n}") for n in range(20)] == [1] * 20


def test_a_dead_task_has_a_failure_as_its_result(poison: ModuleType, start_worker: Start) -> None:
    """A message that was dead-lettered has a result: callers do not wait forever."""
    start_worker()
    errors: dict[str, type[Exception]] = {
        "killed": MaxDeliveriesExceeded,
        "requeues": MaxDeliveriesExceeded,
        "fails": LookupError,
        "to_dlq": Exception,
    }
    sent = {name: getattr(poison, name).delay(name) for name in errors}
    for name, result in sent.items():
        with pytest.raises(errors[name]):
            result.get(timeout=30)


def test_expected_exceptions_and_ignored_tasks_are_no_deaths(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """``throws`` and ``Ignore`` are the task's own business."""
    start_worker()
    poison.expected.delay("expected")
    poison.ignored.delay("ignored")
    last = poison.fails.delay("last")

    found = letters(count=1)
    poll(lambda: ran("expected") and ran("ignored"))

    assert [letter.task_id for letter in found] == [last.id]


def test_reject_to_dlq_works_where_nothing_is_guarded(
    poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """The task asked for it, so no policy is needed."""
    start_worker({"dlq_queues": {}})
    poison.to_dlq_unguarded.delay("x")
    (letter,) = letters("unguarded-DLQ")
    assert (letter.reason, letter.description) == (Reason.REJECTED, "nobody guards me")


def test_a_queue_limits_the_retries_of_a_task_that_has_no_limit(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """``max_retries`` of a policy holds although the task's own is ``None``."""
    start_worker({"dlq_queues": {"patient": {"max_retries": 4}}})
    result = poison.retries_for_ever.delay("patient")

    (letter,) = letters("patient-DLQ")

    assert letter.reason is Reason.MAX_RETRIES_EXCEEDED
    assert ran("patient") == 5
    assert [d.outcome for d in letter.history] == [RETRIED] * 5
    with pytest.raises(MaxRetriesExceededError):
        result.get(timeout=10)


def test_reasons_that_a_policy_does_not_keep_are_left_to_celery(
    poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """Only the listed deaths become letters."""
    start_worker({"dlq_queues": {"orders": {"max_deliveries": 2, "reasons": ["rejected"]}}})
    with pytest.raises(LookupError):
        poison.fails.delay("fails").get(timeout=30)
    sent = poison.drops.delay("drops")
    assert [letter.task_id for letter in letters()] == [sent.id]


# Kombu gives a dead worker's messages back when another starts, if they are this old.
SHORT_SIGHT: dict[str, Any] = {"broker_transport_options": {"visibility_timeout": 1}}


def test_a_worker_that_is_killed_again_and_again_executes_a_message_at_most_max_deliveries_times(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    grown_old: Callable[[], None],
) -> None:
    """The count is in Redis before user code runs, so no death of the worker escapes it."""
    sent = poison.kills_worker.delay("worker")
    worker = start_worker(SHORT_SIGHT)
    for executions in (1, 2, 3):
        poll(lambda n=executions: ran("worker") >= n, timeout_seconds=30)  # type: ignore[misc]
        worker.process.wait(30)
        worker.kill()
        grown_old()
        worker.start()

    (letter,) = letters()

    assert letter.task_id == sent.id
    assert letter.reason is Reason.MAX_DELIVERIES_EXCEEDED
    assert (letter.deliveries, ran("worker")) == (3, 3)
    assert [d.outcome for d in letter.history] == [Outcome.VANISHED] * 3


def test_a_worker_killed_between_storing_and_acknowledging_leaves_one_letter(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    grown_old: Callable[[], None],
    redis_url: str,
) -> None:
    """The message comes back, dies again, and finds its letter there."""
    sent = poison.to_dlq.delay("x")
    first = start_worker(SHORT_SIGHT, env={"POISON_DIE_AFTER_STORING": "1"})
    first.process.wait(30)
    first.kill()
    assert len(letters()) == 1
    grown_old()

    start_worker(SHORT_SIGHT)

    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.llen("orders") and not client.hlen("unacked"), timeout_seconds=30)
    assert [letter.task_id for letter in letters()] == [sent.id]


@pytest.mark.parametrize("pool", ["prefork", *(GREEN if ACKNOWLEDGES_AT_ONCE else ())])
def test_a_killed_worker_loses_what_it_acknowledged_before_it_ran(
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    redis_url: str,
    pool: str,
) -> None:
    """As in Celery; the pages that say which guarantee one has warn of it."""
    task = poison.kills_worker if pool == "prefork" else poison.once
    task.delay("early")
    first = start_worker({"task_acks_late": False}, pool=pool, wait=False)
    first.process.wait(30)
    first.kill()

    start_worker({"task_acks_late": False}, pool=pool)
    poison.healthy.delay("after")
    poll(lambda: ran("after") == 1, timeout_seconds=30)

    with redis.Redis.from_url(redis_url) as client:
        poll(lambda: not client.llen("orders") and not client.hlen("unacked"), timeout_seconds=30)
    assert ran("early") == 1
    assert not poison.dlq.queues()


@pytest.mark.parametrize("pool", ["solo", *(() if ACKNOWLEDGES_AT_ONCE else GREEN)])
def test_an_early_acknowledgement_that_was_not_sent_yet_leaves_one_letter(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran, pool: str
) -> None:
    """Celery sends it in the next turn of its loop: in solo, when the task has ended."""
    sent = poison.once.delay("early")
    conf = {**SHORT_SIGHT, "task_acks_late": False}
    first = start_worker(conf, pool=pool, wait=False)
    first.process.wait(30)
    first.kill()

    start_worker(conf, pool=pool)

    (letter,) = letters(timeout_seconds=30)
    assert (letter.task_id, ran("early")) == (sent.id, 1)


def test_a_default_delay_holds_back_messages_without_their_own(
    poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """An explicit countdown of 0 says now; no countdown gets the queue's delay."""
    start_worker()
    late = poison.delayed.delay("late")
    now = poison.delayed.apply_async(("now",), countdown=0)
    assert now.get(timeout=10) == "now"
    assert ran("late") == 0
    assert late.get(timeout=10) == "late"
