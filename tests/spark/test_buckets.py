"""``dlq triage`` of what ``dlq export`` wrote to a bucket."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from builders import DLQ, a_letter, key_of
from click.testing import Result
from fresh import fresh_store
from s3 import s3_server, url_of

from celery_dlq.export.exporter import ParquetExport


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Give the address of an S3 server."""
    with s3_server() as address:
        yield address


@pytest.fixture(autouse=True)
def _no_cloud(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask no machine of Amazon for a password."""
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def test_a_triage_reads_the_bucket_that_an_export_wrote(
    triage_command: Callable[..., Result], s3: str, tmp_path: Path
) -> None:
    """Spark itself has no S3; the files are copied, and the password is nowhere."""
    store = fresh_store().letters
    letters = [a_letter() for _ in range(5)]
    for letter in letters:
        store.dead_letter(letter, key_of(letter))
    url = url_of(s3, "triaged/letters")
    ParquetExport(store, url).run([DLQ])
    page = tmp_path / "why.html"
    done = triage_command(url, "--json", "--html", str(page))
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["letters"], found["path"]) == (5, "s3://triaged/letters")
    assert "hush" not in done.stdout + done.stderr + page.read_text()


@pytest.mark.parametrize("place", ["nothing/here", None])
def test_a_bucket_without_letters_is_one_line(
    triage_command: Callable[..., Result], s3: str, place: str | None
) -> None:
    """A person sees what is wrong, without a traceback or a password."""
    done = triage_command(url_of(s3, place) if place else "nowhere://user:hush@x/y")
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.exit_code == 1, done.stderr
    assert len(lines) == 1
    assert "expected" in lines[0]
    assert "hush" not in lines[0]
