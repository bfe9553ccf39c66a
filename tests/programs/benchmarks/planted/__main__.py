"""A look in seconds, without Spark: ``python -m benchmarks.planted 1000 30000 --seeds 1 2``."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.planted import asked, shown
from benchmarks.planted.asking import by_core, by_spark
from benchmarks.planted.judging import Verdict


def main() -> None:
    """Say what is missed and what is false, cause by cause."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted", description=__doc__)
    parser.add_argument("letters", nargs="+", type=int)
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3, 4, 5])
    parser.add_argument("--noise", action="store_true", help="no cause depends on anything")
    parser.add_argument("--spark", action="store_true", help="ask Spark, not the core alone")
    parser.add_argument("--keep", type=Path, help="keep the letters and their truth in this folder")
    options = parser.parse_args()
    for letters in options.letters:
        whole = Verdict()
        for seed in options.seeds:
            ask = by_spark if options.spark else by_core
            seconds, found = asked(letters, seed, ask, noise=options.noise, keep=options.keep)
            one = Verdict()
            for _kind, verdict in found:
                one.add(verdict)
            whole.add(one)
            for example in one.examples:
                print(f"  {example}")
            print(f"{letters:,} letters, seed {seed}: {shown(one)}, {seconds:.1f} s")
        print(
            f"{letters:,} letters: {shown(whole)}; {whole.causes} causes, {whole.luck} found beyond"
        )


if __name__ == "__main__":
    main()
