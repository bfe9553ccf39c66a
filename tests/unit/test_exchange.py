"""The policy keys of the dead-letter exchange."""

from __future__ import annotations

from typing import Any

import pytest
from builders import a_letter, an_app

from celery_dlq.errors import SettingsError
from celery_dlq.features.exchange.connection import Exchanges, announced_headers
from celery_dlq.features.exchange.policy import DeadLetterExchange
from celery_dlq.letters.record import Reason
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable


def policy(exchange: object, routing_key: object = None) -> Policy:
    """A policy as a user writes it."""
    if routing_key is not None:
        exchange = {"name": exchange, "routing_key": routing_key}
    return Policy.parse({"dead_letter_exchange": exchange}, "dlq_queues['orders']")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("deaths", DeadLetterExchange(name="deaths")),
        ({"name": "deaths"}, DeadLetterExchange(name="deaths")),
        ({"name": "deaths", "type": "topic"}, DeadLetterExchange(name="deaths", type="topic")),
        (DeadLetterExchange(name="x", type="fanout"), DeadLetterExchange(name="x", type="fanout")),
        ("", DeadLetterExchange(name="")),
        (
            {"name": "", "routing_key": "copies", "before_ack": True},
            DeadLetterExchange(name="", routing_key="copies", before_ack=True),
        ),
    ],
)
def test_an_exchange_is_a_name_or_a_mapping(given: object, expected: DeadLetterExchange) -> None:
    """As the user says."""
    assert policy(given).of("dead_letter_exchange") == expected
    assert policy(expected.to_json()).of("dead_letter_exchange") == expected


@pytest.mark.parametrize(
    ("exchange", "routing_key", "text"),
    [
        (7, None, "the name of an exchange, or a mapping of name, type, routing_key"),
        ({"type": "topic"}, None, "a mapping with 'name', got {'type': 'topic'}"),
        ({"name": "x", "kind": "topic"}, None, "only known keys in"),
        ({"name": "x", "before_ack": 1}, None, "True or False, got 1"),
        ({"name": "x", "type": "headers"}, None, "one of direct, fanout, topic, got 'headers'"),
        ({"name": "", "type": "topic"}, None, "direct for the broker's default exchange"),
        ({"name": 7}, None, "at most 255 bytes, got 7"),
        ("x" * 256, None, "at most 255 bytes"),
        ("x", "", "text of 1 to 255 bytes, got ''"),
        ("x", "ü" * 128, "text of at most 255 bytes"),
    ],
)
def test_anything_else_is_refused(exchange: object, routing_key: object, text: str) -> None:
    """With the place, what was expected and what came."""
    with pytest.raises(SettingsError) as raised:
        policy(exchange, routing_key)
    assert text in str(raised.value)
    assert "dlq_queues['orders']" in str(raised.value)


def targets(**policies: Policy) -> Exchanges:
    return Exchanges(an_app(), PolicyTable(policies))


def test_a_letter_has_the_exchange_of_its_policy() -> None:
    """Perhaps none."""
    found = targets(orders=policy("deaths"), slow=policy("deaths", "slow.dead"), quiet=Policy())
    keys = {
        queue: entry and (entry.name, entry.routing_key)
        for queue in ("orders", "slow", "quiet", "unknown")
        for entry in [found.exchange_of(a_letter(source_queue=queue))]
    }
    assert keys == {
        "orders": ("deaths", None),
        "slow": ("deaths", "slow.dead"),
        "quiet": None,
        "unknown": None,
    }


def test_two_types_of_one_exchange_are_refused() -> None:
    """The broker could have only one."""
    two = targets(orders=policy("deaths"), slow=policy({"name": "deaths", "type": "topic"}))
    with pytest.raises(SettingsError, match=r"one type for the exchange 'deaths', got 'direct'"):
        two.checked()


@pytest.mark.parametrize(("key", "text"), [(None, "got none"), ("slow", "would run the dead")])
def test_the_default_exchange_never_gives_letters_back_to_workers(key: Any, text: str) -> None:
    """They would run again what is dead."""
    found = targets(orders=policy("", key), slow=Policy(max_deliveries=3))
    with pytest.raises(SettingsError, match=text):
        found.checked()


def test_the_headers_are_the_contract() -> None:
    """Those of the original, without the broker's; and the death."""
    letter = a_letter(
        headers='{"id":"t","task":"shop.charge","x-death":[],"x-first-death-queue":"a",'
        '"x-delivery-count":2,"x-acquired-count":2,"redelivered":true}',
        reason=Reason.EXPIRED,
        deliveries=3,
        retries=2,
    )
    assert announced_headers(letter) == {
        "id": "t",
        "task": "shop.charge",
        "dlq_letter": letter.id,
        "dlq_reason": "expired",
        "dlq_dead_lettered_at": "2026-03-04T05:06:07.891011+00:00",
        "dlq_source_queue": "orders",
        "dlq_dead_letter_queue": "orders-DLQ",
        "dlq_deliveries": 3,
        "dlq_retries": 2,
    }
    assert announced_headers(a_letter(headers="[1]"))["dlq_reason"] == "failed"
