"""Combination of policies, and contradictions between them."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from celery_dlq import registry
from celery_dlq.errors import SettingsError
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.table import (
    MAX_CACHED_POLICIES,
    PolicyTable,
    SourcedValue,
    check_targets,
    of_whole_queues,
)


def one_line(raised: pytest.ExceptionInfo[SettingsError]) -> str:
    """The text of an error, which must be one line."""
    text = str(raised.value)
    assert "\n" not in text
    return text


def test_layers_fill_each_other_field_by_field() -> None:
    """The task's decorator wins, then the exact queue name, then the pattern."""
    table = PolicyTable(
        {
            "orders": Policy(max_deliveries=5, max_retries=7),
            "*": Policy(max_deliveries=20, max_retries=20, default_delay=3.0),
        }
    )
    task = Policy(max_deliveries=2)
    assert table.resolve("orders", task) == Policy(
        max_deliveries=2, max_retries=7, default_delay=3.0
    )
    assert table.resolve("orders") == Policy(max_deliveries=5, max_retries=7, default_delay=3.0)
    assert table.resolve("other") == Policy(max_deliveries=20, max_retries=20, default_delay=3.0)


def test_a_value_of_zero_is_set() -> None:
    """``0`` retries and ``0`` seconds are decisions, not gaps."""
    table = PolicyTable(
        {
            "orders": Policy(max_retries=0, default_delay=0.0),
            "*": Policy(max_retries=3, default_delay=9.0),
        }
    )
    assert table.resolve("orders") == Policy(max_retries=0, default_delay=0.0)


VALUES: dict[str, Any] = {
    "max_deliveries": 3,
    "max_crashes": {"times": 2, "within": 60},
    "max_retries": 1,
    "dead_letter_queue": "dead",
    "default_delay": 5,
    "dead_letter_ttl": 60,
    "dead_letter_max_length": 9,
    "reasons": ["failed"],
    **{key: found.example for key, (_feature, found) in registry.policy_keys().items()},
}


@pytest.mark.parametrize("off", [False, "off", "None", "null"])
@pytest.mark.parametrize("key", sorted(VALUES))
def test_every_key_can_be_off_whatever_a_pattern_says(key: str, off: Any) -> None:
    """As if no policy set it; the source stays, and it can be written and read as JSON."""
    _feature, found = registry.policy_keys().get(key, (None, None))
    if found.is_name if found else key == "dead_letter_queue":
        off = False  # "off" is the name of one
    exact = Policy.parse({key: off}, "dlq_queues['orders']")
    assert Policy.parse(json.loads(json.dumps(exact.to_json())), "again") == exact
    table = PolicyTable({"*": Policy.parse({key: VALUES[key]}, "x"), "orders": exact})
    assert table.resolve("orders") == Policy()
    assert table.resolve("mails") != Policy()
    assert table.explain("orders")[key] == SourcedValue(False, "dlq_queues['orders']")
    table.check()


def test_exceptions_that_are_off_end_those_of_weaker_policies_only() -> None:
    """A task's own stay."""
    one, two = ({"exceptions": {name: {"action": "ignore"}}} for name in ("KeyError", "OSError"))
    task, weak = Policy.parse(one, "x"), Policy.parse(two, "x")
    table = PolicyTable(
        {"*": weak, "orders": Policy.parse({"exceptions": "off"}, "x")}, {"t": task}
    )
    assert table.resolve("orders", task) == task
    assert table.explain("orders", "t")["exceptions"].value == task.of("exceptions")


@pytest.mark.parametrize(
    ("queue", "patterns", "winner"),
    [
        ("orders", ["*", "orders"], "orders"),
        ("orders", ["order?", "orders"], "orders"),
        ("orders", ["*", "or*"], "or*"),
        ("orders", ["or*", "orde*"], "orde*"),
        ("orders", ["*s", "ord*s"], "ord*s"),
        ("orders", ["order?", "*"], "order?"),
        ("orders", ["[n-p]*", "*"], "[n-p]*"),
        ("orders", ["or*", "[n-p]*"], "or*"),
        ("orders", ["orders*", "[abcdefghijklmnop]*"], "orders*"),
        ("a*", ["a*", "a[*]"], "a*"),
    ],
)
@pytest.mark.parametrize("step", [1, -1])
def test_the_most_specific_pattern_wins_in_any_order(
    queue: str, patterns: list[str], winner: str, step: int
) -> None:
    """The order in the settings says nothing; literal characters do, and a class is one of many."""
    table = PolicyTable(
        {name: Policy(dead_letter_queue=f"for {name}") for name in patterns[::step]}
    )
    resolved = table.resolve(queue)
    assert resolved is not None
    assert resolved.dead_letter_queue == f"for {winner}"


def test_nothing_guards_a_queue_without_a_policy() -> None:
    """No default policy exists."""
    assert PolicyTable({"orders": Policy(max_deliveries=5)}).resolve("mail") is None
    assert not PolicyTable()


def test_a_task_policy_alone_guards_in_any_queue() -> None:
    """A decorator needs no queue policy."""
    policy = Policy(max_deliveries=3)
    assert PolicyTable().resolve("anything", policy) == policy


@pytest.mark.parametrize("queue", ["orders-DLQ", "anything-DLQ", "lost-orders"])
def test_no_pattern_guards_a_dead_letter_queue(queue: str) -> None:
    """Letters of letters would never end."""
    table = PolicyTable(
        {"*": Policy(max_deliveries=20), "orders": Policy(dead_letter_queue="lost-orders")}
    )
    assert table.resolve(queue) is None


def test_resolving_gives_the_same_object_again() -> None:
    """A worker asks for each message; the answer is made once."""
    table = PolicyTable({"*": Policy(max_deliveries=20)})
    assert table.resolve("orders") is table.resolve("orders")


def test_made_up_queue_names_do_not_fill_the_memory() -> None:
    """Routing keys may be made at run time, without end."""
    table = PolicyTable({"*": Policy(max_deliveries=20)})
    for number in range(MAX_CACHED_POLICIES + 1000):
        assert table.resolve(f"q-{number}") == Policy(max_deliveries=20)
    kept: Any = table.cached
    assert kept.cache_info().currsize == MAX_CACHED_POLICIES


@pytest.mark.parametrize(
    "queues",
    [
        {"orders": {"dead_letter_queue": "orders"}},
        {"orders": {"dead_letter_queue": "mail"}, "mail": {}},
        {"orders": {}, "orders-DLQ": {}},
        {"*": {"dead_letter_queue": "orders"}, "orders": {}},
        {"*": {}, "orders-DLQ": {}},
        {"or*": {}, "orders-DLQ": {}},
    ],
)
def test_a_dead_letter_queue_must_not_be_guarded(queues: dict[str, dict[str, Any]]) -> None:
    """Chains and circles of dead-letter queues are refused, with the way out."""
    with pytest.raises(SettingsError) as raised:
        check_targets({name: Policy(**keys) for name, keys in queues.items()})
    text = one_line(raised)
    assert text.startswith("expected ")
    assert "got" in text


@pytest.mark.parametrize(
    "queues",
    [
        {},
        {"orders": {}, "mail": {}},
        {
            "orders": {"dead_letter_queue": "lost-orders"},
            "mail": {"dead_letter_queue": "lost-orders"},
        },
        {"*": {"dead_letter_queue": "lost-orders"}},
        {"*": {}, "orders": {"dead_letter_queue": "orders-dead"}},
    ],
)
def test_queues_may_share_a_dead_letter_queue(queues: dict[str, dict[str, Any]]) -> None:
    """Everything that makes no chain is allowed."""
    check_targets({name: Policy(**keys) for name, keys in queues.items()})


def test_every_value_says_where_it_comes_from() -> None:
    """The sources that `dlq policies` shows: override, decorator, exact name, pattern, default."""
    table = PolicyTable(
        {"orders": Policy(max_retries=7), "*": Policy(default_delay=3.0, max_retries=9)},
        {"shop.charge": Policy(max_deliveries=3)},
        {"orders": (Policy(reasons=frozenset()), "ann@desk")},
    )
    explained = table.explain("orders", "shop.charge")
    assert {name: sourced for name, sourced in explained.items() if sourced.value is not None} == {
        "reasons": SourcedValue(frozenset(), "override by ann@desk"),
        "max_deliveries": SourcedValue(3, "dead_letter_policy of shop.charge"),
        "max_retries": SourcedValue(7, "dlq_queues['orders']"),
        "default_delay": SourcedValue(3.0, "dlq_queues['*']"),
    }
    assert table.explain("orders")["max_deliveries"] == SourcedValue(None, "default")


def test_an_override_beats_everything_and_guards_alone() -> None:
    """An operator at night means it."""
    table = PolicyTable({}, {}, {"orders": (Policy(max_deliveries=1), "ann@desk")})
    assert table.resolve("orders", Policy(max_deliveries=5)) == Policy(max_deliveries=1)
    assert table
    assert table.resolve("mail") is None


@pytest.mark.parametrize(
    ("name", "ttl"),
    [
        ("orders-DLQ", 5.0),
        ("mails-DLQ", 1.0),
        ("shared-DLQ", 7.0),
        ("x-DLQ", 1.0),
        ("other", None),
        ("charges", 9.0),
    ],
)
def test_a_dead_letter_queue_finds_the_policy_that_rules_it(name: str, ttl: float | None) -> None:
    """Through the queue that names it, through its default name, or through a task."""
    table = PolicyTable(
        {
            "*": Policy(dead_letter_ttl=1.0),
            "orders": Policy(dead_letter_ttl=5.0),
            "old": Policy(dead_letter_ttl=7.0, dead_letter_queue="shared-DLQ"),
        },
        {"shop.charge": Policy(dead_letter_queue="charges", dead_letter_ttl=9.0)},
    )
    table.check()
    ruling = table.of_dead_letter_queue(name)
    assert (ruling.dead_letter_ttl if ruling else None) == ttl


@pytest.mark.parametrize("key", ["dead_letter_ttl", "dead_letter_max_length"])
def test_one_dead_letter_queue_has_one_retention(key: str) -> None:
    """Two policies for one DLQ would take turns to trim it."""
    table = PolicyTable(
        {
            "orders": Policy.parse({key: 5, "dead_letter_queue": "shared-DLQ"}, "x"),
            "mails": Policy.parse({key: 6, "dead_letter_queue": "shared-DLQ"}, "x"),
        }
    )
    with pytest.raises(SettingsError) as raised:
        table.check()
    assert f"expected one {key} for the dead-letter queue 'shared-DLQ'" in one_line(raised)
    assert "'orders'" in str(raised.value)
    assert "'mails'" in str(raised.value)


@pytest.mark.parametrize(
    ("policy", "said"),
    [
        ({"dead_letter_queue": "orders"}, "no guarded queue"),
        ({"dead_letter_ttl": 5}, "beside a dead_letter_queue of its own"),
    ],
)
def test_a_task_keeps_the_same_rules(policy: dict[str, Any], said: str) -> None:
    """Its decorator makes neither a chain nor a second retention."""
    table = PolicyTable({"orders": Policy()}, {"shop.charge": Policy.parse(policy, "x")})
    with pytest.raises(SettingsError, match=said):
        table.check()


def test_a_policy_for_a_queue_that_nobody_knows_is_named() -> None:
    """Patterns are left out: they are meant to match what is not there yet."""
    table = PolicyTable({"ordesr": Policy(), "mail*": Policy(), "mails": Policy()})
    known = KnownQueues(frozenset({"orders", "mails"}), complete=True)
    assert table.unknown_queues(known) == {"ordesr": "did you mean 'orders'?"}
    assert table.unknown_queues(replace(known, complete=False)) == {}


def elsewhere(*names: str, **keys: Any) -> Policy:
    """A policy whose exceptions have dead-letter queues of their own."""
    rules = {
        f"a.E{n}": {"action": "dead_letter", "dead_letter_queue": x} for n, x in enumerate(names)
    }
    return Policy.parse({"exceptions": rules, **keys}, "x")


def test_exceptions_are_merged_one_by_one_and_say_where_they_come_from() -> None:
    """Each exception is a field of its own."""
    retry, ignore = {"action": "retry"}, {"action": "ignore"}
    queue = Policy.parse({"exceptions": {"a.A": retry, "a.B": retry}}, "x")
    task = Policy.parse({"exceptions": {"a.B": ignore}}, "x")
    table = PolicyTable({"*": queue}, {"shop.charge": task})
    both = Policy.parse({"exceptions": {"a.A": retry, "a.B": ignore}}, "x")
    assert table.resolve("orders", task) == both
    assert table.explain("orders", "shop.charge")["exceptions"] == SourcedValue(
        both.of("exceptions"), "dead_letter_policy of shop.charge, dlq_queues['*']"
    )
    assert table.explain("orders")["exceptions"] == SourcedValue(
        queue.of("exceptions"), "dlq_queues['*']"
    )


@pytest.mark.parametrize(
    ("queues", "tasks", "said"),
    [
        ({"orders": elsewhere("mail"), "mail": Policy()}, {}, "which has a policy in dlq_queues"),
        ({"orders": elsewhere("orders")}, {}, "which has a policy in dlq_queues"),
        ({"mail": Policy()}, {"t": elsewhere("mail")}, "which has a policy in dlq_queues"),
        (
            {
                "orders": elsewhere("fatal", dead_letter_ttl=5),
                "mail": elsewhere("fatal", dead_letter_ttl=6),
            },
            {},
            "expected one dead_letter_ttl for the dead-letter queue 'fatal'",
        ),
        (
            {"orders": elsewhere("mail-DLQ", dead_letter_ttl=5), "mail": Policy(dead_letter_ttl=6)},
            {},
            "expected one dead_letter_ttl for the dead-letter queue 'mail-DLQ'",
        ),
    ],
)
def test_a_queue_of_an_exception_is_a_dead_letter_queue_as_others_are(
    queues: dict[str, Policy], tasks: dict[str, Policy], said: str
) -> None:
    """No chain, and one retention."""
    with pytest.raises(SettingsError) as raised:
        PolicyTable(queues, tasks).check()
    assert said in one_line(raised)


def test_a_queue_of_an_exception_has_the_retention_of_who_names_it() -> None:
    """Of a policy that sets any; it is listed as one without bounds if none does."""
    table = PolicyTable(
        {
            "*": elsewhere("fatal", "other"),
            "orders": elsewhere("fatal", dead_letter_ttl=5),
        },
        {"shop.charge": elsewhere("charges", dead_letter_max_length=7)},
    )
    table.check()
    found = {name: table.of_dead_letter_queue(name) for name in ("fatal", "other", "charges")}
    assert found["fatal"].dead_letter_ttl == 5  # type: ignore[union-attr]
    assert found["charges"].dead_letter_max_length == 7  # type: ignore[union-attr]
    assert table.resolve("fatal") is None
    assert table.dead_letter_queue_of("fatal") == "fatal"
    assert table.by_exception == {"fatal", "other", "charges"}
    assert "other" in table.unbounded([])
    assert not {"fatal", "charges"} & {*table.unbounded([])}


@pytest.mark.parametrize(
    ("letter_queue", "task", "counted"),
    [
        ("orders-DLQ", "x", "orders-DLQ"),
        ("old-DLQ", "x", "old-DLQ"),
        ("fatal", "x", "orders-DLQ"),
        ("fatal", "shop.charge", "charges"),
        (None, "x", "orders-DLQ"),
    ],
)
def test_a_redriven_message_is_counted_where_workers_will_look(
    letter_queue: str | None, task: str, counted: str
) -> None:
    """Not beside the letter that it left, if an exception put that elsewhere."""
    table = PolicyTable(
        {"orders": elsewhere("fatal")}, {"shop.charge": Policy(dead_letter_queue="charges")}
    )
    assert table.counted_in(letter_queue, "orders", task) == counted


@pytest.mark.parametrize("key", of_whole_queues())
def test_a_key_that_is_off_is_unset_for_each_kind_of_dead_letter_queue(key: str) -> None:
    """``False`` must not be taken for 0 seconds or 0 letters: all would be trimmed."""
    rule = {"action": "dead_letter", "dead_letter_queue": "fatal"}
    made = Policy.parse({key: "off", "exceptions": {"KeyError": rule}}, "x")
    task = Policy.parse({key: "off", "dead_letter_queue": "of-task"}, "x")
    table = PolicyTable({"orders": made}, {"t": task}, {"mails": (made, "ann")})
    table.check()
    for name in ("orders-DLQ", "fatal", "of-task", "mails-DLQ"):
        policy = table.of_dead_letter_queue(name)
        assert policy is not None
        assert policy.of(key) is None, name
