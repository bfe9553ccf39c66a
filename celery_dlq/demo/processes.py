"""The worker of the demo; always ended."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from celery_dlq.testing.server import child


@contextmanager
def worker(app: str, queues: Sequence[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a real ``celery worker`` with two pool processes."""
    command = [
        sys.executable,
        "-m",
        "celery",
        "-A",
        app,
        "worker",
        "--pool",
        "prefork",
        "--concurrency",
        "2",
        "--queues",
        ",".join(queues),
        "--loglevel",
        "INFO",
        "--without-gossip",
        "--without-mingle",
    ]
    with child(command, log) as process:
        yield process
