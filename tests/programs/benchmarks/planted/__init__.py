"""What the triage finds of causes whose truth is known, and what it says without one.

``python -m benchmarks planted``. Five shops, with half of the `benchmarks.planted.kinds` each and
twelve steady causes beside them, at three sizes, and as many shops in which no cause depends on
anything. Every second shop has a sample of successes. What can be found is decided by a test that
knows the truth, see `benchmarks.planted.truths`; a statement that is neither true nor follows from
the truth is false.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.planted.folders import write
from benchmarks.planted.judging import Verdict


@dataclass(frozen=True)
class Size:
    """Letters of the folders, and the shops of each size."""

    letters: tuple[int, ...]
    seeds: tuple[int, ...]


FULL = Size(letters=(1_000, 30_000, 1_000_000), seeds=(1, 2, 3, 4, 5))
QUICK = Size(letters=(1_000,), seeds=(2,))


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """Two results: of each size, and of each kind of cause."""
    from benchmarks.planted.asking import by_spark

    # Java starts before the first report is measured.
    asked(1_000, 1, by_spark)
    kinds: dict[str, dict[int, Verdict]] = defaultdict(lambda: defaultdict(Verdict))
    sizes = []
    for letters in size.letters:
        whole, silent, seconds = Verdict(), Verdict(), 0.0
        for seed in size.seeds:
            for noise in (False, True):
                took, found = asked(letters, seed, by_spark, noise=noise)
                seconds = max(seconds, took)
                for kind, verdict in found:
                    (silent if noise else whole).add(verdict)
                    if not noise:
                        kinds[kind][letters].add(verdict)
            tell(f"planted: {letters:,} letters, seed {seed}: {shown(whole)}")
        sizes.append(
            {
                "name": f"{letters:,} letters",
                "causes": whole.causes,
                "findable": whole.findable,
                "found": whole.found,
                "recall": whole.found / max(whole.findable, 1),
                "false_of_100": 100 * whole.false / whole.causes,
                "noise_of_100": 100 * silent.false / silent.causes,
                "seconds": seconds,
            }
        )
    yield {"cell": "what is found of planted causes", "rows": sizes}
    rows = [
        {"name": kind, **{f"of_{n}": shown(one) for n, one in found.items()}}
        for kind, found in sorted(kinds.items())
    ]
    yield {"cell": "found, of what can be found; false statements", "table": "kinds", "rows": rows}


Ask = Callable[[Path], dict[str, Any]]


def asked(
    letters: int, seed: int, ask: Ask, *, noise: bool = False, keep: Path | None = None
) -> tuple[float, list[tuple[str, Verdict]]]:
    """The seconds of one report, and the verdict on each cause that it has to explain.

    The letters stay in ``keep``, if it is given.
    """
    from benchmarks.planted.asking import timed

    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) if keep is None else keep / f"{letters}-{seed}"
        write(folder, letters, seed, noise=noise, successes=seed % 2 == 0)
        return timed(folder, ask)


def shown(found: Verdict) -> str:
    """Such as ``3 of 4; 1 false``."""
    false = f"; {found.false} false" if found.false else ""
    return f"{found.found} of {found.findable}{false}" if found.findable else f"–{false}"
