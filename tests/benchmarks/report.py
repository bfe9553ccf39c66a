"""Results as JSON, as tables for ``docs/performance.md``, and as plots."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
Result = Mapping[str, Any]

_PACKAGES = ("celery", "kombu", "billiard", "redis", "hiredis", "amqp", "dramatiq", "rq")


def machine() -> dict[str, Any]:
    """Where it was measured, and with which versions."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
    }


def merged(results: Mapping[str, list[Result]], folder: Path) -> dict[str, list[Result]]:
    """These results and those of cells that were measured before."""
    path = folder / "results.json"
    known = json.loads(path.read_text())["results"] if path.exists() else {}
    return {
        name: list({r["cell"]: r for r in (*known.get(name, ()), *results.get(name, ()))}.values())
        for name in (*known, *(name for name in results if name not in known))
    }


def write(results: Mapping[str, list[Result]], folder: Path) -> list[Path]:
    """One JSON file, and for each benchmark a file of tables and a plot."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    written = [path]
    for name, found in results.items():
        written += [folder / f"{name}.md", folder / f"{name}.svg"]
        written[-2].write_text(table(name, found))
        plot(name, found, written[-1])
    return written


def into_page(results: Mapping[str, list[Result]], page: Path) -> None:
    """Put the tables between their marks in a page."""
    text = page.read_text("utf-8")
    for name, found in results.items():
        marks = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        pattern = re.compile(re.escape(marks[0]) + ".*?" + re.escape(marks[1]), re.DOTALL)
        body = f"{marks[0]}\n{table(name, found)}\n{marks[1]}"
        text, count = pattern.subn(lambda _, body=body: body, text)
        assert count == 1, f"expected the marks of {name} once in {page}, got them {count} times"
    page.write_text(text, "utf-8")


def table(name: str, results: Iterable[Result]) -> str:
    """The results of one benchmark as Markdown."""
    columns = _TABLES[name]
    titles = ["", *columns]
    parts = []
    for result in results:
        rows = [[row["name"], *(show(row) for show in columns.values())] for row in result["rows"]]
        lines = [titles, ["---"] * len(titles), *rows]
        body = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
        parts.append(f"**{result['cell']}**\n\n{body}\n")
    return "\n".join(parts)


def plot(name: str, results: list[Result], path: Path) -> None:
    """CPU per task: bars beside each other, one group per cell; lines are the quartiles."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "celery_dlq"  # the same figures make the same file
    from matplotlib import pyplot as plt

    names = list(dict.fromkeys(row["name"] for result in results for row in result["rows"]))
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.22 * sum(len(r["rows"]) for r in results)))
    place, ticks, labels = 0.0, [], []
    for result in results:
        base = result["rows"][0]["worker_cpu_ms"]
        for row in result["rows"]:
            low, middle, high = (q * base for q in row["worker_cpu_ratio"])
            color = f"C{names.index(row['name'])}"
            axes.barh(place, middle, color=color, xerr=[[middle - low], [high - middle]])
            ticks.append(place)
            labels.append(row["name"] if len(results) == 1 else f"{result['cell']}: {row['name']}")
            place += 1
        place += 0.7
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("CPU milliseconds of the workers a task")
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _ratio(name: str) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        low, middle, high = row[name]
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    return show


def _number(name: str, pattern: str = "{:,.0f}", scale: float = 1.0) -> Callable[[Row], str]:
    def show(row: Row) -> str:
        value = row.get(name)
        return "–" if value is None else pattern.format(value * scale)

    return show


_COMMON: dict[str, Callable[[Row], str]] = {
    "tasks/s": _number("tasks_per_second"),
    "worker CPU s per 1,000": _number("worker_cpu_ms", "{:.3f}"),
    "ratio (quartiles)": _ratio("worker_cpu_ratio"),
    "server CPU s per 1,000": _number("server_cpu_ms", "{:.3f}"),
}
_TABLES: dict[str, dict[str, Callable[[Row], str]]] = {
    "worker": {
        **_COMMON,
        "MiB": _number("memory_mib", "{:.1f}"),
        "idle CPU ms/s": _number("idle_cpu_ms_per_second", "{:.1f}"),
    },
    "dying": {**_COMMON, "MiB": _number("memory_mib", "{:.1f}")},
    "peers": {
        "dead/s": _number("tasks_per_second"),
        "worker CPU ms each": _number("worker_cpu_ms", "{:.2f}"),
        "server CPU ms each": _number("server_cpu_ms", "{:.2f}"),
        "bytes kept each": _number("kept_bytes"),
        "redriven/s": _number("redriven_per_second"),
        "redrive CPU µs each": _number("redrive_cpu_us"),
    },
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
