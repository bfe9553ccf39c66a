"""Plots of the results: the same figures make the same file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.node import AGAIN, DECORATOR, PLUGIN, QUEUE

COMPARED = (AGAIN, PLUGIN, QUEUE, DECORATOR)
"""Variants of a worker that are compared with plain Celery in every cell."""

Row = Mapping[str, Any]
Result = Mapping[str, Any]
Quartiles = tuple[float, float, float]


def plot(name: str, results: list[Result], path: Path) -> None:
    """One picture for all results of a benchmark."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams["svg.hashsalt"] = "celery_dlq"
    from matplotlib import pyplot as plt

    if name in _LINES:
        figure = _lines(plt, results, **_LINES[name])
    elif name == "worker":
        figure = _dots(plt, results)
    else:
        figure = _bars(plt, results, *_BARS[name])
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(
    plt: Any, results: list[Result], label: str, value: Callable[[Result, Row], Quartiles | None]
) -> Any:
    """Bars beside each other, one group per cell; lines are the quartiles."""
    names = list(dict.fromkeys(row["name"] for result in results for row in result["rows"]))
    figure, axes = plt.subplots(figsize=(8, 0.9 + 0.22 * sum(len(r["rows"]) for r in results)))
    place, ticks, labels = 0.0, [], []
    for result in results:
        for row in result["rows"]:
            quartiles = value(result, row)
            if quartiles is None:
                continue
            low, middle, high = quartiles
            color = f"C{names.index(row['name'])}"
            axes.barh(place, middle, color=color, xerr=[[middle - low], [high - middle]])
            ticks.append(place)
            shown = row["name"].replace("`", "")
            labels.append(shown if len(results) == 1 else f"{result['cell']}: {shown}")
            place += 1
        place += 0.7
    axes.set_yticks(ticks, labels, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _dots(plt: Any, results: list[Result]) -> Any:
    """A line for each cell, with a dot for each variant; thin lines are the quartiles."""
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.45 * len(results)))
    for number, name in enumerate(COMPARED):
        shown = [
            (place + (number - 1.5) * 0.16, row["worker_cpu_ratio"])
            for place, result in enumerate(results)
            for row in result["rows"]
            if row["name"] == name
        ]
        middles = [middle for _, (_, middle, _) in shown]
        sides = [[m - low for _, (low, m, _) in shown], [high - m for _, (_, m, high) in shown]]
        axes.errorbar(
            middles,
            [y for y, _ in shown],
            xerr=sides,
            fmt="o",
            markersize=4,
            linewidth=1,
            color=f"C{number}",
            label=name,
        )
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks(range(len(results)), [result["cell"] for result in results], fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(LABELS["worker"])
    axes.legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1), ncols=len(COMPARED))
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def _lines(plt: Any, results: list[Result], *, by: str, panels: Mapping[str, str]) -> Any:
    """One line for each operation over the number of letters; logarithmic but for memory."""
    rows = [row for result in results for row in result["rows"]]
    figure, every = plt.subplots(1, len(panels), figsize=(3.4 * len(panels), 3.4))
    for axes, (key, label) in zip(every, panels.items(), strict=True):
        for operation in dict.fromkeys(row["operation"] for row in rows):
            mine = [row for row in rows if row["operation"] == operation]
            if key != "peak_mib":
                mine = [row for row in mine if not row["partly"]]
            axes.plot([r[by] for r in mine], [r[key] for r in mine], marker="o", label=operation)
        axes.set_xscale("log")
        axes.set_yscale("log" if key != "peak_mib" else "linear")
        axes.set_xlabel("letters")
        axes.set_title(label, fontsize=9)
        if key == "peak_mib":
            axes.set_ylim(0)
        axes.spines[["top", "right"]].set_visible(False)
    every[0].legend(fontsize=7, loc="center", bbox_to_anchor=(0.55, 0.53), ncols=2)
    return figure


def _cpu_by_plain(result: Result, row: Row) -> Quartiles:
    base = result["rows"][0]["worker_cpu_ms"]
    low, middle, high = (quartile * base for quartile in row["worker_cpu_ratio"])
    return low, middle, high


def _quartiles(name: str) -> Callable[[Result, Row], Quartiles | None]:
    def value(_: Result, row: Row) -> Quartiles | None:
        return tuple(row[name]) if row.get(name) is not None else None  # type: ignore[return-value]

    return value


def _single(name: str) -> Callable[[Result, Row], Quartiles | None]:
    def value(_: Result, row: Row) -> Quartiles | None:
        return (row[name],) * 3 if row.get(name) is not None else None

    return value


_CPU = "CPU milliseconds of the workers a task"
_BARS: dict[str, tuple[str, Callable[[Result, Row], Quartiles | None]]] = {
    "dying": (_CPU, _cpu_by_plain),
    "killed": ("CPU of the workers a run, by plain Celery's", _quartiles("ratio_per_run")),
    "peers": (_CPU, _cpu_by_plain),
    "publish": ("CPU a message, by plain Celery's", _quartiles("cpu_ratio")),
    "redrive": ("messages a second", _quartiles("per_second")),
    "export": ("letters a second", _quartiles("per_second")),
    "planted": ("found, of what can be found", _single("recall")),
    "triage": ("seconds for groups in Spark", _single("groups")),
    "web": ("milliseconds of a page", _single("median_ms")),
}
_LINES: dict[str, dict[str, Any]] = {
    "growth": {
        "by": "size",
        "panels": {
            "seconds": "seconds",
            "redis_ms": "milliseconds of Redis",
            "peak_mib": "MiB of the process at most",
        },
    }
}

LABELS = {
    **{name: label for name, (label, _) in _BARS.items()},
    "worker": "CPU of the workers a task, by plain Celery's",
    "growth": "How cost grows with the number of letters",
}
"""What each plot shows."""
