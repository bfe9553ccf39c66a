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
from typing import TYPE_CHECKING, Any

import planted
import pytest
from all_questions import ask
from java import QUICK_JAVA
from servers import require

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def test_each_question_has_an_answer(spark: SparkSession, tmp_path: Path) -> None:
    """In the Spark that is installed."""
    check(ask(spark, planted.write(planted.letters(600), tmp_path / "letters")))


@pytest.mark.usefixtures("pyspark")
def test_each_question_has_an_answer_by_spark_connect(tmp_path: Path) -> None:
    """It has no Java of its own; the server compiles queries, which the Spark of tests does not."""
    import pyspark

    if pyspark.__version__ < "4":
        pytest.skip("the package of Spark 3.5 has no server of Spark Connect")
    require(find_spec("grpc"), "the packages of Spark Connect (pip install 'pyspark[connect]')")
    folder = planted.write(planted.letters(600), tmp_path / "letters")
    here = Path(__file__).parent
    # A process has one kind of session.
    done = subprocess.run(
        [sys.executable, str(here / "all_questions.py"), str(folder)],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env={
            **os.environ,
            "PYTHONPATH": f"{here}:{os.environ.get('PYTHONPATH', '')}",
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
            **QUICK_JAVA,
        },
        cwd=here.parents[1],
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout + done.stderr[-4000:]
    check(json.loads(lines[0].partition(" ")[2]))


def check(found: dict[str, Any]) -> None:
    """The answers are those of the planted letters."""
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
