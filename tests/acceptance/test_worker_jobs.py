"""Workers run the jobs that wait; on Redis and RabbitMQ, under kills."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import intervals
import pytest
from command_line import Dlq
from stored_letters import QUEUE, left, put
from waiting import poll
from workers import Place, Worker

from celery_dlq import DLQError

Start = Callable[..., Worker]
Ran = Callable[[str], int]


def ended(poison: ModuleType, job_id: str, state: str = "done") -> Any:
    """The job, once it has this state."""
    return poll(lambda: (j := poison.dlq.job(job_id)).state == state and j, timeout_seconds=60)


# -- jobs that wait -----------------------------------------------------------------------


def test_a_worker_runs_what_was_handed_to_the_background(
    here: Place, poison: ModuleType, dlq: Dlq, start_worker: Start, ran: Ran
) -> None:
    """A redrive, then a discard: on behalf of who asked, each message once."""
    start_worker(env=here.env)
    letters = [put(poison) for _ in range(5)]
    kept = put(poison, exception_type="shop.Other")
    options = ("--exception", "ValueError", "--background", "--json")
    done = dlq("redrive", QUEUE, "--yes", *options)
    assert done.exit_code == 0, done.stderr
    job = ended(poison, done.lines[0]["id"])
    assert job.counts["published"] == 5
    poll(lambda: all(ran(each.task_id) for each in letters), timeout_seconds=30)
    assert [ran(each.task_id) for each in letters] == [1] * 5
    assert [each.id for each in left(poison)] == [kept.id]
    done = dlq("discard", QUEUE, "--all", "--yes", "--background")
    assert done.exit_code == 0, done.stderr
    poll(lambda: left(poison) == [], timeout_seconds=30)
    actors = {change.actor for change in poison.dlq.changes()}
    assert actors == {job.actor}
    assert "@" in job.actor


def test_a_worker_that_stops_leaves_its_job_to_the_next(
    here: Place, poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """Between two batches; nothing is lost, nothing runs twice."""
    first = start_worker(env=here.env)
    letters = [put(poison) for _ in range(60)]
    plan = poison.dlq.plan("redrive", QUEUE, rate=10)
    poison.dlq.start(plan.id)
    ended(poison, plan.id, "running")
    poll(lambda: 0 < len(left(poison)) < 60, timeout_seconds=30)
    first.stop()
    job = poison.dlq.job(plan.id)
    assert (job.state, job.note) == ("waiting", "its process has ended; the next one goes on")
    assert left(poison)
    start_worker(env=here.env)
    job = ended(poison, plan.id)
    assert (job.run, job.counts["published"], left(poison)) == (2, 60, [])
    poll(lambda: all(ran(each.task_id) for each in letters), timeout_seconds=30)
    assert sum(ran(each.task_id) for each in letters) == 60


def test_a_job_of_a_killed_worker_is_resumed_by_another(
    here: Place,
    poison: ModuleType,
    dlq: Dlq,
    start_worker: Start,
    ran: Ran,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`dlq jobs resume --background` hands it over."""
    intervals.change(monkeypatch, job_silent=timedelta(seconds=4))
    conf = {"dlq_lease": 5}  # what the killed one had fetched runs, too
    first = start_worker(conf, env=here.env)
    letters = [put(poison) for _ in range(60)]
    plan = poison.dlq.plan("redrive", QUEUE, rate=10)
    poison.dlq.start(plan.id)
    poll(lambda: 0 < len(left(poison)) < 60, timeout_seconds=60)
    first.kill()
    ended(poison, plan.id, "interrupted")
    start_worker(conf, env=here.env)
    done = dlq("jobs", "resume", plan.id, "--background")
    assert done.exit_code == 0, done.stderr
    job = ended(poison, plan.id)
    assert (job.counts["maybe_twice"], left(poison)) == (0, [])
    poll(lambda: all(ran(each.task_id) for each in letters), timeout_seconds=60)


def test_a_job_starts_at_its_time_and_not_before(
    poison: ModuleType, dlq: Dlq, start_worker: Start, ran: Ran
) -> None:
    """By the store's clock; what is cancelled before it never starts."""
    start_worker()
    letter, kept = put(poison), put(poison, exception_type="shop.Other")
    done = dlq("redrive", QUEUE, letter.id, "--at", "+6s", "--json")
    assert done.exit_code == 0, done.stderr
    never = dlq("purge", QUEUE, "--all", "--yes", "--at", "+6s", "--json")
    assert never.exit_code == 0, never.stderr
    job = poison.dlq.job(done.lines[0]["id"])
    assert job.start_at is not None
    assert job.start_at - job.updated_at > timedelta(seconds=5)
    shown = dlq("jobs")
    assert "waiting" in shown.stdout
    assert f"{job.start_at:%H:%M:%S}" in shown.stdout
    assert dlq("jobs", "cancel", never.lines[0]["id"]).exit_code == 0
    job = ended(poison, job.id)
    assert job.started_at >= job.start_at
    poll(lambda: ran(letter.task_id) == 1, timeout_seconds=30)
    assert poison.dlq.job(never.lines[0]["id"]).state == "cancelled"
    assert [each.id for each in left(poison)] == [kept.id]


def test_a_time_must_be_usable(poison: ModuleType, dlq: Dlq) -> None:
    """One sentence each, and no job."""
    put(poison)
    for at, text in (("25:00", "expected a time such as 09:00"), ("soon", "got 'soon'")):
        done = dlq("redrive", QUEUE, "--yes", "--all", "--at", at)
        assert (done.exit_code, text in done.stderr) == (2, True), done.stderr
    done = dlq("redrive", QUEUE, "--yes", "--all", "--at", "2020-01-31T18:00")
    assert (done.exit_code, "a time in the future" in done.stderr) == (1, True)
    plan = poison.dlq.plan("purge", QUEUE)
    with pytest.raises(DLQError, match="a time in the future"):
        poison.dlq.start(plan.id, at=plan.started_at)


def test_a_worker_of_another_broker_leaves_the_job(poison: ModuleType, start_worker: Start) -> None:
    """It would publish the messages where nobody knows them."""
    start_worker()
    put(poison)
    plan = poison.dlq.plan("redrive", QUEUE)
    state = poison.dlq.job_store.read(plan.id)
    poison.dlq.job_store.write(plan.id, {**state, "broker": "amqp /shop"})
    poison.dlq.start(plan.id)
    purge = poison.dlq.plan("purge", QUEUE)
    poison.dlq.start(purge.id)
    ended(poison, purge.id)
    assert poison.dlq.job(plan.id).state == "waiting"
