"""Celery's event of a letter, from real workers to Celery's own receivers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from celery.events.state import State
from waiting import poll
from workers import HERE, Worker, environment

from celery_dlq.worker.task_events import TASK_EVENT as NAME

Received = list[dict[str, Any]]


@contextmanager
def receiving(app: Any) -> Iterator[tuple[Received, State]]:
    """All events of an app's workers, and the state that Flower and others make of them."""
    seen: Received = []
    events, ended = State(), threading.Event()
    ready = threading.Event()

    def receive() -> None:
        with app.connection_for_read() as connection:

            def take(event: dict[str, Any]) -> None:
                events.event(dict(event))
                seen.append(event)

            receiver = app.events.Receiver(connection, handlers={"*": take})
            with receiver.consumer_context() as (own, _, _):
                ready.set()
                while not ended.is_set():
                    try:
                        own.drain_events(timeout=0.2)
                    except TimeoutError:
                        continue

    thread = threading.Thread(target=receive, daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield seen, events
    finally:
        ended.set()
        thread.join(10)


def ours(seen: Received) -> Received:
    """The events of letters."""
    return [event for event in seen if event["type"] == NAME]


@pytest.mark.parametrize("pool", ["prefork", "threads", "solo"])
def test_a_receiver_of_celerys_events_learns_of_each_letter(
    observed: ModuleType, redis_url: str, tmp_path: Path, pool: str
) -> None:
    """Once; the state that Flower shows stays the one that Celery's own events make."""
    worker = Worker(
        redis_url, tmp_path / "worker.log", arguments=("-E",), pool=pool, app="observed_app"
    )
    with receiving(observed.app) as (seen, events), worker:
        failed = observed.fails.delay("a")
        rejected = observed.rejects.delay("b")
        expected = {failed.id: "failed", rejected.id: "rejected"}
        if pool == "prefork":
            expected[observed.killed.delay("c").id] = "max_deliveries_exceeded"
        poll(lambda: len(ours(seen)) >= len(expected), timeout_seconds=40)
        poll(lambda: any(event["type"] == "task-failed" for event in seen), timeout_seconds=15)
    found = {event["uuid"]: event for event in ours(seen)}
    assert {task_id: event["reason"] for task_id, event in found.items()} == expected
    assert len(ours(seen)) == len(expected)
    letters = {letter.task_id: letter for letter in observed.dlq.letters("orders-DLQ")}
    for task_id, event in found.items():
        letter = letters[task_id]
        assert (event["name"], event["queue"]) == (letter.task_name, "orders")
        assert (event["dead_letter_queue"], event["letter_id"]) == ("orders-DLQ", letter.id)
        assert (event["fingerprint"], event["regressed"]) == (letter.fingerprint, False)
        assert {"hostname", "timestamp", "pid", "clock", "utcoffset"} <= set(event)
    assert events.tasks[failed.id].state == "FAILURE"
    assert events.tasks[rejected.id].name == "observed_app.rejects"


def test_a_worker_that_sends_no_events_of_tasks_sends_none_of_letters(
    observed: ModuleType, redis_url: str, tmp_path: Path
) -> None:
    """As Celery itself: heartbeats only. A letter is stored all the same."""
    worker = Worker(redis_url, tmp_path / "worker.log", app="observed_app")
    with receiving(observed.app) as (seen, _), worker:
        observed.fails.delay("a")
        poll(lambda: any(q.letters for q in observed.dlq.queues()), timeout_seconds=15)
        poll(lambda: any(e["type"] == "worker-heartbeat" for e in seen), timeout_seconds=15)
        worker.stop()
        poll(lambda: any(e["type"] == "worker-offline" for e in seen), timeout_seconds=15)
    assert {event["type"].partition("-")[0] for event in seen} == {"worker"}


def test_celerys_own_command_prints_the_event(
    observed: ModuleType, redis_url: str, tmp_path: Path
) -> None:
    """``celery events --dump``, as people look first."""
    dump = tmp_path / "dump.txt"
    with dump.open("w", encoding="utf-8") as file:
        command = [sys.executable, "-u", "-m", "celery", "-A", "observed_app", "events", "--dump"]
        process = subprocess.Popen(command, env=environment(redis_url), cwd=HERE, stdout=file)
    try:
        with Worker(redis_url, tmp_path / "worker.log", arguments=("-E",), app="observed_app"):
            poll(lambda: "celery@" in dump.read_text("utf-8"), timeout_seconds=15)
            observed.fails.delay("a")
            poll(
                lambda: "task dead lettered: observed_app.fails" in dump.read_text("utf-8"),
                timeout_seconds=15,
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
