"""The export to an object store: a real S3 server on loopback, spoken to by pyarrow."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import intervals
import pyarrow.dataset as ds
import pytest
from builders import DLQ, a_letter, key_of
from fresh import fresh_store
from pyarrow import fs as pafs
from s3 import s3_server, url_of
from servers import RedisServer

from celery_dlq.errors import ExportError
from celery_dlq.export.exporter import ParquetExport, Rolling
from celery_dlq.store.store import Store

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Give the address of a server; ended by its process."""
    with s3_server() as address:
        yield address


def test_letters_are_once_in_a_bucket_and_the_password_nowhere(s3: str) -> None:
    """Incremental, trimmed, read back by Arrow."""
    store = fresh_store().letters
    letters = [a_letter() for _ in range(9)]
    for letter in letters:
        store.dead_letter(letter, key_of(letter))
    url = url_of(s3, "once/letters")
    first = ParquetExport(store, url, rolling=Rolling(rows=4)).run([DLQ])
    again = ParquetExport(store, url, trimmed=lambda *_what: None).run([DLQ])
    assert (first.letters, again.letters, again.trimmed) == (9, 0, 9)
    assert first.destination == "s3://once/letters"
    filesystem, path = pafs.FileSystem.from_uri(url)
    table = ds.dataset(path, filesystem=filesystem, partitioning="hive").to_table()
    assert sorted(table.column("id").to_pylist()) == sorted(letter.id for letter in letters)


@pytest.mark.parametrize(("mode", "stride"), [("keep", 43), ("overtaken", 53), ("back", 71)])
def test_killed_or_overtaken_exports_to_a_bucket_leave_each_letter_once(
    s3: str, mode: str, stride: int
) -> None:
    """No rename there: an object is seen when its upload has ended, the checkpoint comes last.

    Nothing there keeps a second machine out either: the leases in Redis do.
    """
    first = random.randrange(stride)  # noqa: S311 - the seed is printed by pytest-randomly
    with RedisServer() as server:
        done = subprocess.run(
            [
                sys.executable,
                HERE / "export_steps.py",
                server.url,
                url_of(s3, f"{mode}/{{}}"),
                mode,
                str(first),
                str(stride),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
            env={**os.environ, "PYTHONPATH": str(HERE.parent), "AWS_EC2_METADATA_DISABLED": "true"},
        )
    assert done.returncode == 0, done.stderr + done.stdout
    assert int(done.stdout.split()[-1]) > 50


def test_a_second_export_to_a_bucket_says_who_is_at_work(
    s3: str, redis_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """From another machine, whose lock is another one."""
    store = Store(redis_url, timeout_seconds=10.0).letters
    letter = a_letter()
    store.dead_letter(letter, key_of(letter))
    url = url_of(s3, "two/letters")
    intervals.change(monkeypatch, export_lease=0.6)
    refusals = []

    def second(_count: int) -> None:
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        with pytest.raises(ExportError, match=rf"another export.*pid {os.getpid()}") as refused:
            ParquetExport(store, url).run([DLQ])
        refusals.append(str(refused.value))

    assert ParquetExport(store, url).run([DLQ], progress=second).letters == 1
    assert refusals
    assert "hush" not in refusals[0]
    assert ParquetExport(store, url).run([DLQ]).letters == 0
    store.close()
