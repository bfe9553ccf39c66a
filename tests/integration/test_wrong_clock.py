"""Machines with wrong clocks among others: the clock of Redis decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from builders import DLQ, a_letter, key_of
from celery import Celery

from celery_dlq import DeadLetters, LetterFilter
from celery_dlq.operations.job import RUNNING
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.store.instructions import Override
from celery_dlq.worker.heartbeat import Heartbeat, worker_info

HOUR = timedelta(hours=1)
Machine = Callable[[timedelta], DeadLetters]


@pytest.fixture
def machine(redis_url: str) -> Iterator[Machine]:
    """A process of one app, whose clock is so far ahead."""
    running = []

    def made(ahead: timedelta) -> DeadLetters:
        app = Celery("shop", broker=redis_url, set_as_current=False)
        app.conf.dlq_queues = {"orders": {"dead_letter_ttl": 1800}, "mails": {"max_deliveries": 3}}
        running.append(DeadLetters(app, clock=lambda: datetime.now(timezone.utc) + ahead))
        return running[-1]

    yield made
    for dlq in running:
        dlq.close()


def letters(dlq: DeadLetters, number: int, **changes: Any) -> list[str]:
    """Letters of a machine, dated by its clock; their ids."""
    made = [a_letter(dead_lettered_at=dlq.assembly.clock(), **changes) for _ in range(number)]
    for letter in made:
        dlq.store.dead_letter(letter, key_of(letter))
    return [letter.id for letter in made]


@pytest.mark.parametrize("hours", [-1, 1])
def test_fresh_letters_are_never_trimmed(machine: Machine, hours: int) -> None:
    """Neither by a machine with a wrong clock, nor because one dated them."""
    wrong, right = machine(hours * HOUR), machine(timedelta(0))
    expires = datetime.now(timezone.utc) + timedelta(minutes=30)
    made = [*letters(right, 2), *letters(wrong, 2), *letters(right, 2)]
    letters(right, 1, dead_letter_queue="mails-DLQ", expires=expires)
    passed = wrong.assembly.clock() + timedelta(
        seconds=5
    )  # over, unless the clock is an hour behind
    letters(wrong, 1, dead_letter_queue="mails-DLQ", expires=passed)

    assert wrong.trim() == right.trim() == []

    assert [letter.id for letter in right.letters(DLQ)] == made
    assert right.store.length("mails-DLQ") == 2


@pytest.mark.parametrize("hours", [-1, 1])
def test_an_override_lasts_as_long_as_was_said(machine: Machine, hours: int) -> None:
    """A clock that is ahead must not end it for all, and its author's must not make it longer."""
    wrong, right = machine(hours * HOUR), machine(timedelta(0))
    right.override_policy("orders", timedelta(minutes=30), max_deliveries=3)
    (made,) = wrong.override_policy("mails", timedelta(minutes=30), max_deliveries=4)

    assert {view.fields["max_deliveries"].value for view in wrong.policies().views} >= {3, 4}
    assert [o.value for o in right.assembly.backend.instructions.in_force(Override)] == [3, 4]
    left = made.until - datetime.now(timezone.utc)
    assert timedelta(minutes=29) < left <= timedelta(minutes=30)


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_minute_before_a_change_is_the_stores(machine: Machine, hours: int) -> None:
    """By neither machine's clock it begins earlier or later."""
    wrong, right = machine(hours * HOUR), machine(timedelta(0))
    for setter, queue in ((wrong, "orders"), (right, "mails")):
        (made,) = setter.override_policy(queue, timedelta(minutes=30), dead_letter_max_length=1)
        left = made.since - datetime.now(timezone.utc)
        assert timedelta(seconds=50) < left <= timedelta(minutes=1)
    for each in (wrong, right):
        table = PolicyAdmin(each.assembly).in_force()
        assert table.resting == {"orders", "mails"}
        assert table.never_trims(DLQ)


def test_a_worker_obeys_an_override_until_its_end(machine: Machine) -> None:
    """It sleeps by a clock that cannot be set, and asks the store whether the end has come."""
    dlq, in_force, seconds = machine(-HOUR), list[int](), [0.0]
    info = worker_info(dlq.app, dlq.settings)
    heartbeat = Heartbeat(
        dlq.registry,
        info,
        dlq.assembly.backend.instructions,
        lambda found, now: in_force.append(sum(one.in_force(now) for one in found)),
        lambda: seconds[0],
    )
    dlq.hold(queue="celery", span=timedelta(seconds=0.3))
    dlq.override_policy("orders", timedelta(seconds=0.3), max_deliveries=3)
    for _ in range(2):
        heartbeat.tick()
    assert in_force == [2]
    while dlq.assembly.backend.instructions.in_force(Override):
        pass
    seconds[0] += 0.3
    heartbeat.tick()
    assert in_force == [2, 0]


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_job_that_runs_is_not_taken_for_dead(machine: Machine, hours: int) -> None:
    """Otherwise somebody resumes it, and two processes publish the same letters."""
    wrong, right = machine(hours * HOUR), machine(timedelta(0))
    for at_work, other in ((wrong, right), (right, wrong)):
        run = at_work.assembly.jobs().new("redrive", DLQ, LetterFilter(), RedriveOptions())
        run.send_heartbeat()
        assert other.job(run.job.id).state == RUNNING
    assert [job.state for job in right.jobs()] == [RUNNING, RUNNING]
