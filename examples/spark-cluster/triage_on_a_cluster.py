"""A triage of millions of letters on a standalone Spark cluster on one machine, and its figures.

It makes letters, starts a master and workers of one core, asks all questions of
`dlq triage --html` with one, two and four executors, and reads Spark's event log: which part of
the time no executor worked, how even the tasks are, what a letter costs, and what the driver got.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LETTERS_A_FILE = 250_000
FIRST = "-first"  # the folder of the letters that are asked about before the clock starts
CAUSES = 27
START_SECONDS = 90
LEAST_SECONDS = 1.0  # a shorter task holds nobody up, whatever its share of its stage

# What a cluster needs for letters, which are small: a task for each 16 MB of files, and hash
# tables for more groups than 128.
SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.files.maxPartitionBytes": "16m",
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "10000",
}

# 27 causes of 7 tasks, the largest with a seventh of the letters, 30 days, a customer each.
LETTER = f"""
    SELECT uuid() AS id, md5(CAST(cause AS STRING)) AS fingerprint,
           concat('shop.task_', cause % 7) AS task_name,
           concat('queue-', cause % 3) AS source_queue,
           concat('queue-', cause % 3, '-DLQ') AS dead_letter_queue,
           'failed' AS reason, concat('shop.errors.Error', cause) AS exception_type,
           concat('order ', id, ' cannot be charged') AS description,
           timestamp_seconds(1767225600 + CAST(rand(2) * 2592000 AS BIGINT)) AS dead_lettered_at,
           CAST(1 + rand(3) * 5 AS BIGINT) AS deliveries, 0L AS retries,
           concat('celery@web-', CAST(rand(4) * 40 AS INT)) AS worker_hostname,
           concat('v', CAST(rand(5) * 12 AS INT)) AS release, '[]' AS args_json,
           to_json(named_struct('order_id', id, 'customer', CAST(rand(6) * 1e6 AS INT),
               'currency', IF(cause = 3, 'XXX', element_at(array('EUR', 'USD', 'GBP'),
                                                          1 + CAST(rand(7) * 3 AS INT)))))
               AS kwargs_json
    FROM (SELECT id, CAST({CAUSES} * pow(rand(1), 1.7) AS INT) AS cause FROM numbers)
"""  # noqa: S608 - of a number


@dataclass(frozen=True)
class Figures:
    """What the event log says of a triage."""

    executors: int
    seconds: float
    idle_share: float  # of the time, in which no task ran
    tasks: int
    work_seconds: float  # of all tasks
    longest: tuple[float, str]  # the largest share of a stage that one task had, and the stage
    result_bytes: int


def main() -> None:
    """Make the letters, run the triages, print a table."""
    options = parsed()
    if options.job:
        run_job(*options.job)
        return
    with ExitStack() as stack:
        place = tempfile.mkdtemp(prefix="celery-dlq-cluster-")
        stack.callback(shutil.rmtree, place, ignore_errors=True)
        folder = Path(place)
        counts = [int(one) for one in options.executors.split(",")]
        letters = folder / "letters"
        submitted(f"local[{max(counts)}]", max(counts), folder, "make", letters, options.letters)
        master = stack.enter_context(cluster(folder, max(counts)))
        size = sum(file.stat().st_size for file in letters.glob("*.parquet"))
        print(f"{options.letters:,} letters, {size / 1e6:,.0f} MB of files")
        show(
            [
                figures_of(submitted(master, count, folder, "triage", letters, options.letters))
                for count in counts
            ],
            options.letters,
        )


def parsed() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--letters", type=int, default=1_000_000)
    parser.add_argument("--executors", default="1,2,4", help="one number for each triage")
    parser.add_argument("--job", nargs=5, help=argparse.SUPPRESS)  # what a job is started with
    return parser.parse_args()


@contextmanager
def cluster(folder: Path, workers: int) -> Iterator[str]:
    """A master and workers of one core each on loopback; gives the master's URL."""
    package = "org.apache.spark.deploy"
    local = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with ExitStack() as stack:
        log = stack.enter_context(daemon(folder, "master", f"{package}.master.Master", *local))
        until = time.monotonic() + START_SECONDS
        while not (found := re.search(r"spark://127\.0\.0\.1:\d+", log.read_text("utf-8"))):
            if time.monotonic() > until:
                raise SystemExit(f"expected a master to start, got:\n{log.read_text('utf-8')}")
            time.sleep(0.1)
        worker = (f"{package}.worker.Worker", "--cores", "1", "--memory", "1g", *local, found[0])
        for number in range(workers):
            stack.enter_context(daemon(folder, f"worker-{number}", *worker))
        yield found[0]


@contextmanager
def daemon(folder: Path, name: str, *arguments: str) -> Iterator[Path]:
    """A process of the cluster and its log; it ends with the block."""
    log = folder / f"{name}.log"
    environment = {
        **os.environ,
        "SPARK_HOME": str(spark_home()),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(folder / name),
    }
    with log.open("wb") as output:
        process = subprocess.Popen(  # noqa: S603 - Spark's own script
            [str(spark_home() / "bin" / "spark-class"), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(30)


def spark_home() -> Path:
    """Where pip put Spark."""
    found = find_spec("pyspark")
    if found is None or found.origin is None:
        raise SystemExit("expected PySpark to be installed; see README.md")
    return Path(found.origin).parent


def submitted(
    master: str, executors: int, folder: Path, kind: str, letters: Path, count: int
) -> Path:
    """Run a job in a process of its own; returns its event log."""
    log = folder / f"events-{kind}-{executors}"
    log.mkdir()
    job = ["--job", kind, master, str(executors), str(letters), f"{log}:{count}"]
    output = folder / f"{kind}-{executors}.log"
    with output.open("wb") as sink:
        done = subprocess.run(  # noqa: S603 - this program
            [sys.executable, __file__, *job],
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
        )
    if done.returncode:
        raise SystemExit(f"expected the job to end well, got:\n{output.read_text('utf-8')[-3000:]}")
    return log


def run_job(kind: str, master: str, executors: str, letters: str, log_and_count: str) -> None:
    """Make letters, or ask about them, with so many executors of one core."""
    from pyspark.sql import SparkSession  # noqa: PLC0415 - where a job runs

    log, _, count = log_and_count.rpartition(":")
    os.environ.update(PYSPARK_PYTHON=sys.executable, SPARK_LOCAL_IP="127.0.0.1")
    builder = SparkSession.builder.master(master).appName(f"{kind} {executors}")
    for name, value in {
        **SETTINGS,
        "spark.cores.max": executors,
        "spark.executor.cores": "1",
        "spark.executor.memory": "640m",
        "spark.driver.memory": "640m",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        "spark.eventLog.enabled": "true",
        "spark.eventLog.rolling.enabled": "false",
        "spark.eventLog.compress": "false",
        "spark.eventLog.dir": f"file://{log}",
        "spark.sql.warehouse.dir": f"{log}/warehouse",
        # All executors must be there, or one of them could do the first half alone.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": f"{START_SECONDS}s",
    }.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    try:
        if kind == "make":
            make(spark, letters, int(count))
            make(spark, letters + FIRST, min(int(count), LETTERS_A_FILE))
        else:
            ask(spark, letters, int(count), Path(log))
    finally:
        spark.stop()


def make(spark: Any, letters: str, count: int) -> None:
    """Write the letters, in files of 250,000."""
    files = max(1, count // LETTERS_A_FILE)
    spark.range(0, count, 1, files).createOrReplaceTempView("numbers")
    spark.sql(LETTER).write.parquet(f"file://{letters}", compression="zstd")


def ask(spark: Any, letters: str, count: int, log: Path) -> None:
    """All questions of the report; says when they began and ended, and checks an answer."""
    from celery_dlq.spark.triage.rows import findings  # noqa: PLC0415 - where a job runs

    # The executors have started, have compiled, and have a Python process.
    findings(letters + FIRST, spark)
    begun = time.time()
    found = findings(letters, spark)
    ended = time.time()
    (log / "asked").write_text(json.dumps([begun, ended]), "utf-8")
    assert found.triage.letters == count
    assert len(found.causes) == found.triage.causes == CAUSES
    assert any("kwargs.currency = XXX" in one.headline for one in found.causes.values())


def figures_of(log: Path) -> Figures:
    """Read the event log of a triage."""
    begun, ended = json.loads((log / "asked").read_text("utf-8"))
    (events,) = [file for file in log.iterdir() if file.name.startswith("app-")]
    names: dict[int, str] = {}
    tasks = []
    with events.open(encoding="utf-8") as lines:
        for event in map(json.loads, lines):
            if event["Event"] == "SparkListenerStageSubmitted":
                names[event["Stage Info"]["Stage ID"]] = event["Stage Info"]["Stage Name"]
            elif event["Event"] == "SparkListenerTaskEnd":
                tasks.append(event)
    tasks = [task for task in tasks if task["Task Info"]["Launch Time"] >= begun * 1000]
    work: dict[int, list[float]] = defaultdict(list)
    for task in tasks:
        work[task["Stage ID"]].append(task["Task Metrics"]["Executor Run Time"] / 1000)
    shares = [
        (max(times) / sum(times), f"{names[stage]}, {len(times)} tasks, {sum(times):.0f} s")
        for stage, times in work.items()
        if max(times) >= LEAST_SECONDS
    ]
    return Figures(
        executors=int(log.name.rpartition("-")[2]),
        seconds=ended - begun,
        idle_share=1 - busy_seconds(tasks) / (ended - begun),
        tasks=len(tasks),
        work_seconds=sum(map(sum, work.values())),
        longest=max(shares, default=(0.0, "no task was long")),
        result_bytes=sum(
            task["Task Metrics"]["Result Size"]
            for task in tasks
            if task["Task Type"] == "ResultTask"
        ),
    )


def busy_seconds(tasks: list[dict[str, Any]]) -> float:
    """The time in which one task or more ran."""
    infos = [task["Task Info"] for task in tasks]
    busy, until = 0, 0
    for begun, ended in sorted((info["Launch Time"], info["Finish Time"]) for info in infos):
        busy += max(0, ended - max(begun, until))
        until = max(until, ended)
    return busy / 1000


def show(found: list[Figures], letters: int) -> None:
    """Print the table."""
    print(
        "executors  seconds  letters/s  no task runs  tasks  work a letter  results  longest task"
    )
    for one in found:
        share, stage = one.longest
        work = 1e6 * one.work_seconds / letters
        print(
            f"{one.executors:>9}  {one.seconds:>7.1f}  {letters / one.seconds:>9,.0f}"
            f"  {one.idle_share:>12.0%}  {one.tasks:>5}  {work:>10.1f} µs"
            f"  {one.result_bytes / 1e3:>4,.0f} KB  {share:.0%} of {stage}"
        )


if __name__ == "__main__":
    main()
