"""One operation on a full dead-letter queue, in a process of its own.

`run` starts ``python -m benchmarks.operate redrive '{"url": …}'``, so that what one takes of
memory and CPU is its own. Imports, connections and made-up messages are there before the
clock starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import redis
from benchmarks.contest import spread
from benchmarks.letters import messages
from benchmarks.processes import Tree, peak_mib
from builders import DLQ, an_app
from servers import RedisServer

from celery_dlq import DeadLetters
from celery_dlq.cli.context import ready_for_many
from celery_dlq.letters.packed import COMPRESSED, SEPARATOR, decompressed
from celery_dlq.store.keys import Keys

if TYPE_CHECKING:
    from celery_dlq.store.records import ExportReport

Facts = dict[str, Any]

_BATCH = 500
"""As a redrive's."""

_LOOKS = 9
_QUEUE = "orders"


def run(operation: str, server: RedisServer, **options: Any) -> Facts:
    """Do it, on the letters of this server.

    Args:
        operation: One of `OPERATIONS`.
        server: Where the letters are, and the broker.
        **options: ``letters``: how many; ``folder``: of an export, or of the letters of a redrive;
            ``letters_url``: of a redrive whose letters are not in the broker's database.

    Returns:
        ``letters``, ``seconds``, ``cpu_seconds`` of Python, ``server_cpu_seconds`` of all the
        process did, ``peak_mib``; of a look also ``commands_ms``, the time of Redis in commands.
    """
    path = os.pathsep.join(str(place) for place in Path(__file__).parents[1:4])
    before = Tree(server.pid).cpu_seconds()
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "benchmarks.operate",
            operation,
            json.dumps({"url": server.url, **options}),
        ],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        check=True,
    )
    cpu = Tree(server.pid).cpu_seconds() - before
    return {**json.loads(done.stdout), "server_cpu_seconds": cpu}


def row_of(name: str, turns: list[Facts]) -> Facts:
    """The row of a table: quartiles of the rate, medians, and the most memory of all turns."""
    return {
        "name": name,
        "rounds": len(turns),
        "per_second": spread(turn["letters"] / turn["seconds"] for turn in turns),
        "cpu_us": median(turn["cpu_seconds"] / turn["letters"] * 1e6 for turn in turns),
        "server_cpu_us": median(
            turn["server_cpu_seconds"] / turn["letters"] * 1e6 for turn in turns
        ),
        "peak_mib": max(turn["peak_mib"] for turn in turns),
        "turns": turns,
    }


def look(work: Callable[[DeadLetters], object], options: Facts) -> Facts:
    """Medians of the times for which an operator waits."""
    with _dead_letters(options["url"]) as dlq, _client(options["url"]) as client:
        work(dlq)
        client.config_resetstat()
        times = [_timed(lambda: work(dlq), 1) for _ in range(_LOOKS)]
        stats = {
            name.removeprefix("cmdstat_"): s for name, s in client.info("commandstats").items()
        }
        spent = sum(s["usec"] for name, s in stats.items() if not name.startswith("config"))
        return {
            **times[-1],
            "seconds": median(found["seconds"] for found in times),
            "cpu_seconds": median(found["cpu_seconds"] for found in times),
            "commands_ms": spent / 1e3 / _LOOKS,
            "commands": sorted(stats),
        }


def redrive(options: Facts) -> Facts:
    """The plugin's redrive of this number of letters, after as many as ``first``."""
    letters, first = options["letters"], options.get("first", 0)
    place, files = options.get("letters_url", options["url"]), options.get("folder", "")
    with (
        _dead_letters(options["url"], place) as dlq,
        _client(options["url"]) as client,
        _client(place) as beside,
    ):
        before = beside.xlen(Keys().letters(DLQ))
        ready_for_many()
        if files:
            os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")  # as the command does
            import celery_dlq.export.exported  # noqa: F401 - not what is measured
        if first:
            dlq.redrive(DLQ, limit=first, files=files)
        facts = _timed(
            lambda: dlq.redrive(DLQ, limit=None if files else letters, files=files), letters
        )
        assert client.llen(_QUEUE) == first + letters
        assert files or before - beside.xlen(Keys().letters(DLQ)) == first + letters
        return facts


def batch(options: Facts) -> Facts:
    """The bare limit: kombu's ``Producer.batch()`` and messages that lie ready in memory."""
    ready = list(messages(options["letters"]))
    app = an_app(broker_url=options["url"])
    with app.connection_for_write() as connection:
        producer = connection.Producer()

        def publish() -> None:
            left = iter(ready)
            while some := list(islice(left, _BATCH)):
                with producer.batch() if hasattr(producer, "batch") else nullcontext():
                    for body, headers, properties in some:
                        producer.publish(
                            body,
                            routing_key=_QUEUE,
                            headers=headers,
                            content_type="application/json",
                            content_encoding="utf-8",
                            delivery_mode=2,
                            correlation_id=properties["correlation_id"],
                            reply_to=properties["reply_to"],
                        )

        producer.publish("", routing_key="warm-up")
        return _published(publish, options)


def apply_async(options: Facts) -> Facts:
    """A redrive as people write it who have none."""
    ready = [json.loads(body) for body, _, _ in messages(options["letters"])]
    app = an_app(broker_url=options["url"], task_ignore_result=True)

    @app.task(name="shop.charge")
    def charge(**_: object) -> None:
        """Never run here."""

    def publish() -> None:
        for args, kwargs, _ in ready:
            charge.apply_async(args, kwargs, queue=_QUEUE)

    charge.apply_async((), {}, queue="warm-up")
    return _published(publish, options)


def export(options: Facts) -> Facts:
    """The export of ``dlq export``."""
    import pyarrow as pa

    import celery_dlq.export.exporter  # noqa: F401 - not what is measured

    pa.array([""])  # nor that the first array imports pandas, half a second, where it is installed
    ready_for_many()  # as the command does
    with _dead_letters(options["url"]) as dlq, _folder(options) as folder:
        reports: list[ExportReport] = []
        place = Path(folder) / "letters"
        facts = _timed(lambda: reports.append(dlq.export(place, [DLQ])), options["letters"])
        assert reports[0].letters == options["letters"], reports
        return facts


def parquet(options: Facts) -> Facts:
    """The bare limit: the files of an export, written again from tables in memory."""
    import pyarrow.parquet as pq

    from celery_dlq.export.roll import ROWS_A_GROUP, WRITING

    files = sorted(Path(options["folder"]).glob("letters/dlq=*/day=*/*.parquet"))
    tables = [pq.ParquetFile(file).read() for file in files]

    def write() -> None:
        for number, table in enumerate(tables):
            place = Path(options["folder"]) / f"{number}.parquet"
            with pq.ParquetWriter(place, table.schema, **WRITING) as writer:
                for start in range(0, table.num_rows, ROWS_A_GROUP):
                    writer.write_table(table.slice(start, ROWS_A_GROUP))

    return _timed(write, sum(table.num_rows for table in tables))


def least(options: Facts) -> Facts:
    """What an export in Python cannot do without, one after the other, and nothing else.

    Each entry is read, its compressed texts are inflated, its joined ones split and put in the
    order of columns; then the same columns are written as by `parquet`.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    letters = options["letters"]
    written = parquet(options)
    with _client(options["url"]) as client:
        client.set_response_callback("XRANGE", lambda reply, **_: reply)

        def read() -> None:
            low, stream = "-", Keys().letters(DLQ)
            while page := client.execute_command("XRANGE", stream, low, "+", "COUNT", _BATCH):
                low = f"({page[-1][0].decode()}"
                entries = [parts for _, parts in page]
                for parts in entries:
                    decompressed(parts[parts.index(COMPRESSED) + 1])
                joined = pa.array([parts[1] for parts in entries], pa.binary())
                values = pc.split_pattern(joined, SEPARATOR).values
                total, order = len(values), array("i")
                for at in range(total // len(page)):
                    order += numbers[at : total : total // len(page)]
                values.take(pa.Array.from_buffers(pa.int32(), total, [None, pa.py_buffer(order)]))

        pa.array([""])  # imports pandas where it is installed
        numbers = array("i", range(100 * _BATCH))
        facts = _timed(read, letters)
    both = ("seconds", "cpu_seconds")
    return {**facts, **{name: facts[name] + written[name] for name in both}}


LOOKS: dict[str, Callable[[DeadLetters], object]] = {
    "list": lambda dlq: list(dlq.letters(DLQ, newest_first=True, limit=50)),
    "queues": lambda dlq: dlq.queues(),
    "groups": lambda dlq: dlq.groups(DLQ, limit=100),
}
"""First pages, as the command line shows them."""

OPERATIONS: dict[str, Callable[[Facts], Facts]] = {
    "redrive": redrive,
    "batch": batch,
    "apply_async": apply_async,
    "export": export,
    "parquet": parquet,
    "least": least,
    **{name: partial(look, work) for name, work in LOOKS.items()},
}


def _published(work: Callable[[], object], options: Facts) -> Facts:
    with _client(options["url"]) as client:
        before = client.llen(_QUEUE)
        facts = _timed(work, options["letters"])
        assert client.llen(_QUEUE) - before == options["letters"]
        return facts


def _timed(work: Callable[[], object], letters: int) -> Facts:
    begun, cpu = time.perf_counter(), time.process_time()
    work()
    seconds, cpu = time.perf_counter() - begun, time.process_time() - cpu
    return {"letters": letters, "seconds": seconds, "cpu_seconds": cpu, "peak_mib": peak_mib()}


@contextmanager
def _dead_letters(url: str, letters_url: str = "") -> Iterator[DeadLetters]:
    app = an_app(dlq_url=letters_url or url, broker_url=url)
    dlq = DeadLetters(app)
    try:
        dlq.queues()  # connected
        yield dlq
    finally:
        dlq.close()
        app.close()


@contextmanager
def _client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as client:
        yield client


@contextmanager
def _folder(options: Facts) -> Iterator[str]:
    """The folder that keeps the files, or one that is removed."""
    if "folder" in options:
        yield options["folder"]
        return
    with tempfile.TemporaryDirectory() as folder:
        yield folder


if __name__ == "__main__":
    print(json.dumps(OPERATIONS[sys.argv[1]](json.loads(sys.argv[2]))))
