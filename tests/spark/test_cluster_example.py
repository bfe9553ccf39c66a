"""The cluster of the examples: a master, a worker, and figures of Spark's event log."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from java import interpreted

EXAMPLE = Path(__file__).parents[2] / "examples/spark-cluster/triage_on_a_cluster.py"


@pytest.mark.usefixtures("pyspark")
def test_a_triage_on_a_cluster_has_figures(tmp_path: Path) -> None:
    """Each number of executors has a row, and nothing of it goes on when it has ended."""
    if shutil.which("java") is None:
        pytest.skip("Spark's own scripts need a whole Java on PATH")
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--letters", "5000", "--executors", "1"],
        check=False,
        capture_output=True,
        text=True,
        timeout=900,
        env={**os.environ, **interpreted(tmp_path)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    head, names, row = done.stdout.splitlines()
    assert head.startswith("5,000 letters, ")
    assert names.startswith("executors  seconds  letters/s  no task runs  tasks")
    executors, seconds, speed, idle, tasks, *_ = row.split()
    assert (executors, idle[-1]) == ("1", "%")
    assert float(seconds) > 0
    assert int(speed.replace(",", "")) > 0
    assert int(tasks) > 20
