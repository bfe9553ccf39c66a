"""PyArrow, or what to install: every module that needs it has it from here."""

from __future__ import annotations

from celery_dlq.errors import MissingExtra

try:
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq
    from pyarrow import fs as pafs
except ImportError as exc:
    feature = "letters in Parquet files"
    raise MissingExtra(feature, "pyarrow", "parquet") from exc

__all__ = ["pa", "pafs", "pc", "pq"]
