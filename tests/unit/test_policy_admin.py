"""Overrides, drift, and what `dlq policies` shows."""

from __future__ import annotations

import re
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import intervals
import pytest
from builders import NOW, an_app
from fresh import fresh_store
from rich.console import Console

from celery_dlq.cli.policies import show_policies
from celery_dlq.decorators import dead_letter_policy
from celery_dlq.errors import NotFound, SettingsError
from celery_dlq.events import Action, Event, Events, whoami
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.policies.overrides import by_queue, checked, overridable_keys
from celery_dlq.policies.policy import CrashLimit, Policy, policy_keys
from celery_dlq.policies.registered import differences
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.instructions import Override
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import WorkerInfo

HOUR = timedelta(hours=1)
TABLE = PolicyTable(
    {"orders": Policy(max_deliveries=5), "ord*": Policy(dead_letter_ttl=60.0)},
    {"shop.charge": Policy(max_retries=2)},
)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store, with a clock that does not move; so changes begin at once."""
    intervals.change(monkeypatch, grace=timedelta(0))
    made = fresh_store()
    monkeypatch.setattr(made.workers, "now", lambda: NOW)
    monkeypatch.setattr(made.instructions, "now", lambda: NOW)
    return made


@pytest.fixture
def heard() -> list[Event]:
    """The events that the admin emitted."""
    return []


@pytest.fixture
def policy_admin(backend: Store, heard: list[Event]) -> PolicyAdmin:
    """The rules of a small app."""
    events = Events()
    events.subscribe(heard.append)
    backend.letters.names = lambda: ["mails-DLQ"]  # type: ignore[method-assign]
    return an_admin(TABLE, backend, events, "default")


def an_admin(table: PolicyTable, backend: Store, events: Events, queue: str) -> PolicyAdmin:
    """The rules of an app that knows one queue."""
    app = an_app(task_default_queue=queue)

    @app.task(name="shop.charge", shared=False)
    @dead_letter_policy(max_retries=2)
    def charge() -> None: ...

    assembly: Any = SimpleNamespace(
        app=app, backend=backend, events=events, policy_table=lambda: table
    )
    return PolicyAdmin(assembly)


def a_worker(hostname: str, policies: dict[str, Any], *queues: str) -> WorkerInfo:
    """A worker with these policies."""
    return WorkerInfo(
        hostname=hostname, pid=1, version="0.1.0", started_at=NOW, queues=queues, policies=policies
    )


def test_an_override_is_in_force_audited_and_an_event(
    policy_admin: PolicyAdmin, backend: Store, heard: list[Event]
) -> None:
    """From the command line values are text."""
    policy_admin.override_policy("orders", HOUR, max_deliveries="3", reasons="failed, rejected")

    explained = policy_admin.in_force().explain("orders")
    assert explained["max_deliveries"].value == 3
    assert explained["max_deliveries"].source == f"override by {whoami()} until 2026-03-04T06:06Z"
    assert sorted(r.value for r in explained["reasons"].value) == ["failed", "rejected"]
    assert explained["dead_letter_ttl"].value == 60.0
    (change,) = backend.workers.changes(limit=9)
    assert heard == [change]
    assert (change.action, change.target) == (Action.POLICY_SET, "orders")
    assert change.detail["values"] == {"max_deliveries": 3, "reasons": ["failed", "rejected"]}
    assert change.detail["until"] == "2026-03-04T06:06:07.891011+00:00"


def test_an_override_can_be_taken_back(policy_admin: PolicyAdmin, backend: Store) -> None:
    """All keys of a queue, or one."""
    policy_admin.override_policy("orders", HOUR, max_deliveries=3, max_retries=0)
    assert policy_admin.lift_policy("orders", "max_retries") == ["max_retries"]
    assert policy_admin.lift_policy("orders") == ["max_deliveries"]
    assert policy_admin.in_force().explain("orders")["max_deliveries"].value == 5
    assert [c.action for c in backend.workers.changes(limit=2)] == [Action.POLICY_UNSET] * 2
    with pytest.raises(NotFound, match="expected an override of any key for queue 'orders'"):
        policy_admin.lift_policy("orders")


@pytest.mark.parametrize(
    ("queue", "duration", "values", "said"),
    [
        ("orders", HOUR, {"max_deliveries": "0"}, "a whole number of 1 or more, got 0"),
        ("orders", HOUR, {"max_deliveries": "many"}, "a whole number of 1 or more, got 'many'"),
        ("orders", HOUR, {"max_delivery": "3"}, "did you mean 'max_deliveries'"),
        ("orders", HOUR, {"default_delay": "3"}, "publishers do not ask Redis"),
        ("orders", HOUR, {"dead_letter_queue": "x"}, "kept beside their letters"),
        ("orders", HOUR, {"reasons": "tired"}, "expected only known reasons"),
        ("ord*", HOUR, {"max_deliveries": "3"}, "exact name of a queue"),
        ("", HOUR, {"max_deliveries": "3"}, "exact name of a queue"),
        ("orders", timedelta(0), {"max_deliveries": "3"}, "more than 0 s and at most 30 days"),
        ("orders", timedelta(days=31), {"max_deliveries": "3"}, "at most 30 days"),
        ("orders", HOUR, {"max_deliveries": "3", "max_retries": "-1"}, "0 or more"),
    ],
)
def test_an_unusable_override_changes_nothing(
    policy_admin: PolicyAdmin,
    backend: Store,
    queue: str,
    duration: timedelta,
    values: Any,
    said: str,
) -> None:
    """One line, and neither an override nor a record of one."""
    with pytest.raises(SettingsError, match="expected ") as raised:
        policy_admin.override_policy(queue, duration, **values)
    assert said in str(raised.value)
    assert backend.instructions.in_force(Override) == backend.workers.changes(limit=9) == []


def test_an_override_of_a_queue_that_nobody_knows_is_refused(
    policy_admin: PolicyAdmin, backend: Store
) -> None:
    """Nothing would happen; a queue of a worker, or one with letters, is known."""
    with pytest.raises(NotFound, match="got 'ordres'; did you mean 'orders'\\?"):
        policy_admin.override_policy("ordres", HOUR, max_deliveries=3)
    with pytest.raises(NotFound, match="got 'zzz'; `dlq policies` lists them"):
        policy_admin.override_policy("zzz", HOUR, max_deliveries=3)
    assert backend.instructions.in_force(Override) == backend.workers.changes(limit=9) == []
    backend.workers.register(a_worker("one", {}, "by-hand"))
    policy_admin.override_policy("by-hand", HOUR, max_deliveries=3)
    backend.workers.deregister("one")
    policy_admin.override_policy("by-hand", HOUR, max_deliveries=4)  # it is overridden already
    policy_admin.override_policy("mails", HOUR, max_deliveries=3)


@pytest.mark.parametrize("queue", ["orders-DLQ", "letters", "fatal", "parked"])
def test_an_override_of_a_dead_letter_queue_is_refused(backend: Store, queue: str) -> None:
    """By its name, named by a policy of a queue or task, or with letters: no chain of them."""
    table = PolicyTable(
        {"slow": Policy(dead_letter_queue="letters")}, {"t": Policy(dead_letter_queue="fatal")}
    )
    backend.letters.names = lambda: ["parked"]  # type: ignore[method-assign]
    admin = an_admin(table, backend, Events(), "letters")
    with pytest.raises(SettingsError, match=f"got '{queue}', a dead-letter queue"):
        admin.override_policy(queue, HOUR, max_deliveries=3)
    assert backend.instructions.in_force(Override) == []


def test_an_override_of_another_version_is_passed_over() -> None:
    """A worker obeys what it understands."""
    made = [
        Override(queue="orders", key=key, value=3, until=NOW, actor="ann@desk")
        for key in ("max_deliveries", "colour")
    ]
    assert by_queue(made) == {
        "orders": (Policy(max_deliveries=3), "ann@desk until 2026-03-04T05:06Z")
    }


def test_a_duration_may_be_written_as_people_do(policy_admin: PolicyAdmin) -> None:
    """``14d`` for the time to live of letters."""
    policy_admin.override_policy("default", HOUR, dead_letter_ttl="14d")
    assert policy_admin.in_force().explain("default")["dead_letter_ttl"].value == 14 * 86400


def test_the_limit_of_crashes_can_be_overridden_and_exceptions_cannot(
    policy_admin: PolicyAdmin,
) -> None:
    """Only main processes read overrides; exceptions are met where tasks run."""
    policy_admin.override_policy("default", HOUR, max_crashes='{"times": 2, "within": "10m"}')
    explained = policy_admin.in_force().explain("default")
    assert explained["max_crashes"].value == CrashLimit(2, 600.0)
    with pytest.raises(SettingsError, match="processes that run tasks"):
        policy_admin.override_policy("default", HOUR, exceptions={"a.A": {"action": "ignore"}})


@pytest.mark.parametrize("off", [None, False, "null", "None", "off", " off "])
@pytest.mark.parametrize("key", overridable_keys())
def test_an_override_can_end_every_key(
    policy_admin: PolicyAdmin, backend: Store, key: str, off: Any
) -> None:
    """It is stored, read by workers, and shown as what it is."""
    policy_admin.override_policy("orders", HOUR, **{key: off})
    (override,) = backend.instructions.in_force(Override)
    assert override.value is False
    (policy, _source) = by_queue([override])["orders"]
    assert policy.over(Policy(max_deliveries=5)).of(key) is False
    (view,) = policy_admin.policies("orders").views
    assert view.fields[key].value is False
    assert view.to_json()["policy"][key]["value"] is False
    console = Console(record=True, width=200)
    show_policies(console, policy_admin.policies("orders"))
    assert re.search(rf"{key} +off +override by", console.export_text())


@pytest.mark.parametrize("key", ["default_delay", "exceptions", "dead_letter_queue"])
def test_a_key_that_workers_do_not_apply_cannot_be_ended_either(
    policy_admin: PolicyAdmin, key: str
) -> None:
    """One line, with the reason."""
    with pytest.raises(SettingsError, match=f"can be overridden, got '{key}': "):
        policy_admin.override_policy("orders", HOUR, **{key: None})


def test_workers_that_differ_are_named() -> None:
    """For queues that both have to do with, as each resolves them."""
    one = a_worker("one", {"*": {"max_deliveries": 20}, "a": {}}, "orders", "mails")
    two = a_worker(
        "two",
        {
            "*": {"max_deliveries": 20},
            "orders": {"max_deliveries": 5},
            "task:t": {"max_retries": 1},
        },
        "orders",
    )
    assert differences(one, two) == [
        "For queue 'orders', one and two have different policies: max_deliveries 20 and 5"
    ]
    three = a_worker(
        "three", {**two.policies, "task:t": {"max_retries": 2, "new_key": 1}}, "orders"
    )
    assert differences(two, three) == [
        "For task t, two and three have different policies: max_retries 1 and 2"
    ]
    assert differences(two, two) == []
    ignore, retry = {"action": "ignore"}, {"action": "retry"}
    four = a_worker("four", {"orders": {"exceptions": {"a.A": ignore, "a.B": retry}}}, "orders")
    five = a_worker("five", {"orders": {"exceptions": {"a.A": ignore, "a.B": ignore}}}, "orders")
    assert differences(four, five) == [
        (
            "For queue 'orders', four and five have different policies: "
            "exceptions['a.B'] {'action': 'retry'} and {'action': 'ignore'}"
        )
    ]


def test_apps_that_share_a_redis_do_not_differ() -> None:
    """Their queues have nothing to do with each other."""
    one = a_worker("one", {"*": {"max_deliveries": 20}}, "orders")
    two = a_worker("two", {"mails": {"max_deliveries": 5}}, "mails")
    assert differences(one, two) == []


def test_all_policies_are_shown_with_their_warnings(
    policy_admin: PolicyAdmin, backend: Store
) -> None:
    """Queues, then tasks; unknown queues and differences last."""
    same = {name: policy.to_json() for name, policy in TABLE.queues.items()}
    backend.workers.register(a_worker("one", same, "orders"))
    other = {**same, "orders": {"max_deliveries": 6}}
    backend.workers.register(a_worker("two", other, "orders"))
    rules = policy_admin.policies()
    assert [(view.queue, view.task) for view in rules.views] == [
        ("ord*", None),
        ("orders", None),
        ("default", "shop.charge"),
    ]
    assert rules.warnings == (
        "For queue 'orders', this app and two have different policies: max_deliveries 5 and 6",
    )
    *lines, warning = rules.to_json()
    assert warning == {"warning": rules.warnings[0]}
    assert lines[1]["dead_letter_queue"] == "orders-DLQ"
    assert lines[1]["policy"]["max_deliveries"] == {"value": 5, "source": "dlq_queues['orders']"}
    assert lines[1]["policy"]["exceptions"] == {"value": None, "source": "default"}
    assert lines[2]["policy"]["max_retries"]["source"] == "dead_letter_policy of shop.charge"


@pytest.mark.parametrize("key", sorted({*policy_keys()} - {*overridable_keys()}))
def test_a_key_that_cannot_be_overridden_says_why(key: str) -> None:
    """A new key that nobody thought of would be refused as if it were misspelt."""
    with pytest.raises(SettingsError) as refused:
        checked("orders", key, 1, HOUR, "ada", NOW)
    assert re.search(rf"got '{key}': \w+", str(refused.value))
