"""The names of other packages that we rely on: the list is whole, and has nothing old."""

from __future__ import annotations

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


def last(name: str) -> str:
    """The part of a name that stands in the code."""
    return name.rpartition(".")[2]


def test_a_row_names_what_is_there() -> None:
    """A name that the code has no more, or a test that is gone, is still in the table."""
    for row in foreign.all_rows():
        code = "\n".join((PACKAGE / path).read_text("utf-8") for path in row.files.split())
        gone = [name for name in row.names.split() if not re.search(rf"\b{last(name)}\b", code)]
        assert gone == []
        for test in row.tests.split():
            assert (ROOT / test).is_file() or f"def {test}(" in INTERNALS, test


def test_no_name_stands_in_two_rows() -> None:
    """It would be counted once and explained twice."""
    found = [name for row in foreign.all_rows() for name in row.names.split()]
    assert sorted(set(found)) == sorted(found)


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
        last(name) for row in foreign.all_rows() if path in row.files for name in row.names.split()
    }
    assert {
        (kind, name)
        for kind, name in overridden(module, ("kombu", "amqp", "uvicorn"))
        if name not in listed
    } == set()


def test_every_overridden_method_of_a_request_has_a_row() -> None:
    """The guard is mixed in front of Celery's class, so Python does not see it as a subclass."""
    request: Any = import_module("celery.worker.request").Request
    modules = [import_module(f"celery_dlq.worker.{name}") for name in ("request", "in_process")]
    classes = [
        kind
        for module in modules
        for kind in vars(module).values()
        if inspect.isclass(kind) and kind.__module__ == module.__name__
    ]
    listed = {
        last(name)
        for row in foreign.all_rows()
        if "worker/request.py" in row.files
        for name in row.names.split()
    }
    over = {name for kind in classes for name in vars(kind) if name in vars(request)}
    assert {name for name in over if not name.startswith("__")} - listed == set()


def test_each_row_has_its_price_and_no_documented_name_is_private() -> None:
    """What nobody can say the price of is comfort; what is private is promised to nobody."""
    assert [row.names for row in foreign.rows() if len(row.price) < 10] == []
    documented = [name for row in foreign.DOCUMENTED for name in row.names.split()]
    assert [name for name in documented if foreign.is_private(name)] == []
    assert [row.where for row in foreign.DOCUMENTED if not row.where.startswith("https://")] == []


def test_the_house_counts_the_list() -> None:
    """The figure that is held down and the table that people read are one."""
    assert house.foreign_names() == (
        len(foreign.names()),
        sum(map(foreign.is_private, foreign.names())),
    )
