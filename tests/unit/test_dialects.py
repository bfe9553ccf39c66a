"""The statements that make exported files a table elsewhere."""

from __future__ import annotations

import json
import re

import pytest
from celery import Celery
from click.testing import CliRunner

from celery_dlq.cli.commands import dlq
from celery_dlq.errors import DLQError
from celery_dlq.letters.dialects import DIALECTS, columns_of, statement
from celery_dlq.letters.record import field_kinds

FRAMES = {
    "athena": """\
CREATE EXTERNAL TABLE shop.dead (
  `schema_version` bigint …
)
PARTITIONED BY (
  `dlq` string,
  `day` date
)
STORED AS PARQUET
LOCATION 's3://bucket/letters/';
MSCK REPAIR TABLE shop.dead;
""",
    "bigquery": """\
CREATE OR REPLACE EXTERNAL TABLE shop.dead (
  `schema_version` INT64 …
)
WITH PARTITION COLUMNS (
  `dlq` STRING,
  `day` DATE
)
OPTIONS (
  format = 'PARQUET',
  uris = ['s3://bucket/letters/dlq=*'],
  hive_partition_uri_prefix = 's3://bucket/letters'
);
""",
    "duckdb": """\
CREATE OR REPLACE VIEW shop.dead AS
SELECT
  CAST(NULL AS BIGINT) AS "schema_version" …,
  CAST(NULL AS VARCHAR) AS "dlq",
  CAST(NULL AS DATE) AS "day"
WHERE false
UNION ALL BY NAME
FROM read_parquet(
  's3://bucket/letters/dlq=*/day=*/*.parquet',
  union_by_name = true, hive_partitioning = true,
  hive_types = {'dlq': VARCHAR, 'day': DATE}
);
""",
    "snowflake": """\
CREATE OR REPLACE EXTERNAL TABLE shop.dead (
  schema_version NUMBER AS (value:schema_version::NUMBER) …,
  dlq TEXT AS (split_part(split_part(metadata$filename, 'dlq=', 2), '/', 1)),
  day DATE AS (try_to_date(split_part(split_part(metadata$filename, 'day=', 2), '/', 1)))
)
PARTITION BY (dlq, day)
LOCATION = s3://bucket/letters/
PATTERN = '.*dlq=.*[.]parquet'
AUTO_REFRESH = FALSE
FILE_FORMAT = (TYPE = PARQUET BINARY_AS_TEXT = FALSE USE_LOGICAL_TYPE = TRUE);
ALTER EXTERNAL TABLE shop.dead REFRESH;
""",
    "spark": """\
CREATE TABLE shop.dead (
  `schema_version` BIGINT …,
  `dlq` STRING,
  `day` DATE
)
USING PARQUET
PARTITIONED BY (`dlq`, `day`)
LOCATION 's3://bucket/letters';
MSCK REPAIR TABLE shop.dead;
""",
    "trino": """\
CREATE TABLE shop.dead (
  "schema_version" bigint …,
  "dlq" varchar,
  "day" date
)
WITH (
  external_location = 's3://bucket/letters/',
  format = 'PARQUET',
  partitioned_by = ARRAY['dlq', 'day']
);
CALL system.sync_partition_metadata('shop', 'dead', 'FULL');
""",
}
TYPES = {
    "athena": "bigint string timestamp binary date",
    "bigquery": "INT64 STRING TIMESTAMP BYTES DATE",
    "duckdb": "BIGINT VARCHAR TIMESTAMPTZ BLOB DATE",
    "snowflake": "NUMBER TEXT TIMESTAMP_NTZ BINARY DATE",
    "spark": "BIGINT STRING TIMESTAMP BINARY DATE",
    "trino": "bigint varchar timestamp varbinary date",
}


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_the_statement_of_a_dialect(dialect: str) -> None:
    """It has all columns of the record, with their types, and those of the folders."""
    text = statement(dialect, "s3://bucket/letters/", "shop.dead")
    *_others, last = field_kinds()
    others = rf'(["` (]schema_version\b[^\n]*?),\n.*\b{last}\b[^\n]*?(,?)\n'
    frame = re.sub(others, r"\1 …\2\n", text, count=1, flags=re.DOTALL)
    assert frame == FRAMES[dialect]
    columns = columns_of(dialect)
    assert list(columns) == [*field_kinds(), "dlq", "day"]
    chosen = ("deliveries", "headers", "dead_lettered_at", "body", "day")
    assert " ".join(columns[name] for name in chosen) == TYPES[dialect]
    for name, kind in columns.items():
        assert re.search(rf"\b{name}\b", text), name
        assert kind in text


@pytest.mark.parametrize("dialect", sorted(DIALECTS))
def test_a_parser_of_the_dialect_reads_the_statement(dialect: str) -> None:
    """As far as it knows the dialect: of BigQuery it does not know these tables."""
    sqlglot = pytest.importorskip("sqlglot")
    first = sqlglot.parse(statement(dialect, "@l/x" if dialect == "snowflake" else "x"), dialect)[0]
    if dialect != "bigquery":
        assert first.key == "create"
    if dialect in {"athena", "spark", "trino", "snowflake"}:
        names = [one.name for one in first.find_all(sqlglot.exp.ColumnDef)]
        assert names[: len(field_kinds())] == list(field_kinds())


def test_what_would_end_a_quote_is_refused() -> None:
    """A statement that is pasted does what it says, and nothing else."""
    for location, table in (("x'; DROP TABLE y; --", "t"), ("x", 't"'), ("", "t"), ("x", "`t`")):
        with pytest.raises(DLQError, match="without quotes and semicolons"):
            statement("spark", location, table)
    with pytest.raises(DLQError, match=r"expected a dialect \(athena, "):
        statement("athene", "x")


def test_a_table_of_a_catalog_is_synchronized_there() -> None:
    """Trino's names have up to three parts."""
    called = [statement("trino", "x", name).rsplit("\n", 2)[-2] for name in ("t", "c.s.t")]
    assert called == [
        "CALL system.sync_partition_metadata('default', 't', 'FULL');",
        "CALL c.system.sync_partition_metadata('s', 't', 'FULL');",
    ]


def test_the_command_prints_the_statement_or_the_columns() -> None:
    """It needs neither Redis nor a broker."""
    runner, obj = CliRunner(), type("Context", (), {"app": Celery("x")})()
    done = runner.invoke(dlq, ["schema", "--dialect", "trino", "--location", "s3://b"], obj=obj)
    assert (done.exit_code, done.stdout) == (0, statement("trino", "s3://b"))
    done = runner.invoke(dlq, ["schema", "--dialect", "trino", "--json"], obj=obj)
    assert [json.loads(line) for line in done.stdout.splitlines()] == [
        {"name": name, "type": kind} for name, kind in columns_of("trino").items()
    ]
    done = runner.invoke(dlq, ["schema", "--dialect", "oracle"], obj=obj)
    assert done.exit_code == 2
    assert "athena" in done.stderr
    done = runner.invoke(dlq, ["schema", "--dialect", "spark", "--table", "a;b"], obj=obj)
    assert done.exit_code == 1
    assert done.stderr.startswith("Error: expected a table without quotes")
