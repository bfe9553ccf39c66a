"""All benchmarks: ``tox -e bench``, or ``python -m benchmarks [names]``.

What was measured is written after every cell: ``results.json`` with each turn, and a table
and a plot for each name. A later run adds to it. Nothing else should run on the machine
meanwhile. ``--docs`` measures nothing and puts these files into ``docs/performance.md``.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import report

PAGE = Path(__file__).parents[3] / "docs" / "performance.md"
NAMES = ("worker", "dying", "killed", "publish", "peers", "redrive", "export", "growth", "web")
ON_REQUEST = ("triage", "planted")
"""Those that need more than Python and servers: Java."""


def main() -> int:
    """Measure what was named, or all that needs no Java."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    every = (*NAMES, *ON_REQUEST)
    parser.add_argument(
        "names", nargs="*", help=f"of {', '.join(every)}; none for all but {', '.join(ON_REQUEST)}"
    )
    parser.add_argument("--quick", action="store_true", help="see that all works, in seconds")
    parser.add_argument(
        "--cells", default="", help="of `worker`: only cells whose name has this text"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=None,
        help="folder; build/benchmarks if not given, with --quick build/benchmarks-quick",
    )
    parser.add_argument(
        "--docs",
        action="store_true",
        help="measure nothing; put what was measured into docs/performance.md",
    )
    options = parser.parse_args()
    if unknown := set(options.names) - set(every):
        parser.error(f"expected names of {', '.join(every)}, got {', '.join(sorted(unknown))}")
    names = options.names or NAMES
    folder = options.out or Path("build") / f"benchmarks{'-quick' * options.quick}"
    if options.docs:
        report.into_docs(folder, PAGE, options.names or every)
        return 0
    failed = [name for name in names if not _measured(name, options, folder)]
    if failed:
        _tell(f"failed: {', '.join(failed)}; see above")
    return 1 if failed else 0


def _measured(name: str, options: argparse.Namespace, folder: Path) -> bool:
    """Measure one and keep it; a failure must not cost the figures of the others."""
    begun = time.monotonic()
    try:
        for result in _results(name, options):
            print(report.table(name, [result]), flush=True)
            report.keep(name, result, folder, quick=options.quick)
    except Exception:
        traceback.print_exc()
        return False
    finally:
        _tell(f"{name}: {time.monotonic() - begun:.0f} s in all")
    return True


def _results(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    # Imported when it is wanted: dramatiq, rq, duckdb and Spark are extras.
    measures = importlib.import_module(f"benchmarks.{name}")
    measure: Callable[..., Iterator[dict[str, Any]]] = measures.measure
    if name == "worker":
        size = measures.cells(options.cells, quick=options.quick)
    else:
        size = measures.QUICK if options.quick else measures.FULL
    return measure(size, _tell)


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
