"""A redrive that is bound by running tasks: never more of them are open, whatever kills it."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import Any

import intervals
import pytest
import redis
from builders import DLQ
from celery.contrib.testing.worker import start_worker
from fork_server import ForkedProcess
from killing import KILLED, ends_of
from servers import RedisServer
from test_redrive_in_one_step import put
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.errors import DLQError
from celery_dlq.store.keys import Keys
from celery_dlq.store.worker_records import MessageKey

Make = Callable[..., DeadLetters]
BOUND = 3


class Fleet:
    """Takes messages as workers do, and lets one succeed every few milliseconds."""

    def __init__(self, server: RedisServer, database: int = 0) -> None:
        self.broker = redis.Redis.from_url(server.url)
        self.store = redis.Redis.from_url(f"{server.url.removesuffix('0')}{database}")
        self.running: list[str] = []
        self.took: list[str] = []
        self.most = 0
        self.works = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Fleet:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.005):
            while (entry := self.broker.rpop("orders")) is not None:
                self.running.append(json.loads(entry)["headers"]["id"])
                self.took.append(self.running[-1])
            self.most = max(self.most, len({*self.running}))
            if self.running and self.works.is_set():
                task_id = self.running.pop(0)
                if task_id not in self.running:  # a copy of it
                    key = MessageKey(dead_letter_queue=DLQ, task_id=task_id, redrives=1)
                    self.store.delete(Keys().run(key))


@pytest.fixture(params=[0, 3], ids=["one step", "claims"])
def fleet(request: pytest.FixtureRequest, server: RedisServer) -> Iterator[Fleet]:
    """Workers; letters are beside the broker or in another database."""
    with Fleet(server, request.param) as found:
        yield found


@pytest.fixture
def dlq(
    make: Make, server: RedisServer, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> DeadLetters:
    """An app whose letters are where the fleet looks."""
    intervals.change(monkeypatch, short_look=0.01)
    return make(
        dlq_url=f"{server.url.removesuffix('0')}{fleet.store.get_connection_kwargs()['db']}"
    )


def test_no_more_messages_are_open_than_the_bound(dlq: DeadLetters, fleet: Fleet) -> None:
    """Also those of the canary; all letters go, and the job says how many are open."""
    sent = [letter.task_id for letter in put(dlq.store, 25)]
    fleet.works.set()
    report = dlq.redrive(DLQ, at_most=BOUND, canary=5, force=True)
    assert (report.state, report.published) == ("done", 25)
    poll(lambda: len(fleet.took) == 25)
    assert sorted(fleet.took) == sorted(sent)
    assert fleet.most <= BOUND
    assert dlq.job(report.redrive_id).unfinished["open"] <= BOUND
    assert report.canary is not None
    assert report.canary["redriven"] == BOUND


def test_it_stops_where_nothing_ends_and_says_what_is_in_doubt(
    dlq: DeadLetters, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It never passes its bound by itself; who resumes it has looked at those in doubt."""
    intervals.change(monkeypatch, unfinished=0.2)
    put(dlq.store, 8)
    report = dlq.redrive(DLQ, at_most=BOUND, force=True)
    assert (report.state, report.published) == ("stopped", BOUND)
    assert report.note.startswith("3 of its messages have not ended, and none did lately")
    assert dlq.job(report.redrive_id).unfinished["in_doubt"] == BOUND
    fleet.works.set()
    assert dlq.resume(report.redrive_id).state == "done"
    poll(lambda: len(fleet.took) == 8)


def test_letters_that_others_have_take_no_place(dlq: DeadLetters, fleet: Fleet) -> None:
    """They were noted before it was known; their messages are never published by this job."""
    letters = put(dlq.store, 6)
    ids = [letter.id for letter in letters[:BOUND]]
    dlq.store.claims.claim(DLQ, ids, owner="other", lease_seconds=60)
    fleet.works.set()
    report = dlq.redrive(DLQ, at_most=BOUND, force=True)
    assert (report.state, report.published, report.skipped) == ("done", 3, 3)


@pytest.mark.parametrize("most", [0, -1, 1001])
def test_a_bound_that_is_none_is_refused(make: Make, most: int) -> None:
    """Before anything is done."""
    with pytest.raises(DLQError, match="expected at_most to be 1 to 1000 messages, got"):
        make().redrive(DLQ, at_most=most)


REDRIVES = """
import sys
from dataclasses import replace
from builders import DLQ, an_app
from celery_dlq import DeadLetters, timing
timing.current = replace(timing.current, short_look=0.01)
dlq = DeadLetters(an_app(broker_url=sys.argv[1], dlq_url=sys.argv[2]))
print("ready", flush=True)
jobs = [job for job in dlq.jobs() if job.state == "interrupted"]
dlq.resume(jobs[0].id) if jobs else dlq.redrive(DLQ, at_most=3, force=True)
"""


@pytest.mark.full
def test_killed_at_any_instant_it_goes_on_within_its_bound(
    dlq: DeadLetters, fleet: Fleet, server: RedisServer
) -> None:
    """Whoever resumes it counts what was noted before it was published."""
    sent = [letter.task_id for letter in put(dlq.store, 60)]
    url = f"{server.url.removesuffix('0')}{fleet.store.get_connection_kwargs()['db']}"
    fleet.works.set()

    def some_are_taken(process: ForkedProcess) -> None:
        before = len(fleet.took)
        poll(lambda: len(fleet.took) > before + 1 or process.poll() is not None)

    ends = [*ends_of(REDRIVES, server.url, url, wait=some_are_taken, kills=5, step_seconds=0.004)]
    poll(lambda: {*fleet.took} == {*sent})
    assert fleet.most <= BOUND
    assert ends.count(KILLED) >= 3
    (job,) = dlq.jobs()
    assert job.state == "done"


def test_it_stops_where_all_its_messages_are_held_also_when_it_is_resumed(
    make: Make, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It says which hold has them, and does not wait for what a person must release first."""
    intervals.change(monkeypatch, tick=0.05, short_look=0.05, unfinished=15)
    guarded = {"dlq_queues": {"orders": {"max_deliveries": 3}}, "task_default_queue": "orders"}
    dlq, ran = make(broker_url=redis_url, dlq_url=redis_url, **guarded), list[Any]()

    def charge(*arguments: Any, **_more: Any) -> None:
        ran.append(arguments)

    dlq.app.task(charge, name="shop.charge", shared=False, acks_late=True)
    sent = [letter.task_id for letter in put(dlq.store, 6)]
    hold = dlq.hold("shop.charge").id
    with start_worker(dlq.app, perform_ping_check=False, queues=["orders"], pool="solo"):
        report = dlq.redrive(DLQ, at_most=BOUND)
        for state in (report.state, dlq.resume(report.redrive_id).state):
            assert state == "stopped"
            job = dlq.job(report.redrive_id)
            assert job.note.startswith(f"{BOUND} of its messages have not ended: {hold} holds them")
            assert (job.unfinished["open"], job.unfinished.get("in_doubt", 0)) == (BOUND, 0)
            assert [one.command.split()[0] for one in dlq.next_steps(job.id)][:1] == ["release"]
        assert ran == []
        dlq.release(hold)
        assert dlq.resume(report.redrive_id).state == "done"
        poll(lambda: len(ran) == len(sent))
    assert dlq.job(report.redrive_id).unfinished["holds"] == []
