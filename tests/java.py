"""Java processes that tests start: each is over before a compiler pays."""

from __future__ import annotations

from pathlib import Path

QUICK_JAVA = {"JDK_JAVA_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For the environment of a process that starts Java."""


def interpreted(folder: Path) -> dict[str, str]:
    """The environment of a Spark that compiles no query, as ``dlq triage`` of small folders does.

    What it is told lies in a file of this folder.
    """
    settings = {"codegen.wholeStage": "false", "codegen.factoryMode": "NO_CODEGEN"}
    lines = [f"spark.sql.{name} {value}\n" for name, value in settings.items()]
    (folder / "spark-defaults.conf").write_text("".join(lines), "utf-8")
    return {"SPARK_CONF_DIR": str(folder), **QUICK_JAVA}
