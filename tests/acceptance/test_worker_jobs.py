"""Workers run the jobs that wait, and redrive by policy; on Redis and RabbitMQ, under kills."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import intervals
import pytest
import redis
from builders import a_letter, a_request, key_of
from command_line import Dlq
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, DLQError
from celery_dlq.features.auto_redrive import operations as auto_redrive
from celery_dlq.features.auto_redrive.operations import ACTOR

Start = Callable[..., Worker]
Ran = Callable[[str], int]
QUEUE = "orders-DLQ"


def policy(**rule: Any) -> dict[str, Any]:
    """Settings with an automatic redrive of ``orders``."""
    rule = {"after": 1, "times": 2, "backoff": 2, **rule}
    return {"dlq_queues": {"orders": {"max_deliveries": 1, "auto_redrive": rule}}}


def put(poison: ModuleType, task: str = "healthy", **changes: Any) -> DeadLetter:
    """A letter of a task of the app, as if a worker had stored it."""
    letter = a_letter(task_name=f"poison_app.{task}", **changes)
    headers = a_request(id=letter.task_id, root_id=letter.task_id, task=f"poison_app.{task}")
    letter = a_letter(
        **{
            "task_name": f"poison_app.{task}",
            "body": json.dumps([[letter.task_id], {}, {"callbacks": None}]).encode(),
            "headers": json.dumps(headers),
            "properties": json.dumps({"correlation_id": letter.task_id, "priority": 0}),
            **changes,
            "task_id": letter.task_id,
        }
    )
    poison.dlq.store.dead_letter(letter, key_of(letter))
    return letter


def left(poison: ModuleType) -> list[DeadLetter]:
    """The letters that are still there."""
    return list(poison.dlq.letters(QUEUE)) if QUEUE in poison.dlq.store.names() else []


@pytest.fixture
def here(place: Place, poison: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Each broker but SQS; the app of this process uses it, too."""
    if place.name in ("sqs", "quorum"):
        pytest.skip("as RabbitMQ's classic queues")
    if "POISON_BROKER" in place.env:
        monkeypatch.setitem(poison.app.conf, "broker_url", place.env["POISON_BROKER"])
        monkeypatch.setitem(poison.app.conf, "broker_read_url", place.env["POISON_BROKER"])
        monkeypatch.setitem(poison.app.conf, "broker_write_url", place.env["POISON_BROKER"])
    return place


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
    here: Place, poison: ModuleType, dlq: Dlq, start_worker: Start, ran: Ran
) -> None:
    """`dlq jobs resume --background` hands it over."""
    first = start_worker(env=here.env)
    letters = [put(poison) for _ in range(60)]
    plan = poison.dlq.plan("redrive", QUEUE, rate=10)
    poison.dlq.start(plan.id)
    poll(lambda: 0 < len(left(poison)) < 60, timeout_seconds=60)
    first.kill()
    ended(poison, plan.id, "interrupted")
    start_worker(env=here.env)
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


# -- by policy ----------------------------------------------------------------------------


def test_a_letter_is_redriven_until_its_times_are_used_up(
    here: Place, poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """It waits longer each time; the last letter stays, and the worker says so."""
    worker = start_worker(policy(), env=here.env)
    with poison.app.connection_for_write() as connection:  # not the pool's, of another test
        sent = poison.fails.apply_async(("again",), connection=connection)
    letter = poll(
        lambda: next((each for each in left(poison) if each.redrives == 2), None),
        timeout_seconds=60,
    )
    assert (letter.task_id, ran("again")) == (sent.id, 3)
    poll(lambda: {job.state for job in poison.dlq.jobs()} == {"done"}, timeout_seconds=10)
    jobs = [job for job in poison.dlq.jobs() if job.actor == ACTOR]
    assert [job.counts["published"] for job in jobs] == [1, 1]
    second, first = jobs
    assert second.started_at - first.started_at >= timedelta(seconds=2)
    assert letter.description.endswith("; redriven 2 of 2 times by auto_redrive")
    poll(lambda: "redriven 2 of 2 times by auto_redrive" in worker.output, timeout_seconds=10)
    assert {change.actor for change in poison.dlq.changes()} == {ACTOR}


def test_a_worker_killed_in_a_redrive_by_policy_is_followed_by_another(
    here: Place, poison: ModuleType, start_worker: Start, ran: Ran
) -> None:
    """The other one takes over when the lease of the dead one is over: nothing twice."""
    conf = policy()
    conf["dlq_queues"]["orders"]["max_deliveries"] = 9  # what it ran when it was killed runs again
    letters = [put(poison) for _ in range(400)]
    first = start_worker(conf, env=here.env)
    poll(lambda: len(left(poison)) < 400, timeout_seconds=60)
    first.kill()
    assert left(poison)
    second = start_worker(conf, env=here.env)
    third = start_worker(conf, env=here.env, arguments=("--hostname", "third@%h"))
    poll(lambda: left(poison) == [], timeout_seconds=120, every_seconds=0.5)
    poll(lambda: all(ran(each.task_id) for each in letters), timeout_seconds=120, every_seconds=0.5)
    jobs = poll(
        lambda: (found := poison.dlq.jobs()) and {j.state for j in found} == {"done"} and found,
        timeout_seconds=60,
    )
    assert {job.actor for job in jobs} == {ACTOR}
    assert max(job.run for job in jobs) == 2
    twice = sum(job.counts["maybe_twice"] for job in jobs)
    if here.name == "redis":  # elsewhere, only what a heartbeat has told is known of a killed run
        assert (sum(job.counts["published"] for job in jobs), twice) == (400, 0)
    assert twice <= 100  # one batch
    for worker in (second, third):
        worker.stop()


DIES = """
import os, signal, sys
import poison_app
from celery_dlq.operations import job
from celery_dlq.features.auto_redrive import operations as auto_redrive
from celery_dlq.operations.redrive import publisher
from celery_dlq.store.claims import Claims
from celery_dlq.store.lease import Lease

owner, name, when, number, elsewhere = sys.argv[1:]
parts = {"Lease": Lease, "Claims": Claims, "JobRun": job.JobRun, "Publisher": publisher.Publisher}
place = parts[owner]
inner, calls = getattr(place, name), []

def dying(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == int(number) and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = inner(self, *args, **kwargs)
    if len(calls) == int(number):
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(place, name, dying)
if elsewhere:
    Claims.marker = lambda _: None
jobs = poison_app.dlq.assembly.jobs()
while auto_redrive.look(jobs, jobs.policies.in_force()) and jobs.run_next(lambda: False):
    pass
"""


@pytest.mark.parametrize(
    ("owner", "name", "when", "number", "elsewhere", "twice"),
    [
        ("Lease", "request", "after", "1", "", 0),
        ("Lease", "request", "after", "2", "", 0),
        ("JobRun", "beat", "before", "1", "", 0),
        ("JobRun", "beat", "after", "1", "", 0),
        ("Claims", "redrive", "before", "2", "", 0),
        ("Claims", "redrive", "after", "2", "", 0),
        ("JobRun", "end", "before", "1", "", 0),
        ("JobRun", "end", "after", "1", "", 0),
        ("Lease", "request", "before", "3", "", 0),
        ("Claims", "claim", "after", "2", "elsewhere", 0),
        ("Publisher", "publish", "before", "2", "elsewhere", 0),
        ("Publisher", "publish", "after", "2", "elsewhere", 100),
        ("Claims", "mark_published", "after", "2", "elsewhere", 0),
    ],
)
def test_a_look_killed_anywhere_is_finished_by_the_next_ones(
    poison: ModuleType,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    name: str,
    when: str,
    number: str,
    elsewhere: str,
    twice: int,
) -> None:
    """No letter is lost; nothing goes out twice but what was published and not noted."""
    intervals.change(monkeypatch, grace=timedelta(0), redrive_lease=1.0)
    sent = {put(poison).id for _ in range(350)}
    rule = {"after": 0.1, "times": 1}
    poison.dlq.override_policy("orders", timedelta(hours=1), auto_redrive=rule)
    done = run_python(redis_url, "-c", DIES, owner, name, when, number, elsewhere)
    assert done.returncode == -signal.SIGKILL, done.stderr

    def look() -> bool:
        jobs = poison.dlq.assembly.jobs()
        while auto_redrive.look(jobs, jobs.policies.in_force()) and jobs.run_next(lambda: False):
            pass
        return left(poison) == []

    poll(look, timeout_seconds=60, every_seconds=0.2)
    sent.add(put(poison).id)  # an empty queue is not looked at: its job has no letters left
    poll(
        lambda: look() and {job.state for job in poison.dlq.jobs()} == {"done"},
        timeout_seconds=60,
        every_seconds=0.2,
    )
    with redis.Redis.from_url(redis_url) as client:
        found = [json.loads(raw) for raw in client.lrange("orders", 0, -1)]
    ids = [message["headers"]["dlq_letter"] for message in found]
    assert (set(ids), len(ids) - len(sent)) == (sent, twice)
    assert sum(job.counts["maybe_twice"] for job in poison.dlq.jobs()) >= twice
