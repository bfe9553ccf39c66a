"""``dlq schema``: the columns of exported files, in the SQL of other tools."""

from __future__ import annotations

import click

from celery_dlq.cli.context import print_lines
from celery_dlq.cli.options import json_option
from celery_dlq.letters.dialects import DIALECTS, columns_of, statement


@click.command(short_help="Print the statement that makes exported files a table of a SQL tool.")
@click.option(
    "--dialect", type=click.Choice(sorted(DIALECTS)), required=True, help="The SQL of which tool."
)
@click.option(
    "--location",
    default="letters",
    help="Where that tool finds the files, e.g. s3://bucket/letters; of Snowflake a stage, e.g. "
    "@letters.",
    show_default=True,
)
@click.option("--table", default="dead_letters", help="The table's name.", show_default=True)
@json_option
def schema(dialect: str, location: str, table: str, *, as_json: bool) -> None:
    """Print the statement that makes the files of `export` a table, or in DuckDB a view.

    With --json, a line for each column, with its type.
    """
    text = statement(dialect, location, table)  # also with --json: a wrong option is one
    if as_json:
        print_lines({"name": name, "type": one} for name, one in columns_of(dialect).items())
    else:
        click.echo(text, nl=False)
