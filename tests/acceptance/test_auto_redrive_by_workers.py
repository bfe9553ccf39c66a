"""Workers redrive by policy; on Redis and RabbitMQ, under kills."""

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
from stored_letters import left, put
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq.features.auto_redrive import operations as auto_redrive
from celery_dlq.features.auto_redrive.operations import ACTOR

Start = Callable[..., Worker]
Ran = Callable[[str], int]


def policy(**rule: Any) -> dict[str, Any]:
    """Settings with an automatic redrive of ``orders``."""
    rule = {"after": 1, "times": 2, "backoff": 2, **rule}
    return {"dlq_queues": {"orders": {"max_deliveries": 1, "auto_redrive": rule}}}


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
    here: Place,
    poison: ModuleType,
    start_worker: Start,
    ran: Ran,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one takes over when the lease of the dead one is over: nothing twice."""
    intervals.change(monkeypatch, redrive_lease=5.0, job_silent=timedelta(seconds=5), claim=10.0)
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
    Claims.marker = lambda *_: None
jobs = poison_app.dlq.assembly.jobs()
while auto_redrive.look_for_due(jobs, jobs.policies.in_force()) and jobs.run_next(lambda: False):
    pass
"""


@pytest.mark.parametrize(
    ("owner", "name", "when", "number", "elsewhere", "twice"),
    [
        ("Lease", "request", "after", "1", "", 0),
        ("Lease", "request", "after", "2", "", 0),
        ("JobRun", "send_heartbeat", "before", "1", "", 0),
        ("JobRun", "send_heartbeat", "after", "1", "", 0),
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
        while auto_redrive.look_for_due(jobs, jobs.policies.in_force()) and jobs.run_next(
            lambda: False
        ):
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


def test_a_rule_that_is_off_redrives_nothing(
    poison: ModuleType, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The letters stay while those of another queue go."""
    intervals.change(monkeypatch, grace=timedelta(0))
    rule = {"after": 1, "times": 3}
    queues = {"orders": {"auto_redrive": rule}, "slow": {"auto_redrive": rule}}
    poison.dlq.override_policy("orders", timedelta(minutes=5), auto_redrive=False)
    start_worker({"dlq_queues": queues})
    put(poison)
    for _ in range(2):
        put(poison, source_queue="slow", dead_letter_queue="slow-DLQ")
        poll(lambda: poison.dlq.store.length("slow-DLQ") == 0, timeout_seconds=30)
    assert len(left(poison)) == 1
