"""A cluster in the style of pytest-celery: nodes that are killed and restarted."""

from __future__ import annotations

from nodes import *  # noqa: F403 - its fixtures
from nodes import PoisonSetup
from waiting import poll

from celery_dlq import Outcome, Reason


def test_a_cluster_of_two_workers_is_ready_and_named_as_its_nodes_are(
    celery_setup: PoisonSetup,
) -> None:
    """Broker, result backend and workers answer; a worker's node has the worker's own name."""
    assert len(celery_setup) == 4
    assert celery_setup.ready(control=True)
    answers = {name for answer in celery_setup.app.control.ping() for name in answer}
    assert answers == {node.hostname() for node in celery_setup.worker_cluster}


def test_poison_on_a_cluster_is_dead_lettered_once(celery_setup: PoisonSetup) -> None:
    """Any worker may get it, and it may move between the two many times."""
    sent = {
        name: celery_setup.send(name, name) for name in ("killed", "requeues", "to_dlq", "fails")
    }
    healthy = [celery_setup.send("healthy", f"healthy-{n}") for n in range(10)]

    found = celery_setup.letters(count=4)

    assert {letter.task_id: letter.reason for letter in found} == {
        sent["killed"]: Reason.MAX_DELIVERIES_EXCEEDED,
        sent["requeues"]: Reason.MAX_DELIVERIES_EXCEEDED,
        sent["to_dlq"]: Reason.REJECTED,
        sent["fails"]: Reason.FAILED,
    }
    assert len(found) == len(sent)
    assert [celery_setup.executions(name) for name in sent] == [3, 3, 1, 1]
    poll(lambda: all(celery_setup.app.AsyncResult(each).successful() for each in healthy))
    names = {node.hostname() for node in celery_setup.worker_cluster}
    assert {letter.worker_hostname for letter in found} <= names


def test_a_message_that_kills_its_workers_is_executed_at_most_max_deliveries_times(
    celery_setup: PoisonSetup,
) -> None:
    """It may come back to any worker; the fourth time it is not executed."""
    task_id = celery_setup.send("kills_worker", "victim")
    for executions in (1, 2, 3):
        poll(lambda n=executions: celery_setup.executions("victim") >= n, timeout_seconds=30)  # type: ignore[misc]
        dead = poll(celery_setup.dead, timeout_seconds=30)
        poll(celery_setup.unseen, timeout_seconds=30)
        for node in dead:
            node.restart()

    (letter,) = celery_setup.letters()

    assert (letter.task_id, letter.reason) == (task_id, Reason.MAX_DELIVERIES_EXCEEDED)
    assert (letter.deliveries, celery_setup.executions("victim")) == (3, 3)
    assert [delivery.outcome for delivery in letter.history] == [Outcome.VANISHED] * 3


def test_dead_letters_survive_the_restart_of_every_worker(celery_setup: PoisonSetup) -> None:
    """They are kept in Redis, and a worker that was restarted executes what is redriven."""
    celery_setup.send("fails", "x")
    before = celery_setup.letters()

    for node in celery_setup.worker_cluster:
        node.restart(force=True)

    assert celery_setup.letters() == before
    assert celery_setup.dlq.redrive("orders-DLQ").published == 1
    (again,) = celery_setup.letters()
    assert (again.task_id, again.redrives) == (before[0].task_id, 1)
    assert celery_setup.executions("x") == 2


def test_a_cluster_goes_on_after_its_broker_was_killed(celery_setup: PoisonSetup) -> None:
    """Workers connect again; letters of before and after are both there."""
    first = celery_setup.send("to_dlq", "before")
    celery_setup.letters()

    celery_setup.broker.kill()
    for node in celery_setup.worker_cluster:
        node.wait_for_log("Connection to broker lost")
    celery_setup.broker.restart()
    second = celery_setup.send("to_dlq", "after")

    assert [letter.task_id for letter in celery_setup.letters(count=2)] == [first, second]
