"""What a redrive needs, and whether it would be lost."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from builders import NOW, a_letter, an_app
from kombu import Queue

from celery_dlq.errors import RedriveError
from celery_dlq.operations.redrive import checks as module
from celery_dlq.operations.redrive.checks import Targets, dry_run, refuse_lost
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.store.worker_records import MAX_TASKS, WorkerInfo


def a_worker(*queues: str, tasks: tuple[str, ...] = ("shop.charge",)) -> WorkerInfo:
    """A live worker."""
    name = f"celery@{len(queues)}"
    return WorkerInfo(
        hostname=name, pid=1, version="0.1.0", started_at=NOW, queues=queues, tasks=tasks
    )


def an_entry(queue: str = "orders", task: str = "shop.charge") -> RawEntry:
    """An entry of a letter."""
    fields = a_letter(source_queue=queue, task_name=task).to_fields()
    return RawEntry("1-0", {name.encode(): value for name, value in fields.items()})


def targets(*workers: WorkerInfo, **more: Any) -> Targets:
    """The targets of an app that declares `mails`, on a broker without queues."""
    app = an_app(task_queues=[Queue("mails")])
    return Targets(app, workers, **more)


@pytest.fixture(autouse=True)
def nothing_on_the_broker(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A broker that has no queue and makes each at its first publish; the names it was asked."""
    asked: list[str] = []
    monkeypatch.setattr(module, "on_broker", lambda _app, name: (bool(asked.append(name)), True))
    return asked


def test_what_a_live_worker_consumes_and_registers_is_there() -> None:
    """Its empty queue has no key in Redis."""
    assert targets(a_worker("orders")).reason_of_loss(an_entry()) == ""


def test_a_queue_of_the_app_is_there_though_nobody_consumes_it_now() -> None:
    """Declared, or in its routes."""
    some = targets(a_worker("orders"), configured=frozenset({"routed"}))
    assert some.look_up_queue("mails")[0] is True
    assert some.look_up_queue("routed")[0] is True


def test_without_live_workers_nothing_of_a_letter_is_missing() -> None:
    """Unknown is not missing: its queue was consumed once."""
    some = targets()
    assert some.look_up_queue("orders")[0] is None
    assert some.look_up_task("shop.charge", "orders")[0] is None
    assert some.reason_of_loss(an_entry()) == ""


@pytest.mark.parametrize("workers", [(), (a_worker("orders"),)])
def test_a_queue_that_nobody_knows_is_missing_where_an_operator_names_it(
    workers: tuple[WorkerInfo, ...],
) -> None:
    """With "did you mean", whether workers live or not."""
    some = targets(*workers, guarded=frozenset({"orders"}), to_queue="ordres")
    found, why = some.look_up_queue("ordres")
    assert found is False
    assert why.endswith("; did you mean 'orders'?")


def test_a_queue_with_letters_is_known_while_no_worker_lives() -> None:
    """Else an operator could not prepare a restart."""
    assert targets(guarded=frozenset({"old"}), to_queue="old").look_up_queue("old")[0] is None
    assert targets(a_worker("x"), guarded=frozenset({"old"}), to_queue="old").look_up_queue("old")[
        0
    ] is (False)


def test_a_queue_that_publishing_does_not_make_must_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ returns such a message, whatever routes say."""
    monkeypatch.setattr(module, "on_broker", lambda *_: (False, False))
    some = targets(configured=frozenset({"routed"}))
    assert [some.look_up_queue(name)[0] for name in ("routed", "mails")] == [False, True]
    monkeypatch.setattr(module, "on_broker", lambda *_: (None, False))
    assert targets().look_up_queue("orders") == (None, "this broker does not answer")


def test_a_task_is_asked_of_the_workers_that_consume_its_queue() -> None:
    """A worker of another queue may have other code."""
    some = targets(a_worker("orders", tasks=("new",)), a_worker("a", "mails", tasks=("old",)))
    assert some.look_up_task("old", "orders") == (
        False,
        "not registered by celery@1, the only live worker that consumes 'orders'",
    )
    assert some.look_up_task("old", "mails") == (True, "registered by celery@2")
    assert some.look_up_task("old", "elsewhere")[0] is None
    assert some.look_up_task("", "orders")[0] is None
    assert some.look_up_task("celery.chord_unlock", "orders")[0] is True
    assert (
        some.reason_of_loss(an_entry(task="old"))
        == f"task 'old' is {some.look_up_task('old', 'orders')[1]}"
    )


def test_a_worker_with_more_tasks_than_it_lists_may_have_any() -> None:
    """It lists the first 5,000."""
    many = tuple(f"t{n}" for n in range(MAX_TASKS))
    assert targets(a_worker("orders", tasks=many)).look_up_task("other", "orders")[0] is None


def test_each_name_is_looked_up_once(nothing_on_the_broker: list[str]) -> None:
    """However many letters have it."""
    some = targets(a_worker("orders"))
    for _ in range(100):
        assert "queue 'gone' is neither" in some.reason_of_loss(an_entry("gone"))
    assert nothing_on_the_broker == ["gone"]
    for n in range(3000):
        some.reason_of_loss(an_entry(f"gone-{n}"))
    assert len(nothing_on_the_broker) <= 1000


def test_entries_that_are_no_letters_and_letters_without_a_queue_are_not_lost() -> None:
    """They are told apart elsewhere: skipped, and failed with their own words."""
    some = targets(a_worker("orders"))
    assert some.reason_of_loss(RawEntry("1-0", {b"source_queue": b"gone"})) == ""
    assert some.reason_of_loss(an_entry("")) == ""


def test_a_dry_run_counts_letters_by_queue_and_by_task() -> None:
    """A task that one of its queues lacks is missing."""
    some = targets(a_worker("orders"), a_worker("a", "b", tasks=("other",)))
    entries = [*[an_entry() for _ in range(3)], an_entry("a"), an_entry("b", "other")]
    plan = dry_run(lambda _: [*entries, RawEntry("1-0", {})], some)
    assert (plan.letters, plan.corrupt, plan.ready) == (5, 1, False)
    assert [(c.name, c.letters, c.found) for c in plan.queues] == [
        ("orders", 3, True),
        ("a", 1, True),
        ("b", 1, True),
    ]
    assert [(c.name, c.letters, c.found) for c in plan.tasks] == [
        ("shop.charge", 4, False),
        ("other", 1, True),
    ]


def test_a_plan_that_would_lose_messages_is_refused_unless_it_is_forced() -> None:
    """By name, with what to do."""
    lost = dry_run(lambda _: [an_entry(f"gone-{uuid4().hex}")], targets(a_worker("orders")))
    with pytest.raises(RedriveError, match=r"messages would be lost: queue 'gone-.*--force"):
        refuse_lost(lost)
    refuse_lost(lost, force=True)
    refuse_lost(dry_run(lambda _: [an_entry()], targets(a_worker("orders"))))
