"""Reads letters in one of the ways that there are; run by the tests as a script.

Prints how many letters were read, and the most memory that the process had in use, in MiB.

Args: URL of Redis, a name of `READERS`, a folder to write to.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

from builders import DLQ, an_app

from celery_dlq import DeadLetters
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.spark.live import LiveLetters, PositionRange
from celery_dlq.spark.options import ReadOptions
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import FIRST_POSITION
from celery_dlq.store.store import Store


def main(url: str, reader: str, folder: str) -> None:
    sys.stdout.write(f"{READERS[reader](url, folder)} {peak_mib():.0f}\n")


def peak_mib() -> float:
    """Not ``ru_maxrss``: that begins with what the process had which started this one."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM:"))


def an_installed(url: str) -> DeadLetters:
    return DeadLetters(an_app(broker_url=url, dlq_url=None))


def letters_of(url: str) -> Letters:
    return Store(url, timeout_seconds=10.0).letters


def export(url: str, folder: str) -> int:
    from celery_dlq.export.exporter import ParquetExport  # of this reader alone: it is large

    return ParquetExport(letters_of(url), folder).run([DLQ]).letters


def follow(url: str, folder: str) -> int:
    from celery_dlq.export.exporter import ParquetExport  # of this reader alone: it is large

    store, stop, read = letters_of(url), threading.Event(), list[int]()
    wanted = sum(map(store.length, store.names()))

    def progress(letters: int) -> None:
        read.append(letters)
        if sum(read) >= wanted:
            stop.set()

    return ParquetExport(store, folder).follow(store.names, stop, progress=progress).letters


def spark(url: str, _folder: str) -> int:
    columns = ReadOptions.parse({"url": url}).columns
    with LiveLetters(ReadOptions.parse({"url": url})) as live:
        span = PositionRange(DLQ, FIRST_POSITION, live.end_position(DLQ))
        return sum(one.num_rows for one in live.batches(span, LetterFilter(), columns))


def listing(url: str, _folder: str) -> int:
    return sum(1 for _ in an_installed(url).letters(DLQ))


def pages(url: str, _folder: str) -> int:
    dlq, cursor, found = an_installed(url), None, 0
    while True:
        page = dlq.page(DLQ, cursor=cursor, size=200)
        found, cursor = found + len(page.entries), page.older
        if cursor is None:
            return found


def differences(url: str, _folder: str) -> int:
    dlq = an_installed(url)
    found = dlq.differences(DLQ, reason="failed", most=20_000, deadline_seconds=60.0)
    return found.letters


def redrive(url: str, _folder: str) -> int:
    return an_installed(url).plan("redrive", DLQ, seconds=60.0).total or 0


def retention(url: str, _folder: str) -> int:
    store, after, found = letters_of(url), None, 0
    while page := store.oldest_letters(DLQ, after=after, most=500):
        found, after = found + len(page), page[-1].position
    return found


READERS: dict[str, Callable[[str, str], int]] = {
    one.__name__: one
    for one in (export, follow, spark, listing, pages, differences, redrive, retention)
}

if __name__ == "__main__":
    main(*sys.argv[1:])
