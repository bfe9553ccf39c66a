"""The page on SQL tools reads files of an old and a new version with each tool that it names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from builders import a_letter, key_of
from fenced import ROOT, blocks
from fresh import fresh_store

from celery_dlq.letters.dialects import statement
from celery_dlq.letters.record import field_kinds

PAGE = ROOT / "docs/how-to/sql-tools.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give an export whose first file lacks a column, in the working directory."""
    parquet = pytest.importorskip("pyarrow.parquet")
    from celery_dlq.export.exporter import ParquetExport

    store, found = fresh_store().letters, tmp_path / "letters"
    for release in ("v6", "v7"):
        letter = a_letter(release=release, dead_letter_queue="x:ü DLQ")
        store.dead_letter(letter, key_of(letter))
        ParquetExport(store, found).run(store.names())
    first = min(found.glob("dlq=*/day=*/*.parquet"))
    parquet.write_table(parquet.ParquetFile(first).read().drop_columns(["release"]), first)
    monkeypatch.chdir(tmp_path)
    return found


def run(title: str, names: dict[str, Any]) -> None:
    """Run the Python of a section of the page."""
    text = PAGE.read_text("utf-8")
    begin = text[: text.index(f"\n## {title}\n")].count("\n") + 2
    section = text.split(f"\n## {title}\n")[1].split("\n## ")[0]
    for block in blocks(PAGE):
        if block.language == "python" and begin < block.line < begin + section.count("\n"):
            exec(block.text, names)  # noqa: S102 - the page's own


def releases(rows: Iterable[Any]) -> list[str | None]:
    """Sorted, nothing last."""
    return sorted(rows, key=lambda one: one or "~")


def test_each_tool_finds_the_column_that_the_first_file_lacks(folder: Path) -> None:
    """It is null there, and neither an error nor left out; days are dates, and names are names."""
    for name in ("polars", "duckdb", "pandas"):
        pytest.importorskip(name)
    names: dict[str, Any] = {}
    Path("letters.sql").write_text(statement("duckdb", "letters"), "utf-8")
    run("DuckDB", names)
    found = names["duckdb"].sql("SELECT release, dlq, day FROM dead_letters").fetchall()
    assert releases(row[0] for row in found) == ["v7", None]
    assert {(row[1], str(row[2])) for row in found} == {("x:ü DLQ", "2026-03-04")}
    columns = [row[0] for row in names["duckdb"].sql("DESCRIBE dead_letters").fetchall()]
    assert columns == [*field_kinds(), "dlq", "day"]
    run("Polars", names)
    rows = names["lazy"].select("release", "dlq", "day").collect().rows()
    assert releases(row[0] for row in rows) == ["v7", None]
    assert {(row[1], str(row[2])) for row in rows} == {("x:ü DLQ", "2026-03-04")}
    run("Arrow and pandas", names)
    table = names["letters"].to_table(["release", "dlq"])
    assert releases(table["release"].to_pylist()) == ["v7", None]
    assert set(table["dlq"].to_pylist()) == {"x:ü DLQ"}
    assert releases(one or None for one in names["frame"]["release"]) == ["v7", None]


def test_tables_of_others_get_each_file_once(folder: Path) -> None:
    """Also if the registration runs again, and after the next export."""
    for name in ("deltalake", "pyiceberg"):
        pytest.importorskip(name)
    from celery_dlq.export.exporter import ParquetExport

    names: dict[str, Any] = {"Path": Path}
    run("Arrow and pandas", names)
    for letters in (2, 2, 3):
        if letters > 2:
            store = fresh_store().letters
            letter = a_letter(release="v8", dead_letter_queue="orders-DLQ")
            store.dead_letter(letter, key_of(letter))
            ParquetExport(store, folder, take_over=True).run(store.names())
        run("Delta Lake", names)
        delta = names["DeltaTable"]("letters").to_pyarrow_table()
        assert len(set(delta["id"].to_pylist())) == delta.num_rows == letters
        assert delta.column_names == [*field_kinds(), "dlq", "day"]
        run("Iceberg", names)
        iceberg = names["table"].scan().to_arrow()
        assert len(set(iceberg["id"].to_pylist())) == iceberg.num_rows == letters
        run("Arrow and pandas", names)  # which reads on, beside the log of Delta
    assert releases(delta["release"].to_pylist()) == ["v7", "v8", None]
