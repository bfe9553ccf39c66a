"""Letters of messages that a broker dead-lettered."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from builders import NOW, a_message, a_request, an_app
from fresh import fresh_store

from celery_dlq.features.adopt.letter import Adoption
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.writing.letter import LetterMaker

AT = NOW.replace(microsecond=0)
X_DEATH = {
    "x-death": [{"queue": "orders", "reason": "expired", "count": 1, "time": AT}],
    "x-first-death-queue": "orders",
}
PLAIN: dict[str, Any] = {
    "headers": {},
    "properties": {},
    "body": b"\xffnot celery",
    "delivery_tag": 7,
    "content_type": "text/plain",
    "delivery_info": {"routing_key": "orders.dead"},
}


def an_adoption(target: str | None = None, **policies: Policy) -> Adoption:
    return Adoption(
        an_app(),
        PolicyTable(policies),
        "orders.dead",
        target,
        fresh_store().counter,
        LetterMaker(clock=lambda: NOW, hostname="web-1", pid=4711),
    )


def letter(adoption: Adoption | None = None, **message: Any) -> DeadLetter:
    """The letter of a message of `a_message`."""
    adoption, made = adoption or an_adoption(), a_message(**message)
    return adoption.letter(made, adoption.identity(made))[0]


def test_a_celery_message_keeps_its_task_and_gets_its_history() -> None:
    """Bytes and headers as they came; the broker's time is the letter's."""
    headers = {**a_request(retries=2, dlq_redrives=1), **X_DEATH}
    found = letter(an_adoption(orders=Policy(max_deliveries=3)), headers=headers)
    assert (found.reason, found.task_id, found.task_name) == (Reason.ADOPTED, "t-1", "shop.charge")
    assert (found.retries, found.redrives, found.max_deliveries) == (2, 1, 3)
    assert (found.source_queue, found.dead_letter_queue) == ("orders", "orders-DLQ")
    assert found.dead_lettered_at == NOW
    assert (found.args_json, found.worker_hostname, found.release) == ("[1]", "web-1", None)
    assert found.decoded("headers") == headers
    assert found.decoded("native_death")["x-death"][0]["reason"] == "expired"
    assert found.description == (
        "adopted from 'orders.dead': expired in queue 'orders' at 2026-03-04T05:06:07+00:00"
    )
    assert DeadLetter.from_fields(found.to_fields()) == found


def test_a_message_of_protocol_1_says_its_task_in_its_body() -> None:
    """Read as JSON only."""
    body = {"task": "shop.charge", "id": "t-9", "args": [1], "kwargs": {}, "retries": 3}
    found = letter(headers=X_DEATH, body=json.dumps(body).encode(), properties={})
    assert (found.task_id, found.task_name, found.retries) == ("t-9", "shop.charge", 3)


def test_a_letter_goes_to_the_named_queue_or_to_that_of_its_policy() -> None:
    """The order of the operator beats the policy."""
    policy = Policy(dead_letter_queue="lost-orders")
    headers = {**a_request(), **X_DEATH}
    assert letter(an_adoption(orders=policy), headers=headers).dead_letter_queue == "lost-orders"
    named = letter(an_adoption("named-DLQ", orders=policy), headers=headers)
    assert (named.dead_letter_queue, named.source_queue) == ("named-DLQ", "orders")


def test_without_a_word_of_the_broker_the_routing_key_tells() -> None:
    """A plain list queue in Redis still has kombu's delivery information."""
    assert letter().source_queue == "orders"


def test_a_message_of_nobody_becomes_a_letter_with_what_is_known() -> None:
    """Not Celery's, no history, no origin."""
    found = letter(**PLAIN)
    assert (found.body, found.task_name, found.source_queue) == (b"\xffnot celery", "", "")
    assert found.dead_letter_queue == "orders.dead-DLQ"
    assert "original queue is not known" in found.description
    assert found.task_id.startswith("adopted-")


def test_the_name_of_the_target_tells_the_source_if_nothing_else_does() -> None:
    """``{"orders.dead": "orders-DLQ"}`` is meant that way."""
    assert letter(an_adoption("orders-DLQ"), **PLAIN).source_queue == "orders"


def test_the_message_id_names_a_message_and_the_correlation_id_does_not() -> None:
    """Programs that are not Celery give one correlation id to many messages."""
    properties = {"message_id": "m-1", "correlation_id": "c-1"}
    assert letter(**{**PLAIN, "properties": properties}).task_id == "m-1"
    assert letter(**{**PLAIN, "properties": {"correlation_id": "c-1"}}).task_id != "c-1"


def test_an_unnamed_message_is_known_again_and_not_mistaken_for_others() -> None:
    """By its content; what changes from delivery to delivery does not count."""
    adoption = an_adoption()

    def identity(**changes: Any) -> Any:
        return adoption.identity(a_message(**{**PLAIN, **changes}))

    first = identity()
    again = identity(headers={"x-delivery-count": 3, "redelivered": True}, delivery_tag=9)
    assert (first, first.certain) == (again, False)
    assert identity(body=b"other") != first
    assert identity(headers={"a": 1}) != first
    assert first.numbered(0) == first != first.numbered(1)


def test_a_receipt_of_sqs_names_nothing() -> None:
    """It is another one for each delivery; the message id stays."""
    raw = {"MessageId": "sqs-1", "Attributes": {"ApproximateReceiveCount": "4"}}
    found = letter(
        **{
            **PLAIN,
            "delivery_tag": "receipt-2",
            "properties": {"delivery_tag": "receipt-2", "delivery_info": {"sqs_message": raw}},
        }
    )
    assert (found.task_id, found.deliveries) == ("sqs-1", 4)
    assert found.decoded("native_death") == {"ApproximateReceiveCount": "4"}


@pytest.mark.parametrize("time", [NOW - timedelta(days=99), NOW + timedelta(days=1), "odd", None])
def test_its_time_in_the_queue_begins_when_it_is_adopted(time: object) -> None:
    """A letter that died long ago by the broker's word must not be trimmed at once."""
    headers = {"x-death": [{"queue": "orders", "reason": "expired", "time": time}]}
    expires = (NOW - timedelta(days=1)).isoformat()
    found = letter(headers={**a_request(expires=expires), **headers})
    assert found.dead_lettered_at == NOW
    assert (found.expires or NOW) < NOW


def test_groups_tell_the_brokers_reasons_apart() -> None:
    """Expired and rejected messages have two causes."""
    prints = {
        letter(headers={"x-death": [{"queue": "orders", "reason": reason}]}).fingerprint
        for reason in ("expired", "rejected", "maxlen", "delivery_limit")
    }
    assert len(prints) == 4
