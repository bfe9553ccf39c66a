"""The data source on a real standalone cluster: a master and two workers on loopback."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timezone
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from builders import a_letter, key_of
from waiting import poll

import celery_dlq
from celery_dlq.store.store import Store

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
letters = reader.load()

def where(_):
    import celery_dlq
    from celery_dlq.spark import live
    yield celery_dlq.__file__

found = spark.sparkContext.parallelize(range(8), 8).mapPartitions(where).collect()
counted = letters.selectExpr("count(*)", "count(DISTINCT id)").first()
print("ANSWER", json.dumps({
    "letters": counted[0],
    "distinct": counted[1],
    "groups": [[row.fingerprint, row.letters] for row in groups(letters).collect()],
    "executors": len(spark.sparkContext._jsc.sc().statusTracker().getExecutorInfos()) - 1,
    "packages": sorted(set(found)),
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
    }
    log = folder / f"{name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [str(spark_home / "bin" / "spark-class"), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=folder,
        )
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


def a_python(folder: Path, *, installed: bool) -> Path:
    """A Python of its own, with all that this one has but Celery, kombu and our package.

    With ``installed`` the package is in it, as pip puts it there.
    """
    venv.create(folder, symlinks=True)
    library = f"python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
    packages = folder / "lib" / library
    for site in (Path(place) for place in sys.path if place.endswith("-packages")):
        for entry in site.iterdir():
            left_out = entry.name.startswith(("celery", "kombu", "__editable__"))
            if not (left_out or entry.suffix == ".pth" or (packages / entry.name).exists()):
                (packages / entry.name).symlink_to(entry)
    if installed:
        shutil.copytree(PACKAGE, packages / PACKAGE.name)
    return folder / "bin" / "python"


def test_cluster_reads_live_letters_with_the_package_shipped_or_installed(
    redis_url: str, tmp_path: Path
) -> None:
    """Executors on two workers read with what --py-files sent, or what is installed there.

    Neither Python has Celery, and the one that is sent the package has none of its own.
    """
    if shutil.which("java") is None:
        pytest.skip("Spark's own scripts need a whole Java on PATH")
    store = Store(redis_url, timeout_seconds=5).letters
    for number in range(200):
        letter = a_letter(
            fingerprint="ab"[number % 2] * 16, dead_lettered_at=datetime.now(timezone.utc)
        )
        store.dead_letter(letter, key_of(letter))
    store.close()
    bare = a_python(tmp_path / "bare", installed=False)
    has_it = a_python(tmp_path / "has_it", installed=True)
    (tmp_path / "job.py").write_text(JOB, "utf-8")
    package = "org.apache.spark.deploy"
    local = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    with daemon(tmp_path, "master", f"{package}.master.Master", *local) as log:
        found = poll(
            lambda: re.search(r"spark://127\.0\.0\.1:\d+", log.read_text()),
            timeout_seconds=90,
            every_seconds=0.1,
        )
        assert found is not None
        # Room for one executor of each job.
        half = ("--cores", "2", "--memory", "1400m", *local, found[0])
        worker = f"{package}.worker.Worker"
        with (
            daemon(tmp_path, "one", worker, *half),
            daemon(tmp_path, "two", worker, *half),
            ThreadPoolExecutor(2) as both,
        ):
            # They wait themselves until both are there.
            files = ("--py-files", str(zipped(tmp_path)))
            sent = both.submit(submitted, found[0], redis_url, tmp_path, bare, files)
            there = both.submit(submitted, found[0], redis_url, tmp_path, has_it)
            shipped, installed = sent.result(), there.result()
    for answer in (shipped, installed):
        assert (answer["letters"], answer["distinct"]) == (200, 200)
        assert answer["groups"] == [["a" * 16, 100], ["b" * 16, 100]]
        assert answer["executors"] == 2
    assert all("celery_dlq.zip" in file for file in shipped["packages"]), shipped
    its_own = f"{has_it.parents[1]}/lib/"
    assert all(file.startswith(its_own) for file in installed["packages"]), installed


def submitted(
    master: str, url: str, folder: Path, python: Path, options: Sequence[str] = ()
) -> dict[str, Any]:
    """Run the job with spark-submit and this Python; returns what it printed."""
    conf = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.driver.extraJavaOptions": QUICK,
        "spark.executor.extraJavaOptions": QUICK,
        "spark.executor.memory": "512m",
        "spark.cores.max": "2",
        "spark.sql.shuffle.partitions": "1",
        # Each query runs once.
        "spark.sql.codegen.wholeStage": "false",
        "spark.sql.codegen.factoryMode": "NO_CODEGEN",
        # Both workers must be there, or one of them could do all of the job.
        "spark.scheduler.minRegisteredResourcesRatio": "1.0",
        "spark.scheduler.maxRegisteredResourcesWaitingTime": "90s",
    }
    settings = [part for name, value in conf.items() for part in ("--conf", f"{name}={value}")]
    submit = str(Path(str(find_spec("pyspark").origin)).parent / "bin" / "spark-submit")  # type: ignore[union-attr]
    done = subprocess.run(
        [submit, "--master", master, *options, *settings, str(folder / "job.py"), url],
        env={**os.environ, "PYSPARK_PYTHON": str(python), "SPARK_LOCAL_IP": "127.0.0.1"},
        check=False,
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWER ")]
    assert lines, done.stdout + done.stderr[-3000:]
    answer: dict[str, Any] = json.loads(lines[0].partition(" ")[2])
    return answer
