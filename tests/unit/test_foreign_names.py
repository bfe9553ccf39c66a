"""The names of other packages that we rely on: the list is whole, and has nothing old."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import foreign
import house
import pytest

import celery_dlq

PACKAGE = Path(celery_dlq.__file__).parent
ROOT = Path(__file__).parents[2]
INTERNALS = (ROOT / "tests/unit/test_celery_internals.py").read_text("utf-8")

OURS = {"_celery_dlq": "the attribute of an app that holds its first `DeadLetters`"}
"""Private names that look like another package's."""

DOCUMENTED = {
    "_exit": "of os",
    "_get_current_object": "listed with its files: werkzeug's name, which every proxy has",
    "_replace": "of named tuples",
    "_value_": "of enumerations",
}
"""Private names that Python documents."""


def last(name: str) -> str:
    """The part of a name that stands in the code."""
    return name.rpartition(".")[2]


@pytest.mark.parametrize("row", list(foreign.rows()), ids=lambda row: row.names.split()[0])
def test_a_row_names_what_is_there(row: foreign.Row) -> None:
    """A name that the code has no more, or a test that is gone, is still in the table."""
    code = "\n".join((PACKAGE / path).read_text("utf-8") for path in row.files.split())
    gone = [name for name in row.names.split() if not re.search(rf"\b{last(name)}\b", code)]
    assert gone == []
    for test in row.tests.split():
        assert (ROOT / test).is_file() or f"def {test}(" in INTERNALS, test


def test_no_name_stands_in_two_rows() -> None:
    """It would be counted once and explained twice."""
    assert len(foreign.names()) == sum(len(row.names.split()) for row in foreign.rows())


def accesses(tree: ast.AST) -> Iterator[str]:
    """The private attributes that code asks an object for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield node.attr


def own_names(tree: ast.AST) -> Iterator[str]:
    """What code defines: functions, classes, attributes that it sets on itself."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for one in (each for target in targets for each in ast.walk(target)):
                if isinstance(one, ast.Name):
                    yield one.id
                elif isinstance(one, ast.Attribute) and isinstance(one.value, ast.Name):
                    yield one.attr if one.value.id == "self" else ""


def test_every_private_name_of_another_package_has_a_row() -> None:
    """What nobody promised us changes without a word: somebody must look at each release."""
    listed = {
        (path, last(name))
        for row in foreign.rows()
        for path in row.files.split()
        for name in row.names.split()
    }
    trees = {path: ast.parse(path.read_text("utf-8")) for path in PACKAGE.rglob("*.py")}
    defined = {name for tree in trees.values() for name in own_names(tree)}
    unlisted = {
        (str(path.relative_to(PACKAGE)), name)
        for path, tree in trees.items()
        for name in accesses(tree)
        if not name.endswith("__") and name not in {*defined, *OURS, *DOCUMENTED}
    } - listed
    assert unlisted == set()


def overridden(module: str, roots: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """What classes of a module override of other packages' classes."""
    for kind in vars(import_module(f"celery_dlq.{module}")).values():
        if not (inspect.isclass(kind) and kind.__module__.startswith("celery_dlq.")):
            continue
        bases = [base for base in kind.__mro__ if base.__module__.partition(".")[0] in roots]
        for name in vars(kind):
            if not name.startswith("__") and any(name in vars(base) for base in bases):
                yield kind.__name__, name


@pytest.mark.parametrize(
    "module",
    [
        "transport.redis.channel",
        "transport.redis.leases",
        "transport.redis.wake",
        "transport.sqs.channel",
        "web.server",
    ],
)
def test_every_overridden_method_of_a_transport_or_a_server_has_a_row(module: str) -> None:
    """Classes such as kombu's and uvicorn's are not made to be subclassed by others."""
    path = f"{module.replace('.', '/')}.py"
    listed = {
        last(name) for row in foreign.rows() if path in row.files for name in row.names.split()
    }
    assert {
        (kind, name)
        for kind, name in overridden(module, ("kombu", "amqp", "uvicorn"))
        if name not in listed
    } == set()


def test_every_overridden_method_of_a_request_has_a_row() -> None:
    """The guard is mixed in front of Celery's class, so Python does not see it as a subclass."""
    request: Any = import_module("celery.worker.request").Request
    module = import_module("celery_dlq.worker.request")
    classes = [
        kind
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
    ]
    listed = {
        last(name)
        for row in foreign.rows()
        if "worker/request.py" in row.files
        for name in row.names.split()
    }
    over = {name for kind in classes for name in vars(kind) if name in vars(request)}
    assert {name for name in over if not name.startswith("__")} - listed == set()


def test_the_house_counts_the_list() -> None:
    """The figure that is held down and the table that people read are one."""
    assert house.foreign_names() == (
        len(foreign.names()),
        sum(map(foreign.is_private, foreign.names())),
    )
