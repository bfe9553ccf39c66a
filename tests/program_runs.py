"""Programs of `tests/programs`, run as people type them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parent


def run_program(name: str, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run ``python -m name`` to its end, four minutes at most; returns also where it fails."""
    return subprocess.run(
        [sys.executable, "-m", name, *options],
        env={**os.environ, "PYTHONPATH": f"{TESTS}{os.pathsep}{TESTS / 'programs'}"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
