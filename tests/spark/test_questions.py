"""The triage finds planted causes, and none in noise."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from random import Random
from typing import TYPE_CHECKING, Any

import pytest

from celery_dlq.errors import DLQError
from celery_dlq.letters.record import field_kinds, from_micros
from celery_dlq.spark import triage as questions
from celery_dlq.spark.triage.causes import explanations_of
from celery_dlq.spark.triage.questions import column_ddl
from celery_dlq.spark.triage.samples import plan_of, rows_of_units

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 3, 29, 12, 0, tzinfo=timezone.utc)
CLUSTER = "a" * 16


def frame(spark: SparkSession, letters: list[dict[str, Any]]) -> DataFrame:
    """Letters of which only some columns matter."""
    rows = [
        {
            "task_name": "shop.charge",
            "source_queue": "orders",
            "dead_letter_queue": "orders-DLQ",
            "reason": "failed",
            "dead_lettered_at": NOON,
            "fingerprint": CLUSTER,
            "worker_hostname": "web-1",
            "release": "v1",
            "args_json": "[]",
            "kwargs_json": "{}",
            "id": str(number),
            **letter,
        }
        for number, letter in enumerate(letters)
    ]
    times = {"dead_lettered_at": lambda moment: moment}
    names = list(field_kinds())
    table = [tuple(times.get(n, lambda v: v)(row.get(n)) for n in names) for row in rows]
    return spark.createDataFrame(table, column_ddl(names)).coalesce(1)


def rows(df: DataFrame) -> list[dict[str, Any]]:
    """Rows as mappings, times as aware ones."""
    times = {name for name, kind in df.dtypes if kind == "timestamp"}
    plain = df.selectExpr(*(f"unix_micros({n}) AS {n}" if n in times else n for n in df.columns))
    return [
        {n: from_micros(v) if n in times and v is not None else v for n, v in row.asDict().items()}
        for row in plain.collect()
    ]


# -- why --------------------------------------------------------------------------


def orders(seed: int, count: int, **planted: Any) -> list[dict[str, Any]]:
    """Orders of every kind; a fifth of them are in the cluster, with what is planted there."""
    dice = Random(seed)  # noqa: S311 - the same every time
    found = []
    for number in range(count):
        inside = number % 5 == 0
        kwargs = {
            "currency": dice.choice(["EUR", "USD", "GBP"]),
            "order_id": number,
            "customer": {"kind": dice.choice(["b2b", "b2c"]), "age": dice.randrange(30)},
            "tags": [dice.choice("pqr"), dice.choice("stu")],
        }
        letter: dict[str, Any] = {
            "fingerprint": CLUSTER if inside else dice.choice(["b" * 16, "c" * 16]),
            "worker_hostname": f"web-{dice.randrange(20)}",
            "release": f"v{dice.randrange(4)}",
            "dead_lettered_at": NOON + timedelta(minutes=dice.randrange(10_000)),
            "source_queue": dice.choice(["orders", "express"]),
        }
        args: list[Any] = [dice.randrange(50), {"sku": dice.randrange(40)}]
        if inside and dice.random() < 0.9:
            kwargs |= planted.get("kwargs", {})
            letter |= planted.get("letter", {})
            args = planted.get("args", args)
        letter |= {"args_json": json.dumps(args), "kwargs_json": json.dumps(kwargs)}
        found.append(letter)
    return found


FINDINGS = "against IS NOT NULL"  # neither what all letters share, nor a sentence


def explained(df: DataFrame, good: DataFrame | None = None, name: str = CLUSTER) -> DataFrame:
    """The rows about a cause, without its sentence."""
    return questions.explain(df, good, fingerprints=[name]).where("kind <> 'headline'")


def causes(df: DataFrame) -> set[tuple[str, str]]:
    """Features and values that are found."""
    found = explained(df).where(FINDINGS).collect()
    return {(row["feature"], row["value"]) for row in found}


def test_planted_causes_are_found(spark: SparkSession) -> None:
    """Values of arguments at any depth, hosts and releases are named, and nothing else."""
    planted = orders(
        1,
        1_500,
        kwargs={"currency": "XXX", "customer": {"kind": "vip", "age": None}, "coupon": "C"},
        letter={"worker_hostname": "web-13", "release": "v9"},
        args=[7, {"sku": 99}],
    )
    found = explained(frame(spark, planted), name=CLUSTER[:6]).where(FINDINGS).collect()
    # All of them are in the same letters: one is told, and the others beside it.
    assert {(row["feature"], row["value"]) for row in found} <= {
        ("kwargs.currency", "XXX"),
        ("kwargs.customer.kind", "vip"),
        ("kwargs.customer.age", "null"),
        ("kwargs.coupon", "(given)"),
        ("host", "web-13"),
        ("release", "v9"),
        ("args[0]", "7"),
        ("args[1].sku", "99"),
    }
    first = found[0]
    inside = [letter for letter in planted if letter["fingerprint"] == CLUSTER]
    assert first["letters"] == sum('"XXX"' in letter["kwargs_json"] for letter in inside)
    assert first["share_here"] == pytest.approx(first["letters"] / len(inside))
    assert first["against"] == "same tasks"
    assert first["q_value"] < 1e-10


def test_noise_has_no_causes(spark: SparkSession) -> None:
    """Among hundreds of values without any connection none is named, cause after cause."""
    for seed in range(2):
        found = questions.explain(frame(spark, orders(seed, 1_000))).collect()
        assert len({row["fingerprint"] for row in found}) == 3
        assert [row for row in found if row["against"] is not None] == []
        nothing = [row for row in found if (row["text"] or "").startswith("Nothing stands out")]
        assert len(nothing) >= 3


def test_causes_are_asked_together_in_one_pass(spark: SparkSession) -> None:
    """Several causes read the letters as often as one does, and each gets its own answer."""
    letters = orders(3, 400, kwargs={"currency": "XXX", "tags": ["z"]}, args=[[7, 7], {"a": "b"}])
    for number, letter in enumerate(letters):
        if letter["fingerprint"] == "b" * 16 and number % 4:
            letter |= {"release": "v9", "task_name": "shop.ship"}
    df = frame(spark, letters)
    good = frame(spark, orders(4, 200)).drop("fingerprint")
    clusters = ["a", "b" * 16, "c"]
    # Of a task with few others the letters of its queues are read as well, with a table of queues.
    assert scans(df, clusters, good) <= scans(df, clusters[:1], good) + 2
    assert {name[0] for name in explanations_of(df, clusters, good)} == set("abc")


def scans(df: DataFrame, clusters: list[str], good: DataFrame) -> int:
    """Number of times that the plan of the comparisons reads the letters."""
    rows = rows_of_units(df, plan_of(df, clusters, good), good)
    plan = rows._jdf.queryExecution().sparkPlan().toString()  # type: ignore[operator]
    return str(plan).count("Scan ")


def test_successes_are_a_second_comparison(spark: SparkSession) -> None:
    """Where all letters share the cause, messages that succeeded show it."""
    dice = Random(5)  # noqa: S311 - the same every time
    bad = [{"kwargs_json": json.dumps({"currency": "XXX", "n": n % 9})} for n in range(60)]
    good = [
        {
            "kwargs_json": json.dumps({"currency": dice.choice("ABC"), "n": n % 9}),
            "fingerprint": None,
        }
        for n in range(200)
    ]
    mails = [{"task_name": "mail.send", "fingerprint": "m" * 16} for _ in range(30)]
    df = frame(spark, [*bad, *mails])
    arguments = f"feature LIKE 'kwargs%' AND {FINDINGS}"
    assert explained(df).where(arguments).collect() == []
    found = rows(explained(df, frame(spark, good)).where(arguments))
    assert [(row["feature"], row["value"], row["against"]) for row in found] == [
        ("kwargs.currency", "XXX", "successes")
    ]


def test_what_all_letters_share_comes_first_and_what_is_open_last(spark: SparkSession) -> None:
    """Also of three letters; with nothing to compare with, nothing is said to stand out or not."""
    three = [{"kwargs_json": json.dumps({"tenant": "nordic", "n": n})} for n in range(3)]
    found = rows(explained(frame(spark, three)))
    shared = ["kwargs.tenant", "release", "host"]
    assert [row["feature"] for row in found] == [*shared, None, None, None]
    assert [row["letters"] for row in found] == [3, 3, 3, None, None, None]
    assert found[0]["text"] == "All 3 letters have kwargs.tenant = nordic."
    assert found[-2]["text"].startswith("There is nothing to compare 3 letters with")
    assert found[-1]["text"] == "Fewer than 5 letters hardly differ beyond chance."
    unread = [{"kwargs_json": None, "fingerprint": "b" * 16}]
    some = rows(explained(frame(spark, [*orders(1, 400), *unread])))
    assert "1 message was compared without arguments" in some[-2]["text"]
    assert some[-1]["text"].startswith("What was compared shows no difference")


def test_odd_arguments_stop_nothing(spark: SparkSession) -> None:
    """Arguments that are no JSON, or look like it, are values or nothing, never an error."""
    texts = ("not json", '"[open"', '{"a": "[open", "b": "{open"}', "null")
    causes = {f"{number}" * 16: text for number, text in enumerate(texts)}
    letters = [
        {"args_json": text, "kwargs_json": text, "release": f"bad {name}", "fingerprint": name}
        for name, text in causes.items()
        for _ in range(30)
    ]
    letters += [{"fingerprint": "b" * 16} for _ in range(30)]
    found = questions.explain(frame(spark, letters)).where(FINDINGS).collect()
    told = {(row["fingerprint"], row["feature"], row["value"]) for row in found}
    assert {(name, "release", f"bad {name}") for name in causes} <= told


def test_an_unknown_cluster_is_refused(spark: SparkSession) -> None:
    """A fingerprint that is not there, or not only one, is named in one line."""
    df = frame(spark, [{"fingerprint": "ab12"}, {"fingerprint": "ab34"}, {"fingerprint": None}])
    for cluster, text in [
        ("ffff", "expected a fingerprint of these letters, got 'ffff'"),
        ("", "got ''"),
        ("ab", "got several: ab12, ab34"),
    ]:
        with pytest.raises(DLQError, match=text) as caught:
            explained(df, name=cluster)
        assert "\n" not in str(caught.value)
    with pytest.raises(DLQError, match="expected alpha between 0 and 1"):
        questions.explain(df, alpha=1)


# -- trends -----------------------------------------------------------------------


def test_new_and_returned_causes(spark: SparkSession) -> None:
    """A cause is new if it never was before, returned if it was long gone, else neither."""
    day = timedelta(days=1)

    def at(fingerprint: str, *days: float) -> list[dict[str, Any]]:
        return [{"fingerprint": fingerprint, "dead_lettered_at": NOON + d * day} for d in days]

    df = frame(
        spark,
        [
            *at("new", 0, 1, 2),
            *at("back", -20, 3),
            *at("steady", -1, 1),
            *at("over", -1),
            *at("soon", -6.5, 0.4),
        ],
    )
    found = rows(questions.new_since(df, NOON))
    assert [(row["fingerprint"], row["kind"], row["letters"]) for row in found] == [
        ("new", "new", 3),
        ("back", "returned", 1),
    ]
    assert (found[0]["first_seen_at"], found[0]["gone_since"]) == (NOON, None)
    assert found[1]["gone_since"] == NOON - 20 * day
    shorter = rows(questions.new_since(df, NOON, "6 days"))
    assert {row["fingerprint"] for row in shorter} == {"new", "back", "soon"}
    with pytest.raises(DLQError, match="expected since to be an aware datetime"):
        questions.new_since(df, NOON.replace(tzinfo=None))


def test_spikes_stand_out_of_a_steady_rate(spark: SparkSession) -> None:
    """A flood is found at its time; a steady rate, however high, and single letters are not."""
    minute = timedelta(minutes=1)
    steady = [
        {"fingerprint": "steady", "dead_lettered_at": NOON + minute * m}
        for m in range(300)
        for _ in range(3)
    ]
    flood = [
        {"fingerprint": "flood", "dead_lettered_at": NOON + minute * 200 + minute * n / 50}
        for n in range(100)
    ]
    rare = [{"fingerprint": "rare", "dead_lettered_at": NOON + minute * m} for m in (50, 170)]
    df = frame(spark, [*steady, *flood, *rare])
    found = rows(questions.spikes(df))
    assert [(row["fingerprint"], row["bucket_start"], row["letters"]) for row in found] == [
        ("flood", NOON + minute * 200, 100)
    ]
    assert found[0]["expected"] == 0


def test_spike_of_a_cause_with_two_tasks_is_one(spark: SparkSession) -> None:
    """Letters of one cause count together, whatever task they are of."""
    minutes = [0, 60, *[200] * 12]
    df = frame(
        spark,
        [
            {"dead_lettered_at": NOON + timedelta(minutes=m), "task_name": f"t{n % 2}"}
            for n, m in enumerate(minutes)
        ],
    )
    found = rows(questions.spikes(df))
    assert [(row["task_name"], row["letters"]) for row in found] == [("t0", 12)]


# -- limits -----------------------------------------------------------------------


def test_limits_advise_where_success_ends(spark: SparkSession) -> None:
    """The advice loses less than was allowed, surely; letters alone or few successes give none."""
    history = json.dumps([{"number": n} for n in range(1, 6)])
    df = frame(
        spark,
        [
            *({"deliveries": 5, "history": history} for _ in range(10)),
            {"deliveries": None, "history": history},
            {"task_name": "mail.send", "deliveries": 2, "history": "broken"},
        ],
    )
    good = spark.createDataFrame(
        [
            ("shop.charge", n)
            for n, times in [(1, 900), (2, 90), (3, 9), (4, 1)]
            for _ in range(times)
        ],
        "task_name STRING, deliveries BIGINT",
    )
    found = rows(questions.limits(df, good))
    charges = [row for row in found if row["task_name"] == "shop.charge"]
    assert [(r["delivery"], r["reached"], r["succeeded"], r["died"]) for r in charges] == [
        (1, 1_011, 900, 0),
        (2, 111, 90, 0),
        (3, 21, 9, 0),
        (4, 12, 1, 0),
        (5, 11, 0, 11),
    ]
    assert charges[1]["share"] == pytest.approx(90 / 111)
    assert charges[1]["cumulative_share"] == pytest.approx(0.99)
    assert {row["advised_max_deliveries"] for row in charges} == {None}
    assert {row["samples"] for row in charges} == {1_000}
    # Wilson's upper ends for 100, 10, 1, 0 and 0 of 1,000.
    assert [row["lost_at_most"] for row in charges] == pytest.approx(
        [0.12014, 0.018309, 0.005642, 0.003827, 0.003827], rel=1e-3
    )
    mail = next(row for row in found if row["task_name"] == "mail.send")
    assert (mail["delivery"], mail["advised_max_deliveries"]) == (2, None)
    for lost, advised in [(0.02, 2), (0.004, 4)]:  # above, 0.001
        found = rows(questions.limits(df, good, lost=lost))
        assert {r["advised_max_deliveries"] for r in found if r["samples"]} == {advised}
    assert rows(questions.limits(df, good, sample=0.1))[1]["succeeded"] == 9_000
    assert {row["cumulative_share"] for row in rows(questions.limits(df))} == {None}
    # Of three tasks: one sampled in a hundredth, one with shares that cannot be, one with none.
    shares = [json.dumps({"dlq_sample_share": share}) for share in (0.01, 1, -1)]
    others = spark.createDataFrame(
        [("sampled", shares[0]), ("sure", shares[1]), ("sure", shares[2]), ("text", "not json")],
        "task_name STRING, headers STRING",
    )
    times = good.where("deliveries = 1").select("deliveries")
    known = others.where("task_name <> 'sure'").crossJoin(times)
    known = known.unionByName(others.where("task_name = 'sure'").selectExpr("*", "1L deliveries"))
    told = {row["task_name"]: row for row in rows(questions.limits(df.limit(0), known))}
    assert told["sampled"]["succeeded"] == 90_000
    assert told["text"]["succeeded"] == 900
    assert told["sure"]["advised_max_deliveries"] is None
    for unusable in ({"sample": 0}, {"lost": 0}):
        with pytest.raises(DLQError, match="expected sample above 0"):
            questions.limits(df, good, **unusable)
