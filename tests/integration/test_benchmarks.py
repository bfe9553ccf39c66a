"""The benchmarks run: what they measure is not looked at here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="they read /proc")
def test_a_quick_look_writes_figures_tables_and_plots(tmp_path: Path) -> None:
    """One command, as people type it."""
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "worker", "--quick", "--out", tmp_path],
        env={**os.environ, "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    cells = [(name, cell["cell"]) for name, cells in results.items() for cell in cells]
    assert len(cells) == 1, cells
    rows = [row for cells in results.values() for cell in cells for row in cell["rows"]]
    assert all(row["worker_cpu_ms"] > 0 and row["tasks_per_second"] > 0 for row in rows)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".svg"}
