"""The queue from which a worker takes a message to be, by its routing key or not."""

from __future__ import annotations

from typing import Any

import pytest
from builders import NOW, an_app
from kombu import Queue

from celery_dlq import dead_letter_policy
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.resolved import PolicyCache
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.instructions import Override


def policy_cache(*consumed: str, **policies: Policy) -> PolicyCache:
    """The cache of a worker that consumes these queues."""
    app = an_app(task_queues=[Queue(name) for name in ("orders", "mails")])
    app.amqp.queues.select(consumed)
    return PolicyCache(PolicyTable({"*": Policy(max_deliveries=3), **policies}), app.amqp.queues)


def an_override(name: str) -> Override:
    """One execution at most."""
    return Override(queue=name, key="max_deliveries", value=1, until=NOW, actor="ann")


def queue(known: PolicyCache, routing_key: Any, exchange: Any = "") -> str:
    return known.resolve({"exchange": exchange, "routing_key": routing_key}).queue


def test_routing_keys_that_anybody_makes_up_are_no_queues(caplog: pytest.LogCaptureFixture) -> None:
    """Each would have a dead-letter queue, and a heartbeat every second; it is logged once."""
    known = policy_cache("orders")
    assert {queue(known, f"made-up-{n}") for n in range(2000)} == {"orders"}
    assert caplog.text.count("come from no queue that this app knows") == 1


def test_queues_that_the_app_a_policy_or_an_override_names_are_known() -> None:
    """Also without a declaration."""
    known = policy_cache("orders", **{"by-hand": Policy(max_deliveries=1)})
    assert [queue(known, name) for name in ("orders", "mails", "by-hand")] == [
        "orders",
        "mails",
        "by-hand",
    ]
    known.apply_overrides([an_override("later")], NOW)
    assert queue(known, "later") == "later"


@pytest.mark.parametrize("odd", [5, None, ["orders"], {"a": 1}, True])
def test_routing_keys_and_exchanges_of_odd_types_are_taken(odd: Any) -> None:
    """They come over the wire; Celery runs such messages."""
    known = policy_cache("mails")
    assert queue(known, odd) == "mails"
    assert queue(known, "orders", odd) in {"orders", "mails"}


@pytest.mark.parametrize("overridden", [False, True])
@pytest.mark.parametrize("name", ["orders-DLQ", "letters", "fatal"])
def test_a_worker_that_consumes_a_dead_letter_queue_keeps_its_letters_there(
    name: str, overridden: bool
) -> None:
    """With patterns, a policy that names it, the task's own policy and an old override."""
    app = an_app(task_queues=[Queue("orders")])
    app.amqp.queues.select([name])
    queues = {"*": Policy(max_deliveries=3), "orders": Policy(dead_letter_queue="letters")}
    fatal = Policy(dead_letter_queue="fatal", max_deliveries=2)
    known = PolicyCache(PolicyTable(queues, {"t": fatal}), app.amqp.queues)
    if overridden:
        known.apply_overrides([an_override(name)], NOW)

    @app.task(shared=False)
    @dead_letter_policy(dead_letter_queue="fatal", max_deliveries=2)
    def guarded() -> None: ...

    for task in (None, guarded):
        resolved = known.resolve({"exchange": "", "routing_key": name}, task)
        assert (resolved.queue, resolved.dead_letter_queue) == (name, name)
        assert resolved.policy is None or resolved.policy.max_deliveries == 2
