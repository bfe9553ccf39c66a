"""What publishing costs with the plugin: interleaved pairs in one process, CPU seconds.

``PYTHONPATH=tests python -m benchmarks.publish --pairs 41``. Every variant is an app of its
own on one Redis; variant and plain Celery take turns, block by block, in an order that
changes, and each pair gives one ratio of CPU seconds. The median of the ratios is the
figure; the quartiles say how far to trust it.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import statistics
import sys
import time
from typing import Any

from celery import Celery
from kombu import Queue
from rich.console import Console
from rich.table import Table
from servers import RedisServer

from celery_dlq import DeadLetters

QUEUES = ("normal", "delayed")
DELAY = 30.0
VARIANTS: dict[str, dict[str, Any] | None] = {
    "plain again (the noise)": None,
    "plugin, no policy": {},
    "plugin, policies without delays": {"normal": {"max_deliveries": 3}},
    "plugin, another queue is delayed": {"delayed": {"default_delay": DELAY}},
}


def app_of(url: str, policies: dict[str, Any] | None) -> Celery:
    """An app on this Redis; ``None``: without the plugin."""
    app = Celery("bench", broker=url, set_as_current=False)
    app.conf.task_queues = [Queue(name) for name in QUEUES]
    app.conf.task_default_queue = "normal"
    app.conf.task_ignore_result = True
    app.task(name="work")(work)
    if policies is not None:
        app.conf.dlq_queues = policies
        DeadLetters(app)
    return app


def work(number: int) -> None:
    """Never run here."""


def block(app: Celery, messages: int, options: dict[str, Any]) -> float:
    """Publish so many messages; CPU seconds of this process."""
    task = app.tasks["work"]
    begun = time.process_time()
    for number in range(messages):
        task.apply_async((number,), **options)
    return time.process_time() - begun


def paired(
    plain: Celery, other: Celery, messages: int, pairs: int,
    plain_options: dict[str, Any], options: dict[str, Any],
) -> list[tuple[float, float]]:  # fmt: skip
    """CPU seconds of both, pair by pair; who goes first is drawn by lot."""
    found = []
    for app, given in ((plain, plain_options), (other, options)):
        block(app, messages, given)  # connections, caches
    for _ in range(pairs):
        if random.random() < 0.5:  # noqa: S311 - no secret
            first = block(plain, messages, plain_options)
            found.append((first, block(other, messages, options)))
        else:
            second = block(other, messages, options)
            found.append((block(plain, messages, plain_options), second))
    return found


def summary(pairs: list[tuple[float, float]], messages: int) -> dict[str, Any]:
    """Medians and the ratio with its quartiles."""
    ratios = [other / plain for plain, other in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    scale = 1e6 / messages
    return {
        "pairs": len(pairs),
        "plain_us": statistics.median(plain for plain, _ in pairs) * scale,
        "variant_us": statistics.median(other for _, other in pairs) * scale,
        "ratio": middle,
        "quartiles": [low, high],
    }


def main() -> int:
    """Measure and print; the figures are one JSON object a line with ``--json``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=41)
    parser.add_argument("--messages", type=int, default=250, help="per block")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with RedisServer() as server:
        server.client().config_set("save", "")
        plain = app_of(server.url, None)
        for name, policies in VARIANTS.items():
            pairs = paired(
                plain, app_of(server.url, policies), arguments.messages, arguments.pairs, {}, {}
            )
            results[name] = summary(pairs, arguments.messages)
            server.client().flushall()
        delayed = app_of(server.url, {"delayed": {"default_delay": DELAY}})
        results["a delayed queue, against Celery's own countdown"] = summary(
            paired(
                plain, delayed, arguments.messages, arguments.pairs,
                {"queue": "delayed", "countdown": DELAY}, {"queue": "delayed"},
            ),
            arguments.messages,
        )  # fmt: skip
    _print(results, as_json=arguments.json)
    return 0


def _print(results: dict[str, dict[str, Any]], *, as_json: bool) -> None:
    if as_json:
        sys.stdout.writelines(json.dumps({"variant": n, **r}) + "\n" for n, r in results.items())
        return
    table = Table("variant", "plain µs", "variant µs", "ratio", "quartiles", "pairs")
    for name, result in results.items():
        low, high = result["quartiles"]
        table.add_row(
            name,
            f"{result['plain_us']:.1f}",
            f"{result['variant_us']:.1f}",
            f"{result['ratio']:.4f}",
            f"{low:.4f} to {high:.4f}",
            str(result["pairs"]),
        )
    console = Console()
    console.print(f"Python {platform.python_version()}, CPU microseconds a published message")
    console.print(table)


if __name__ == "__main__":
    sys.exit(main())
