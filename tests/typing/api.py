"""The public face as a user writes it: mypy --strict must accept this file."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
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
from celery_dlq.operations.edit import Edit

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


def operate_more(path: str) -> Iterator[str]:
    where = LetterFilter(grep="tenant")
    dry = dlq.dry_run("orders-DLQ", where, to_queue="orders")
    if dry.ready:
        report = dlq.redrive(
            "orders-DLQ", where, canary=5, max_failures=1, delay=timedelta(minutes=5),
            keep_count=True, new_id=False, progress=lambda letters: print(letters + 1),
        )  # fmt: skip
        yield from (report.state, *report.failed)
    yield dlq.edit("id", Edit(assign={"kwargs.tenant": 42})).redrive_id
    discarded = dlq.discard("orders-DLQ", where, export_first=path)
    purged = dlq.purge("orders-DLQ", reason=Reason.EXPIRED, limit=10)
    yield from (discarded.job_id, purged.job_id, dlq.restore("id"))
    yield from (found.key for found in dlq.entries("orders-DLQ", newest_first=True))
    yield from (letter.id for letter in dlq.tail("orders-DLQ", reason="failed"))
    for job in dlq.jobs():
        yield dlq.cancel(job.id).state if job.state == "running" else dlq.job(job.id).state
        yield dlq.resume(job.id).state
    yield from (f"{change.actor} {change.action} {change.letters}" for change in dlq.changes(5))


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
