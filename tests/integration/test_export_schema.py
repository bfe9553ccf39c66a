"""The columns of all files of a folder, written down beside them."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from builders import a_letter, key_of
from fresh import fresh_store

from celery_dlq.export.exporter import ParquetExport
from celery_dlq.export.table import schema


def export(folder: Path) -> None:
    """Export a letter."""
    store = fresh_store().letters
    letter = a_letter()
    store.dead_letter(letter, key_of(letter))
    ParquetExport(store, folder, take_over=True).run(store.names())


def test_an_export_writes_down_the_columns_of_all_versions(tmp_path: Path) -> None:
    """An older one lacks ours; what a later one has added stays; a damaged one is written anew."""
    place = tmp_path / "letters/_celery_dlq/schema"
    export(tmp_path / "letters")
    assert pq.read_schema(place).equals(schema(), check_metadata=True)
    assert pq.read_metadata(place).num_rows == 0
    written = place.stat().st_mtime_ns
    export(tmp_path / "letters")
    assert place.stat().st_mtime_ns == written

    older = schema().remove(schema().get_field_index("release"))
    pq.write_table(older.empty_table(), place)
    export(tmp_path / "letters")
    assert pq.read_schema(place).equals(schema(), check_metadata=True)

    later = schema().insert(3, pa.field("verdict", pa.string()))
    later = later.with_metadata({"celery_dlq.schema_version": "7"})
    pq.write_table(later.empty_table(), place)
    export(tmp_path / "letters")
    found = pq.read_schema(place)
    assert set(found.names) == {*schema().names, "verdict"}
    assert found.metadata[b"celery_dlq.schema_version"] == b"7"

    stranger = schema().with_metadata({"celery_dlq.schema_version": "two"})
    pq.write_table(stranger.empty_table(), place)
    export(tmp_path / "letters")
    assert pq.read_schema(place).equals(schema(), check_metadata=True)

    place.write_bytes(b"PAR1 half a fi")
    export(tmp_path / "letters")
    assert pq.read_schema(place).equals(schema(), check_metadata=True)
