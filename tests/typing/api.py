"""The public face as a user writes it: mypy --strict must accept this file."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import TYPE_CHECKING

from celery import Celery

from celery_dlq import (
    DeadLetter,
    DeadLetters,
    DLQError,
    LetterFilter,
    Policy,
    Reason,
    RejectToDLQ,
    dead_letter_policy,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

app = Celery("shop")
dlq = DeadLetters(app)


@dead_letter_policy(max_deliveries=3, ignore=(KeyError,))
def charge(order_id: int) -> int:
    if order_id < 0:
        raise RejectToDLQ("no such order")
    return order_id


def charged() -> int:
    return charge(1)


def read() -> Iterator[DeadLetter]:
    where = LetterFilter(reason=Reason.FAILED, since=datetime.now(timezone.utc))
    yield from dlq.letters("orders-DLQ", where, newest_first=True, limit=10)
    yield from dlq.letters("orders-DLQ", reason="max_deliveries_exceeded")


def operate() -> list[str]:
    try:
        report = dlq.redrive("orders-DLQ", fingerprint="c0ffee", rate=100)
        exported = dlq.export("letters")
    except DLQError as exc:
        return [str(exc)]
    names = [queue.name for queue in dlq.queues()]
    groups = [group.fingerprint for group in dlq.groups(names[0])]
    return [report.redrive_id, str(exported.letters), *groups, dlq.get("id").id]


POLICY = Policy.parse({"max_deliveries": 3}, "here")
