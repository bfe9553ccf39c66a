"""All benchmarks: ``tox -e bench``, or ``PYTHONPATH=tests python -m benchmarks [names] [--quick]``.

``worker``, ``dying`` and ``peers`` write JSON, tables and plots. The others print what they
find; they have options of their own: ``python -m benchmarks.redrive --help``. Nothing else
should run on the machine meanwhile.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import dying, report, worker

PAGE = Path(__file__).parents[2] / "docs" / "performance.md"
PRINTING = {
    "publish": (["--pairs", "400", "--messages", "20"], ["--pairs", "2", "--messages", "5"]),
    "redrive": (["--letters", "100000", "--runs", "3"], ["--letters", "200"]),
    "scale": (["--letters", "1000000"], ["--letters", "200"]),
    "export": (["--letters", "200000"], ["--letters", "200", "--pairs", "1"]),
    "triage": (["--millions", "1", "3", "10"], ["--millions", "0.001"]),
}
"""Benchmarks that print; their arguments, and those of a quick look."""

Measure = Callable[[Callable[[str], None]], Iterator[dict[str, Any]]]


def main() -> int:
    """Measure what was named, or all."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = [*_measures(quick=True), *PRINTING]
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; none for all")
    parser.add_argument("--quick", action="store_true", help="see that all works, in seconds")
    parser.add_argument("--cells", default="", help="only cells whose name has this text")
    parser.add_argument("--out", type=Path, default=Path("build/benchmarks"))
    parser.add_argument(
        "--docs", action="store_true",
        help="measure nothing; put what was measured into docs/performance.md",
    )  # fmt: skip
    options = parser.parse_args()
    if options.docs:
        _into_docs(report.merged({}, options.out), options.out)
        return 0
    unknown = set(options.names) - set(names)
    if unknown:
        parser.error(f"expected names of {', '.join(names)}, got {', '.join(sorted(unknown))}")
    measures = _measures(quick=options.quick, cells=options.cells)
    for name in options.names or names:
        if name in measures:
            for result in measures[name](_tell):
                print(report.table(name, [result]), flush=True)
                report.write(report.merged({name: [result]}, options.out), options.out)
        else:
            arguments = PRINTING[name][options.quick]
            subprocess.run([sys.executable, "-m", f"benchmarks.{name}", *arguments], check=True)
    return 0


def _into_docs(results: dict[str, list[report.Result]], folder: Path) -> None:
    report.write(results, folder)
    report.into_page(results, PAGE)
    plots = PAGE.parent / "performance"
    plots.mkdir(exist_ok=True)
    for name in results:
        shutil.copy(folder / f"{name}.svg", plots)


def _measures(*, quick: bool, cells: str = "") -> dict[str, Measure]:
    chosen = worker.QUICK if quick else tuple(c for c in worker.CELLS if cells in c.name)

    def peers(tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
        from benchmarks import peers  # dramatiq and rq are extras of their own

        return peers.measure(peers.QUICK if quick else peers.FULL, tell)

    return {
        "worker": lambda tell: worker.measure(chosen, tell),
        "dying": lambda tell: dying.measure(dying.QUICK if quick else dying.FULL, tell),
        "peers": peers,
    }


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
