"""`dlq differences` and the triage's `why` say the same of the same letters, in the same order."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from test_questions import CLUSTER, NOON, frame, orders

from celery_dlq.features.differences.operations import Message, compared
from celery_dlq.letters.comparison import TASK, pairs_of
from celery_dlq.letters.explanation import Explanation, sentence
from celery_dlq.letters.record import to_micros
from celery_dlq.spark.triage.causes import why_each

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def message(letter: dict[str, Any]) -> Message:
    """A letter of `frame` as it is compared without Spark."""
    defaults = {"worker_hostname": "web-1", "release": "v1"}
    fields = {**defaults, **letter, "dead_lettered_at": to_micros(letter["dead_lettered_at"])}
    pairs = pairs_of(lambda name: str(fields.get(name) or ""))
    return Message(fields["task_name"], frozenset(p for p in pairs if p[0] != TASK))


def texts(found: Explanation) -> list[str]:
    """Everything that it says, in order."""
    shared = [f"All {found.letters:,} letters have {one.text}." for one in found.shared]
    findings = [sentence(one, found.letters) for one in found.findings]
    return [*shared, *findings, *found.sentences[bool(shared) :]]


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


@pytest.mark.parametrize("same", [True, False], ids=["same tasks", "same queues"])
def test_both_find_the_same_in_the_same_order(spark: SparkSession, *, same: bool) -> None:
    """Counts, shares and probabilities are equal, against letters and against successes."""
    letters = varied(7, 600, **PLANTED)
    letters = [one for one in letters if same or one["fingerprint"] != "b" * 16]
    good = varied(8, 300)
    inside = [one for one in letters if one["fingerprint"] == CLUSTER]
    others = [one for one in letters if one["fingerprint"] != CLUSTER]
    successes = [one for one in good if one["task_name"] == "shop.charge"]
    here = compared(*([message(one) for one in side] for side in (inside, others, successes)))
    there = why_each(frame(spark, letters), [CLUSTER], frame(spark, good).drop("fingerprint"))
    assert texts(here) == [row["text"] for row in there]
    there = [row for row in there if row["against"]]
    assert [(one.feature, one.value, one.against) for one in here.findings] == [
        (row["feature"], row["value"], row["against"]) for row in there
    ]
    against = {one.against for one in here.findings}
    assert against == {"same tasks" if same else "same queues", "successes"}
    features = {one.feature for one in here.findings}
    assert {"kwargs.currency", "host", "args[0][]", "args[1].sku"} <= features
    if not same:
        others = {one.feature for one in here.findings if one.against == "same queues"}
        assert others == {"host"}
    for one, row in zip(here.findings, there, strict=True):
        assert one.letters == row["letters"]
        for mine, its in [
            (one.share_here, row["support"]),
            (one.share_elsewhere, row["share_of_others"]),
            (one.lift, row["lift"]),
            (one.p_value, row["p_value"]),
            (one.q_value, row["q_value"]),
        ]:
            assert mine == pytest.approx(its, rel=1e-9)
