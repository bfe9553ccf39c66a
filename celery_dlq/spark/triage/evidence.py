"""The explanations of causes as a table: a row for each sentence, with what it rests on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.comparison import ALPHA, Significant
from celery_dlq.letters.explanation import Explanation
from celery_dlq.spark.triage.causes import explanations_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

HEADLINE, SHARED, NOTE = "headline", "shared", "note"
"""Kinds of rows that are no findings."""

_COLUMNS = {
    "fingerprint": "STRING",
    "kind": "STRING",
    "text": "STRING",
    "feature": "STRING",
    "value": "STRING",
    "values": "ARRAY<STRING>",
    "low": "STRING",
    "high": "STRING",
    "against": "STRING",
    "letters": "BIGINT",
    "of_letters": "BIGINT",
    "others": "BIGINT",
    "of_others": "BIGINT",
    "share_here": "DOUBLE",
    "share_elsewhere": "DOUBLE",
    "lift": "DOUBLE",
    "p_value": "DOUBLE",
    "q_value": "DOUBLE",
    "also": "ARRAY<STRING>",
    "since": "TIMESTAMP",
    "uncertainty_seconds": "DOUBLE",
    "trend": "STRING",
    "release": "STRING",
    "died_again": "BIGINT",
    "redriven": "BIGINT",
}
_OF_FINDING = ("feature", "value", "low", "high", "against", "letters", "of_letters", "others")
_OF_TEST = ("of_others", "share_here", "share_elsewhere", "lift", "p_value", "q_value")


def explain(
    df: DataFrame,
    successes: DataFrame | None = None,
    *,
    fingerprints: Sequence[str] | None = None,
    alpha: float = ALPHA,
) -> DataFrame:
    """Explain causes: since when they are there, and what their letters have that others lack.

    Spark looks at once at 2,000 letters of each cause at most, and counts all of them over time;
    the rows are a few KB a cause. The executors need this package and pyarrow. A finding is a
    correlation: a host that got all the bad orders is found as well as the orders.

    Args:
        df: Letters, as `letters` reads them.
        successes: Messages that succeeded, as `successes` reads them: the best to compare with.
        fingerprints: The causes to explain, by their fingerprints or the beginnings of them. By
            default those with more than 20 letters or 1 % of all, the 500 largest.
        alpha: The tolerated share of false findings.

    Returns:
        The rows of each cause follow each other, of the largest cause first, with ``fingerprint``,
        ``kind`` and the sentence ``text``. Columns that a row has no value for are null:

        - ``headline``: the cause in one sentence. ``letters`` of ``of_letters`` were looked at;
          ``since`` (timestamp, give or take ``uncertainty_seconds``), ``trend``, the ``release``
          it began with, and of its ``redriven`` messages those that ``died_again``.
        - a finding, of kind ``value``, ``set``, ``range`` or another: ``feature``, ``value`` (and
          ``values`` of a set, ``low`` and ``high`` of a range), ``against`` what it was compared;
          ``letters`` of ``of_letters`` have it, and ``others`` of ``of_others``, as shares
          ``share_here`` and ``share_elsewhere``, ``lift``, ``p_value``, ``q_value``; ``also`` has
          what nearly the same letters have.
        - ``shared``: a value that all letters have.
        - ``note``: with what they were compared, and what that leaves open.

    Raises:
        DLQError: No fingerprint, or more than one, begins with one of ``fingerprints``, or
            ``alpha`` is not between 0 and 1.
    """
    found = explanations_of(df, fingerprints, successes, alpha)
    rows = [
        tuple({"fingerprint": fingerprint, **row}.get(name) for name in _COLUMNS)
        for fingerprint, one in found.items()
        for row in _evidence_rows(one)
    ]
    schema = ", ".join(f"`{name}` {kind}" for name, kind in _COLUMNS.items())
    return df.sparkSession.createDataFrame(rows, schema).coalesce(1)


def _evidence_rows(found: Explanation) -> Iterator[dict[str, Any]]:
    """The headline, the findings, what all letters share, and what that leaves open."""
    yield _headline(found)
    for one in found.findings:
        yield _finding(one) | {"text": found.sentence_of(one)}
    for shared in found.shared:
        yield {
            "kind": SHARED,
            "text": f"All {found.letters:,} letters have {shared.text}.",
            "feature": shared.feature,
            "value": shared.value,
            "letters": found.letters,
            "of_letters": found.letters,
            "others": shared.others,
            "of_others": shared.of_others,
            "share_here": 1.0,
            "share_elsewhere": shared.others / shared.of_others if shared.of_others else None,
        }
    for text in found.sentences:
        if text != found.headline:
            yield {"kind": NOTE, "text": text}


def _headline(found: Explanation) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": HEADLINE,
        "text": found.headline,
        "letters": found.letters,
        "of_letters": found.letters if found.selected is None else found.selected,
    }
    if found.onset:
        row["since"] = datetime.fromtimestamp(found.onset.at, timezone.utc)
        row["uncertainty_seconds"] = float(found.onset.uncertainty)
    if found.trend:
        row["trend"] = found.trend.kind
    if found.release:
        row["release"] = found.release.name
    if found.again:
        row["died_again"], row["redriven"] = found.again[0], sum(found.again)
    return row


def _finding(one: Significant) -> dict[str, Any]:
    row: dict[str, Any] = {name: getattr(one, name) for name in (*_OF_FINDING, *_OF_TEST)}
    return row | {"kind": one.kind, "values": list(one.values), "also": list(one.also)}
