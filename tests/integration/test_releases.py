"""Held messages go back as they came, in order, and once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
import redis
from builders import a_letter, an_app, key_of
from click.testing import CliRunner
from servers import RedisServer
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.errors import DLQError, NotFound
from celery_dlq.features.hold import operations
from celery_dlq.features.hold.operations import Holds, WaitsInHolds
from celery_dlq.letters.record import Reason
from celery_dlq.operations.release import HeldQueues
from celery_dlq.policies.decisions import Taken
from celery_dlq.store.claims import Claims
from celery_dlq.store.holds import Hold
from celery_dlq.store.letters import Letters
from celery_dlq.store.worker_records import WorkerInfo
from celery_dlq.worker.wiring import guard_of

Make = Callable[..., DeadLetters]
# Of a publish, not of a message; the expiry itself is a header.
STALE = {"delivery_tag", "delivery_info", "body_encoding", "expiration"}


@pytest.fixture
def make(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """Makes the plugin for an app whose broker and held messages are on this server."""
    intervals.change(monkeypatch, hold_noticed=timedelta(0))
    with ExitStack() as stack:

        def make(**settings: Any) -> DeadLetters:
            dlq = DeadLetters(
                an_app(**{"broker_url": server.url, "dlq_url": server.url, **settings})
            )

            @dlq.app.task(name="shop.charge", shared=False)
            def charge() -> None:
                """Is the task of all held messages here."""

            stack.callback(dlq.close)
            return dlq

        yield make


@pytest.fixture(params=["in one step", "step by step"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Broker and store in one database, or as if they were not."""
    if request.param == "step by step":
        monkeypatch.setattr(Claims, "marker", lambda *_: None)
    return str(request.param)


def holds_of(dlq: DeadLetters) -> Holds:
    """The operations on holds."""
    return Holds(dlq.assembly)


def put(dlq: DeadLetters, hold: Hold, count: int) -> list[str]:
    """Hold messages; their task ids, oldest first."""
    ids = []
    for number in range(count):
        letter = a_letter(
            task_id=f"task-{number}",
            source_queue="orders",
            dead_letter_queue=hold.id,
            reason=Reason.HELD,
            headers=json.dumps({"id": f"task-{number}", "task": "shop.charge", "retries": 2}),
            properties="{}",
        )
        dlq.assembly.backend.held.dead_letter(letter, key_of(letter))
        ids.append(letter.task_id)
    return ids


def queued(client: redis.Redis) -> list[str]:
    """The task ids of the messages in the queue, the next one first."""
    return [json.loads(raw)["headers"]["id"] for raw in reversed(client.lrange("orders", 0, -1))]


def held(dlq: DeadLetters, hold: Hold) -> list[str]:
    """The task ids of the messages of a hold, oldest first."""
    store = dlq.assembly.backend.held
    return [one.letter.task_id for one in store.letters(hold.id, newest_first=False)]


def ended(dlq: DeadLetters, seconds: float = 60) -> Hold:
    """A hold that has ended by itself."""
    now = datetime.now(timezone.utc)
    hold = Hold(
        id="hold-1",
        task="shop.charge",
        since=now - timedelta(hours=1),
        until=now - timedelta(seconds=seconds),
        actor="ann@desk",
    )
    assert dlq.assembly.backend.instructions.replace(None, hold)
    return hold


def test_a_message_goes_back_as_it_came(make: Make, client: redis.Redis, way: str) -> None:
    """Body, retries, ETA, expiry, priority and headers of others; markers name hold and entry."""
    dlq = make(task_default_queue="orders")
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    dlq.app.send_task(
        "shop.charge", (1, "süß"), {"tenant": 42}, eta=later, expires=later, retries=2,
        headers={"tenant": "acme", "dlq_redrives": 1}, priority=3, link=dlq.app.signature("x"),
    )  # fmt: skip
    (key,) = client.keys("orders*")
    before = json.loads(client.lindex(key, 0))
    hold = dlq.hold("shop.charge")
    _take_all(dlq)
    assert dlq.holds()[0].held == 1
    (entry,) = dlq.assembly.backend.held.letters(hold.id, newest_first=False)
    assert client.keys("orders*") == []

    report = dlq.release(hold.id)

    assert (report.published, report.state) == (1, "done")
    after = json.loads(client.lindex(key, 0))
    assert after["body"] == before["body"]
    assert after["headers"] == {
        **before["headers"],
        "dlq_hold": hold.id,
        "dlq_letter": entry.letter.id,
    }
    properties = [
        {name: value for name, value in one["properties"].items() if name not in STALE}
        for one in (before, after)
    ]
    assert properties[0] == properties[1]
    assert dlq.holds() == []
    assert dlq.queues() == []


def _take_all(dlq: DeadLetters) -> None:
    """Let a worker hold all messages of the queue."""
    guard = guard_of(dlq.assembly, hostname="w", pid=1, flags_redelivery=True)
    guard.tick()
    with dlq.app.connection_for_read() as connection:
        queue = dlq.app.amqp.queues["orders"].bind(connection.default_channel)
        while (message := queue.get()) is not None:
            request = SimpleNamespace(
                id=message.headers["id"],
                message=message,
                request_dict=message.headers,
                delivery_info=message.delivery_info,
                task=SimpleNamespace(name=message.headers["task"]),
            )
            assert guard.verdict_before_start(request) == Taken()  # type: ignore[arg-type]
            message.ack()
    guard.close()


def test_messages_go_back_in_the_order_in_which_they_came(
    make: Make, client: redis.Redis, way: str
) -> None:
    """Behind those that wait in their queue; a few at a time where that is asked for."""
    dlq = make()
    hold = dlq.hold("shop.charge", reason="gateway down")
    ids = put(dlq, hold, 250)
    assert dlq.release(hold.id, limit=3).published == 3
    assert queued(client) == ids[:3]
    (one,) = dlq.holds()
    assert (one.hold, one.state, one.held) == (hold, "holding", 247)

    report = dlq.release(hold.id, rate=10_000)

    assert report.published == 247
    assert queued(client) == ids
    job = dlq.job(report.redrive_id)
    assert (job.kind, job.queue, job.state, job.total) == ("release", hold.id, "done", 247)
    actions = [(change.action.value, change.target, change.letters) for change in dlq.changes()]
    assert actions[::-1] == [
        ("held", hold.id, 0),
        ("released", hold.id, 3),
        ("released", hold.id, 247),
    ]


def test_the_release_of_an_empty_hold_ends_it(make: Make) -> None:
    """It is in the audit all the same."""
    dlq = make()
    hold = dlq.hold("shop.charge")
    assert dlq.release(hold.id).published == 0
    assert dlq.holds() == []
    assert [change.action.value for change in dlq.changes()] == ["released", "held"]


def test_a_hold_that_has_ended_keeps_nothing(make: Make) -> None:
    """A canary that is started within two seconds of a release was said to be held."""
    dlq = make()
    hold = dlq.hold("shop.charge")
    put(dlq, hold, 1)
    key = replace(key_of(next(dlq.held_messages(hold.id))), dead_letter_queue="orders-DLQ")
    message = SimpleNamespace(headers={"task": "shop.charge"}, queue="orders")

    def have() -> list[str]:
        waits = WaitsInHolds(dlq.app, dlq.assembly.backend)
        return waits.have([(key, message)])  # type: ignore[list-item]

    assert have() == [hold.id]
    dlq.end_hold(hold.id)
    assert have() == []


def test_a_second_release_has_nothing_to_release(make: Make) -> None:
    """Nor has one of a part of nothing; the first of an empty hold ends it."""
    dlq = make()
    hold = dlq.hold("shop.charge")
    with pytest.raises(DLQError, match="which has none; there is nothing to release"):
        dlq.release(hold.id, limit=5)
    put(dlq, hold, 2)
    assert dlq.release(hold.id).published == 2
    with pytest.raises(DLQError, match="has none and has ended; there is nothing to release"):
        dlq.release(hold.id)
    assert len(dlq.jobs()) == 1


def test_a_task_that_no_live_worker_has_is_asked_for(make: Make) -> None:
    """Without a live worker nobody knows; a pattern is fine if it fits one task."""
    dlq = make()
    names = dlq.assembly.known_names()
    assert names.doubt_of_task("shop.charge") == ""
    now = datetime.now(timezone.utc)
    info = WorkerInfo(hostname="w@1", pid=1, version="0", started_at=now, tasks=("shop.mail",))
    dlq.registry.register(info)
    assert "No live worker has registered a task 'shop.charge'" in names.doubt_of_task(
        "shop.charge"
    )
    assert [names.doubt_of_task(task) for task in (None, "shop.*", "shop.mail")] == [""] * 3
    obj = SimpleNamespace(app=dlq.app, no_color=True, quiet=False)
    for command in (["hold", "--task", "shop.charge"], ["breaker", "open", "shop.charge"]):
        done = CliRunner().invoke(commands, command, obj=obj)
        assert done.exit_code == 2, done.output
        assert "shop.charge all the same without a terminal" in done.output
    assert dlq.holds() == []
    done = CliRunner().invoke(commands, ["hold", "--task", "shop.charge", "--yes"], obj=obj)
    assert done.exit_code == 0, done.output
    assert len(dlq.holds()) == 1


def test_killed_between_publishing_and_removing_the_next_run_knows(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one script cannot do both: what the broker has is not published again."""
    monkeypatch.setattr(Claims, "marker", lambda *_: None)
    dlq = make()
    hold = dlq.hold("shop.charge")
    ids = put(dlq, hold, 5)
    with monkeypatch.context() as patch:
        patch.setattr(Letters, "remove", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            dlq.release(hold.id)
    assert (queued(client), held(dlq, hold)) == (ids, ids)
    report = dlq.release(hold.id)
    assert (report.published, report.finished, report.maybe_twice) == (0, 5, 0)
    assert (queued(client), held(dlq, hold)) == (ids, [])


RELEASES = """
import sys
sys.path.insert(0, sys.argv[2])
import intervals
from builders import an_app
from celery_dlq import DeadLetters
from celery_dlq.features.hold import operations as holds
from celery_dlq.operations.redrive import one_step
holds.RELEASE_RATE = 5000.0
intervals.inherit()
one_step.OneStep.batch_size = 20
dlq = DeadLetters(an_app(broker_url=sys.argv[1], dlq_url=sys.argv[1]))
print("ready", flush=True)
holds.Holds(dlq.assembly).release_ended(lambda: False)
"""


def test_killed_at_any_instant_each_message_is_held_or_in_its_queue(
    make: Make, server: RedisServer, client: redis.Redis
) -> None:
    """Never both, never neither, always in order; the next worker goes on with the job."""
    dlq = make()
    hold = ended(dlq)
    ids = put(dlq, hold, 2000)
    tests = str(Path(__file__).parents[1])
    ends: list[int] = []
    while held(dlq, hold):
        process = subprocess.Popen(
            [sys.executable, "-c", RELEASES, server.url, tests], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        if len(ends) < 6:
            left = dlq.assembly.backend.held.length(hold.id)
            poll(partial(_moves, process, dlq, hold, left))
            time.sleep(0.002 * len(ends))
            os.kill(process.pid, signal.SIGKILL)
        ends.append(process.wait(60))
        process.stdout.close()
        assert queued(client) + held(dlq, hold) == ids
    assert ends.count(-signal.SIGKILL) >= 3
    (job,) = dlq.jobs()
    assert (job.counts["published"], job.actor, job.state) == (2000, "ann@desk", "done")


def _moves(process: subprocess.Popen[bytes], dlq: DeadLetters, hold: Hold, left: int) -> bool:
    return process.poll() is not None or dlq.assembly.backend.held.length(hold.id) < left


# -- by workers ----------------------------------------------------------------------


def test_workers_release_a_hold_that_has_ended(make: Make, client: redis.Redis) -> None:
    """Once, by one of them, on behalf of who made it; then it is forgotten."""
    dlq = make()
    hold = ended(dlq, 600)
    ids = put(dlq, hold, 10)
    holds_of(dlq).release_ended(lambda: False)
    assert (queued(client), held(dlq, hold)) == (ids, [])
    (job,) = dlq.jobs()
    assert (job.actor, job.options) == ("ann@desk", {"rate": operations.RELEASE_RATE})
    holds_of(dlq).release_ended(lambda: False)
    assert dlq.assembly.backend.instructions.of(Hold) == []
    assert len(dlq.jobs()) == 1


def test_workers_leave_a_hold_alone_that_is_in_force(make: Make, client: redis.Redis) -> None:
    """Also one that has just ended: workers may not have noticed."""
    dlq = make()
    one = dlq.hold("shop.charge", span=timedelta(hours=1))
    put(dlq, one, 3)
    holds_of(dlq).release_ended(lambda: False)
    assert len(held(dlq, one)) == 3


def test_a_worker_that_stops_leaves_the_release_to_the_next(
    make: Make, client: redis.Redis
) -> None:
    """After its batch; the job waits and then goes on."""
    dlq = make()
    hold = ended(dlq)
    ids = put(dlq, hold, 1000)
    asked = iter([False, False, True])
    holds_of(dlq).release_ended(lambda: next(asked, True))
    (job,) = dlq.jobs()
    assert job.state == "waiting"
    assert queued(client) + held(dlq, hold) == ids
    holds_of(dlq).release_ended(lambda: False)
    assert queued(client) == ids
    assert [one.state for one in dlq.jobs()] == ["done"]


def test_workers_leave_a_release_alone_that_was_cancelled(make: Make) -> None:
    """Who cancelled it decides when it goes on; `dlq holds` shows what is left."""
    dlq = make()
    hold = ended(dlq)
    put(dlq, hold, 1000)
    asked = iter([False, False, True])
    holds_of(dlq).release_ended(lambda: next(asked, True))
    dlq.cancel(dlq.jobs()[0].id)
    holds_of(dlq).release_ended(lambda: False)
    (one,) = dlq.holds()
    assert (one.state, one.held > 0) == ("ended", True)
    assert dlq.release(hold.id).published == one.held


def test_a_message_that_cannot_go_back_does_not_keep_later_ones(
    make: Make, client: redis.Redis
) -> None:
    """A worker that stood still may hold a message after the release has read the last one."""
    dlq = make()
    hold = ended(dlq)
    client.xadd(f"dlq:held:{{{hold.id}}}:letters", {"nonsense": "x"})
    holds_of(dlq).release_ended(lambda: False)
    assert dlq.jobs()[0].counts["corrupt"] == 1
    ids = put(dlq, hold, 2)
    holds_of(dlq).release_ended(lambda: False)
    assert queued(client) == ids
    holds_of(dlq).release_ended(lambda: False)
    assert len(dlq.jobs()) == 2, "nothing is new"


def test_an_unreadable_entry_does_not_use_up_a_limit(make: Make, client: redis.Redis) -> None:
    """It is the oldest one each time."""
    dlq = make()
    hold = dlq.hold("shop.charge")
    client.xadd(f"dlq:held:{{{hold.id}}}:letters", {"nonsense": "x"})
    ids = put(dlq, hold, 2)
    assert dlq.release(hold.id, limit=1).published == 1
    assert queued(client) == ids[:1]


def test_an_error_of_one_hold_does_not_stop_the_others(
    make: Make, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next look tries it again."""
    dlq = make()
    put(dlq, ended(dlq), 1)
    now = datetime.now(timezone.utc)
    good = Hold(id="hold-2", since=now, until=now - timedelta(seconds=60))
    assert dlq.assembly.backend.instructions.replace(None, good)
    ids = put(dlq, good, 2)
    count = HeldQueues.length

    def fails(self: HeldQueues, hold: Hold) -> int:
        if hold.id == "hold-1":
            raise DLQError("its messages cannot be counted")
        return count(self, hold)

    monkeypatch.setattr(Holds, "forget_old", lambda *_: None)
    monkeypatch.setattr(HeldQueues, "length", fails)
    with suppress(DLQError):
        holds_of(dlq).release_ended(lambda: False)
    assert queued(client) == ids


def test_a_second_release_is_refused_while_one_runs(make: Make) -> None:
    """Two would mix up the order."""
    dlq = make()
    hold = dlq.hold("shop.charge")
    put(dlq, hold, 300)
    refused: list[str] = []

    def progress(_: int) -> None:
        if not refused:
            with pytest.raises(DLQError, match="is not being released") as error:
                make().release(hold.id)
            refused.append(str(error.value))

    assert dlq.release(hold.id, progress=progress).published == 300
    assert refused


# -- what is refused -----------------------------------------------------------------


def test_a_hold_that_nobody_has_is_named_with_those_there_are(make: Make) -> None:
    """A typo at three in the morning."""
    dlq = make()
    hold = dlq.hold("shop.charge")
    with pytest.raises(NotFound, match=hold.id):
        dlq.release("hold-1")


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "expected the task or the queue to hold, got neither"),
        ({"task": "shop.chrage"}, "did you mean 'shop.charge'"),
        ({"queue": "oders"}, "expected a queue that the app or a live worker knows"),
        ({"task": ""}, "expected task to be a name"),
        ({"task": "shop.charge", "span": timedelta(0)}, "at most 30 days, got"),
        ({"task": "shop.charge", "span": timedelta(days=31)}, "at most 30 days, got"),
        ({"task": "shop.charge", "conditions": ["tenant=1"]}, "expected args, kwargs or headers"),
    ],
)
def test_what_would_hold_nothing_is_refused(make: Make, options: dict[str, Any], text: str) -> None:
    """With what to write instead; nothing is held."""
    dlq = make()
    with pytest.raises(DLQError, match=text):
        dlq.hold(**options)
    assert dlq.holds() == []


def test_the_number_of_holds_is_bounded(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers compare each message with all of them."""
    monkeypatch.setattr(operations, "MOST_HOLDS", 2)
    dlq = make()
    for _ in range(2):
        dlq.hold("shop.charge")
    with pytest.raises(DLQError, match="expected fewer than 2 holds"):
        dlq.hold("shop.charge")
