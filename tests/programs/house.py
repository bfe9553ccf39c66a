"""What a change of celery_dlq costs: ``python tests/programs/house.py``, part of ``tox -e lint``.

Six figures, each with its limit, which is today's value, and its goal. A figure may fall: then set
the limit in `LIMITS` to it. Lines are printed and limited nowhere; a function has at most 45 lines
of code, so that it is read at once.

1. The files that five standing changes touch. ``docs/explanation/changes.md`` lists them.
2. The names of other packages that we wrap, replace or rely on: ``tests/programs/foreign.py``.
3. The modules and lines that a worker has loaded once it has run a task and sits idle.
4. The lines of code of the core, and of the largest feature.
5. The mechanisms that stand more than once, in `COPIES`.
6. The minutes of the tests, as CONTRIBUTING.md promises them.
"""

from __future__ import annotations

import ast
import io
import json
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

import foreign

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "celery_dlq"
CHANGES = ROOT / "docs" / "explanation" / "changes.md"
LONGEST_FUNCTION = 45
"""Lines of code."""

LIMITS: dict[str, tuple[int, int]] = {
    "files, a letter's field (A)": (3, 4),
    "files, an operator's power (B)": (7, 7),
    "files, a policy key (C1)": (3, 4),
    "files, a feature removed (C2)": (10, 10),
    "files, a reason (D)": (2, 2),
    "names of other packages": (74, 70),
    "of these, private": (22, 22),
    "lines a worker loads": (14_956, 12_000),
    "lines a worker loads, every feature": (18_519, 16_000),
    "lines of code of the core": (33_016, 22_500),
    "lines of code of the largest feature": (700, 700),
    "copies of mechanisms": (7, 6),
    "minutes of tox": (3, 3),
    "minutes of tox -e full": (35, 20),
}
"""The most of each figure, which is today's value; and its goal."""

COPIES: dict[str, tuple[str, ...]] = {
    "back-off": ("timing.py:class Backoff",),
    # Of a right, and of messages that a broker gives to others; `ExportLeases` keeps some of the
    # first kind.
    "lease": ("store/lease.py:class Lease", "transport/held.py:class LeasedMessages"),
    "publisher": ("transport/confirmed.py:class ConfirmedProducer",),
    "parser of times": ("letters/json_codec.py:datetime.fromisoformat",),
    "palette": ("letters/record.py:colour",),
    "stale headers": ("letters/redriven.py:OF_ONE_PUBLICATION",),
}
"""Mechanisms and all their places, as ``file:text``, below celery_dlq; the goal is one of each."""

_STARTED = """
import dataclasses, json, sys, threading, time
from celery import Celery, signals
from celery.worker import state
from celery_dlq import registry, timing

broker, features, settings = json.loads(sys.argv[1])
if not features:
    registry.FEATURES = ()
policy = {key: found.example for key, (_, found) in registry.policy_keys().items()}
timing.current = dataclasses.replace(
    timing.current, tick=0.1, metrics_flush=0.3, lease_tick=0.1, lease_max_look=0.3
)
from celery_dlq import DeadLetters
app = Celery("shop", broker=broker, set_as_current=False)
app.conf.dlq_queues = {"*": {"max_deliveries": 3, **policy}}
app.conf.update(worker_send_task_events=False, **settings)
DeadLetters(app)

@app.task(name="shop.noop")
def noop():
    pass

def files():
    return [m.__file__ for n, m in [*sys.modules.items()] if n.startswith("celery_dlq")]

def look(**_):
    started = files()
    noop.delay()
    threading.Thread(target=wait, args=[started]).start()

def wait(started):
    until = time.monotonic() + 30
    while not (state.all_total_count[0] and not state.reserved_requests):
        if time.monotonic() > until:
            break
        time.sleep(0.02)
    time.sleep(2.5)
    found = state.all_total_count[0], started, files()
    print(json.dumps(found), file=sys.__stdout__, flush=True)
    state.should_stop = 0

signals.worker_ready.connect(look, weak=False)
app.Worker(pool="prefork", concurrency=1, hostname="worker@here", quiet=True).start()
"""
"""A worker that runs one task of a Redis and then sits idle for 25 rounds of what is periodic.

So an import that waits for the first task, or for the first round, wins nothing.
"""

_EVERY_FEATURE = {"dlq_adopt": {"dead": "orders-DLQ"}, "dlq_sample_successes": 0.1}
"""Settings that use what workers do for features; their policy keys have an example each."""

_NO_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}
_WITH_DOCSTRING = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def code_of(source: str, tree: ast.Module) -> set[int]:
    """The numbers of the lines that have code: no comment, no docstring, not blank."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            docstrings.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstrings


def lines_of_code() -> tuple[dict[str, int], list[tuple[int, str]]]:
    """The lines of code of each file, and those of the functions, longest first."""
    files: dict[str, int] = {}
    functions: list[tuple[int, str]] = []
    for path in sorted(PACKAGE.rglob("*.py")):
        source, name = path.read_text("utf-8"), path.relative_to(PACKAGE).as_posix()
        tree = ast.parse(source)
        code = code_of(source, tree)
        files[name] = len(code)
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                inside = code.intersection(range(node.lineno, (node.end_lineno or 0) + 1))
                functions.append((len(inside), f"{name}:{node.name}"))
    return files, sorted(functions, reverse=True)


def rooms(files: dict[str, int]) -> tuple[int, int]:
    """The lines of code of the core, and of the largest feature."""
    features: dict[str, int] = {}
    for name, code in files.items():
        if name.startswith("features/"):
            feature = name.split("/")[1]
            features[feature] = features.get(feature, 0) + code
    return sum(files.values()) - sum(features.values()), max(features.values())


def foreign_names() -> tuple[int, int]:
    """How many names of other packages are relied on, and how many of them are private."""
    found = foreign.names()
    return len(found), sum(map(foreign.is_private, found))


def loaded(*, features: bool) -> tuple[list[Path], list[Path]]:
    """The modules that a worker loads until it is ready, and until it has run a task and is idle.

    With features: such as use all of them.
    """
    sys.path.append(str(ROOT / "tests"))
    from servers import RedisServer

    settings = _EVERY_FEATURE if features else {}
    with RedisServer() as server:
        done = subprocess.run(
            [sys.executable, "-c", _STARTED, json.dumps([server.url, features, settings])],
            capture_output=True,
            text=True,
            check=False,
            encoding="utf-8",
            timeout=60,
        )
    ran, *found = json.loads((done.stdout.splitlines() or ["[0]"])[-1])
    if done.returncode or ran != 1:
        raise SystemExit(f"expected a worker to run a task, got:\n{done.stderr}")
    started, idle = (sorted(map(Path, names)) for names in found)
    return started, idle


def lines(paths: list[Path]) -> int:
    """The lines of files, with comments and blank ones: all are read by whoever mends a worker."""
    return sum(path.read_text("utf-8").count("\n") for path in paths)


def changes() -> dict[str, list[str]]:
    """The standing changes by their letter, each with the files that it touches."""
    found: dict[str, list[str]] = {}
    for part in CHANGES.read_text("utf-8").split("\n## ")[1:]:
        letter, _, text = part.partition(". ")
        found[letter] = re.findall(r"^- `(\S+)`", text, re.MULTILINE)
    return found


def missing() -> Iterator[str]:
    """What the page of changes and `COPIES` name and what is not there."""
    for letter, paths in changes().items():
        for path in paths:
            if not (ROOT / path).exists():
                yield f"{CHANGES.name}, {letter}: {path}"
    for mechanism, places in COPIES.items():
        for place in places:
            path, _, text = place.partition(":")
            if not ((PACKAGE / path).exists() and text in (PACKAGE / path).read_text("utf-8")):
                yield f"COPIES, {mechanism}: {place}"


def minutes() -> tuple[int, int]:
    """The most minutes of ``tox`` and of ``tox -e full``, as CONTRIBUTING.md says them."""
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    found = re.findall(r"^\| `tox(?: -e full)?` \|.*?(\d+) minutes \|$", text, re.MULTILINE)
    return int(found[0]), int(found[1])


def figures(files: dict[str, int]) -> dict[str, int]:
    """Each figure of `LIMITS`, as it is now."""
    touched = changes()
    (ready, few), (ready_every, every) = loaded(features=False), loaded(features=True)
    print(f"a worker loads {len(few)} modules, with every feature {len(every)};")
    print(f"of their lines, until it is ready: {lines(ready):,}, and {lines(ready_every):,}")
    values = (
        *(len(touched[letter]) for letter in ("A", "B", "C1", "C2", "D")),
        *foreign_names(),
        lines(few),
        lines(every),
        *rooms(files),
        sum(map(len, COPIES.values())),
        *minutes(),
    )
    return dict(zip(LIMITS, values, strict=True))


def main() -> int:
    """Print the figures; exit code 1 if one is above its limit, or a function is too long."""
    files, functions = lines_of_code()
    everything = list(PACKAGE.rglob("*.py"))
    print(f"{len(everything)} files, {lines(everything):,} lines, {sum(files.values()):,} of code")
    wrong = [f"expected what is named to be there: {name}" for name in missing()]
    found = figures(files)
    print(f"{'':40}{'now':>8}{'limit':>8}{'goal':>8}")
    for name, value in found.items():
        limit, goal = LIMITS[name]
        print(f"{name:40}{value:8,}{limit:8,}{goal:8,}")
        if value > limit:
            wrong.append(f"expected at most {limit:,} {name}, got {value:,}: see {__file__}")
    for length, place in functions:
        if length > LONGEST_FUNCTION:
            limit_text = f"at most {LONGEST_FUNCTION} lines of code"
            wrong.append(f"expected a function of {limit_text}, got {length}: split {place}")
    print("longest functions:", ", ".join(f"{place} {length}" for length, place in functions[:3]))
    for text in wrong:
        print(text)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
