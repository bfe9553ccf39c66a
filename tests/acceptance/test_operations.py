"""Operations as people run them: options, crashes, two at once, jobs, the bin, the audit."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import redis
from builders import a_letter, a_request, key_of
from command_line import Dlq
from waiting import poll
from workers import HERE, Worker, environment, run_python

from celery_dlq import DeadLetter, DLQError, LetterFilter
from celery_dlq.errors import NotFound, RedriveError
from celery_dlq.events import Action, Change
from celery_dlq.features.circuit_breaker.operations import Breakers
from celery_dlq.features.circuit_breaker.policy import (
    CircuitBreaker,
    Happened,
)
from celery_dlq.operations.edit import Edit
from celery_dlq.operations.redrive.message import Canary, RedriveOptions
from celery_dlq.store.keys import Keys

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]
QUEUE = "orders-DLQ"


def put(poison: ModuleType, task: str = "fails", **changes: Any) -> DeadLetter:
    """A letter of a task of the app, as if a worker had stored it."""
    letter = a_letter(**changes)
    body = changes.get("body", json.dumps([[letter.task_id], {}, {"callbacks": None}]).encode())
    headers = a_request(id=letter.task_id, root_id=letter.task_id, task=f"poison_app.{task}")
    values = {
        "task_name": f"poison_app.{task}",
        "body": body,
        "headers": json.dumps(headers),
        "properties": json.dumps({"correlation_id": letter.task_id, "priority": 0}),
        **changes,
    }
    letter = a_letter(**{**values, "task_id": letter.task_id})
    poison.dlq.store.dead_letter(letter, key_of(letter))
    return letter


def left(poison: ModuleType) -> list[str]:
    """The ids of the letters that are still there."""
    return [letter.id for letter in poison.dlq.letters(QUEUE)]


@pytest.fixture
def broker(redis_url: str) -> Iterator[redis.Redis]:
    """The broker's Redis."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def published(broker: redis.Redis, queue: str = "orders") -> list[dict[str, Any]]:
    """The messages that wait in a queue, oldest first."""
    return [json.loads(raw) for raw in reversed(broker.lrange(queue, 0, -1))]


# -- what a redrive publishes ----------------------------------------------------------


def test_options_change_only_what_they_say(poison: ModuleType, broker: redis.Redis) -> None:
    """Queue, delay and id; the body stays byte by byte."""
    letter = put(poison)
    report = poison.dlq.redrive(QUEUE, to_queue="slow", delay=timedelta(hours=1), new_id=True)
    (message,) = published(broker, "slow")
    headers = message["headers"]
    assert report.published == 1
    assert headers["id"] == headers["root_id"] == message["properties"]["correlation_id"]
    assert headers["id"] != letter.task_id
    assert headers["eta"] is not None
    assert (headers["dlq_redrives"], headers["dlq_letter"]) == (1, letter.id)
    assert left(poison) == []


def test_marks_of_brokers_are_taken_off(poison: ModuleType, broker: redis.Redis) -> None:
    """Old x-death headers would make RabbitMQ drop the message as a cycle."""
    headers = {
        **a_request(task="poison_app.fails"),
        "x-death": [{"count": 3}],
        "x-tenant": "a",
        "x-first-death-queue": "orders",
        "redelivered": True,
    }
    put(poison, headers=json.dumps(headers))
    poison.dlq.redrive(QUEUE)
    (message,) = published(broker)
    assert {n for n in message["headers"] if n.startswith("x-")} == {"x-tenant"}
    assert "redelivered" not in message["headers"]


def test_with_keep_count_earlier_deliveries_count(
    poison: ModuleType, start_worker: Start, letters: Letters, ran: Callable[[str], int]
) -> None:
    """Three of three are spent: none is left; forced, one more, then the next letter."""
    start_worker()
    sent = poison.requeues.delay("kept")
    (first,) = letters()
    assert (first.deliveries, first.max_deliveries) == (3, 3)
    report = poison.dlq.redrive(QUEUE, keep_count=True)
    assert (report.published, report.failures, report.refused) == (0, 0, 1)
    assert "max_deliveries of 3 is reached" in next(iter(report.refused_by))
    assert [x.id for x in poison.dlq.letters(QUEUE)] == [first.id]
    poison.dlq.redrive(QUEUE, keep_count=True, force=True)
    second = poll(
        lambda: [x for x in poison.dlq.letters(QUEUE) if x.redrives == 1], timeout_seconds=30
    )[0]
    assert (second.task_id, second.deliveries) == (sent.id, 3)
    assert ran("kept") == 4


def test_a_message_that_no_transport_writes_stays_and_stops_nothing(
    poison: ModuleType, broker: redis.Redis
) -> None:
    """A corrupt letter and a foreign entry are passed over; the others go."""
    broker.xadd(Keys().letters(QUEUE), {"mood": "bad"})
    broken = put(poison, headers="[1]")
    good = put(poison)
    report = poison.dlq.redrive(QUEUE)
    assert (report.published, report.corrupt) == (1, 2)
    assert published(broker)[0]["headers"]["dlq_letter"] == good.id
    assert left(poison) == [broken.id]
    assert [found.is_letter for found in poison.dlq.entries(QUEUE)] == [False, True]


def test_letters_that_arrive_during_a_redrive_are_not_touched(poison: ModuleType) -> None:
    """Otherwise one that dies again at once would go round forever."""
    put(poison)
    late: list[DeadLetter] = []
    poison.dlq.redrive(QUEUE, progress=lambda _n: late.append(put(poison)))
    assert left(poison) == [late[0].id]


# -- bad input --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"rate": 0}, "rate to be more than 0"),
        ({"rate": float("nan")}, "rate to be more than 0"),
        ({"limit": 0}, "limit to be 1 or more"),
        ({"delay": -1}, "delay to be 0 seconds or more"),
        ({"to_queue": ""}, "to_queue to be the name"),
        ({"to_queue": QUEUE}, "got the dead-letter queue"),
        ({"canary": 0}, "canary to be 1"),
        ({"canary": 1, "max_failures": -1}, "max_failures to be 0"),
    ],
)
def test_unusable_options_are_refused_before_anything_happens(
    poison: ModuleType, options: dict[str, Any], text: str
) -> None:
    """One sentence; no letter is claimed, no job begun."""
    letter = put(poison)
    with pytest.raises(DLQError, match=text):
        poison.dlq.redrive(QUEUE, **options)
    assert left(poison) == [letter.id]
    assert poison.dlq.jobs() == poison.dlq.changes() == []


def test_a_filter_that_matches_nothing_changes_nothing(poison: ModuleType) -> None:
    """No job, no line in the audit."""
    put(poison)
    assert poison.dlq.redrive(QUEUE, fingerprint="ffff").published == 0
    assert poison.dlq.discard(QUEUE, task_name="nobody").removed == 0
    assert poison.dlq.jobs() == poison.dlq.changes() == []


# -- edit -------------------------------------------------------------------------------


def test_an_edited_message_runs_with_its_new_arguments_and_keeps_the_trail(
    poison: ModuleType, start_worker: Start, ran: Callable[[str], int]
) -> None:
    """The header has who changed what, from what; links of the workflow stay."""
    letter = put(poison)
    report = poison.dlq.edit(letter.id, Edit(assign={"args.0": "new", "kwargs.fixed": True}))
    assert report.published == 1
    start_worker()
    poll(lambda: ran("new") == 1, timeout_seconds=30)
    assert ran(letter.task_id) == 0
    (change,) = poison.dlq.changes()
    assert (change.action, change.letters) == (Action.EDITED, 1)


def test_the_trail_of_an_edit_is_in_the_message(poison: ModuleType, broker: redis.Redis) -> None:
    """Should it die again, the next letter has it."""
    letter = put(poison)
    poison.dlq.edit(letter.id, Edit(args=["b"], kwargs={"x": 1}))
    (message,) = published(broker)
    (trail,) = json.loads(message["headers"]["dlq_edited"])
    assert trail["from"] == json.dumps([[letter.task_id], {}])
    assert trail["to"] == '[["b"], {"x": 1}]'
    assert "@" in trail["actor"]


@pytest.mark.parametrize(
    "changes",
    [
        {"content_type": "application/data"},
        {"content_type": "application/x-python-serialize", "body": b"\x80\x04."},
        {"body": b'{"no": "protocol 2"}'},
        {"body": b"broken"},
    ],
)
def test_signed_and_foreign_bodies_are_not_edited(
    poison: ModuleType, changes: dict[str, Any]
) -> None:
    """Refused in one sentence; the letter is not even claimed."""
    letter = put(poison, **changes)
    with pytest.raises(RedriveError, match="expected a JSON message of Celery"):
        poison.dlq.edit(letter.id, Edit(assign={"kwargs.a": 1}))
    assert left(poison) == [letter.id]


def test_an_edit_that_leads_nowhere_is_refused(poison: ModuleType) -> None:
    """A misspelt path must not become a redrive without the change."""
    letter = put(poison)
    with pytest.raises(RedriveError, match=r"'args\.7'"):
        poison.dlq.edit(letter.id, Edit(assign={"args.7": 1}))
    assert left(poison) == [letter.id]


# -- dry run ----------------------------------------------------------------------------


def test_a_dry_run_says_what_is_missing_and_changes_nothing(
    poison: ModuleType, start_worker: Start, broker: redis.Redis
) -> None:
    """A queue that is nowhere, and whether a live worker knows the task."""
    letter = put(poison)
    nowhere = poison.dlq.dry_run(QUEUE, to_queue="nowhere")
    assert (nowhere.letters, nowhere.ready) == (1, False)
    assert [check.found for check in nowhere.queues] == [False]
    assert [check.found for check in nowhere.tasks] == [None]  # no worker has said a word
    start_worker()
    ready = poison.dlq.dry_run(QUEUE)
    assert ready.ready
    assert [(check.name, check.found) for check in ready.queues] == [("orders", True)]
    assert left(poison) == [letter.id]
    assert broker.llen("orders") == 0


# -- canary -----------------------------------------------------------------------------


def test_a_canary_that_dies_stops_the_redrive(poison: ModuleType, start_worker: Start) -> None:
    """One of each group goes first; the bug is still there; the rest stays where it is."""
    start_worker()
    for n in range(12):
        put(poison, fingerprint=f"{n % 2:016x}")
    report = poison.dlq.redrive(QUEUE, canary=2, canary_wait=30)
    assert (report.state, report.published) == ("stopped", 2)
    assert report.canary is not None
    assert report.canary["died"] >= 1
    live = poison.dlq.job(report.redrive_id).canary
    assert (live["letters"], live["verdict"]) == (2, "died again")
    assert poison.dlq.job(report.redrive_id).note.endswith("of 2 letters of the canary died again")
    assert (live["died"], len(live["died_ids"])) == (report.canary["died"],) * 2
    assert {poison.dlq.get(letter_id).redrives for letter_id in live["died_ids"]} == {1}
    again = poll(lambda: [x for x in poison.dlq.letters(QUEUE) if x.redrives == 1])
    assert poison.dlq.job(report.redrive_id).state == "stopped"
    assert poll(lambda: len(left(poison)) == 12, timeout_seconds=30)
    assert poison.dlq.job(report.redrive_id).counts["died_again"] >= len(again)


def test_a_canary_that_lives_lets_the_rest_go(poison: ModuleType, start_worker: Start) -> None:
    """All of them end well; so the whole queue is redriven."""
    start_worker()
    for n in range(10):
        put(poison, task="healthy", fingerprint=f"{n % 3:016x}")
    report = poison.dlq.redrive(QUEUE, canary=3, canary_wait=30)
    assert (report.state, report.published) == ("done", 10)
    numbers = {"redriven": 3, "succeeded": 3, "died": 0, "open": 0, "held": 0}
    assert report.canary == {**numbers, "holds": [], "verdict": "passed"}
    live = poison.dlq.job(report.redrive_id).canary
    assert (live["verdict"], live["succeeded"], live["died_ids"]) == ("passed", 3, [])
    assert poll(
        lambda: poison.dlq.job(report.redrive_id).counts["succeeded"] == 10, timeout_seconds=30
    )
    assert poison.dlq.job(report.redrive_id).counts["died_again"] == 0


def test_a_canary_can_be_watched_while_it_waits(poison: ModuleType) -> None:
    """Its job says how many are open, for how long it has waited, and of how many seconds."""
    for _ in range(3):
        put(poison)
    plan = poison.dlq.plan("redrive", QUEUE, canary=2, canary_wait=60)
    poison.dlq.start(plan.id)
    runner = poison.dlq.runner().start()
    try:
        live = poll(
            lambda: (c := poison.dlq.job(plan.id).canary) and c["waited_seconds"] > 0 and c,
            timeout_seconds=30,
        )
    finally:
        assert runner.close()
    assert (live["letters"], live["open"], live["verdict"]) == (2, 2, "running")
    assert live["waited_seconds"] <= live["wait_seconds"] == 60
    assert poison.dlq.job(plan.id).state == "waiting"


def test_a_canary_nobody_runs_stops_the_redrive(poison: ModuleType) -> None:
    """Not to know is not to succeed."""
    for _ in range(3):
        put(poison)
    report = poison.dlq.redrive(QUEUE, canary=1, canary_wait=0.3)
    assert (report.state, report.published) == ("stopped", 1)
    assert report.canary["verdict"] == "not finished"
    note = poison.dlq.job(report.redrive_id).note
    assert note == "1 of 1 letters of the canary did not end in 0.3 s"
    assert len(left(poison)) == 2


def held_by(poison: ModuleType, how: str) -> str:
    """Let messages of the task be held; the id of the hold."""
    if how == "task":
        return str(poison.dlq.hold("poison_app.healthy").id)
    if how == "queue":
        return str(poison.dlq.hold(queue="orders", conditions=["args[0]!=x"]).id)
    circuits = Breakers(poison.dlq.assembly).circuits
    hold, _ = circuits.change_breaker(
        "poison_app.healthy", "orders", Happened.OPENED, CircuitBreaker()
    )
    return str(hold.id)


@pytest.mark.parametrize("how", ["task", "queue", "breaker"])
def test_a_canary_that_is_held_has_not_died(
    poison: ModuleType, start_worker: Start, dlq: Dlq, how: str
) -> None:
    """Plan, page and dry run name the hold before; the verdict comes at once and names it after."""
    worker = start_worker()
    hold_id = held_by(poison, how)
    poll(lambda: f"{hold_id} of" in worker.output, timeout_seconds=30)
    for n in range(5):
        put(poison, task="healthy", fingerprint=f"{n:016x}")
    named = "circuit breaker of task 'poison_app.healthy'" if how == "breaker" else hold_id

    ((what, letters),) = poison.dlq.plan("redrive", QUEUE).preview["waits_for"].items()
    assert (named in what, letters) == (True, 5)
    assert poison.dlq.dry_run(QUEUE).waits_for == {what: 5}
    assert f"5 letters would wait for {what}." in dlq("redrive", QUEUE, "--all", "--dry-run").stdout
    (shown,) = dlq("redrive", QUEUE, "--all", "--dry-run", "--json").lines
    assert shown["waits_for"] == {what: 5}

    asked = dlq("redrive", QUEUE, "--all")
    assert (asked.exit_code, f"5 letters would wait for {what}." in asked.stdout) == (2, True)

    began = time.monotonic()
    done = dlq("redrive", QUEUE, "--all", "--canary", "3", "--canary-wait", "120s", "--yes")
    assert (done.exit_code, time.monotonic() - began < 60) == (1, True)
    assert f"3 did not end, held by {hold_id}. Verdict: held." in done.stdout
    job = poison.dlq.jobs()[0]
    assert (job.state, job.canary["verdict"], job.counts["published"]) == ("stopped", "held", 3)
    assert [job.canary[name] for name in ("died", "open", "held")] == [0, 3, 3]
    assert job.note == f"the canary is held by {hold_id}: release that first, then resume this job"
    assert len(left(poison)) == 2

    poison.dlq.release(hold_id)
    assert poison.dlq.resume(job.id).state == "done"
    assert left(poison) == []


def test_a_plan_names_a_queue_without_a_worker_and_a_delay_that_is_too_long(
    poison: ModuleType, start_worker: Start, dlq: Dlq
) -> None:
    """What nobody consumes, or may not run yet, cannot end while it is watched."""
    start_worker()
    for _ in range(3):
        put(poison, task="healthy")
    assert poison.dlq.plan("redrive", QUEUE, canary=2).preview["waits_for"] == {}
    late = {"canary": 2, "delay": 60, "canary_wait": 5}
    waits = {"the delay of 60 s, which is longer than the canary is watched, 5 s": 2}
    assert poison.dlq.plan("redrive", QUEUE, **late).preview["waits_for"] == waits
    report = poison.dlq.redrive(QUEUE, **{**late, "canary_wait": 0.5})
    assert report.canary["verdict"] == "not finished"
    poison.app.control.cancel_consumer("orders", reply=True, limit=1)
    what = "a live worker that consumes queue 'orders'"
    poll(lambda: poison.dlq.dry_run(QUEUE).waits_for == {what: 1}, timeout_seconds=60)
    said = dlq(
        "redrive",
        QUEUE,
        "--all",
        "--dry-run",
        "--delay",
        "9s",
        "--canary",
        "1",
        "--canary-wait",
        "8s",
    ).stdout
    assert "1 letter would wait for the delay of 9 s, which is longer" in said
    assert f"1 letter would wait for {what}." in said


def test_a_stopped_canary_is_followed_by_another_one(poison: ModuleType) -> None:
    """To resume is not to do without; a job that passed its canary needs no second one."""
    for _ in range(4):
        put(poison, task="healthy")
    stopped = poison.dlq.redrive(QUEUE, canary=1, canary_wait=0.3, max_failures=0)
    assert (stopped.state, stopped.published) == ("stopped", 1)
    again = poison.dlq.resume(stopped.redrive_id)
    assert (again.state, again.published) == ("stopped", 2)
    assert again.canary["open"] == 1
    kept = poison.dlq.job(stopped.redrive_id).options["canary"]
    assert kept == {"letters": 1, "max_failures": 0, "wait_seconds": 0.3, "passed": False}
    assert RedriveOptions.from_json({"canary": kept}).canary == Canary(**kept)


def test_a_job_that_passed_its_canary_says_so(poison: ModuleType, start_worker: Start) -> None:
    """Killed after that, it goes on with the rest."""
    start_worker()
    for _ in range(3):
        put(poison, task="healthy")
    report = poison.dlq.redrive(QUEUE, canary=1, canary_wait=30)
    assert report.state == "done"
    assert poison.dlq.job(report.redrive_id).options["canary"]["passed"] is True


# -- discard, bin, audit ----------------------------------------------------------------


def test_discarded_letters_can_be_restored(poison: ModuleType) -> None:
    """They come back whole, with their group, once."""
    letter, other = put(poison), put(poison)
    before = poison.dlq.groups(QUEUE)
    report = poison.dlq.discard(QUEUE, ids=frozenset({letter.id}))
    assert report.removed == 1
    assert report.kept_until is not None
    assert left(poison) == [other.id]
    assert [found.text("id") for found in poison.dlq.discarded(QUEUE)] == [letter.id]
    assert poison.dlq.restore(letter.id[:8]) == QUEUE
    assert poison.dlq.get(letter.id) == letter
    assert [(g.fingerprint, g.letters) for g in poison.dlq.groups(QUEUE)] == [
        (g.fingerprint, g.letters) for g in before
    ]
    with pytest.raises(NotFound, match="expected the id of a discarded letter"):
        poison.dlq.restore(letter.id)


def test_purged_letters_are_gone(poison: ModuleType) -> None:
    """No bin has them."""
    gone = [put(poison, fingerprint="aa") for _ in range(5)]
    stays = put(poison, fingerprint="bb")
    assert poison.dlq.purge(QUEUE, fingerprint="aa").removed == 5
    assert left(poison) == [stays.id]
    with pytest.raises(NotFound):
        poison.dlq.restore(gone[0].id)


def test_an_entry_that_is_no_letter_can_be_discarded_and_restored(
    poison: ModuleType, broker: redis.Redis
) -> None:
    """By its position, which the list shows."""
    letter = put(poison)
    position = broker.xadd(Keys().letters(QUEUE), {"mood": "bad"}).decode()
    assert poison.dlq.entry(position)[1].key == position
    assert poison.dlq.discard(QUEUE, ids=frozenset({position})).removed == 1
    assert [found.key for found in poison.dlq.entries(QUEUE)] == [letter.id]
    poison.dlq.restore(position)
    (_, back) = poison.dlq.entries(QUEUE)
    assert back.fields == {b"mood": b"bad"}


def test_every_change_is_in_the_audit_and_on_the_bus(poison: ModuleType) -> None:
    """The audit has who, when, what, how many, and how they were chosen."""
    letter = put(poison, fingerprint="abc")
    heard: list[Any] = []
    poison.dlq.events.subscribe(heard.append)
    poison.dlq.discard(QUEUE, fingerprint="abc")
    poison.dlq.restore(letter.id)
    poison.dlq.redrive(QUEUE, LetterFilter(grep=letter.task_id), rate=1000)
    poison.dlq.events.unsubscribe(heard.append)
    changes = poison.dlq.changes()
    assert [change.action for change in changes] == [
        Action.REDRIVEN,
        Action.RESTORED,
        Action.DISCARDED,
    ]
    assert changes == [event for event in heard if isinstance(event, Change)][::-1]
    assert {(change.target, change.letters) for change in changes} == {(QUEUE, 1)}
    assert changes[0].detail["filter"] == {"grep": letter.task_id}
    assert changes[0].detail["options"] == {"rate": 1000}
    assert changes[2].detail["filter"] == {"fingerprint": "abc"}


# -- crashes ----------------------------------------------------------------------------

DIES = """
import os, signal, sys, time
from celery_dlq.store.jobs import JobStore
from celery_dlq.store.claims import Claims
from celery_dlq.store.letters import Letters
from celery_dlq.operations.redrive.publisher import Publisher
import poison_app

owner, name, when = sys.argv[1], sys.argv[2], sys.argv[3]
number = signal.Signals[os.environ.get("DIES_BY", "SIGKILL")]
if len(sys.argv) > 5:  # as if the broker were elsewhere
    Claims.marker = lambda *_: None
places = {"Letters": Letters, "Claims": Claims, "Publisher": Publisher, "JobStore": JobStore}
place = places[owner]
inner, calls = getattr(place, name), []

def dying(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == 2 and when == "before":
        os.kill(os.getpid(), number)
    result = inner(self, *args, **kwargs)
    if len(calls) == 2 and when == "after":
        os.kill(os.getpid(), number)
    return result

setattr(place, name, dying)
if sys.argv[4] == "runner":
    poison_app.dlq.runner().start()
    time.sleep(60)
else:
    getattr(poison_app.dlq, sys.argv[4])("orders-DLQ", limit=None)
"""


A_BATCH = 500


def dies(redis_url: str, owner: str, name: str, when: str, operation: str, *more: str) -> None:
    """Run an operation in a process that is SIGKILLed at the second call of a method."""
    done = run_python(redis_url, "-c", DIES, owner, name, when, operation, *more)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("owner", "name", "when", "twice"),
    [
        ("Claims", "claim", "before", 0),
        ("Claims", "claim", "after", 0),
        ("Publisher", "publish", "after", 500),
        ("Claims", "mark_published", "after", 0),
        # Removed in the background: the next letters may be on their way at that moment.
        ("Letters", "remove", "before", None),
        ("Letters", "remove", "after", None),
    ],
)
def test_a_redrive_killed_anywhere_is_finished_by_resuming_its_job(
    poison: ModuleType,
    redis_url: str,
    broker: redis.Redis,
    owner: str,
    name: str,
    when: str,
    twice: int | None,
) -> None:
    """No letter is lost; only what was published and not noted goes out twice, and is reported."""
    sent = {put(poison).id for _ in range(1100)}
    dies(redis_url, owner, name, when, "redrive", "elsewhere")
    (job,) = poison.dlq.jobs()
    assert job.state == "interrupted"
    report = poison.dlq.resume(job.id)
    assert report.state == "done"
    assert left(poison) == []
    found = [message["headers"]["dlq_letter"] for message in published(broker)]
    assert set(found) == sent
    doubled = len(found) - len(sent)
    assert doubled in (range(A_BATCH + 1) if twice is None else [twice])
    assert report.maybe_twice >= doubled
    assert broker.hlen(Keys().claims(QUEUE)) == 0
    with pytest.raises(DLQError, match="which is done"):
        poison.dlq.resume(job.id)


@pytest.mark.parametrize(
    ("owner", "name", "when", "elsewhere", "twice"),
    [
        ("JobStore", "replace", "before", (), 0),
        ("JobStore", "replace", "after", (), 0),
        ("Claims", "redrive", "before", (), 0),
        ("Claims", "redrive", "after", (), 0),
        ("Claims", "claim", "after", ("elsewhere",), 0),
        ("Publisher", "publish", "before", ("elsewhere",), 0),
        ("Publisher", "publish", "after", ("elsewhere",), A_BATCH),
        ("Claims", "mark_published", "after", ("elsewhere",), 0),
    ],
)
def test_a_job_whose_runner_is_killed_anywhere_is_finished_by_another(
    poison: ModuleType,
    redis_url: str,
    broker: redis.Redis,
    owner: str,
    name: str,
    when: str,
    elsewhere: tuple[str, ...],
    twice: int,
) -> None:
    """Nothing is lost; only what was published and not noted goes out twice, and is reported."""
    sent = {put(poison).id for _ in range(1100)}
    plan = poison.dlq.plan("redrive", QUEUE)
    poison.dlq.start(plan.id)
    if owner == "JobStore":  # its second call is the one of a second job
        other = poison.dlq.plan("purge", QUEUE, LetterFilter(task_name="none"))
        poison.dlq.start(other.id)
    dies(redis_url, owner, name, when, "runner", *elsewhere)
    for job in poison.dlq.jobs():
        assert job.state in ("waiting", "interrupted", "done")
        if job.state == "interrupted":
            poison.dlq.resume_in_background(job.id)
    runner = poison.dlq.runner().start()
    try:
        poll(
            lambda: {job.state for job in poison.dlq.jobs()} == {"done"},
            timeout_seconds=30,
        )
    finally:
        assert runner.close()
    assert left(poison) == []
    found = [message["headers"]["dlq_letter"] for message in published(broker)]
    assert set(found) == sent
    assert len(found) - len(sent) == twice
    counts = poison.dlq.job(plan.id).counts
    assert counts["maybe_twice"] >= twice
    if not elsewhere:  # there, only what a heartbeat has told is known of a killed run
        assert counts["published"] == len(sent)
    assert broker.hlen(Keys().claims(QUEUE)) == 0


def test_a_redrive_in_the_background_is_run_by_another_process(
    poison: ModuleType, dlq: Dlq, broker: redis.Redis
) -> None:
    """The command ends at once; whoever runs jobs runs it, and `dlq jobs` shows it."""
    for number in range(5):
        put(poison, exception_type="shop.Bug" if number else "shop.Other")
    shown = dlq("redrive", QUEUE, "--yes", "--exception", "Bug", "--rate", "100/s", "--background")
    assert shown.exit_code == 0, shown.stderr
    (job,) = dlq("jobs", "--json").lines
    assert (job["state"], job["total"], job["options"]) == ("waiting", 4, {"rate": 100.0})
    assert job["id"] in shown.stdout
    assert "redrive 4 letters of orders-DLQ" in shown.stdout
    assert broker.llen("orders") == 0
    runner = poison.dlq.runner().start()
    try:
        poll(lambda: poison.dlq.job(job["id"]).state == "done", timeout_seconds=30)
    finally:
        assert runner.close()
    assert (broker.llen("orders"), len(left(poison))) == (4, 1)
    assert dlq("redrive", QUEUE, "--all", "--background", "--dry-run").exit_code == 2
    none = dlq("redrive", QUEUE, "--yes", "--exception", "Bug", "--background")
    assert (none.exit_code, "no letter" in none.stderr.lower()) == (1, True)


@pytest.mark.parametrize("operation", ["discard", "purge"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_discard_killed_anywhere_is_finished_by_resuming_its_job(
    poison: ModuleType, redis_url: str, broker: redis.Redis, operation: str, when: str
) -> None:
    """Each letter is in its queue or in the bin, at every moment."""
    sent = {put(poison).id for _ in range(1100)}
    dies(redis_url, "Letters", "remove", when, operation)
    binned = {found.text("id") for found in poison.dlq.discarded(QUEUE)}
    here = set(left(poison))
    assert not here & binned
    if operation == "discard":
        assert here | binned == sent
    (job,) = poison.dlq.jobs()
    report = poison.dlq.resume(job.id)
    assert report.state == "done"
    assert left(poison) == []
    assert broker.hlen(Keys().claims(QUEUE)) == 0
    assert broker.zcard(Keys().groups(QUEUE)) == 0


def audited(poison: ModuleType) -> int:
    """The number of letters that the audit says were removed or restored."""
    return sum(change.letters for change in poison.dlq.changes())


STEPS = [
    ("purge", "Letters", "remove", ()),
    ("discard", "Letters", "remove", ()),
    ("discard", "Claims", "claim", ()),
    ("discard", "JobStore", "write", ()),
    ("restore_all", "Letters", "restore", ()),
    ("redrive", "Claims", "redrive", ()),
    ("redrive", "Claims", "mark_published", ("elsewhere",)),
    ("redrive", "Letters", "remove", ("elsewhere",)),
]


@pytest.mark.parametrize("by", ["SIGKILL", "SIGINT"])
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("operation", "owner", "name", "elsewhere"), STEPS)
def test_the_audit_of_what_was_interrupted_says_what_was_done(
    poison: ModuleType,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    owner: str,
    name: str,
    elsewhere: tuple[str, ...],
    when: str,
    by: str,
) -> None:
    """At every moment; each run has its own part and the sum, and one word says how it ended."""
    sent = {put(poison).id for _ in range(600)}
    before = 0
    if operation == "restore_all":
        before = poison.dlq.discard(QUEUE).removed
    monkeypatch.setenv("DIES_BY", by)
    arguments = ("-c", DIES, owner, name, when, operation, *elsewhere)
    done = run_python(redis_url, *arguments)
    assert done.returncode in (-signal.SIGKILL, -signal.SIGINT, 1), done.stderr
    here = left(poison)
    changed = len(here) if operation == "restore_all" else len(sent) - len(here)
    assert audited(poison) - before == changed
    job = poison.dlq.jobs()[0]
    ended = (name, when) == ("write", "after")  # its second save is that of its end
    assert job.state == ("done" if ended else "interrupted")
    if changed:
        assert poison.dlq.changes()[0].detail["state"] == job.state
    if not ended:
        poison.dlq.resume(job.id)
    assert len(left(poison)) == (len(sent) if operation == "restore_all" else 0)
    assert audited(poison) - before == len(sent)
    assert poison.dlq.changes()[0].detail["state"] == "done"
    assert poison.dlq.changes()[0].detail.get("letters_of_job", len(sent)) == len(sent)
    assert poison.dlq.job(job.id).changed == len(sent)


# -- two at once, jobs ------------------------------------------------------------------


def test_two_operators_never_redrive_one_letter_twice(
    poison: ModuleType, broker: redis.Redis
) -> None:
    """One redrives, one discards, one redrives too: each letter goes one way."""
    sent = [put(poison).id for _ in range(1500)]
    reports: list[Any] = []
    operations = (poison.dlq.redrive, poison.dlq.discard, poison.dlq.redrive)
    threads = [
        threading.Thread(target=lambda o=operation: reports.append(o(QUEUE)))
        for operation in operations
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    binned = [found.text("id") for found in poison.dlq.discarded(QUEUE)]
    went = [message["headers"]["dlq_letter"] for message in published(broker)]
    assert sorted([*binned, *went, *left(poison)]) == sorted(sent)
    done = [getattr(r, "published", 0) + getattr(r, "removed", 0) for r in reports]
    assert sum(done) == len(binned) + len(went)


def test_a_job_is_cancelled_between_two_letters_and_can_go_on(
    poison: ModuleType, broker: redis.Redis
) -> None:
    """Nothing is half done; resuming does the rest."""
    sent = {put(poison).id for _ in range(40)}
    begun, reports = threading.Event(), []
    thread = threading.Thread(
        target=lambda: reports.append(
            poison.dlq.redrive(QUEUE, rate=5, progress=lambda _n: begun.set())
        )
    )
    thread.start()
    assert begun.wait(30)
    (job,) = poison.dlq.jobs()
    assert job.state == "running"
    with pytest.raises(DLQError, match="which is running"):
        poison.dlq.resume(job.id)
    poison.dlq.cancel(job.id)
    thread.join(30)
    (report,) = reports
    assert report.state == poison.dlq.job(job.id).state == "cancelled"
    assert len(left(poison)) == 40 - report.published > 0
    assert broker.hlen(Keys().claims(QUEUE)) == 0
    broker.hset(Keys().jobs(), job.id, json.dumps(_without_rate(broker, job.id)))
    assert poison.dlq.resume(job.id).state == "done"
    assert {m["headers"]["dlq_letter"] for m in published(broker)} == sent
    assert len(published(broker)) == 40
    assert poison.dlq.job(job.id).counts["published"] == 40


def _without_rate(broker: redis.Redis, job_id: str) -> dict[str, Any]:
    """The job's state, hurried up."""
    state: dict[str, Any] = json.loads(broker.hget(Keys().jobs(), job_id) or b"{}")
    return {**state, "options": {}}


def test_unknown_jobs_are_refused(poison: ModuleType) -> None:
    """In one sentence."""
    for call in (poison.dlq.job, poison.dlq.cancel, poison.dlq.resume):
        with pytest.raises(NotFound, match="expected the id of a job, got 'x'"):
            call("x")


def test_a_redrive_leaves_no_thread_behind(poison: ModuleType) -> None:
    """The one that removes letters ends with the redrive."""
    put(poison)
    poison.dlq.redrive(QUEUE)
    assert not [t for t in threading.enumerate() if t.name.startswith("dlq-remover")]


RABBIT = """
import json, sys
import poison_app

to_queue, force = sys.argv[1:]
report = poison_app.dlq.redrive("orders-DLQ", to_queue=to_queue or None, force=bool(force))
print(json.dumps(report.to_json()))
"""


def test_rabbitmq_confirms_each_message_and_refuses_an_unknown_queue(
    poison: ModuleType, redis_url: str, request: pytest.FixtureRequest
) -> None:
    """A message to a queue that is nowhere would be dropped by the broker; the letter stays."""
    server = request.getfixturevalue("rabbit_server")
    server.delete_queues("orders")
    sent = {put(poison).id for _ in range(5)}

    def run(to_queue: str, force: str = "") -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, "-c", RABBIT, to_queue, force],
            env=environment(redis_url, POISON_BROKER=server.url),
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        report: dict[str, Any] = json.loads(done.stdout)
        return report

    with pytest.raises(subprocess.CalledProcessError) as raised:
        run("nowhere-at-all")
    assert "RedriveError: nothing was redriven" in raised.value.stderr
    refused = run("nowhere-at-all", "force")
    assert (refused["published"], refused["failures"], refused["doubtful"]) == (0, 5, 0)
    assert set(left(poison)) == sent
    report = run("")
    assert (report["published"], report["failures"], report["maybe_twice"]) == (5, 0, 0)
    assert left(poison) == []
