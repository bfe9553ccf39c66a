"""The public face: a name that disappears is a broken promise."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import pytest

import celery_dlq
from celery_dlq import DeadLetters
from celery_dlq.errors import SettingsError

ROOT = Path(__file__).parents[2]

NAMES = [
    "DLQError",
    "DeadLetter",
    "DeadLetters",
    "Delivery",
    "LetterFilter",
    "Loader",
    "Outcome",
    "Policy",
    "Reason",
    "RejectToDLQ",
    "__version__",
    "dead_letter_policy",
]


def test_the_public_names_are_these() -> None:
    """Adding one is a decision, removing one breaks somebody."""
    assert sorted(celery_dlq.__all__) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_loads_from_its_home(name: str) -> None:
    """Lazy names are there when they are asked for, and listed before."""
    assert name in dir(celery_dlq)
    value = getattr(celery_dlq, name)
    if name != "__version__":
        assert value is getattr(import_module(value.__module__), name)


def test_all_public_names_can_be_imported_at_once() -> None:
    """``from celery_dlq import *`` finds each."""
    found: dict[str, object] = {}
    exec("from celery_dlq import *", found)  # noqa: S102 - the one way to say it in a function
    assert set(NAMES) <= set(found)


def test_an_unknown_name_is_an_attribute_error() -> None:
    """The package behaves as every module does."""
    with pytest.raises(AttributeError, match="module 'celery_dlq' has no attribute 'DeadLeter'"):
        celery_dlq.DeadLeter  # type: ignore[attr-defined] # noqa: B018 - the access is the test


def test_the_version_is_one() -> None:
    """Packaging reads it from the source text."""
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.?(a|b|rc|dev)\d+)?", celery_dlq.__version__)


@pytest.mark.parametrize("make", [DeadLetters, DeadLetters.of])
def test_what_is_no_app_is_refused(make: Callable[[str], DeadLetters]) -> None:
    """The name of an app is what people write first."""
    with pytest.raises(SettingsError, match=r"DeadLetters\(app\) to be a Celery app, got 'shop'"):
        make("shop")


def test_an_editor_that_infers_shows_every_method_with_its_parameters() -> None:
    """As jedi does, which runs nothing; mypy reads `tests/typing/api.py`."""
    jedi = pytest.importorskip("jedi", reason="jedi is not installed")
    project = jedi.Project(ROOT)
    head = "from celery_dlq import DeadLetters\ndlq = DeadLetters(None)\ndlq."
    unseen = {}
    for name in dir(DeadLetters):
        if name.startswith("_") or not callable(method := getattr(DeadLetters, name)):
            continue
        parameters = inspect.signature(method).parameters.values()
        # Of what a method passes on as `*args`, jedi knows better.
        named = {each.name for each in parameters if each.kind is not each.VAR_POSITIONAL}
        found = jedi.Script(f"{head}{name}(", project=project).get_signatures()
        shown = {each.name for one in found for each in one.params}
        if not found or named - {"self"} - shown:
            unseen[name] = named - shown
    assert not unseen
