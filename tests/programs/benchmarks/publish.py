"""The cost of publishing with the plugin: ``python -m benchmarks publish``.

Interleaved pairs in one process, CPU seconds: every variant is an app of its own on one
Redis; variant and plain Celery take turns, block by block, in an order that changes, and each
pair gives one ratio. The median of the ratios is the figure; the quartiles say how far to
trust it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.contest import median, spread
from celery import Celery
from kombu import Queue
from servers import RedisServer

from celery_dlq import DeadLetters


@dataclass(frozen=True)
class Size:
    """Numbers of pairs, and of messages a turn."""

    pairs: int
    messages: int


FULL = Size(pairs=400, messages=20)
QUICK = Size(pairs=2, messages=5)

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
    """Publish this number of messages; return the CPU seconds of this process."""
    task = app.tasks["work"]
    begun = time.process_time()
    for number in range(messages):
        task.apply_async((number,), **options)
    return time.process_time() - begun


def paired(
    plain: Celery,
    other: Celery,
    messages: int,
    pairs: int,
    plain_options: dict[str, Any],
    options: dict[str, Any],
) -> list[tuple[float, float]]:
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


def summary(name: str, pairs: list[tuple[float, float]], messages: int) -> dict[str, Any]:
    """Medians, and the ratio with its quartiles."""
    scale = 1e6 / messages
    return {
        "name": name,
        "pairs": len(pairs),
        "plain_us": median(plain for plain, _ in pairs) * scale,
        "variant_us": median(other for _, other in pairs) * scale,
        "cpu_ratio": spread(other / plain for plain, other in pairs),
        "turns": pairs,
    }


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result."""
    rows = []
    with RedisServer() as server:
        plain = app_of(server.url, None)
        for name, policies in VARIANTS.items():
            other = app_of(server.url, policies)
            pairs = paired(plain, other, size.messages, size.pairs, {}, {})
            rows.append(summary(name, pairs, size.messages))
            server.client().flushall()
            tell(f"publish: {name}")
        delayed = app_of(server.url, {"delayed": {"default_delay": DELAY}})
        pairs = paired(
            plain,
            delayed,
            size.messages,
            size.pairs,
            {"queue": "delayed", "countdown": DELAY},
            {"queue": "delayed"},
        )
        rows.append(
            summary("a delayed queue, against Celery's own countdown", pairs, size.messages)
        )
    yield {"cell": f"{size.messages} messages a turn", "rows": rows}
