"""What Spark could not read, in one line: Spark's own first line does not say what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

from celery_dlq.errors import DLQError, ExportError, MissingExtra

_FILE = re.compile(r"while reading (?:the )?file (\S+?)\.?(?:\s|$)")
_CUT = re.compile(
    r"not a Parquet file|EOFException|end of (?:the )?file|Could not read footer", re.IGNORECASE
)
_CAST = re.compile(
    r"cannot be cast|CANNOT_CONVERT|TYPE_MISMATCH|cannot be converted", re.IGNORECASE
)
_LACKS = re.compile(r"(?:ModuleNotFoundError|ImportError): No module named '([\w.]+)'")
_RAISED = re.compile(r"^\w*(?:Error|Exception): .*", re.MULTILINE)
_PYTHON = re.compile(r"\[?PYTHON_EXCEPTION|PythonException|from the Python worker")


def no_letters(path: Path | str, *, selected: bool = False) -> ExportError:
    """The error for a folder without Parquet files, or without the selected letters."""
    if selected:
        return ExportError(f"expected {path} to hold letters with these filters, got none")
    return ExportError(f"expected {path} to hold letters, got none; write some with: dlq export")


@contextmanager
def readable_errors(path: Path | str, *, selected: bool = False) -> Iterator[None]:
    """Turn Spark's errors into one line that says what to do.

    Of ``selected`` letters there may be no folder.

    Raises:
        ExportError: Spark cannot read the files; which one, and what is wrong with it.
        MissingExtra: This Python, or that of the executors, lacks a package.
    """
    errors = import_module("pyspark.errors")
    PySparkException: type[Exception] = errors.PySparkException  # noqa: N806 - a class
    # Spark 3.5 has Python's own.
    lacking: type[Exception] = getattr(errors, "PySparkImportError", ImportError)
    unread: tuple[type[Exception], ...] = (PySparkException, *java_errors())
    try:
        yield
    except lacking as exc:
        feature = "an explanation of causes"
        raise MissingExtra(feature, "pyarrow", "spark") from exc
    except unread as exc:
        if selected and "PATH_NOT_FOUND" in str(exc):
            raise no_letters(path, selected=True) from exc
        raise _in_one_line(str(exc), path, type(exc).__name__) from exc


def java_errors() -> tuple[type[Exception], ...]:
    """What calls of Java raise, where there is Java."""
    try:
        return (import_module("py4j.protocol").Py4JError,)
    except ImportError:  # the thin client of Spark Connect has no Java
        return ()


def _in_one_line(text: str, path: Path | str, kind: str) -> DLQError:
    lacks = _LACKS.search(text)
    if lacks is not None and _PYTHON.search(text):
        return DLQError(
            f"expected the Python of Spark's executors to have the package {lacks[1]!r}; install "
            f"celery_dlq[spark] there"
        )
    file, raised = _FILE.search(text), _RAISED.findall(text)
    if file is None and raised and _PYTHON.search(text):
        return DLQError(f"the triage of {path} failed in Spark's Python: {raised[-1].strip()}")
    if file is None:
        got = first_line(text) or kind
    elif _CUT.search(text):
        got = f"half a file, or one that is not Parquet: {_file_name(file[1])}"
    elif _CAST.search(text):
        got = f"a file of another schema, perhaps of a newer celery_dlq: {_file_name(file[1])}"
    else:
        got = f"a file that it cannot read: {_file_name(file[1])}"
    return ExportError(f"expected {path} to hold letters that Spark can read, got {got}")


def _file_name(url: str) -> str:
    return unquote(re.sub(r"^file:/+", "/", url))


def first_line(text: str) -> str:
    """The first line of an error that says something."""
    lines = [line.strip(" :\t") for line in text.splitlines()]
    told = [line for line in lines if line and not line.startswith("An error occurred while")]
    return told[0] if told else ""
