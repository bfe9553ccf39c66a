"""A small fleet of the real transport: a message costs Redis the same with more workers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent
SIZE = ("--seconds", "2", "--messages", "40", "--processes", "2")


def rows(*options: str) -> dict[str, list[str]]:
    """What the program prints of a fleet of guarded workers, by phase."""
    done = subprocess.run(
        [sys.executable, "-m", "fleet", "--kinds", "guarded", *SIZE, *options],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'programs'}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cells = [[cell.strip() for cell in row.split("|")] for row in done.stdout.splitlines()[2:]]
    return {row[2]: row for row in cells}


def test_each_message_wakes_one_worker_however_many_wait() -> None:
    """The books of the program balance, also when half of the workers are killed."""
    few, many = rows("--workers", "4"), rows("--workers", "40")
    for phase in ("20 a second", "300 a second"):
        assert int(many[phase][4]) <= 1.5 * int(few[phase][4]) + 5, (few, many)
    assert "half killed" in many
