"""The table of letters in the SQL of others: one table of types, one statement for each dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.letters.record import field_kinds

PARTITIONS = {"dlq": "text", "day": "date"}
"""The columns that the names of an export's folders have, with their kinds."""


class Dialect(NamedTuple):
    """The types of a dialect, one for each kind of column, and its statement.

    Times are in UTC.
    """

    text: str
    integer: str
    boolean: str
    time: str
    bytes: str
    date: str
    quote: str  # around names: some columns are reserved words somewhere
    statement: str

    def quoted(self, name: str) -> str:
        """A name that may be a reserved word."""
        return f"{self.quote}{name}{self.quote}"


_SPARK = """\
CREATE TABLE {table} (
  {columns},
  {partitions}
)
USING PARQUET
PARTITIONED BY ({partition_names})
LOCATION '{location}';
MSCK REPAIR TABLE {table};
"""
_ATHENA = """\
CREATE EXTERNAL TABLE {table} (
  {columns}
)
PARTITIONED BY (
  {partitions}
)
STORED AS PARQUET
LOCATION '{location}/';
MSCK REPAIR TABLE {table};
"""
# One wildcard, which also matches what is below; without `_celery_dlq`.
_BIGQUERY = """\
CREATE OR REPLACE EXTERNAL TABLE {table} (
  {columns}
)
WITH PARTITION COLUMNS (
  {partitions}
)
OPTIONS (
  format = 'PARQUET',
  uris = ['{location}/dlq=*'],
  hive_partition_uri_prefix = '{location}'
);
"""
_SNOWFLAKE = """\
CREATE OR REPLACE EXTERNAL TABLE {table} (
  {columns},
  {partitions}
)
PARTITION BY ({partition_names})
LOCATION = {location}/
PATTERN = '.*dlq=.*[.]parquet'
AUTO_REFRESH = FALSE
FILE_FORMAT = (TYPE = PARQUET BINARY_AS_TEXT = FALSE USE_LOGICAL_TYPE = TRUE);
ALTER EXTERNAL TABLE {table} REFRESH;
"""
_TRINO = """\
CREATE TABLE {table} (
  {columns},
  {partitions}
)
WITH (
  external_location = '{location}/',
  format = 'PARQUET',
  partitioned_by = ARRAY['dlq', 'day']
);
CALL {system}sync_partition_metadata('{schema}', '{name}', 'FULL');
"""
# The empty half has the types, and the columns that no file has yet.
_DUCKDB = """\
CREATE OR REPLACE VIEW {table} AS
SELECT
  {columns},
  {partitions}
WHERE false
UNION ALL BY NAME
FROM read_parquet(
  '{location}/dlq=*/day=*/*.parquet',
  union_by_name = true, hive_partitioning = true,
  hive_types = {{'dlq': VARCHAR, 'day': DATE}}
);
"""
DIALECTS: Mapping[str, Dialect] = {
    "athena": Dialect("string", "bigint", "boolean", "timestamp", "binary", "date", "`", _ATHENA),
    "bigquery": Dialect("STRING", "INT64", "BOOL", "TIMESTAMP", "BYTES", "DATE", "`", _BIGQUERY),
    "duckdb": Dialect("VARCHAR", "BIGINT", "BOOLEAN", "TIMESTAMPTZ", "BLOB", "DATE", '"', _DUCKDB),
    "snowflake": Dialect(
        "TEXT", "NUMBER", "BOOLEAN", "TIMESTAMP_NTZ", "BINARY", "DATE", "", _SNOWFLAKE
    ),
    "spark": Dialect("STRING", "BIGINT", "BOOLEAN", "TIMESTAMP", "BINARY", "DATE", "`", _SPARK),
    "trino": Dialect("varchar", "bigint", "boolean", "timestamp", "varbinary", "date", '"', _TRINO),
}
_PART = "split_part(split_part(metadata$filename, '{name}=', 2), '/', 1)"


def columns_of(dialect: str) -> dict[str, str]:
    """The types of all columns in a dialect, those of the folders last.

    Raises:
        DLQError: The dialect is not known.
    """
    known = _dialect(dialect)
    types = {name: kind.column for name, kind in field_kinds().items()} | PARTITIONS
    return {name: getattr(known, column) for name, column in types.items()}


def statement(dialect: str, location: str, table: str = "dead_letters") -> str:
    """The statements that make the files of an export a table (in DuckDB a view) of a dialect.

    Args:
        dialect: One of `DIALECTS`.
        location: Where the files are, for the tool that runs the statement; of Snowflake, the
            stage, such as ``@letters``.
        table: The name of the table.

    Raises:
        DLQError: The dialect is not known, or name or place would end the quotes around them.
    """
    known = _dialect(dialect)
    for what, text in (("table", table), ("location", location)):
        if not text or any(mark in text for mark in "'\"`;\n"):
            raise DLQError(f"expected a {what} without quotes and semicolons, got {text!r}")
    written = _WRITTEN.get(dialect, _with_type)
    columns = [written(known, name, kind) for name, kind in columns_of(dialect).items()]
    *catalog, schema, name = ["default", *table.split(".")][-max(2, table.count(".") + 1) :]
    return known.statement.format(
        table=table,
        system=".".join([*catalog, "system", ""]),
        schema=schema,
        name=name,
        location=location.rstrip("/"),
        columns=",\n  ".join(columns[: -len(PARTITIONS)]),
        partitions=",\n  ".join(columns[-len(PARTITIONS) :]),
        partition_names=", ".join(map(known.quoted, PARTITIONS)),
    )


def _dialect(name: str) -> Dialect:
    if name not in DIALECTS:
        raise DLQError(f"expected a dialect ({', '.join(DIALECTS)}), got {name!r}")
    return DIALECTS[name]


def _with_type(dialect: Dialect, name: str, kind: str) -> str:
    return f"{dialect.quoted(name)} {kind}"


def _of_nothing(dialect: Dialect, name: str, kind: str) -> str:
    return f"CAST(NULL AS {kind}) AS {dialect.quoted(name)}"


def _of_value(_dialect: Dialect, name: str, kind: str) -> str:
    if name not in PARTITIONS:
        return f"{name} {kind} AS (value:{name}::{kind})"
    part = _PART.format(name=name)
    return f"{name} {kind} AS ({f'try_to_date({part})' if name == 'day' else part})"


_WRITTEN: Mapping[str, Callable[[Dialect, str, str], str]] = {
    "duckdb": _of_nothing,
    "snowflake": _of_value,
}
