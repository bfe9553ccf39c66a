"""What a worker does for circuit breakers: real requests, a store in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import intervals
import pytest
from billiard.einfo import ExceptionInfo
from celery.exceptions import Retry, TaskRevokedError
from celery.worker import state
from click.testing import CliRunner
from guarded_worker import Pool, Worker

from celery_dlq import signals
from celery_dlq.cli.commands import dlq
from celery_dlq.errors import DLQError, NotFound, StoreUnavailable
from celery_dlq.events import Action, Change
from celery_dlq.features.circuit_breaker import CIRCUITS, policy
from celery_dlq.features.circuit_breaker.ends import CircuitStore, hold_id_of
from celery_dlq.features.circuit_breaker.policy import Ends, Succeeded
from celery_dlq.features.sentry import observer, reporter
from celery_dlq.features.sentry.events import event_of_opening
from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.operations.in_force import InForce
from celery_dlq.store.holds import OPEN, RELEASING, Circuit
from celery_dlq.store.metrics import INTERNAL_ERRORS, STORE_ERRORS
from celery_dlq.transport.publications import broker_name


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Celery remembers requests that run, and tasks that are revoked, for the whole process."""
    yield
    state.reset_state()


@pytest.fixture
def worker(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker whose task is held after two deaths, and released after two probes."""
    intervals.change(monkeypatch, probe=60.0)
    monkeypatch.setattr(policy, "PROBES", 2)
    return Worker(tmp_path, circuit_breaker={"deaths": 2})


def start(worker: Worker, **headers: Any) -> Any:
    """A message that a process has accepted."""
    worker.id = str(uuid4())
    return worker.start(**headers)


def fail(request: Any, exc: Exception | None = None) -> None:
    """End it by an exception."""
    try:
        raise exc or ConnectionError("away")
    except Exception:
        request.on_failure(ExceptionInfo(), return_ok=True)


def succeed(request: Any) -> None:
    """End it by its return."""
    request.on_success((False, None, 0.1))


def circuit(worker: Worker) -> Circuit | None:
    """The breaker of the task, if it is not closed."""
    found = [one.hold.circuit for one in worker.dlq.breakers()]
    return found[0] if found else None


def opened(worker: Worker) -> str:
    """Let it open; return the mark of the messages that it releases."""
    for _ in range(2):
        fail(start(worker))
    (one,) = worker.dlq.breakers()
    return one.hold.marker


def test_deaths_of_one_cause_open_it_and_the_next_message_is_held(worker: Worker) -> None:
    """At once in the worker that saw the last one; log, metric, signal and audit have it once."""
    told: list[Change] = []

    def receiver(change: Change, sender: str, **_: Any) -> None:
        assert sender == "shop.charge"
        told.append(change)

    signals.circuit_opened.connect(receiver)
    try:
        fail(start(worker))
        assert circuit(worker) is None
        fail(start(worker))
    finally:
        signals.circuit_opened.disconnect(receiver)
    found = circuit(worker)
    assert found is not None
    assert (found.state, found.task, found.queue) == (OPEN, "shop.charge", "orders")
    worker.id = str(uuid4())
    with pytest.raises(TaskRevokedError):
        worker.receive().execute_using_pool(Pool())
    (one,) = worker.dlq.holds()
    assert (one.held, one.state, one.hold.actor) == (1, "open", "circuit_breaker")
    assert "2 of 2 executions within 60 s died" in one.hold.reason
    letters = {letter.id for letter in worker.dlq.letters("orders-DLQ")}
    assert len(letters) == 2
    assert found.letter in letters
    assert [change.target for change in told] == [one.hold.id]
    assert [change.action for change in worker.dlq.changes()] == [Action.CIRCUIT_OPENED]
    assert worker.counted(CIRCUITS) == {("shop.charge", "orders", "open"): 1}
    event = event_of_opening(told[0])
    assert event["tags"]["task"] == "shop.charge"
    assert "2 of 2 executions" in event["logentry"]["message"]


def test_an_opening_is_one_event_in_sentry(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the one of the group of its letters."""
    sent: list[Any] = []
    for module in (observer, reporter):
        monkeypatch.setattr(module, "sentry_client", lambda: SimpleNamespace(options={}))
    monkeypatch.setattr(reporter, "send_event", sent.append)
    opened(worker)
    assert len([event for event in sent if "circuit_breaker" in event["contexts"]]) == 1


@pytest.mark.parametrize(("successes", "opens"), [(0, True), (1, False)])
def test_the_share_of_executions_counts(worker: Worker, successes: int, opens: bool) -> None:
    """A success that this worker has not told yet counts, too."""
    for _ in range(successes):
        succeed(start(worker))
    opened_by = [start(worker), start(worker)]
    for request in opened_by:
        fail(request)
    assert (circuit(worker) is not None) is opens


def test_what_is_retried_counts_neither_way(worker: Worker) -> None:
    """It did not end."""
    for _ in range(3):
        fail(start(worker), Retry(exc=ConnectionError("away")))
    for _ in range(2):
        fail(start(worker))
    assert circuit(worker) is not None


def test_probes_close_it_in_a_row(worker: Worker) -> None:
    """One that dies, or is retried, begins the count anew."""
    marker = opened(worker)
    for end, successes in ((succeed, 1), (fail, 0), (succeed, 1)):
        end(start(worker, **{HOLD_HEADER: marker}))
        found = circuit(worker)
        assert found is not None
        assert (found.state, found.successes) == (OPEN, successes)
    fail(start(worker, **{HOLD_HEADER: marker}), Retry(exc=ConnectionError("away")))
    for _ in range(2):
        succeed(start(worker, **{HOLD_HEADER: marker}))
    found = circuit(worker)
    assert found is not None
    assert found.state == RELEASING
    actions = [change.action for change in worker.dlq.changes()]
    assert actions == [Action.CIRCUIT_CLOSED, Action.CIRCUIT_OPENED]
    assert worker.dlq.assembly.backend.part(CircuitStore).count_death("f", _told(worker)) == Ends(
        1, 1
    )


def _hold_id(worker: Worker) -> str:
    return hold_id_of("shop.charge", "orders", broker_name(worker.app))


def _told(worker: Worker) -> Succeeded:
    """No success."""
    return Succeeded(_hold_id(worker), 60, 0)


def test_a_success_that_is_no_probe_closes_nothing(worker: Worker) -> None:
    """It started before the opening."""
    before = [start(worker) for _ in range(3)]
    opened(worker)
    for request in before:
        succeed(request)
    found = circuit(worker)
    assert found is not None
    assert (found.state, found.successes) == (OPEN, 0)


def test_a_released_message_that_dies_of_the_cause_opens_it_again(worker: Worker) -> None:
    """And what was released before is held once more, beside its first entry."""
    marker = opened(worker)
    worker.dlq.close_breaker("shop.charge")
    worker.guard.tick()
    fail(start(worker, **{HOLD_HEADER: marker}), ValueError("another"))
    found = circuit(worker)
    assert found is not None
    assert found.state == RELEASING
    fail(start(worker, **{HOLD_HEADER: marker}))
    found = circuit(worker)
    assert found is not None
    assert found.state == OPEN
    worker.id = str(uuid4())
    for headers in ({}, {HOLD_HEADER: marker}, {HOLD_HEADER: marker}):
        with pytest.raises(TaskRevokedError):
            worker.receive(**headers).execute_using_pool(Pool())
    assert [one.held for one in worker.dlq.holds()] == [2]


def test_a_store_that_is_away_changes_nothing(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tasks run and end; successes are told once it is back."""

    def away(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("away")

    backend = worker.dlq.assembly.backend
    for name in ("count_death", "succeeded"):
        monkeypatch.setattr(backend.part(CircuitStore), name, away)
    succeed(start(worker))
    for _ in range(3):
        fail(start(worker))
    worker.guard.tick()
    assert circuit(worker) is None
    assert worker.counted(STORE_ERRORS)[("circuit_breaker",)] == 3
    assert worker.counted(INTERNAL_ERRORS) == {}
    monkeypatch.undo()
    for _ in range(40):  # it rests after an outage
        worker.guard.tick()
    assert backend.part(CircuitStore).count_death("f", _told(worker)).all >= 1


def test_by_hand(worker: Worker) -> None:
    """Open, close, and what is refused."""
    with pytest.raises(NotFound, match="expected a task whose circuit breaker is open"):
        worker.dlq.close_breaker("shop.charge")
    hold = worker.dlq.open_breaker("shop.charge", reason="known outage")
    assert (hold.reason, hold.queue, hold.task) == ("known outage", "orders", "shop.charge")
    assert worker.dlq.open_breaker("shop.charge").reason == "known outage"
    (closed,) = worker.dlq.close_breaker("shop.charge", "orders")
    assert closed.circuit is not None
    assert closed.circuit.state == RELEASING
    with pytest.raises(NotFound, match="expected a queue that the app or a live worker knows"):
        worker.dlq.open_breaker("shop.charge", "mail")
    with pytest.raises(NotFound, match=r"did you mean 'shop\.charge'"):
        worker.dlq.open_breaker("shop.chrage")
    worker.app.amqp.queues.add("mail")
    with pytest.raises(DLQError, match="expected a task with circuit_breaker in its policy"):
        worker.dlq.open_breaker("shop.charge", "mail")


def test_a_task_whose_policy_has_none_is_not_counted(tmp_path: Any) -> None:
    """Nor does the store hear of it."""
    worker = Worker(tmp_path, max_deliveries=3)
    for _ in range(30):
        fail(start(worker))
    succeed(start(worker))
    assert worker.dlq.holds() == []
    backend = worker.dlq.assembly.backend
    assert backend.client.keys(backend.keys.breaker_ends("*")) == []


def test_an_override_of_the_policy_begins_and_ends_the_counting(worker: Worker) -> None:
    """Without a deploy."""
    worker.dlq.override_policy("orders", timedelta(hours=1), circuit_breaker='{"deaths": 1}')
    worker.guard.tick()
    fail(start(worker))
    assert circuit(worker) is not None


def run(worker: Worker, *arguments: str) -> str:
    """Run ``dlq breaker``; return what it prints."""
    obj = SimpleNamespace(app=worker.app, no_color=True, quiet=False)
    done = CliRunner(env={"COLUMNS": "200"}).invoke(dlq, ["breaker", *arguments], obj=obj)
    assert done.exit_code == 0, done.output
    return done.output


def test_the_commands(worker: Worker) -> None:
    """Show, open, close; the pages have a line, too."""
    assert "All circuit breakers are closed." in run(worker)
    assert "shop.charge" in run(worker, "open", "shop.charge", "--reason", "maintenance")
    shown = run(worker)
    for text in ("shop.charge", "orders", "open", "0 of 2", "every 60 s", "maintenance"):
        assert text in shown
    (line,) = run(worker, "--json").splitlines()
    assert json.loads(line)["circuit"]["state"] == "open"
    (shown_on_pages,) = InForce.of(worker.dlq.assembly, []).held
    assert (shown_on_pages.state, shown_on_pages.held) == ("open", 0)
    assert "is closed; workers release" in run(worker, "close", "shop.charge")
    assert "releasing" in run(worker)
