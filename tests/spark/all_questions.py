"""All questions of the how-to. As a program it asks by Spark Connect: its argument is a folder."""

from __future__ import annotations

import json
import sys
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import planted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def ask(spark: SparkSession, folder: Path | str) -> dict[str, Any]:
    """How many rows each answer has, and what a triage says of the causes."""
    from celery_dlq.spark import triage
    from celery_dlq.spark.triage.rows import findings

    since = planted.END - timedelta(days=7)
    dead = triage.letters(spark, folder)
    asked = {
        "overview": triage.overview(dead),
        "groups": triage.groups(dead),
        "reasons": triage.reasons(dead),
        "timeline": triage.timeline(dead, "1 day"),
        "deliveries": triage.deliveries_before_death(dead),
        "new": triage.new_since(dead, since),
        "spikes": triage.spikes(dead, "1 day"),
        "changes": triage.changes(
            dead, dead, (since, planted.END), (since - timedelta(days=7), since)
        ),
        "limits": triage.limits(dead, dead),
        "explain": triage.explain(dead),
        "one cause": triage.explain(dead, fingerprints=["bad h"]),
        "recent": triage.letters(spark, folder, since=since, task="shop.charge").select("id"),
    }
    answers: dict[str, Any] = {name: len(one.collect()) for name, one in asked.items()}
    found = findings(folder, spark)
    answers["headlines"] = {name: one.headline for name, one in found.causes.items()}
    answers["main"] = [row.main_reason for row in found.triage.groups]
    return answers


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    session = SparkSession.builder.remote("local[2]").getOrCreate()
    print("ANSWER", json.dumps(ask(session, sys.argv[1])))
    session.stop()
