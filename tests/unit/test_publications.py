"""What tells a message from others with its task id."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from kombu.message import Message

from celery_dlq.letters.headers import PUBLICATION_HEADER, published_at
from celery_dlq.transport.publications import name_publication
from celery_dlq.writing.capture import publication_of


def named(**headers: Any) -> str:
    """The name that a message with these headers gets when it is published."""
    name_publication(headers=headers)
    return str(headers[PUBLICATION_HEADER])


def a_message(body: bytes = b"[]", **changes: Any) -> Message:
    """A message as a worker gets it."""
    return Message(body=body, **{"headers": {}, "properties": {}, "delivery_info": {}, **changes})


def test_each_publication_has_a_name_that_says_when() -> None:
    """Of equal messages, too; the time is the publisher's."""
    first, second = named(id="t"), named(id="t")
    assert first != second
    at = published_at(first)
    assert at is not None
    assert abs(at - datetime.now(timezone.utc)) < timedelta(minutes=1)
    assert publication_of(a_message(headers={PUBLICATION_HEADER: first})) == first


def test_a_retry_keeps_the_name_and_nothing_else_does() -> None:
    """It has the headers of its message; so may a message that a task publishes with them."""
    first = named(id="t")
    assert named(**{"id": "t", "retries": 1, PUBLICATION_HEADER: first}) == first
    assert named(**{"id": "t", "retries": 0, PUBLICATION_HEADER: first}) != first
    assert named(**{"id": "t", "retries": 1, PUBLICATION_HEADER: "a:b"}) != "a:b"


def test_what_cannot_have_headers_is_left_alone() -> None:
    """Our signal must not fail a publish."""
    name_publication(headers=None)


@pytest.mark.parametrize(
    "changes",
    [
        {"properties": {"delivery_tag": "other"}},
        {"delivery_info": {"sqs_message": {"MessageId": "other"}}},
        {"body": b"[1]"},
        {"headers": {"eta": "2026-01-01T00:00:00"}},
        {"headers": {"origin": "7@elsewhere"}},
    ],
)
def test_a_plain_publishers_message_is_told_by_its_broker_or_its_content(
    changes: dict[str, Any],
) -> None:
    """The same for each delivery of it; a broker's own headers change."""
    message = a_message(headers={"x-delivery-count": 1})
    assert publication_of(message) == publication_of(a_message(headers={"redelivered": True}))
    assert publication_of(message) != publication_of(a_message(**changes))


@pytest.mark.parametrize("value", [7, None, "", "a:b", "x" * 99, ["6455f3a1b2c3d-9f3e"]])
def test_a_name_that_is_none_is_not_believed(value: object) -> None:
    """Anybody can publish headers."""
    assert published_at(value) is None
    named_so = publication_of(a_message(headers={PUBLICATION_HEADER: value}))
    assert named_so == publication_of(a_message())
