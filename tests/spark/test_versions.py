"""All questions of the how-to have answers in each Spark, and with Spark Connect.

`tox -e spark35` runs this with Spark 3.5, as EMR 7 and Databricks 15.4 have it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import planted
import pytest
from servers import require

ASK = """
import json, sys
from datetime import timedelta
import planted
import pyspark
from celery_dlq.spark import triage
from celery_dlq.spark.triage.rows import findings

folder, kind = sys.argv[1:]
if kind == "connect":
    from pyspark.sql import SparkSession
    spark = SparkSession.builder.remote("local[2]").getOrCreate()
else:
    from celery_dlq.spark.session import local_session
    spark = local_session(quick=True)
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
answers = {name: len(question.collect()) for name, question in asked.items()}
found = findings(folder, spark)
answers["headlines"] = {name: one.headline for name, one in found.causes.items()}
answers["main"] = [row.main_reason for row in found.triage.groups]
answers["version"] = pyspark.__version__
print("ANSWER", json.dumps(answers))
spark.stop()
"""


def answers(folder: Path, kind: str) -> dict[str, Any]:
    """Ask in a process of its own: a process has one kind of session."""
    here = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(folder), kind],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        cwd=here.parents[1],
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout + done.stderr[-4000:]
    found: dict[str, Any] = json.loads(lines[0].partition(" ")[2])
    return found


@pytest.mark.usefixtures("pyspark")
@pytest.mark.parametrize("kind", ["classic", "connect"])
def test_each_question_has_an_answer(tmp_path: Path, kind: str) -> None:
    """In the Spark that is installed, by its Java and by Spark Connect, which has none."""
    import pyspark

    if kind == "connect":
        if pyspark.__version__ < "4":
            pytest.skip("the package of Spark 3.5 has no server of Spark Connect")
        require(find_spec("grpc"), "the packages of Spark Connect (pip install 'pyspark[connect]')")
    folder = planted.write(planted.letters(600), tmp_path / "letters")
    found = answers(folder, kind)
    assert found["version"] == pyspark.__version__
    causes = len(planted.CAUSES)
    assert found["overview"] == 1
    assert found["groups"] == causes <= found["explain"]
    assert found["main"] == ["failed"] * causes
    assert all(found[name] > 0 for name in ("timeline", "deliveries", "new", "limits", "one cause"))
    assert found["recent"] > 0
    assert "kwargs.currency = XXX" in found["headlines"]["currency"]
    assert planted.BAD_HOST in found["headlines"]["bad host"]


@pytest.mark.usefixtures("pyspark")
def test_what_an_old_spark_cannot_do_is_one_line() -> None:
    """The live source needs Python data sources, which Spark has since 4.0."""
    import pyspark

    code = "import celery_dlq.spark.source"
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    if pyspark.__version__ >= "4":
        assert done.returncode == 0, done.stderr
    else:
        said = done.stderr.splitlines()[-1]
        assert "expected PySpark 4.0 or later" in said
        assert pyspark.__version__ in said
