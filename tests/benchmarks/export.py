"""How fast letters become Parquet files, beside writing the same columns from memory.

Run: ``PYTHONPATH=tests python -m benchmarks.export --letters 200000``. Starts a Redis of its
own. Each pair exports all letters in a new process, then writes the same Arrow tables with the
same settings from memory in another; medians of the pairs are what counts.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.shop_letters import fill
from builders import DLQ
from servers import RedisServer


def main() -> None:
    """Print a line for each pair, then the medians."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=200_000)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--redis", help="A Redis that was filled before.")
    parser.add_argument("--child", choices=["export", "memory"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(CHILDREN[options.child](options)))
    elif options.redis:
        measure(options.redis, options)
    else:
        with RedisServer() as server:
            fill(server.client(), options.letters)
            measure(server.url, options)


def measure(url: str, options: argparse.Namespace) -> None:
    pairs = []
    for _ in range(options.pairs):
        with tempfile.TemporaryDirectory() as folder:
            pair = {name: child(name, url, folder, options) for name in CHILDREN}
        pairs.append(pair)
        exported, memory = pair["export"], pair["memory"]
        print(
            f"export {exported['rate']:,.0f}/s, {exported['rss']:.0f} MB, "
            f"{exported['cpu']:.1f} us CPU each; "
            f"from memory {memory['rate']:,.0f}/s, {memory['cpu']:.1f} us CPU each; "
            f"ratio {exported['rate'] / memory['rate']:.2f}",
            flush=True,
        )
    rates = [pair["export"]["rate"] for pair in pairs]
    ratios = [pair["export"]["rate"] / pair["memory"]["rate"] for pair in pairs]
    print(
        f"median of {len(pairs)}: {median(rates):,.0f} letters/s, ratio {median(ratios):.2f}, "
        f"peak {max(pair['export']['rss'] for pair in pairs):.0f} MB"
    )


def child(name: str, url: str, folder: str, options: argparse.Namespace) -> Any:
    command = [
        sys.executable, "-m", "benchmarks.export", "--child", name, "--redis", url,
        "--folder", folder, "--letters", str(options.letters),
    ]  # fmt: skip
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


def export(options: argparse.Namespace) -> dict[str, float]:
    """What ``dlq export`` does, with imports done before the clock starts."""
    from celery_dlq.backends.redis.connection import connect
    from celery_dlq.backends.redis.keys import Keys
    from celery_dlq.backends.redis.store import RedisStore
    from celery_dlq.export.parquet import ParquetExport

    store = RedisStore(connect(options.redis, 60.0), options.redis, Keys())
    return timed(lambda: ParquetExport(store, Path(options.folder) / "letters").run([DLQ]).letters)


def memory(options: argparse.Namespace) -> dict[str, float]:
    """Write the files of the export anew, from tables that are in memory."""
    import pyarrow.parquet as pq

    from celery_dlq.export.roll import ROWS_A_GROUP, WRITING

    files = sorted(Path(options.folder).glob("letters/dlq=*/day=*/*.parquet"))
    tables = [pq.ParquetFile(file).read() for file in files]

    def write() -> int:
        for number, table in enumerate(tables):
            place = Path(options.folder) / f"{number}.parquet"
            with pq.ParquetWriter(place, table.schema, **WRITING) as writer:
                for start in range(0, table.num_rows, ROWS_A_GROUP):
                    writer.write_table(table.slice(start, ROWS_A_GROUP))
        return sum(table.num_rows for table in tables)

    return timed(write)


def timed(work: Any) -> dict[str, float]:
    began, cpu = time.perf_counter(), time.process_time()
    letters = work()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"rate": letters / seconds, "cpu": cpu / letters * 1e6, "rss": peak}


CHILDREN = {"export": export, "memory": memory}

if __name__ == "__main__":
    main()
