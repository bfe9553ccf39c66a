"""Delivery limits of quorum queues beside the policies of an app."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from kombu import Queue

from celery_dlq import DeadLetters, dead_letter_policy
from celery_dlq.errors import SettingsError
from celery_dlq.operations.broker_limits import warn_of_low_limits
from celery_dlq.policies.delivery_limits import (
    LowLimit,
    default_limit,
    low_limits,
    low_receive_counts,
)
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable

QUORUM = {"x-queue-type": "quorum"}
TO_DEAD = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}


def found(
    most: int | None,
    *,
    adopts: bool = False,
    default: int | None = None,
    tasks: dict[str, int] | None = None,
    **arguments: Any,
) -> list[LowLimit]:
    """What is found for one queue, ``orders``."""
    table = PolicyTable(
        {"ord*": Policy(max_deliveries=most)},
        {name: Policy(max_deliveries=limit) for name, limit in (tasks or {}).items()},
    )
    queues = {"orders": Queue("orders", queue_arguments=arguments), "mails": Queue("mails")}
    places = dict.fromkeys(tasks or {}, "orders")
    return [*low_limits(table, queues, places, adopts=adopts, default=lambda: default)]


@pytest.mark.parametrize(
    ("limit", "vanishes"), [(0, True), (3, True), (4, False), (5, False), (6, None), (-1, None)]
)
def test_a_limit_below_twice_max_deliveries_is_found(limit: int, vanishes: bool | None) -> None:
    """At or below it, poison vanishes; -1 is no limit."""
    low = found(3, **QUORUM, **{"x-delivery-limit": limit})
    assert [one.vanishes for one in low] == ([] if vanishes is None else [vanishes])
    for one in low:
        assert f"at least 6, twice max_deliveries (dlq_queues['ord*']), got {limit}" in one.text
        assert "no letter" in one.text


@pytest.mark.parametrize(
    ("more", "adopts", "expected"),
    [
        ({}, False, [True]),
        ({}, True, [False]),  # a policy of RabbitMQ may have made what AMQP does not show
        (TO_DEAD, False, [False]),
        (TO_DEAD, True, []),
    ],
)
def test_what_is_adopted_does_not_vanish(
    more: dict[str, str], adopts: bool, expected: list[bool]
) -> None:
    """It becomes a letter."""
    low = found(3, adopts=adopts, **QUORUM, **more, **{"x-delivery-limit": 3})
    assert [one.vanishes for one in low] == expected


def test_the_default_of_rabbitmq_4_is_a_warning() -> None:
    """Nobody declared it, and a policy of RabbitMQ may have set another."""
    (low,) = found(20, default=20, **QUORUM)
    assert (low.vanishes, "got 20, the default of RabbitMQ 4" in low.text) == (False, True)
    assert found(10, default=20, **QUORUM) == found(20, default=None, **QUORUM) == []


def test_the_highest_limit_of_the_tasks_of_a_queue_counts() -> None:
    """A decorator beats the queue."""
    (low,) = found(2, tasks={"shop.charge": 4}, **QUORUM, **{"x-delivery-limit": 7})
    assert "at least 8, twice max_deliveries (dead_letter_policy of shop.charge)" in low.text


def test_other_queues_have_no_such_limit() -> None:
    """Classic ones, and those without ``max_deliveries``."""
    assert found(3, **{"x-delivery-limit": 1}) == []
    assert found(None, **QUORUM, **{"x-delivery-limit": 1}) == []


@pytest.mark.parametrize(
    ("product", "version", "expected"),
    [
        ("RabbitMQ", "4.0.5", 20),
        ("RabbitMQ", "3.13.7", None),
        ("RabbitMQ", "10.0", 20),
        ("RabbitMQ", "", None),
        ("LavinMQ", "4.0.0", None),
    ],
)
def test_only_rabbitmq_4_and_later_have_a_default(
    product: str, version: str, expected: int | None
) -> None:
    """As the server names itself."""
    assert default_limit({"product": product, "version": version}) == expected


@pytest.mark.parametrize(("receives", "adopted", "low"), [(5, (), 1), (6, (), 0), (5, ["dead"], 0)])
def test_a_redrive_policy_below_twice_max_deliveries_is_found(
    receives: int, adopted: Sequence[str], low: int
) -> None:
    """Unless a worker adopts what SQS moves."""
    table = PolicyTable(
        {"ord*": Policy(max_deliveries=2)}, {"shop.charge": Policy(max_deliveries=3)}
    )
    policies = {"orders": (receives, "dead"), "mails": (1, "dead")}
    tasks = {"shop.charge": "orders"}
    found = [*low_receive_counts(table, policies, tasks, adopted=adopted)]
    assert len(found) == low
    for one in found:
        assert "'orders' to have a maxReceiveCount of at least 6" in one.text
        assert one.queue == "orders"
        assert "dead_letter_policy of shop.charge" in one.text


def an_app(broker: str, **conf: Any) -> Celery:
    app = Celery("shop", broker=broker, set_as_current=False)
    app.conf.update(dlq_url="redis://127.0.0.1:1/0", **conf)
    return app


def test_validate_refuses_where_poison_vanishes() -> None:
    """Each time as the configuration is then; on brokers that have such limits."""
    conf = {"dlq_queues": {"orders": {"max_deliveries": 3}}}
    app = an_app("amqp://127.0.0.1:1//", **conf)
    dlq = DeadLetters(app)
    dlq.validate()
    for limit, refused in ((3, True), (4, False)):
        arguments = {**QUORUM, "x-delivery-limit": limit}
        app.conf.task_queues = [Queue("orders", queue_arguments=arguments)]
        if refused:
            with pytest.raises(SettingsError, match="expected the quorum queue 'orders'"):
                dlq.validate()
        else:
            dlq.validate()
    other = an_app("redis://127.0.0.1:1/0", **conf)
    other.conf.task_queues = [Queue("orders", queue_arguments={**QUORUM, "x-delivery-limit": 3})]
    DeadLetters(other).validate()


def test_a_worker_warns_of_the_default_when_it_has_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server says its version then; tasks with a limit of their own count, too."""
    app = an_app("amqp://127.0.0.1:1//", dlq_queues={"orders": {"max_deliveries": 3}})
    app.conf.task_queues = [Queue("orders", queue_arguments=QUORUM)]
    app.conf.task_default_queue = "orders"

    @app.task(name="shop.charge", shared=False)
    @dead_letter_policy(max_deliveries=12)
    def charge() -> None: ...

    dlq = DeadLetters(app)
    server = SimpleNamespace(server_properties={"product": "RabbitMQ", "version": "4.1.0"})
    warn_of_low_limits(dlq.assembly, SimpleNamespace(connection=server))
    assert "at least 24, twice max_deliveries (dead_letter_policy of shop.charge)" in caplog.text
