"""`explain`: causes as a table of sentences with their evidence, and what redrives came to."""

from __future__ import annotations

import json
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import planted
import pytest
from click.testing import CliRunner
from test_questions import CLUSTER, NOON, frame, rows

from celery_dlq.cli.commands import dlq
from celery_dlq.errors import DLQError
from celery_dlq.spark.triage import explain, letters
from celery_dlq.spark.triage.again import is_known

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import SparkSession

OTHER = "b" * 16


def of_two_causes() -> list[dict[str, Any]]:
    """The letters of one cause are in CHF and of the last hour of ten, those of the other not."""
    return [
        {
            "fingerprint": CLUSTER if number % 4 == 0 else OTHER,
            "dead_lettered_at": NOON
            + (timedelta(hours=9) if number % 4 == 0 else timedelta())
            + timedelta(seconds=36_000 / (10 if number % 4 == 0 else 1) / 400 * number),
            "kwargs_json": json.dumps(
                {"currency": "CHF" if number % 4 == 0 else ("EUR", "USD")[number % 2]}
            ),
        }
        for number in range(400)
    ]


def test_each_cause_is_a_sentence_with_its_evidence(spark: SparkSession) -> None:
    """The headline comes first; each finding has the numbers that its sentence rests on."""
    found = rows(explain(frame(spark, of_two_causes())))
    assert [*dict.fromkeys(row["fingerprint"] for row in found)] == [OTHER, CLUSTER]
    own = [row for row in found if row["fingerprint"] == CLUSTER]
    headline, *others = own
    assert (headline["kind"], headline["letters"], headline["of_letters"]) == ("headline", 100, 100)
    assert abs(headline["since"] - NOON - timedelta(hours=9)) < timedelta(minutes=10)
    assert 0 < headline["uncertainty_seconds"] < 3600
    assert "CHF" in headline["text"]
    currency = next(row for row in others if row["feature"] == "kwargs.currency")
    assert (currency["kind"], currency["value"], currency["against"]) == (
        "value",
        "CHF",
        "same tasks",
    )
    shares = [currency[name] for name in ("letters", "of_letters", "others", "of_others")]
    assert shares == [100, 100, 0, 300]
    assert (currency["share_here"], currency["share_elsewhere"]) == (1.0, 0.0)
    assert currency["q_value"] >= currency["p_value"] > 0
    assert headline["died_again"] is None
    assert {row["kind"] for row in found} <= {"headline", "shared", "note", "value", "set"}


def test_causes_are_chosen_by_the_beginning_of_their_fingerprint(spark: SparkSession) -> None:
    """Those asked for are explained however small they are; a wrong one is refused."""
    df = frame(spark, [*of_two_causes(), {"fingerprint": "c" * 16}])
    assert "c" * 16 not in {row["fingerprint"] for row in rows(explain(df))}
    chosen = rows(explain(df, fingerprints=["cc", "aaaa"]))
    assert [*dict.fromkeys(row["fingerprint"] for row in chosen)] == ["c" * 16, CLUSTER]
    with pytest.raises(DLQError, match="expected a fingerprint of these letters, got 'dd'"):
        explain(df, fingerprints=["dd"])
    with pytest.raises(DLQError, match="expected alpha between 0 and 1"):
        explain(df, alpha=1)


def test_every_cause_of_any_size_that_matters_is_explained(
    spark: SparkSession, tmp_path: Path
) -> None:
    """One per cent of the letters, or more than 20, is enough."""
    folder = planted.write(planted.letters(2_000), tmp_path / "letters")
    found = explain(letters(spark, folder)).where("kind = 'headline'").collect()
    assert {row.fingerprint for row in found} == set(planted.CAUSES)
    assert all(row.text for row in found)


# -- again ---------------------------------------------------------------------------


def redriven(cause: str, number: int, **more: Any) -> dict[str, Any]:
    """A message that was redriven once, and died of a cause before."""
    earlier = json.dumps([{"fingerprint": "0" * 16}, {"fingerprint": cause}])
    headers = {"dlq_earlier": earlier, **more.pop("headers", {})}
    at = NOON + timedelta(seconds=number)
    values = {"redrives": 1, "headers": json.dumps(headers), "dead_lettered_at": at}
    return {**values, **more}


def succeeded(share: float, **more: Any) -> dict[str, Any]:
    """A sampled success."""
    headers = {"dlq_sample_share": share, **more.pop("headers", {})}
    fixed = {"reason": "succeeded", "fingerprint": None}
    return {"headers": json.dumps(headers), **more, **fixed}


def test_what_earlier_redrives_came_to_is_said(spark: SparkSession) -> None:
    """Of one cause 30 of 40 died again, by another cause too; of another nobody knows enough."""
    dead = [*of_two_causes(), *(redriven(CLUSTER, n, fingerprint=OTHER) for n in range(30))]
    dead += [redriven(OTHER, n) for n in range(4)]
    # Before successes were sampled nothing is known of those that succeeded.
    dead += [redriven(CLUSTER, -9_000 - n) for n in range(50)]
    good = [
        succeeded(1.0, **{**redriven(CLUSTER, n), "headers": {"dlq_earlier": earlier}})
        for n, earlier in enumerate([json.dumps([{"fingerprint": CLUSTER}])] * 10)
    ]
    ends = [NOON - timedelta(hours=1), NOON + timedelta(hours=10)]
    good += [succeeded(1.0, dead_lettered_at=at) for at in ends]
    found = explain(frame(spark, dead), frame(spark, good)).where("kind = 'headline'").collect()
    by_cause = {row.fingerprint: row for row in found}
    assert (by_cause[CLUSTER].died_again, by_cause[CLUSTER].redriven) == (30, 40)
    assert "30 of 40" in by_cause[CLUSTER].text
    assert by_cause[OTHER].redriven is None
    assert "redriven" not in by_cause[OTHER].text


@pytest.mark.parametrize(
    ("died", "samples", "weight", "said"),
    [
        (9, 0, 1, False),
        (10, 0, 1, True),
        (0, 10, 1, True),
        (0, 10, 1000, True),
        (100, 0, 1, True),
        (100, 0, 1000, False),  # 0 of one in a thousand may be three thousand
        (100_000, 0, 1000, True),
        (1000, 100, 10, True),
        (10, 1, 10, False),
    ],
)
def test_a_share_is_said_only_where_it_is_known(
    died: int, samples: int, weight: float, *, said: bool
) -> None:
    """A sampled success stands for many: with few of them anything may be true."""
    assert is_known(died, samples, weight) is said


# -- dlq triage -----------------------------------------------------------------------


def test_the_terminal_begins_with_the_sentences(spark: SparkSession, tmp_path: Path) -> None:
    """Each cause is a sentence beside its fingerprint; small ones are counted, as in the JSON."""
    small = [{"fingerprint": f"{number:016}", "dead_lettered_at": NOON} for number in range(7)]
    folder = planted.write(iter(full([*of_two_causes(), *small])), tmp_path / "letters")
    said = ran(folder)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    assert lines[0].startswith("407 letters, ")
    assert lines[1] == "Causes"
    assert lines.index(next(line for line in lines if line.startswith(CLUSTER))) < 12
    assert "CHF" in said
    assert "Not explained: 7 causes with 7 letters" in said
    assert said.index("Causes") < said.index("Reasons") < said.index("Over time")
    found = json.loads(ran(folder, "--json"))
    assert [one["fingerprint"] for one in found["explained"]] == [OTHER, CLUSTER]
    assert found["unexplained"] == {"causes": 7, "letters": 7}
    headline = found["explained"][1]["headline"]
    assert "CHF" in headline
    assert " ".join(headline.split()[:4]) in " ".join(said.split())
    assert {"sentences", "findings", "timing", "again"} <= set(found["explained"][1])


def full(some: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Letters with what every one has."""
    fixed = {"task_name": "shop.charge", "dead_letter_queue": "orders-DLQ", "reason": "failed"}
    return [
        {"id": str(number), "source_queue": "orders", **fixed, "args_json": "[]", **letter}
        for number, letter in enumerate(some)
    ]


def ran(folder: Path, *options: str) -> str:
    """What the command prints."""
    arguments = ["triage", str(folder), *options]
    obj = SimpleNamespace(app=None, no_color=True)
    done: Any = CliRunner().invoke(dlq, arguments, obj=obj, env={"COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    return str(done.stdout)
