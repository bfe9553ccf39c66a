"""The fuzz of messages: whatever plain Celery runs and acknowledges, a guarded worker does, too.

``python -m fuzz --seed 1 --messages 500 --broker redis``. Every part of a
message is replaced by every type of JSON, one part at a time (with more messages than that,
two); each message goes through a plain worker and a guarded one. Exit code 0: no difference
but those that the guard promises.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fuzz.cases import KINDS, Case, cases
from rabbit import RabbitServer, rabbitmq_executable
from rich.console import Console
from servers import RedisServer, redis_executable

MOST_CONFIRMED = 60


def verdict(plain: Any, guarded: Any) -> str | None:
    """The fault of a guarded outcome, given the plain one; ``None`` if it is as promised."""
    count = len(guarded.letters)
    if guarded.deaths > 2:
        return f"the main process died {guarded.deaths} times"
    if not guarded.healthy:
        return "sound messages behind it did not run"
    if plain.deaths:
        return None if count == 1 and guarded.acknowledged else _wants(guarded, letters=1)
    if guarded.starts != plain.starts:
        return f"ran {guarded.starts} times instead of {plain.starts}"
    if not plain.acknowledged:
        return None
    if not guarded.acknowledged:
        return "not acknowledged"
    if guarded.deaths:
        return f"the main process died {guarded.deaths} times"
    if plain.outside and count <= 1:
        return None  # the main process may have learned of a success; see README.md
    wanted = 0 if plain.succeeded else 1
    return None if count == wanted else _wants(guarded, letters=wanted)


def _wants(guarded: Any, *, letters: int) -> str:
    held = "" if guarded.acknowledged else ", not acknowledged"
    return f"{len(guarded.letters)} letters instead of {letters}{held}"


class Run:
    """One run of the fuzz.

    Args:
        options: The command line.
        folder: For marks and logs.
        console: For people.
    """

    def __init__(self, options: argparse.Namespace, folder: Path, console: Console) -> None:
        self._options = options
        self._folder = folder
        self._console = console
        self._sides: dict[str, Any] = {}
        self._dlq: Any = None

    def __call__(self) -> dict[str, Any]:
        """Run all messages through both sides, and compare."""
        begun = time.monotonic()
        with ExitStack() as stack:
            self._build(stack)
            plain, guarded = self._sides["plain"], self._sides["guarded"]
            every = list(cases(self._options.seed, self._options.messages, self._options.task))
            todo = [case for case in every if plain.place.allows(case.draft("case-0-0"))]
            self._say(f"{len(todo)} of {len(every)} messages are possible on this broker")
            with ThreadPoolExecutor(2) as pool:
                for done in [pool.submit(side, todo) for side in (plain, guarded)]:
                    done.result()
            self._letters()
            wrong = self._confirmed(
                {
                    case: said
                    for case in todo
                    if (said := verdict(plain.outcomes[case.number], guarded.outcomes[case.number]))
                }
            )
            left_out = len(every) - len(todo)
            return {
                "seed": self._options.seed,
                "broker": self._options.broker,
                "messages": len(todo),
                "not possible on this broker": left_out,
                "workers started": {name: s.starts_of_workers for name, s in self._sides.items()},
                "plain": _summary(plain),
                "guarded": _summary(guarded),
                "seconds": round(time.monotonic() - begun, 1),
                "differences": wrong,
            }

    def _build(self, stack: ExitStack) -> None:
        rabbit = None
        if self._options.broker != "redis":
            rabbit = stack.enter_context(RabbitServer())
        env = {**os.environ, "COLUMNS": "120"}
        for name in ("plain", "guarded"):
            server = stack.enter_context(RedisServer())
            folder = self._folder / name
            folder.mkdir()
            more = {
                "FUZZ_REDIS": server.url.rpartition("/")[0],
                "FUZZ_FOLDER": str(folder),
                "FUZZ_GUARDED": "1" if name == "guarded" else "",
            }
            url = server.url
            if rabbit is not None:
                url = rabbit.add_virtual_host(name)
                more |= {"FUZZ_BROKER": url, "FUZZ_QUEUE_TYPE": self._options.broker}
            os.environ.update(more)  # the app in this process is the guarded one, the last
            self._sides[name] = (url, {**env, **more}, folder)
        app = importlib.import_module("fuzz.app")
        places, sides = (importlib.import_module(f"fuzz.{name}") for name in ("places", "sides"))
        for name, (url, its_env, folder) in self._sides.items():
            if rabbit is None:
                place = places.RedisPlace(url)
            else:
                place = places.RabbitPlace(url, rabbit.port, name, self._options.broker)
            self._sides[name] = sides.Side(name, place, its_env, folder)
            stack.callback(self._sides[name].end)
        self._dlq = app.dlq
        stack.callback(app.app.close)
        stack.callback(app.dlq.close)

    def _letters(self) -> None:
        """Give each outcome the letters of its message."""
        reasons = defaultdict(list)
        for queue in self._dlq.queues():
            for letter in self._dlq.letters(queue.name):
                held = f"{letter.properties} {letter.headers} {letter.task_id} {letter.body!r}"
                found = re.search(r"case-\d+-\d+", held)
                if found and letter.parent_id == found[0]:
                    continue  # of a message that the task's errbacks sent
                reasons[found[0] if found else "?"].append(letter.reason.value)
        for outcome in self._sides["guarded"].outcomes.values():
            outcome.letters = reasons[outcome.token]

    def _confirmed(self, found: dict[Case, str]) -> list[dict[str, Any]]:
        """Try the first of each kind of difference once more, alone, for the error behind it."""
        tried: dict[tuple[str, str], int] = defaultdict(int)
        result = []
        for case, said in found.items():
            place = " & ".join(sorted(change.place for change in case.changes))
            alone = any(side.outcomes[case.number].deaths for side in self._sides.values())
            tried[place, said] += 1
            if not alone and tried[place, said] == 1 and len(tried) <= MOST_CONFIRMED:
                with ThreadPoolExecutor(2) as pool:
                    list(pool.map(lambda side: side.alone(case), self._sides.values()))  # noqa: B023
                self._letters()
                alone = True
            plain, guarded = (side.outcomes[case.number] for side in self._sides.values())
            again = verdict(plain, guarded)
            if again is None:
                self._say(f"not seen again: {case}: {said}")
                continue
            result.append(
                {
                    "place": place,
                    "case": str(case),
                    "difference": again,
                    "plain": str(plain),
                    "guarded": str(guarded),
                    "alone": alone,
                    "plain said": plain.said,
                    "guarded said": guarded.said,
                }
            )
        return result

    def _say(self, text: str) -> None:
        self._console.log(text, highlight=False, markup=False)


def _summary(side: Any) -> dict[str, int]:
    every = side.outcomes.values()
    return {
        "ran and succeeded": sum(o.succeeded for o in every),
        "ran and failed": sum(o.starts > 0 and not o.succeeded for o in every),
        "failed beside the body": sum(o.outside for o in every),
        "never ran": sum(o.starts == 0 for o in every),
        "not acknowledged": sum(not o.acknowledged for o in every),
        "killed the main process": sum(o.deaths > 0 for o in every),
        "letters": sum(len(o.letters) for o in every),
    }


def show(report: dict[str, Any], console: Console) -> None:
    """The report for people: one block for each part and difference."""
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for one in report["differences"]:
        groups[one["place"], one["difference"]].append(one)
    for (place, said), ones in sorted(groups.items()):
        first = max(ones, key=lambda one: one["alone"])
        lines = [f"{place}: {said} ({len(ones)} messages)"]
        lines += [f"    {one['case']}" for one in ones[:8]]
        lines += [
            f"    plain: {first['plain']}; {first['plain said']}",
            f"    guarded: {first['guarded']}; {first['guarded said']}",
        ]
        console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)
    rest = {name: value for name, value in report.items() if name != "differences"}
    console.print(json.dumps(rest, indent=2), markup=False, highlight=False)
    console.print(f"{len(report['differences'])} messages fare differently, in {len(groups)} ways.")


def main(arguments: list[str] | None = None) -> int:
    """The command; 0 when all messages fare as promised."""
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--messages", type=int, default=500)
    parser.add_argument(
        "--task", choices=KINDS, nargs="+", default=KINDS, help="only messages for these tasks"
    )
    parser.add_argument("--broker", choices=["redis", "classic", "quorum"], default="redis")
    parser.add_argument("--report", type=Path, help="write the report to this JSON file")
    parser.add_argument("--keep", action="store_true", help="keep marks and logs")
    options = parser.parse_args(arguments)
    console = Console(stderr=False)
    if redis_executable() is None or (options.broker != "redis" and rabbitmq_executable() is None):
        parser.error("redis-server, and rabbitmq-server for its queues, must be installed")
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        report = Run(options, folder, console)()
    finally:
        if options.keep:
            console.print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    show(report, console)
    if options.report:
        options.report.write_text(json.dumps(report, indent=2), "utf-8")
    return 1 if report["differences"] else 0


if __name__ == "__main__":
    sys.exit(main())
