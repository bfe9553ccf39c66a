"""The data source on a real standalone cluster: a master and two workers on loopback."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path

import pytest
from builders import a_letter, key_of
from waiting import poll

import celery_dlq
from celery_dlq.backends.redis.connection import connect
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.store import RedisStore

pytestmark = pytest.mark.usefixtures("pyspark")

PACKAGE = Path(celery_dlq.__file__).parent

# Six Java processes for a few seconds of work: none lives long enough for the thorough compiler.
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"

JOB = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
from celery_dlq.spark.source import register
from celery_dlq.spark.triage import groups
register(spark)
reader = spark.read.format("celery_dlq").option("url", sys.argv[1])
letters = reader.option("partitions", "4").load()

def where(_):
    import celery_dlq, os, socket
    from celery_dlq.spark import live
    foreign = [name for name in ("celery", "kombu") if name in sys.modules]
    yield celery_dlq.__file__, os.environ.get("SPARK_EXECUTOR_DIRS", ""), foreign

found = spark.sparkContext.parallelize(range(8), 8).mapPartitions(where).collect()
counted = letters.selectExpr("count(*)", "count(DISTINCT id)").first()
print("ANSWER", json.dumps({
    "letters": counted[0],
    "distinct": counted[1],
    "groups": [[row.fingerprint, row.letters] for row in groups(letters).collect()],
    "executors": len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1,
    "packages": sorted({file for file, _dirs, _foreign in found}),
    "foreign": sorted({name for _file, _dirs, names in found for name in names}),
}))
spark.stop()
"""


@contextmanager
def daemon(folder: Path, name: str, *arguments: str) -> Iterator[Path]:
    """A process of the cluster and its log; it and its children are ended at the end."""
    spark_home = Path(str(find_spec("pyspark").origin)).parent  # type: ignore[union-attr]
    environment = {
        **os.environ,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "SPARK_HOME": str(spark_home),
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(folder / name),
        "SPARK_DAEMON_JAVA_OPTS": QUICK,
        "PYSPARK_PYTHON": sys.executable,
    }
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(spark_home / "bin" / "spark-class"), *arguments],
            env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, cwd=folder,
        )  # fmt: skip
    try:
        yield log
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(20)


def zipped(folder: Path) -> Path:
    """The package as one file for ``--py-files``."""
    target = folder / "celery_dlq.zip"
    with zipfile.ZipFile(target, "w") as archive:
        for file in PACKAGE.rglob("*"):
            if file.suffix in {".py", ".lua"}:
                archive.write(file, file.relative_to(PACKAGE.parent))
    return target


def test_cluster_reads_live_letters_with_a_shipped_package(redis_url: str, tmp_path: Path) -> None:
    """Executors on two workers read with the zip that --py-files sent them, without Celery."""
    from celery_dlq.spark.session import find_java

    if find_java().home is None and not find_java().has_vector_module:
        pytest.skip("Spark's own scripts need a whole Java on PATH")
    store = RedisStore(connect(redis_url, 5), redis_url, Keys())
    for number in range(200):
        letter = a_letter(
            fingerprint="ab"[number % 2] * 16, dead_lettered_at=datetime.now(timezone.utc)
        )
        store.dead_letter(letter, key_of(letter))
    store.close()
    package = "org.apache.spark.deploy"
    local = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with daemon(tmp_path, "master", f"{package}.master.Master", *local) as log:
        found = poll(lambda: re.search(r"spark://127\.0\.0\.1:\d+", log.read_text()),
                     timeout_seconds=90, every_seconds=0.1)  # fmt: skip
        assert found is not None
        half = ("--cores", "1", "--memory", "700m", *local, found[0])
        worker = f"{package}.worker.Worker"
        with daemon(tmp_path, "one", worker, *half), daemon(tmp_path, "two", worker, *half):
            # It waits itself until both are there.
            answer = submitted(found[0], redis_url, tmp_path)
    assert (answer["letters"], answer["distinct"]) == (200, 200)
    assert answer["groups"] == [["a" * 16, 100], ["b" * 16, 100]]
    assert answer["executors"] == 2
    assert all("celery_dlq.zip" in file for file in answer["packages"]), answer["packages"]
    assert answer["foreign"] == []


def submitted(master: str, url: str, folder: Path) -> dict[str, object]:
    """Run the job with spark-submit; returns what it printed."""
    (folder / "job.py").write_text(JOB, "utf-8")
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.executor.extraJavaOptions": QUICK,
        "spark.executor.memory": "512m",
        "spark.cores.max": "2",
        "spark.sql.shuffle.partitions": "1",
        # Both workers must be there, or one of them could do all of the job.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "90s",
    }
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    submit = str(Path(str(find_spec("pyspark").origin)).parent / "bin" / "spark-submit")  # type: ignore[union-attr]
    done = subprocess.run(
        [submit, "--master", master, "--py-files", str(zipped(folder)), *settings,
         str(folder / "job.py"), url],
        env={**os.environ, "PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"},
        check=False, capture_output=True, text=True, timeout=240, cwd=folder,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout + done.stderr[-3000:]
    answer: dict[str, object] = json.loads(lines[0].partition(" ")[2])
    return answer
