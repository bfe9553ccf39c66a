"""What a triage takes of memory does not follow the size of its letters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import planted
import pytest

LETTERS, LARGE, MEGABYTES = 20_000, 100, 5
MOST_MEGABYTES = 1_300
"""Of the largest process, Java; docs/how-to/triage.md states it."""

# The largest process of a command, in MB: those that it waited for and their children.
MEASURED = """
import resource, subprocess, sys
done = subprocess.run(sys.argv[1:], stdout=subprocess.PIPE, check=True)
sys.stdout.buffer.write(done.stdout)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024, file=sys.stderr)
"""


def large_ones_among() -> Iterator[dict[str, Any]]:
    """One letter of two hundred has 5 MB of arguments and as large a body; their prices differ."""
    noise = os.urandom(MEGABYTES * 512 * 1024).hex()
    for number, letter in enumerate(islice(planted.letters(LETTERS + 100), LETTERS)):
        if number % (LETTERS // LARGE):
            yield {**letter, "body": b"{}"}
        else:
            kwargs = {**json.loads(letter["kwargs_json"]), "document": noise}
            yield {**letter, "body": noise.encode(), "kwargs_json": json.dumps(kwargs)}


def write(rows: Iterator[dict[str, Any]], folder: Path) -> Path:
    """Write groups of rows as an export does, of some 48 MB at most."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    writer = None
    while block := [*islice(rows, LETTERS // LARGE * 4)]:
        table = pa.Table.from_pylist(block)
        writer = writer or pq.ParquetWriter(folder / "all.parquet", table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()
    return folder


@pytest.mark.usefixtures("pyspark")
def test_letters_of_megabytes_among_many_take_no_more_memory(tmp_path: Path) -> None:
    """A hundred letters of 5 MB among 20,000: all are counted, and large arguments left out."""
    folder = write(large_ones_among(), tmp_path / "letters")
    command = [sys.executable, "-m", "celery", "-b", "memory://", "dlq", "triage", str(folder)]
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, *command, "--json"],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["letters"] == LETTERS
    assert {one["fingerprint"] for one in found["explained"]} == set(planted.CAUSES)
    assert sum(one["unread"] for one in found["explained"]) > 0
    assert int(done.stderr.splitlines()[-1]) < MOST_MEGABYTES
