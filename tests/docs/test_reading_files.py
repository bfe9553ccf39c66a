"""The page on exports reads files of an old and a new version with each tool that it names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fenced import ROOT, blocks


def write(file: Path, *without: str, **values: str) -> None:
    """A file of one letter, with the columns of a version that lacks some."""
    pa, parquet = (pytest.importorskip(name) for name in ("pyarrow", "pyarrow.parquet"))
    from celery_dlq.export.table import schema

    letter = {"task_name": "shop.charge", "reason": "failed", **values}
    columns = [column for column in schema() if column.name not in without]
    arrays = [pa.array([letter.get(column.name)], column.type) for column in columns]
    file.parent.mkdir(parents=True)
    parquet.write_table(pa.table(arrays, schema=pa.schema(columns)), file)


def test_files_of_two_versions_are_read_with_all_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A column that the first file lacks is null there, and neither an error nor left out."""
    for name in ("polars", "duckdb", "pandas"):
        pytest.importorskip(name)
    folder = tmp_path / "letters/dlq=orders-DLQ"
    write(folder / "day=2026-11-01/a.parquet", "release", id="1")
    write(folder / "day=2026-11-02/b.parquet", id="2", release="v7")
    (tmp_path / "letters/_celery_dlq").mkdir()
    (tmp_path / "letters/_celery_dlq/about").write_text("{}")
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/how-to/export.md"
    texts = [block.text for block in blocks(page) if block.language == "python"]
    python = [text for text in texts if "dlq.export" not in text]  # those that read files
    names: dict[str, Any] = {}
    for text in python:
        exec(text, names)  # noqa: S102 - the page's own
    assert dict(zip(names["frame"]["id"], names["frame"]["release"], strict=True)) == {
        "1": None,
        "2": "v7",
    }
    assert names["frame"]["day"][0] == "2026-11-01"
    found = names["duckdb"].sql("FROM " + names["found"]).select("id, release").order("id")
    assert found.fetchall() == [("1", None), ("2", "v7")]
    lazy = names["polars"].scan_pyarrow_dataset(names["letters"]).select("id", "release")
    assert lazy.collect().rows() == [("1", None), ("2", "v7")]
