"""The benchmarks run, and figures reach the page; their values are not checked here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from benchmarks import __main__ as command
from benchmarks import report
from benchmarks.node import AGAIN, DECORATOR, PLAIN, PLUGIN, QUEUE
from program_runs import run_program

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="they read /proc")

_ROWS = [
    {
        "name": name,
        "worker_cpu_ms": 2.0,
        "worker_cpu_ratio": [0.9, 1.0, 1.1],
        "server_cpu_ms": 0.2,
        "tasks_per_second": 450.0,
    }
    for name in (PLAIN, AGAIN, PLUGIN, QUEUE, DECORATOR)
]


def test_a_quick_look_writes_figures_tables_and_plots(tmp_path: Path) -> None:
    """One command, as people type it."""
    done = run_program("benchmarks", "worker", "--quick", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "results.json").read_text())["results"]
    cells = [(name, cell["cell"]) for name, cells in results.items() for cell in cells]
    assert len(cells) == 1, cells
    rows = [row for cells in results.values() for cell in cells for row in cell["rows"]]
    assert all(row["worker_cpu_ms"] > 0 and row["tasks_per_second"] > 0 for row in rows)
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".md", ".svg"}


@pytest.mark.parametrize("name", [*command.NAMES, *command.ON_REQUEST])
def test_the_page_has_a_place_for_every_benchmark(name: str) -> None:
    """Once, or a run of an hour would end with nowhere to put it."""
    text = command.PAGE.read_text("utf-8")
    assert text.count(f"<!-- begin {name} -->\n") == text.count(f"<!-- end {name} -->") == 1


def test_what_was_measured_is_rendered_into_a_page_elsewhere(tmp_path: Path) -> None:
    """Cells of two runs are both there, the plot is next to the page, other text stays."""
    page = tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("before\n<!-- begin worker -->\nold\n<!-- end worker -->\nafter\n")
    for cell in ("noop, prefork, Redis", "noop, threads, Redis", "noop, prefork, Redis"):
        report.keep("worker", {"cell": cell, "rows": _ROWS}, tmp_path, quick=False)
    report.into_docs(tmp_path, page, ["worker", "growth"])
    lines = page.read_text("utf-8").splitlines()
    assert (lines[0], lines[-1]) == ("before", "after")
    assert "old" not in lines
    assert [line.split("|")[1].strip() for line in lines if line.startswith("| noop")] == [
        "noop, prefork, Redis",
        "noop, threads, Redis",
    ]
    assert (page.parent / "performance" / "worker.svg").exists()


def test_a_quick_look_is_never_rendered(tmp_path: Path) -> None:
    """Its figures mean nothing."""
    page = tmp_path / "page.md"
    page.write_text("<!-- begin worker -->\n<!-- end worker -->\n")
    report.keep("worker", {"cell": "noop, prefork, Redis", "rows": _ROWS}, tmp_path, quick=True)
    with pytest.raises(SystemExit, match="got a quick look"):
        report.into_docs(tmp_path, page, ["worker"])
