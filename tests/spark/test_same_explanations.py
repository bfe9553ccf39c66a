"""The triage says what the core says of the same letters, as `dlq differences` does."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, Any
from zlib import crc32

import pytest
from test_questions import CLUSTER, NOON, frame, orders

from celery_dlq.letters.causes import ComparedMessage, explain_causes
from celery_dlq.letters.comparison import TASK, pairs_of
from celery_dlq.letters.course import Course, Moment
from celery_dlq.letters.record import to_micros
from celery_dlq.spark.triage.causes import explanations_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def fields_of(letters: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The columns of `frame`, in the order in which Spark draws them."""
    defaults = {"worker_hostname": "web-1", "release": "v1"}
    found = [
        {
            "id": str(number),
            **defaults,
            **letter,
            "at": to_micros(letter["dead_lettered_at"]) / 1e6,
        }
        for number, letter in enumerate(letters)
    ]
    return sorted(found, key=lambda one: crc32(one["id"].encode()))


def message(fields: dict[str, Any], cause: str | None) -> ComparedMessage:
    """A letter, or a success, as the core gets it."""
    pairs = pairs_of(lambda name: str(fields[name]) if fields.get(name) is not None else None)
    without_task = frozenset(pair for pair in pairs if pair[0] != TASK)
    return ComparedMessage(
        cause, fields["task_name"], fields["source_queue"], fields["at"], without_task
    )


def varied(seed: int, count: int, **planted: Any) -> list[dict[str, Any]]:
    """Orders of two tasks, from a few publishers, with retries, and with odd arguments."""
    dice = Random(seed)  # noqa: S311 - the same every time
    found = orders(seed, count, **planted)
    for letter in found:
        letter |= {"task_name": "shop.charge", "origin": f"gen{dice.randrange(6)}@web"}
        letter["retries"] = dice.randrange(3)
        if letter["fingerprint"] == "c" * 16:
            letter["task_name"] = "shop.ship"
        if dice.random() < 0.1:
            letter["kwargs_json"] = dice.choice(
                ['{"order_id": 12345678901234567890, "ratio": 0.5}', "{}", "not json", '{"a": {}}']
            )
    return found


PLANTED = {
    "kwargs": {"currency": "XXX", "customer": {"kind": "vip", "age": None}, "ok": True},
    "letter": {"worker_hostname": "web-13", "dead_lettered_at": NOON},
    "args": [[7, {"x": [1]}], {"sku": {"deep": [1, "é"]}}],
}


@pytest.mark.parametrize("partitions", [1, 200], ids=["one executor", "a cluster"])
@pytest.mark.parametrize("same", [True, False], ids=["same tasks", "same queues"])
def test_spark_and_python_say_the_same(spark: SparkSession, *, same: bool, partitions: int) -> None:
    """Findings, numbers, times and sentences are equal, on a laptop and on a cluster."""
    letters = varied(7, 600, **PLANTED)
    letters = [one for one in letters if same or one["fingerprint"] != "b" * 16]
    good = varied(8, 300)
    fields = fields_of(letters)
    of_task = [one for one in fields if not same or one["task_name"] == "shop.charge"]
    messages = [message(one, one["fingerprint"]) for one in of_task]
    messages += [message(one, None) for one in fields_of(good) if one["task_name"] == "shop.charge"]
    moments = defaultdict(list)
    for one in fields:
        moments[one["fingerprint"]].append(Moment(one["at"], one["release"]))
    causes = {"a" * 16, "b" * 16}  # of the task
    courses = {name: Course.of(times) for name, times in moments.items() if name in causes}
    ends_at = max(one["at"] for one in fields)
    here = explain_causes(messages, courses, [CLUSTER], ends_at=ends_at)[CLUSTER]
    before = spark.conf.get("spark.sql.shuffle.partitions")
    spark.conf.set("spark.sql.shuffle.partitions", str(partitions))
    try:
        successes = frame(spark, good).drop("fingerprint")
        there = explanations_of(frame(spark, letters), [CLUSTER[:3]], successes)[CLUSTER]
    finally:
        spark.conf.set("spark.sql.shuffle.partitions", str(before))
    assert replace(there, again=None) == here
    assert there.sentences == here.sentences
    assert {"kwargs.currency", "host"} <= {one.feature for one in here.findings}
