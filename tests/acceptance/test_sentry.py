"""Sentry, as a worker's errors reach it: a real worker, a real SDK, a real HTTP server."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from fake_sentry import FakeSentry
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter

Start = Callable[..., Worker]


@pytest.fixture
def sentry() -> Iterator[FakeSentry]:
    with FakeSentry() as made:
        yield made


@pytest.fixture
def start(redis_url: str, tmp_path: Path) -> Iterator[Start]:
    """Start a worker whose Sentry is the fake one."""
    started: list[Worker] = []

    def run(
        dsn: str | None,
        conf: dict[str, Any] | None = None,
        pool: str = "prefork",
        **options: Any,
    ) -> Worker:
        env = {"OBSERVED_SENTRY": json.dumps({"dsn": dsn, **options})} if dsn else {}
        worker = Worker(
            redis_url, tmp_path / "worker.log", conf, env=env, app="observed_app", pool=pool
        )
        started.append(worker)
        return worker.start()

    yield run
    for worker in started:
        worker.stop()


def letters(app: ModuleType, count: int) -> list[DeadLetter]:
    """Wait for the letters of ``orders-DLQ``."""

    def enough() -> bool:
        return any(q.letters >= count for q in app.dlq.queues())

    poll(enough, timeout_seconds=30, every_seconds=0.05)
    return list(app.dlq.letters("orders-DLQ"))


def frames(event: dict[str, Any]) -> list[tuple[str, int, str, bool]]:
    """The frames of what escaped: file, line, function, whether it is the app's."""
    last = event["exception"]["values"][-1]
    return [
        (Path(f["abs_path"]).name, f["lineno"], f["function"], f["in_app"])
        for f in last["stacktrace"]["frames"]
    ]


def test_a_failure_is_one_event_that_tells_all_beside_sentrys_own_integration(
    observed: ModuleType, start: Start, sentry: FakeSentry
) -> None:
    """The exception and frames that the pool process saw, our tags, our fingerprint, no values."""
    worker = start(sentry.dsn, release="app-1", conf={"dlq_release": "shop-7"})
    observed.fails.delay("s3cret")
    (letter,) = letters(observed, 1)
    poll(lambda: sentry.events, timeout_seconds=30)
    worker.stop()  # and what the pool processes had to say is flushed

    (event,) = sentry.events
    assert event["event_id"] == letter.sentry_event_id
    assert event["fingerprint"] == [letter.fingerprint]
    assert event["release"] == "shop-7"
    tags = event["tags"]
    assert {name: tags[name] for name in ("task", "queue", "reason", "deliveries", "release")} == {
        "task": "observed_app.fails",
        "queue": "orders",
        "reason": "failed",
        "deliveries": "1",
        "release": "shop-7",
    }
    assert event["contexts"]["dead_letter"]["letter_ids"] == [letter.id]
    first, last = event["exception"]["values"]
    assert (first["type"], last["type"]) == ("KeyError", "LookupError")
    assert last["value"] == "no price, asked with 6 letters"
    assert [frame[2] for frame in frames(event)][-2:] == ["fails", "look_up"]
    assert frames(event)[-1][0] == "observed_app.py"
    assert frames(event)[-1][3] is True
    assert last["stacktrace"]["frames"][-1]["context_line"].startswith("raise LookupError(")
    assert "s3cret" not in json.dumps(event)


def test_a_flood_is_a_handful_of_events_and_a_group_that_comes_back_is_one_more(
    observed: ModuleType, start: Start, sentry: FakeSentry, redis_url: str
) -> None:
    """The first letter of a group, its tenth, its hundredth, and one that was redriven in vain.

    Sentry may have values here: ``send_default_pii`` is its own setting for that.
    """
    start(sentry.dsn, send_default_pii=True)
    for number in range(100):
        observed.fails.delay(str(number))
    found = letters(observed, 100)
    poll(lambda: len(sentry.events) >= 3, timeout_seconds=30)

    numbers = [e["contexts"]["dead_letter"]["letters_in_group"] for e in sentry.events]
    assert sorted(numbers) == [1, 10, 100]
    assert len(sentry.of(found[0].fingerprint)) == 3
    marked = {letter.sentry_event_id for letter in found if letter.sentry_event_id}
    assert marked == {event["event_id"] for event in sentry.events}
    tenth = sentry.events[numbers.index(10)]["contexts"]["dead_letter"]
    assert len(tenth["letter_ids"]) == 10
    assert set(tenth["letter_ids"]) <= {letter.id for letter in found}
    args = {json.loads(event["extra"]["args"])[0] for event in sentry.events}
    assert args <= {str(number) for number in range(100)}

    with redis.Redis.from_url(redis_url) as client:  # the last report was long ago
        client.hset(f"dlq:{{orders-DLQ}}:report:{found[0].fingerprint}", "at", 1)
    observed.dlq.redrive("orders-DLQ")
    poll(lambda: len(sentry.events) >= 6, timeout_seconds=30)

    groups = [event["tags"]["group"] for event in sentry.events]
    assert groups.count("came_back") == 1
    assert {event["tags"]["redrives"] for event in sentry.events[3:]} == {"1"}


def test_what_never_becomes_a_letter_stays_sentrys_own(
    observed: ModuleType, start: Start, sentry: FakeSentry
) -> None:
    """Unguarded tasks are reported by the CeleryIntegration, retries that go on by nobody."""
    start(sentry.dsn)
    assert observed.works_at_last.delay("a").get(timeout=30) == "a"
    observed.fails_unguarded.delay("b")
    observed.rejects.delay("c")
    (letter,) = letters(observed, 1)
    poll(lambda: len(sentry.events) >= 2, timeout_seconds=30)

    ours = sentry.of(letter.fingerprint)
    (theirs,) = [event for event in sentry.events if event not in ours]
    assert len(ours) == 1
    assert ours[0]["exception"]["values"][-1]["value"] == "no such order"
    mechanism = theirs["exception"]["values"][-1]["mechanism"]
    assert mechanism["type"] == "celery"


def test_lost_processes_and_unknown_tasks_are_reported_once(
    observed: ModuleType, start: Start, sentry: FakeSentry
) -> None:
    """Celery logs a line for each, and Sentry's logging integration makes events of lines."""
    start(sentry.dsn)
    observed.killed.delay("a")
    for number in range(20):
        observed.app.send_task("observed_app.gone", [number])
    found = letters(observed, 21)
    prints = {letter.fingerprint for letter in found}
    poll(lambda: sum(len(sentry.of(name)) for name in prints) >= 3, timeout_seconds=30)

    assert len(prints) == 2
    (lost,) = [x for x in sentry.events if x.get("tags", {}).get("task") == "observed_app.killed"]
    assert lost["tags"]["reason"] == "max_deliveries_exceeded"
    lines = [event["logger"] for event in sentry.events if event["logger"] != "celery_dlq"]
    assert lines in ([], ["multiprocessing"])  # three processes were lost


def test_a_sentry_that_hangs_holds_nothing_up(observed: ModuleType, start: Start) -> None:
    """Letters are stored, healthy tasks run, and the worker stops when Sentry's 2 s are over."""
    with socket.create_server(("127.0.0.1", 0)) as listening:  # accepts and never answers
        worker = start(f"http://public@127.0.0.1:{listening.getsockname()[1]}/42")
        for number in range(10):
            observed.fails.delay(str(number))
        assert observed.healthy.delay("a").get(timeout=30) == "a"
        assert len(letters(observed, 10)) == 10
        worker.process.terminate()
        assert worker.process.wait(30) == 0


TRACE, SPAN = "771a43a4192642f0b136d5159a501700", "1234567890abcdef"
TRACED = {"sentry-trace": f"{TRACE}-{SPAN}-1"}
TRACED = {**TRACED, "headers": TRACED}
"""The headers of a message that a process with Sentry's tracing publishes."""


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("rate", [1.0, 0.0])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_event_of_a_failed_task_belongs_to_its_trace(
    observed: ModuleType, start: Start, sentry: FakeSentry, pool: str, rate: float, reports: bool
) -> None:
    """The trace of who published it, as without this package (off), and for a death unseen too."""
    start(sentry.dsn, {"dlq_sentry": reports}, pool, traces_sample_rate=rate)
    task = observed.rejects if reports and pool == "threads" else observed.fails
    task.apply_async(("a",), headers=TRACED)
    poll(lambda: sentry.events, timeout_seconds=30)

    (event,) = sentry.events
    trace = event["contexts"]["trace"]
    assert trace["trace_id"] == TRACE
    assert trace["span_id"] != SPAN


@pytest.mark.parametrize("reports", [True, False])
@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_the_event_of_a_task_that_nobody_traced_before_belongs_to_its_transaction(
    observed: ModuleType, start: Start, sentry: FakeSentry, pool: str, reports: bool
) -> None:
    """The pool process begins the trace, and the letter's event is sent by another process."""
    worker = start(sentry.dsn, {"dlq_sentry": reports}, pool, traces_sample_rate=1.0)
    observed.fails.delay("a")
    poll(lambda: sentry.events, timeout_seconds=30)
    worker.stop()

    (event,) = sentry.events
    traces = {
        (one["contexts"]["trace"]["trace_id"], one["contexts"]["trace"]["span_id"])
        for one in sentry.transactions
        if one["transaction"] == "observed_app.fails"
    }
    trace = event["contexts"]["trace"]
    assert (trace["trace_id"], trace["span_id"]) in traces


def test_the_event_of_a_killed_task_belongs_to_its_trace(
    observed: ModuleType, start: Start, sentry: FakeSentry
) -> None:
    """Its process sends nothing; its message has the trace."""
    start(sentry.dsn, traces_sample_rate=1.0)
    observed.killed.apply_async(("a",), headers=TRACED)

    def ours() -> list[dict[str, Any]]:
        return [event for event in sentry.events if event["logger"] == "celery_dlq"]

    poll(ours, timeout_seconds=30)
    assert ours()[0]["contexts"]["trace"]["trace_id"] == TRACE
