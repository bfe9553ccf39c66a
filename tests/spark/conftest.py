"""A real Spark session, and real exports of synthetic letters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
from builders import an_app, key_of
from click.testing import CliRunner, Result
from fresh import fresh_store
from java import interpreted
from servers import require

from celery_dlq.letters.record import DeadLetter

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import SparkSession

Export = Callable[[Iterable[DeadLetter]], Path]


@pytest.fixture(scope="session")
def pyspark() -> None:
    """Skip where PySpark cannot be; where it can, CI must have it."""
    if sys.version_info < (3, 11):
        pytest.skip("PySpark needs Python 3.11 or later")
    require(find_spec("pyspark"), "PySpark (pip install 'celery_dlq[spark]')")


@pytest.fixture(scope="session")
def spark(pyspark: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """Give one session to all tests of a process: starting Java takes seconds."""
    from celery_dlq.spark.session import local_session

    with pytest.MonkeyPatch.context() as patched:
        # Also the sessions that tests start on it.
        for name, value in interpreted(tmp_path_factory.mktemp("spark")).items():
            patched.setenv(name, value)
        session = local_session("celery_dlq tests", quick=True)
    # A handful of letters needs one task.
    session.conf.set("spark.sql.shuffle.partitions", "1")
    yield session
    session.stop()


@pytest.fixture
def triage_command(spark: SparkSession) -> Callable[..., Result]:
    """Run ``dlq triage`` on the Spark of this process; `test_triage_memory` starts the command."""
    from celery_dlq.cli.commands import dlq

    parts = SimpleNamespace(app=an_app(), no_color=True)
    return lambda *words: CliRunner().invoke(dlq, ["triage", *words], obj=parts)


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """Give a function that exports letters to a new folder, as ``dlq export`` does."""
    from celery_dlq.export.exporter import ParquetExport

    def to_folder(letters: Iterable[DeadLetter]) -> Path:
        store = fresh_store().letters
        for letter in letters:
            store.dead_letter(letter, key_of(letter))
        folder = tmp_path / "letters"
        ParquetExport(store, folder).run(store.names())
        return folder

    return to_folder
