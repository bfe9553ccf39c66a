"""Celery's own test suites, without and with the plugin on every app: ``tox -e upstream``.

A test that fails only with the plugin is a fault of the plugin's, unless `reasons` says why it
cannot be otherwise. Before it counts it is run again both ways, alone and with its whole file:
some of Celery's tests fail now and then.
"""

from __future__ import annotations

import argparse
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from upstream.reasons import REASONS
from upstream.runs import SUITES, Run, fetch, run

WAYS = {False: "without", True: "with"}


def main() -> int:
    """Fetch the suites, or run them."""
    parser = argparse.ArgumentParser(prog="python -m upstream", description=__doc__)
    parser.add_argument("step", choices=("fetch", "run"))
    parser.add_argument("folder", type=Path, help="of the suites, of their output, too")
    parser.add_argument("suites", nargs="*", help=f"of {', '.join(SUITES)}; none for all")
    options = parser.parse_args()
    if unknown := set(options.suites) - set(SUITES):
        parser.error(f"expected suites of {', '.join(SUITES)}, got {', '.join(sorted(unknown))}")
    if options.step == "fetch":
        options.folder.mkdir(parents=True, exist_ok=True)
        fetch(options.folder)
        return 0
    faults = [
        fault
        for name in options.suites or SUITES
        for fault in compared(options.folder, name, SUITES[name])
    ]
    print("\n".join(faults) or "no test fails only with the plugin, but those with a reason")
    return 1 if faults else 0


def compared(source: Path, name: str, suite: str) -> list[str]:
    """Run a suite both ways, side by side, and say what is wrong only with the plugin."""
    begun = time.monotonic()
    runs = both(source, suite, name)
    for plugin, done in runs.items():
        print(f"{name} {WAYS[plugin]} the plugin: {done.counted()}; {done.apps} apps had it")
        if done.apps is None:
            return [f"expected {name} to end, its last test was {done.last}; see {source}"]
        if plugin is not bool(done.apps):
            return [f"expected the plugin on {'all' if plugin else 'no'} apps, got {done.apps}"]
    print(f"{name}: {time.monotonic() - begun:.0f} s", flush=True)
    worse = worse_of(runs[False], runs[True])
    mine = [test for test in REASONS if test.startswith(suite)]
    faults = [
        f"{test} fails only with the plugin:\n{runs[True].texts.get(test, 'it did not run')}"
        for test in worse
        if test not in REASONS and fails_again(source, test)
    ]
    for test in mine:
        print(f"{test}: {REASONS[test]}")
    return faults + [
        f"{test} does not fail with the plugin any more; take it out of the reasons"
        for test in mine
        if runs[True].outcomes.get(test, "passed") == "passed"
    ]


def both(source: Path, selected: str, name: str) -> dict[bool, Run]:
    """Run the selected tests both ways, side by side; the name is that of the output's files."""
    with ThreadPoolExecutor() as pool:
        started = {
            plugin: pool.submit(run, source, selected, source / f"{name}-{way}.log", plugin=plugin)
            for plugin, way in WAYS.items()
        }
    return {plugin: future.result() for plugin, future in started.items()}


def worse_of(without: Run, with_plugin: Run) -> list[str]:
    """The tests that pass without the plugin and not with it."""
    return [
        test
        for test, outcome in without.outcomes.items()
        if outcome == "passed" and with_plugin.outcomes.get(test) != "passed"
    ]


def fails_again(source: Path, test: str) -> bool:
    """True if a test fails only with the plugin also when it is run alone, or with its file."""
    for selected in (test, test.partition("::")[0]):
        runs = both(source, selected, "again")
        if test in worse_of(runs[False], runs[True]):
            return True
    print(f"{test} failed once with the plugin, and passed when it was run again")
    return False


if __name__ == "__main__":
    sys.exit(main())
