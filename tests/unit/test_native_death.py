"""Brokers' records of a death, well-formed or not."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from celery_dlq.features.adopt.letter import native_death
from celery_dlq.letters import json_codec

AT = datetime(2026, 11, 21, 12, 6, 37)  # noqa: DTZ001 - as py-amqp gives it


def a_death(**changes: Any) -> dict[str, Any]:
    """One entry of RabbitMQ's x-death."""
    return {
        "count": 1,
        "reason": "rejected",
        "queue": "orders",
        "time": AT,
        "exchange": "",
        "routing-keys": ["orders"],
        **changes,
    }


def test_rabbitmq_says_where_when_and_why() -> None:
    """The newest death comes first; the first queue has a header of its own."""
    deaths = [a_death(reason="expired", queue="wait"), a_death(time=None)]
    found = native_death({"x-death": deaths, "x-first-death-queue": "orders"}, {})
    assert (found.queue, found.reason) == ("orders", "expired")
    assert found.words == "expired in queue 'orders' at 2026-11-21T12:06:37+00:00"
    kept = json_codec.loads(found.history or "")
    assert kept["x-death"][0]["time"] == "2026-11-21T12:06:37+00:00"
    assert kept["x-first-death-queue"] == "orders"


@pytest.mark.parametrize("prefix", ["", "shop_"])
def test_celerys_delay_queues_are_no_dead_letter_queues(prefix: str) -> None:
    """On quorum queues a countdown makes a message expire from queue to queue on its way."""
    delay = f"{prefix}celery_delayed_0"
    deaths = [a_death(), a_death(queue=delay, reason="expired")]
    found = native_death({"x-death": deaths, "x-first-death-queue": delay}, {})
    assert (found.queue, found.reason) == ("orders", "rejected")


@pytest.mark.parametrize(
    "deaths",
    ["rejected", 7, None, {}, ["rejected"], [None], [["rejected"]]],
)
def test_a_malformed_history_is_kept_as_it_came(deaths: object) -> None:
    """It stops nothing, and the description says so."""
    found = native_death({"x-death": deaths}, {})
    assert found.queue is None
    assert "cannot be read" in found.words
    assert json_codec.loads(found.history or "") == {"x-death": deaths}


def test_malformed_entries_cost_only_themselves() -> None:
    """The first queue is still known from its header."""
    odd = a_death(time="yesterday", queue=7, reason=None)
    found = native_death({"x-death": [odd], "x-first-death-queue": "orders"}, {})
    assert (found.queue, found.reason) == ("orders", None)
    assert found.words == "dead-lettered in queue 'orders'"


@pytest.mark.parametrize("place", ["properties", "delivery_info"])
def test_sqs_says_how_often_it_was_received(place: str) -> None:
    """Kombu's place for the attributes of a message, and a plain property."""
    attributes = {"ApproximateReceiveCount": "4"}
    inside = {"delivery_info": {"sqs_message": {"Attributes": attributes}}}
    found = native_death({}, attributes if place == "properties" else inside)
    assert (found.deliveries, found.words) == (4, "received 4 times")


def test_sqs_may_name_the_source_queue() -> None:
    """An attribute of messages that a redrive policy moved."""
    arn = "arn:aws:sqs:eu-west-1:123456789012:orders"
    attributes = {"ApproximateReceiveCount": 1, "DeadLetterQueueSourceArn": arn}
    found = native_death({}, {"delivery_info": {"sqs_message": {"Attributes": attributes}}})
    assert found.sqs_queue == "orders"


def test_nothing_is_said_without_a_word_of_the_broker() -> None:
    """Somebody just put the message there."""
    assert native_death({}, {}).history is None
    for count, deliveries in (("many", 0), (float("inf"), 0), (-1, 0), (10**30, 2**31 - 1)):
        assert native_death({}, {"ApproximateReceiveCount": count}).deliveries == deliveries


SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
    | st.datetimes()
)
NAMES = st.sampled_from(["x-death", "x-first-death-queue", "x-first-death-reason"])
FIELDS = st.sampled_from(["queue", "reason", "time", "count", "Attributes", "sqs_message"])
ENTRIES = st.dictionaries(FIELDS, SCALARS | st.dictionaries(FIELDS, SCALARS, max_size=2))
PROPERTIES = st.sampled_from(["ApproximateReceiveCount", "delivery_info"])


@settings(max_examples=50)
@given(
    headers=st.dictionaries(NAMES, SCALARS | st.lists(ENTRIES, max_size=3)),
    properties=st.dictionaries(PROPERTIES, SCALARS | ENTRIES),
)
def test_nothing_can_make_it_raise(headers: dict[str, Any], properties: dict[str, Any]) -> None:
    """Headers come from other programs."""
    found = native_death(headers, properties)
    assert found.words
