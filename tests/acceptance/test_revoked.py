"""Celery remembers for hours which ids are revoked; a redriven message has an old id."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import ModuleType
from typing import Any

import pytest
import redis
from builders import a_letter, a_request, key_of
from raw import BODY, JSON, headers, publish
from waiting import poll
from workers import Place, Worker, run_python

from celery_dlq import DeadLetter, Outcome, Reason

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]
Operate = Callable[..., Any]

PAST = (datetime.now(timezone.utc) - timedelta(seconds=5)).isoformat()
DLQ = "orders-DLQ"
REVOKED = "revoked after it was redriven"

EVERYWHERE = [
    ("redis", "prefork"),
    ("redis", "threads"),
    ("redis", "gevent"),
    ("redis", "eventlet"),
    ("redis", "solo"),
    ("quorum", "prefork"),
    ("classic", "threads"),
]


@pytest.fixture
def operate(redis_url: str) -> Operate:
    """Call the plugin's or Celery's operations in a process that uses this broker."""
    code = (
        "import json, sys, poison_app as p\n"
        "name, args, options = json.loads(sys.argv[1])\n"
        "within = p.app.control if name in ('revoke', 'cancel_consumer') else p.dlq\n"
        "found = getattr(within, name)(*args, **options)\n"
        "print(json.dumps(found.to_json() if hasattr(found, 'to_json') else found, default=str))"
    )

    def run(place: Place, name: str, *args: Any, **options: Any) -> Any:
        done = run_python(redis_url, "-c", code, json.dumps([name, args, options]), **place.env)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


@pytest.fixture
def fix_the_bug(redis_url: str) -> Callable[[], None]:
    """Let ``fails`` succeed from now on."""

    def fix() -> None:
        with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
            client.set("fixed", "yes")

    return fix


def expire(redis_url: str, place: Place, *ids: str) -> None:
    """Publish messages that are past their expiry; their tasks leave the mark "x"."""
    broker = place.env.get("POISON_BROKER", redis_url)
    for task_id in ids:
        sent = headers("poison_app.healthy", task_id, expires=PAST)
        publish(broker, BODY, headers=sent, **JSON)


@pytest.mark.parametrize(("place", "pool"), [*EVERYWHERE, ("sqs", "prefork")], indirect=["place"])
def test_an_expired_message_runs_when_it_is_redriven(
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    operate: Operate,
    redis_url: str,
    place: Place,
    pool: str,
) -> None:
    """Its worker calls the id revoked from then on."""
    start_worker(env=place.env, pool=pool)
    expire(redis_url, place, "a", "b")
    assert [one.reason for one in letters(count=2)] == [Reason.EXPIRED] * 2

    assert operate(place, "redrive", DLQ)["published"] == 2

    poll(lambda: ran("x") == 2, timeout_seconds=20)
    assert letters(count=0) == []


@pytest.mark.parametrize("place", ["redis"], indirect=True)
@pytest.mark.parametrize("options", [{"canary": 1}, {"keep_count": True}, {"rate": 5}])
def test_an_expired_message_runs_however_it_is_redriven(
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    operate: Operate,
    redis_url: str,
    place: Place,
    options: dict[str, Any],
) -> None:
    """A canary passes, as its message succeeds."""
    start_worker(pool="threads")
    expire(redis_url, place, "a", "b")
    letters(count=2)
    report = operate(place, "redrive", DLQ, **options)
    assert (report["published"], report["state"]) == (2, "done")
    poll(lambda: ran("x") == 2, timeout_seconds=20)


@pytest.mark.parametrize("place", ["redis", "quorum"], indirect=True)
def test_an_expired_message_runs_when_a_worker_redrives_it(
    start_worker: Start,
    ran: Ran,
    letters: Letters,
    redis_url: str,
    place: Place,
) -> None:
    """Nobody sees a report there that says *published*."""
    start_worker(env=place.env, pool="threads")
    expire(redis_url, place, "a", "b")
    letters(count=2)
    # A worker runs the jobs of its own broker.
    code = f"import poison_app as p; p.dlq.start(p.dlq.plan('redrive', '{DLQ}').id)"
    assert run_python(redis_url, "-c", code, **place.env).returncode == 0
    poll(lambda: ran("x") == 2, timeout_seconds=60)
    assert letters(count=0) == []


@pytest.mark.parametrize(("place", "pool"), EVERYWHERE, indirect=["place"])
def test_what_is_revoked_before_its_redrive_runs_and_what_is_revoked_later_is_a_letter(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    operate: Operate,
    fix_the_bug: Callable[[], None],
    redis_url: str,
    place: Place,
    pool: str,
) -> None:
    """And that letter runs when it is redriven."""
    worker = start_worker(env=place.env, pool=pool)
    code = "import poison_app as p; [p.fails.apply_async((n,), task_id=n) for n in 'ab']"
    assert run_python(redis_url, "-c", code, **place.env).returncode == 0
    letters(count=2)
    fix_the_bug()
    operate(place, "revoke", "a")
    poll(lambda: "flagged as revoked: a" in worker.output, timeout_seconds=20)

    code = f"import poison_app as p; p.dlq.redrive('{DLQ}', delay=3); p.app.control.revoke('b')"
    assert run_python(redis_url, "-c", code, **place.env).returncode == 0

    poll(lambda: ran("a") == 2, timeout_seconds=20)
    (letter,) = letters()
    assert (letter.task_id, letter.reason, letter.redrives) == ("b", Reason.OPERATOR, 1)
    assert (letter.description, letter.deliveries, ran("b")) == (REVOKED, 0, 1)
    poll(lambda: poison.app.backend.get_state("b") == "REVOKED")
    operate(place, "redrive", DLQ)
    poll(lambda: ran("b") == 2, timeout_seconds=20)
    assert letters(count=0) == []


@pytest.mark.parametrize("place", ["redis", "quorum"], indirect=True)
def test_what_workers_tell_each_other_is_no_revocation_of_a_later_redrive(
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    operate: Operate,
    fix_the_bug: Callable[[], None],
    redis_url: str,
    tmp_path: Any,
    place: Place,
) -> None:
    """By mingle, and over a restart; but a revocation that came after the redrive holds there."""
    kept = ("--statedb", str(tmp_path / "state"), "--hostname", "first@x")
    first = start_worker(env=place.env, mingles=True, arguments=kept)
    expire(redis_url, place, "old")
    code = "import poison_app as p; [p.fails.apply_async((n,), task_id=n) for n in 'ab']"
    assert run_python(redis_url, "-c", code, **place.env).returncode == 0
    letters(count=3)
    fix_the_bug()
    operate(place, "revoke", "a")
    poll(lambda: "flagged as revoked: a" in first.output, timeout_seconds=20)

    operate(place, "cancel_consumer", "orders")
    poll(lambda: "Canceling queue orders" in first.output, timeout_seconds=20)
    assert operate(place, "redrive", DLQ)["published"] == 3
    operate(place, "revoke", "b")
    poll(lambda: "flagged as revoked: b" in first.output, timeout_seconds=20)
    second = start_worker(env=place.env, mingles=True, arguments=("--hostname", "second@x"))

    poll(lambda: ran("a") == 2 and ran("x") == 1, timeout_seconds=20)
    (letter,) = letters()
    assert (letter.task_id, letter.reason, ran("b")) == ("b", Reason.OPERATOR, 1)
    assert "sync with 1 nodes" in second.output
    first.stop()
    second.stop()
    operate(place, "redrive", DLQ)
    start_worker(env=place.env, arguments=kept)
    poll(lambda: ran("b") == 2, timeout_seconds=20)
    assert letters(count=0) == []


@pytest.mark.parametrize("place", ["redis", "classic"], indirect=True)
def test_what_a_hold_releases_is_never_gone(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    operate: Operate,
    redis_url: str,
    place: Place,
) -> None:
    """A redriven message runs as without the hold; what was revoked meanwhile is a letter."""
    worker = start_worker(env=place.env, pool="threads")
    expire(redis_url, place, "old")
    letters()
    hold = operate(place, "hold", "poison_app.healthy")["id"]
    poll(lambda: f"{hold} of" in worker.output, timeout_seconds=20)
    operate(place, "redrive", DLQ)
    sent = headers("poison_app.healthy", "revoked")
    publish(place.env.get("POISON_BROKER", redis_url), BODY, headers=sent, **JSON)
    poll(lambda: sum(one.held for one in poison.dlq.holds()) == 2, timeout_seconds=20)
    operate(place, "revoke", "revoked")
    poll(lambda: "flagged as revoked" in worker.output, timeout_seconds=20)

    assert operate(place, "release", hold)["published"] == 2

    poll(lambda: ran("x") == 1, timeout_seconds=20)
    (letter,) = letters()
    assert (letter.task_id, letter.reason) == ("revoked", Reason.OPERATOR)
    assert letter.description == "revoked; it was released from a hold"


@pytest.mark.parametrize(
    ("place", "pool"),
    [("redis", "prefork"), ("redis", "gevent"), ("redis", "eventlet"), ("quorum", "prefork")],
    indirect=["place"],
)
def test_a_redriven_task_that_is_terminated_is_a_letter(
    poison: ModuleType,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    operate: Operate,
    place: Place,
    pool: str,
) -> None:
    """A greenlet that is killed reports a success."""
    task = "poison_app.sleeps"
    letter = a_letter(
        task_name=task,
        body=json.dumps([["x", 60], {}, {}]).encode(),
        headers=json.dumps({**a_request(task=task), "id": "a"}),
        properties="{}",
        task_id="a",
    )
    poison.dlq.store.dead_letter(letter, key_of(letter))
    start_worker(env=place.env, pool=pool)
    operate(place, "redrive", DLQ)
    poll(lambda: ran("x") == 1, timeout_seconds=20)

    operate(place, "revoke", "a", terminate=True)

    (letter,) = letters()
    assert (letter.task_id, letter.reason, letter.deliveries) == ("a", Reason.OPERATOR, 1)
    assert [one.outcome for one in letter.history] == [Outcome.WORKER_LOST]
    poll(lambda: poison.app.backend.get_state("a") == "REVOKED")
    after = headers("poison_app.healthy", "after")
    publish(place.env.get("POISON_BROKER", poison.BROKER), BODY, headers=after, **JSON)
    poll(lambda: ran("x") == 2, timeout_seconds=20)
    assert len(letters()) == 1
