"""The pages at a million letters: ``python -m benchmarks web``.

A real ``celery dlq web`` answers requests over one kept-alive connection. The time is the whole
request as a browser on this machine sees it, so the server's own time is below it.
"""

from __future__ import annotations

import http.client
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any
from urllib.parse import quote

from benchmarks.letters import fill
from benchmarks.processes import Tree
from builders import DLQ
from servers import RedisServer

from celery_dlq.store.keys import Keys

_START_SECONDS = 30.0


@dataclass(frozen=True)
class Size:
    """How many letters, groups, and requests of each page."""

    letters: int
    groups: int
    requests: int


FULL = Size(letters=1_000_000, groups=100_000, requests=50)
QUICK = Size(letters=200, groups=20, requests=3)


def measure(size: Size, tell: Callable[[str], None]) -> Iterator[dict[str, Any]]:
    """One result: a row for each page."""
    with RedisServer() as server:
        client = server.client()
        fill(client, size.letters, groups=size.groups)
        tell(f"web: {size.letters:,} letters stored")
        keys = Keys()
        letter = client.hrandfield(keys.ids(DLQ)).decode()
        group = client.zrandmember(keys.groups(DLQ)).decode()
        queue = quote(DLQ)
        pages = {
            "overview": "/",
            "groups, newest": f"/queues/{queue}",
            "groups, largest": f"/queues/{queue}?by=letters",
            "one group": f"/queues/{queue}/groups/{group}",
            "letters": f"/queues/{queue}/letters",
            "one letter": f"/queues/{queue}/letters/{letter}",
            "jobs": "/jobs",
            "policies": "/policies",
            "audit": "/audit",
            "what sets a group apart": f"/queues/{queue}/groups/{group}/differences",
            "letters of a rare group": f"/queues/{queue}/letters?fingerprint={group}",
        }
        with _served(server.url) as (port, tree):
            rows = [_row(name, path, port, tree, size.requests) for name, path in pages.items()]
        yield {"cell": f"{size.letters:,} letters, {size.groups:,} groups", "rows": rows}


def _row(name: str, path: str, port: int, tree: Tree, requests: int) -> dict[str, Any]:
    slow = name.startswith(("what", "letters of"))
    requests = max(3, requests // 10) if slow else requests
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    times, length = [], 0
    for number in range(requests + 1):
        begun = time.perf_counter()
        connection.request("GET", path)
        answer = connection.getresponse()
        length = len(answer.read())
        if answer.status != 200:
            raise RuntimeError(f"{path} answered {answer.status}")
        if number:  # the first one reads what is kept for a few seconds
            times.append((time.perf_counter() - begun) * 1e3)
    connection.close()
    return {
        "name": name,
        "rounds": requests,
        "median_ms": median(times),
        "p95_ms": quantiles(times, n=20)[-1],
        "page_bytes": length,
        "memory_mib": tree.memory_bytes() / 2**20,
    }


@contextmanager
def _served(url: str) -> Iterator[tuple[int, Tree]]:
    """Start ``celery dlq web`` and wait until it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    path = os.pathsep.join(str(place) for place in Path(__file__).parents[1:4])
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "celery", "-A", "benchmarks.web_app"),
            *("dlq", "web", "--port", str(port)),
        ],
        env={**os.environ, "PYTHONPATH": path, "BENCHMARK_URL": url},
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                if time.monotonic() > deadline or process.poll() is not None:
                    raise
                time.sleep(0.1)
        yield port, Tree(process.pid)
    finally:
        process.terminate()
        process.wait(10)
