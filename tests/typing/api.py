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
from celery_dlq.errors import MissingExtra, NotFound, StoreUnavailable
from celery_dlq.events import Change, DeadLettered, Redriven
from celery_dlq.letters.headers import LETTER_HEADER, REDRIVES_HEADER
from celery_dlq.letters.record import SCHEMA_VERSION, Delivery, Outcome
from celery_dlq.operations.edit import Edit
from celery_dlq.signals import task_dead_lettered, task_redriven
from celery_dlq.testing import WatchedLetters

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from pyspark.sql import DataFrame, SparkSession

app = Celery("shop")
dlq = DeadLetters(app)


@dead_letter_policy(max_deliveries=3, exceptions={KeyError: "ignore"})
def charge(order_id: int) -> int:
    if order_id < 0:
        raise RejectToDLQ("no such order")
    return order_id


def misspelt() -> None:
    """What mypy must refuse: an ignore that is not needed is an error."""
    dead_letter_policy(max_delivery=3)  # type: ignore[call-arg]
    dead_letter_policy(max_deliveries="3")  # type: ignore[arg-type]
    dlq.redrive("orders-DLQ", ratee=5)  # type: ignore[call-arg]
    dlq.letters("orders-DLQ", fingerprnt="c0ffee")  # type: ignore[call-arg]
    dlq.purge("orders-DLQ", limit=10, min_deliveries="2")  # type: ignore[arg-type]
    dlq.export("letters", resaon="failed")  # type: ignore[call-arg]
    dlq.plan("redrive", "orders-DLQ", ratee=5)  # type: ignore[call-arg]
    dlq.override_policy("orders", timedelta(hours=2), max_delivery=1)  # type: ignore[call-arg]


def charged() -> int:
    return charge(1)


def read() -> Iterator[DeadLetter]:
    where = LetterFilter(reason=Reason.FAILED, since=datetime.now(timezone.utc))
    yield from dlq.letters("orders-DLQ", where, newest_first=True, limit=10)
    yield from dlq.letters("orders-DLQ", reason="max_deliveries_exceeded")


def operate_more(path: str) -> Iterator[str]:
    where = LetterFilter(grep="tenant", min_deliveries=2, conditions=("kwargs.tenant=42",))
    where = LetterFilter.from_query(where.to_query())
    dry = dlq.dry_run("orders-DLQ", where, to_queue="orders")
    if dry.ready:
        report = dlq.redrive(
            "orders-DLQ",
            where,
            canary=5,
            max_failures=1,
            delay=timedelta(minutes=5),
            keep_count=True,
            new_id=False,
            progress=lambda letters: print(letters + 1),
        )
        yield from (report.state, *report.failed)
    yield dlq.edit("id", Edit(assign={"kwargs.tenant": 42})).redrive_id
    discarded = dlq.discard("orders-DLQ", where)
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
    told = [dlq.resolve(names[0], one, release="2026.3").state.value for one in groups]
    differences = dlq.differences(names[0], reason="failed")
    told += [one.condition or one.text for one in differences.findings]
    told += [*differences.sentences, *(one.value for one in differences.shared)]
    return [report.redrive_id, str(exported.letters), *groups, *told, dlq.get("id").id]


POLICY = Policy.parse({"max_deliveries": 3}, "here")


def look_after(path: str) -> Iterator[str]:
    rules = DeadLetters.of(app).policies("orders")
    yield from (f"{view.queue} {view.task} {view.dead_letter_queue}" for view in rules.views)
    yield from rules.warnings
    dlq.override_policy("orders", timedelta(hours=2), max_deliveries=1)
    yield from dlq.lift_policy("orders", "max_deliveries")
    yield from (f"{change.target} {change.letters}" for change in dlq.trim(dry_run=True))
    yield str(dlq.adopt("orders.dead", "orders-DLQ", limit=10).adopted)
    report = dlq.export(path, ["orders-DLQ"], redact=["kwargs.card"], redact_key=b"secret")
    yield report.destination
    dlq.validate()
    server = dlq.serve_metrics(port=9808, address="127.0.0.1")
    server.shutdown()


def read_one(letter: DeadLetter) -> Mapping[str, object]:
    last: Delivery | None = letter.history[-1] if letter.history else None
    killed: bool = last is not None and last.outcome is Outcome.WORKER_LOST
    fields: dict[str, bytes] = letter.to_fields()
    same: bool = DeadLetter.from_fields(fields) == letter
    known: bool = letter.schema_version <= SCHEMA_VERSION
    return {"killed": killed, "same": same, "known": known, **letter.extra}


def hear() -> None:
    def died(letter: DeadLetter, **_: object) -> None:
        print(letter.id, LETTER_HEADER, REDRIVES_HEADER)

    task_dead_lettered.connect(died)
    task_redriven.connect(died)


def time_of(event: DeadLettered | Redriven | Change) -> datetime:
    return event.at


def failing() -> str:
    try:
        return dlq.get("id").id
    except (NotFound, StoreUnavailable) as exc:
        return str(exc)
    except MissingExtra as exc:
        return exc.extra


def test_of_a_user(dead_letters: WatchedLetters) -> None:
    dead_letters.watch(app, task_always_eager=True)
    letter: DeadLetter = dead_letters.assert_dead_lettered(charge, reason="rejected")
    assert letter.description
    dead_letters.assert_none("shop.mail")


def in_spark(spark: SparkSession, path: str) -> DataFrame:
    from celery_dlq.spark.source import register
    from celery_dlq.spark.triage import groups, letters

    register(spark)
    return groups(letters(spark, path))
