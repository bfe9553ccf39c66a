"""Names that users, dashboards and other versions rely on do not change by accident."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import click
import pytest
from public_surface import PUBLIC, PUBLIC_SPARK, SURFACES, every_command, names

HERE = Path(__file__).parent / "snapshots"


@pytest.mark.parametrize("name", SURFACES)
def test_the_public_surface_is_the_one_that_is_promised(name: str) -> None:
    """A removed or changed line breaks somebody; a new one is a promise."""
    if name == "spark_names.txt":
        pytest.importorskip("pyspark", reason="PySpark's modules need PySpark")
    expected, got = (HERE / name).read_text("utf-8"), SURFACES[name]()
    if got != expected:
        lines = difflib.unified_diff(
            expected.splitlines(), got.splitlines(), "promised", "now", lineterm="", n=1
        )
        changed = "\n".join(lines)
        pytest.fail(
            f"{name} changed:\n{changed}\n\n"
            "Lines that begin with - are what others rely on and no longer get. If the change is "
            "meant, run `python tests/frozen/accept.py`, commit the snapshot and say it in "
            "CHANGELOG.md.",
            pytrace=False,
        )


def test_every_snapshot_is_compared() -> None:
    """A file that no test reads promises nothing."""
    assert {path.name for path in HERE.iterdir()} == set(SURFACES)


def test_help_fits_80_columns() -> None:
    """Every command's help can be read where people read it."""
    for path, command in every_command():
        context = click.Context(command, info_name=path, terminal_width=80, max_content_width=80)
        lines = command.get_help(context).splitlines()
        assert [line for line in lines if len(line) > 80] == [], path


def test_public_modules_are_those_that_documents_name() -> None:
    """All that the README, the docs and the examples import is frozen here."""
    root = Path(__file__).parents[2]
    texts = [root / "README.md", *root.glob("docs/**/*.md"), *root.glob("examples/**/*.py")]
    line = re.compile(r"^(?:from|import) (celery_dlq[\w.]*)", re.MULTILINE)
    imported = {found for path in texts for found in line.findall(path.read_text("utf-8"))}
    # The notebook also draws with the charts' colours.
    known = {*PUBLIC, *PUBLIC_SPARK, "celery_dlq.spark", "celery_dlq.spark.charts"}
    assert imported - known == set()
    assert "celery_dlq.DeadLetters(" in names()
