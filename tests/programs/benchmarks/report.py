"""Results as JSON, as tables for ``docs/performance.md``, and as plots (see `benchmarks.plots`)."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shutil
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks import plots
from benchmarks.node import BARE, PLAIN, QUEUE

LIMIT_MS = 100.0
"""The most that 95 of 100 requests of a page may take."""

Row = Mapping[str, Any]
Result = Mapping[str, Any]
Column = Callable[[Row], str]

_PACKAGES = ("celery", "kombu", "billiard", "redis", "hiredis", "amqp", "pyarrow", "dramatiq", "rq")


def machine() -> dict[str, Any]:
    """Machine, time and versions of the measurement."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in _PACKAGES},
        "measured_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def keep(name: str, result: Result, folder: Path, *, quick: bool) -> None:
    """Add a result to those of the folder, in the place of an older one of the same cell."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    results = json.loads(path.read_text())["results"] if path.exists() else {}
    cells = {known["cell"]: known for known in results.get(name, ())}
    cells[result["cell"]] = {**result, "quick": quick, "machine": machine()}
    results[name] = list(cells.values())
    path.write_text(json.dumps({"results": results}, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table(name, results[name]), "utf-8")
    plots.plot(name, results[name], folder / f"{name}.svg")


def into_docs(folder: Path, page: Path, names: Iterable[str]) -> None:
    """Put tables between their marks in a page, and plots into the folder beside it.

    Raises:
        SystemExit: Nothing was measured, only a quick look was, or the page lacks the marks.
    """
    path = folder / "results.json"
    if not path.exists():
        raise SystemExit(f"expected {path} of an earlier run, found none; measure first")
    results = json.loads(path.read_text())["results"]
    text = page.read_text("utf-8")
    for name in (name for name in names if name in results):
        if any(result["quick"] for result in results[name]):
            raise SystemExit(f"expected {name} in {path} to be measured, got a quick look")
        begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
        pattern = re.compile(re.escape(begin) + ".*?" + re.escape(end), re.DOTALL)
        body = "\n".join((begin, table(name, results[name]), _below(name, results[name]), end))
        text, count = pattern.subn(lambda _, body=body: body, text)
        if count != 1:
            raise SystemExit(f"expected the marks of {name} once in {page}, got them {count} times")
        plots.plot(name, results[name], folder / f"{name}.svg")
        pictures = page.parent / "performance"
        pictures.mkdir(exist_ok=True)
        shutil.copy(folder / f"{name}.svg", pictures)
    page.write_text(text, "utf-8")


def _below(name: str, results: list[Result]) -> str:
    """Machine and time of the measurement, and the plot."""
    where = results[-1]["machine"]
    return (
        f"*{where['measured_at'][:10]}, {where['cores']} cores ({where['processor']}).*\n\n"
        f"![{plots.LABELS[name]}](performance/{name}.svg)\n"
    )


def table(name: str, results: Iterable[Result]) -> str:
    """The results of one benchmark as Markdown."""
    results = list(results)
    if name == "worker":
        return _worker_tables(results)
    return "\n".join(_of_cell(result, _TABLES[result.get("table", name)]) for result in results)


def _of_cell(result: Result, columns: Mapping[str, Column]) -> str:
    rows = [[row["name"], *(show(row) for show in columns.values())] for row in result["rows"]]
    return f"**{result['cell']}**\n\n{_markdown(['', *columns], rows)}"


def _worker_tables(results: list[Result]) -> str:
    """One row for each cell."""
    rows = []
    compared = (BARE, *plots.COMPARED)
    for result in results:
        variants = {row["name"]: row for row in result["rows"]}
        plain = variants[PLAIN]
        ratios = (
            _ratio("worker_cpu_ratio")(variants[name]) if name in variants else "–"
            for name in compared
        )
        speeds = (_speed(plain), _speed(variants[QUEUE]))
        rows.append([result["cell"], *ratios, f"{plain['worker_cpu_ms']:.2f}", *speeds])
    titles = ["", *compared, "plain CPU ms", "plain tasks/s", "guarded tasks/s"]
    return _markdown(titles, rows)


def _markdown(titles: list[str], rows: Iterable[Iterable[object]]) -> str:
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _ratio(name: str) -> Column:
    def show(row: Row) -> str:
        if name not in row:
            return "–"
        low, middle, high = row[name]
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    return show


def _spread(name: str) -> Column:
    def show(row: Row) -> str:
        low, middle, high = row[name]
        return f"{middle:,.0f} ({low:,.0f} to {high:,.0f})"

    return show


def _number(name: str, pattern: str = "{:,.0f}", scale: float = 1.0) -> Column:
    def show(row: Row) -> str:
        value = row.get(name)
        return "–" if value is None else pattern.format(value * scale)

    return show


def _within(name: str, limit: float) -> Column:
    """A number; one above a limit is marked."""

    def show(row: Row) -> str:
        text = f"{row[name]:.1f}"
        return text if row[name] <= limit else f"**{text}, above {limit:.0f}**"

    return show


def _text(name: str) -> Column:
    return lambda row: row.get(name, "–")


_speed = _number("tasks_per_second")
_COMMON: dict[str, Column] = {
    "tasks/s": _speed,
    "worker CPU s per 1,000": _number("worker_cpu_ms", "{:.3f}"),
    "ratio (quartiles)": _ratio("worker_cpu_ratio"),
    "server CPU s per 1,000": _number("server_cpu_ms", "{:.3f}"),
}
_RATES: dict[str, Column] = {
    "a second (quartiles)": _spread("per_second"),
    "speed, by the bare limit's (quartiles)": _ratio("speed_ratio"),
    "Python CPU µs each": _number("cpu_us"),
    "Redis CPU µs each": _number("server_cpu_us"),
    "MiB at most": _number("peak_mib"),
}
_TABLES: dict[str, dict[str, Column]] = {
    "dying": {**_COMMON, "MiB": _number("memory_mib", "{:.1f}")},
    "killed": {
        "runs a message": _number("runs_per_message"),
        "messages/s": _number("tasks_per_second", "{:,.1f}"),
        "worker CPU ms a run": _number("worker_cpu_ms_per_run"),
        "ratio a run (quartiles)": _ratio("ratio_per_run"),
    },
    "peers": {
        "dead/s": _speed,
        "worker CPU ms each": _number("worker_cpu_ms", "{:.2f}"),
        "server CPU ms each": _number("server_cpu_ms", "{:.2f}"),
        "bytes kept each": _number("kept_bytes"),
        "redriven/s": _number("redriven_per_second"),
        "redrive CPU µs each": _number("redrive_cpu_us"),
    },
    "publish": {
        "plain CPU µs": _number("plain_us"),
        "CPU µs": _number("variant_us"),
        "ratio (quartiles)": _ratio("cpu_ratio"),
    },
    "redrive": _RATES,
    "export": _RATES,
    "growth": {
        "letters": _number("size"),
        "seconds": _number("seconds", "{:,.4g}"),
        "letters/s": _number("per_second"),
        "CPU s": _number("cpu_seconds", "{:,.4g}"),
        "MiB at most": _number("peak_mib"),
        "Redis ms": _number("redis_ms", "{:,.2f}"),
    },
    "web": {
        "ms (median)": _number("median_ms", "{:.1f}"),
        "ms (95th percentile)": _within("p95_ms", LIMIT_MS),
    },
    "report": {
        "seconds": _number("seconds", "{:.1f}"),
        "CPU s": _number("cpu_seconds", "{:.1f}"),
        "Java, peak MB": _number("java_peak_mb"),
        "Python, peak MB": _number("python_peak_mb"),
        "load": _number("load", "{:.1f}"),
    },
    "planted": {
        "causes": _number("causes"),
        "can be found": _number("findable"),
        "found": _number("found"),
        "recall": _number("recall", "{:.2f}"),
        "false, of 100 causes": _number("false_of_100", "{:.1f}"),
        "false, of 100 causes without any truth": _number("noise_of_100", "{:.1f}"),
        "seconds of a report, at most": _number("seconds", "{:.0f}"),
    },
    "kinds": {
        f"{letters:,} letters": _text(f"of_{letters}") for letters in (1_000, 30_000, 1_000_000)
    },
    "triage": {
        "files MB": _number("file_mb"),
        "`groups`": _number("groups", "{:.1f}"),
        "DuckDB": _number("duckdb", "{:.1f}"),
        "ratio": _number("ratio", "{:.1f}"),
        "`reasons`": _number("reasons", "{:.1f}"),
        "`timeline`": _number("timeline", "{:.1f}"),
        "`new_since`": _number("new_since", "{:.1f}"),
        "`spikes`": _number("spikes", "{:.1f}"),
        "`explain`": _number("explain", "{:.1f}"),
        "Java, peak MB": _number("java_peak_mb"),
    },
}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
