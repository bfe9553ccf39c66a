"""The export is killed at every step that leaves something behind, and runs again."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from servers import RedisServer

HERE = Path(__file__).parent

_STRIDE = int(os.environ.get("CELERY_DLQ_TEST_STRIDE", "29"))


def run_steps(server: RedisServer, *arguments: str) -> int:
    """Return the number of steps; fails if a letter was lost or doubled after any of them."""
    done = subprocess.run(
        [sys.executable, HERE / "export_steps.py", server.url, *arguments],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        env={"PYTHONPATH": str(HERE.parent), "PATH": "", "AWS_EC2_METADATA_DISABLED": "true"},
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return int(done.stdout.split()[0])


@pytest.mark.parametrize("mode", ["keep", "trim", "back"])
def test_killed_at_any_step_each_letter_is_in_the_files_once(
    request: pytest.FixtureRequest, tmp_path: Path, mode: str
) -> None:
    """Before and after each write, sync, rename, intent, checkpoint, note and removal.

    Also after Redis came back from a snapshot that is older than the last export.

    There are some two hundred steps: each run takes every `_STRIDE`th from a random one on,
    and half as many in the default tier.
    """
    stride = _STRIDE * (1 + (request.config.option.markexpr == "not full"))
    first = random.randrange(stride)  # noqa: S311 - the seed is printed by pytest-randomly
    with RedisServer() as server:
        steps = run_steps(server, str(tmp_path / "letters-{}"), mode, str(first), str(stride))
    assert steps > 100
