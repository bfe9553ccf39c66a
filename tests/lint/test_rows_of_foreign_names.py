"""Every private name of another package that the code uses has a row in foreign.py."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import foreign

PACKAGE = Path(__file__).parents[2] / "celery_dlq"

OURS = {"_celery_dlq": "the attribute of an app that holds its first `DeadLetters`"}
"""Private names that look like another package's."""

DOCUMENTED = {
    "_exit": "of os",
    "_replace": "of named tuples",
    "_value_": "of enumerations",
}
"""Private names that Python documents."""


BY_TEXT = {"getattr", "hasattr", "setattr", "delattr"}
"""Functions whose second argument is a name."""


def accesses(tree: ast.AST) -> Iterator[str]:
    """The private attributes that code asks an object for."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            yield node.attr
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in BY_TEXT:
            yield from (
                str(text.value)
                for text in node.args[1:2]
                if isinstance(text, ast.Constant) and str(text.value).startswith("_")
            )


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
        (path, name.rpartition(".")[2])
        for row in foreign.all_rows()
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
