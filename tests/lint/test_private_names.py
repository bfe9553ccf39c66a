"""Tests know the package by its public names: what is private may change without them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import celery_dlq

TESTS = Path(__file__).parents[1]
PACKAGE = Path(celery_dlq.__file__).parent
WORDS = re.compile(r"[\w.]+")

THEIRS = frozenset(
    {
        "_value_",  # enum.Enum
        # celery.worker.request.Request
        *("_announce_cancelled", "_announce_revoked"),
        *("_retry_worker_lost", "_success_was_stored"),
        # celery.app.base.Celery, and its default app
        *("_tasks", "_tls", "_state"),
        # billiard.pool
        *("_pool", "_reader", "_recv_message", "_set", "_writer"),
        "_flush_outqueue",  # celery.concurrency.asynpool.ResultHandler
        # kombu.transport.virtual, .redis and .SQS
        "_do_restore_message",
        *("_get_async", "_message_to_python", "_on_messages_ready", "_put"),
        "_size",
        # amqp
        *("_on_blocked", "_on_unblocked", "_read", "_read_buffer"),
    }
)
"""Internals of others that the package overrides or sets, which tests pin, call or imitate."""


def defined(tree: ast.AST) -> Iterator[str]:
    """The names of functions, classes, constants and attributes with one underscore at first."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            name = node.name
        elif isinstance(node, (ast.Name, ast.Attribute)) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        else:
            continue
        if re.fullmatch(r"_[A-Za-z]\w*", name):
            yield name


def used(tree: ast.AST, private: frozenset[str]) -> Iterator[tuple[int, str]]:
    """Where a test uses one: an attribute, an import, its name as a text, a program as a text."""
    own = set(_own(tree))
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Attribute) and node not in own:
            names = [node.attr]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celery_dlq"):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in own:
            names = node.value.split(".") if WORDS.fullmatch(node.value) else []
            if "\n" in node.value and "celery_dlq" in node.value:
                yield from _used_in_program(node.value, node.lineno, private)
        yield from ((node.lineno, name) for name in names if name in private)


def _own(tree: ast.AST) -> Iterator[ast.AST]:
    """What is no use: attributes of a test's own class, and the parts of an f-string."""
    theirs = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("celery_dlq")
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield from node.values
        if isinstance(node, ast.ClassDef):
            bases = {base.id for base in node.bases if isinstance(base, ast.Name)}
            mine = set(defined(node))
            for inner in ast.walk(node):
                if isinstance(inner, ast.Attribute) and isinstance(inner.value, ast.Name):
                    is_mine = not bases & theirs or inner.attr in mine
                    if inner.value.id in ("self", "cls") and is_mine:
                        yield inner


def _used_in_program(text: str, line: int, private: frozenset[str]) -> Iterator[tuple[int, str]]:
    try:
        program = ast.parse(text)
    except SyntaxError:
        return
    yield from ((line + place - 1, name) for place, name in used(program, private))


@pytest.mark.parametrize(
    ("source", "uses"),
    [
        ("store._hidden()", 1),
        ("from celery_dlq.store import _hidden", 1),
        ("patch.setattr(store, '_hidden', 1)", 1),
        ("patch.setattr('celery_dlq.store._hidden', 1)", 1),
        ("PROGRAM = '''\nimport celery_dlq\nstore._hidden\n'''", 1),
        ("from celery_dlq import S\nclass T(S):\n    def f(self): self._hidden()", 1),
        ("class T:\n    def f(self): self._hidden()", 0),
        ("from celery import _hidden", 0),
    ],
)
def test_a_use_is_seen_wherever_it_is(source: str, uses: int) -> None:
    """Also in a text that names it, and in a program as a text."""
    assert len([*used(ast.parse(source), frozenset({"_hidden"}))]) == uses


@pytest.fixture(scope="module")
def ours() -> frozenset[str]:
    """The private names of the package."""
    texts = (path.read_text("utf-8") for path in PACKAGE.rglob("*.py"))
    return frozenset(name for text in texts for name in defined(ast.parse(text)))


def test_tests_use_no_private_name_of_the_package(ours: frozenset[str]) -> None:
    """Behaviour, or a public name: where a test needs a seam, the seam is made public."""
    found = []
    for path in sorted(TESTS.rglob("*.py")):
        if path.name == "foreign.py":  # it lists names of other packages
            continue
        text = path.read_text("utf-8")
        private = ours.intersection(re.findall(r"(?<!\w)_\w+", text)) - THEIRS
        uses = used(ast.parse(text), private) if private else ()
        found += [f"{path.relative_to(TESTS)}:{line} {name}" for line, name in sorted(uses)]
    assert found == []


def test_what_is_allowed_is_overridden_or_set_by_the_package(ours: frozenset[str]) -> None:
    """An internal that the package no longer touches leaves the list."""
    assert THEIRS - ours == set()
