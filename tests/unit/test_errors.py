"""The tree of errors."""

from __future__ import annotations

import inspect
import pickle

import pytest

from celery_dlq import errors
from celery_dlq.errors import (
    CorruptLetter,
    DLQError,
    MaxDeliveriesExceeded,
    MissingExtra,
    StoreError,
    StoreUnavailable,
)

ALL = [
    cls
    for _, cls in inspect.getmembers(errors, inspect.isclass)
    if cls.__module__ == errors.__name__
]


def an_error(cls: type[DLQError]) -> DLQError:
    """An error of any type of the tree."""
    if cls is MissingExtra:
        return MissingExtra("dlq export", "pyarrow", "parquet")
    return cls("expected x, got y")


def test_every_error_hangs_in_one_tree() -> None:
    """Catching `DLQError` catches them all, and the drawing in the module shows each."""
    assert ALL
    for cls in ALL:
        assert issubclass(cls, DLQError)
        assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("cls", [StoreUnavailable, CorruptLetter])
def test_errors_of_the_store_are_caught_together(cls: type[DLQError]) -> None:
    """The tree has one branch for the place where letters are kept."""
    assert issubclass(cls, StoreError)


@pytest.mark.parametrize("cls", ALL)
def test_every_error_survives_pickling(cls: type[DLQError]) -> None:
    """Errors travel from a pool child to its parent, and through result backends."""
    error = an_error(cls)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert type(copy) is cls, protocol
        assert str(copy) == str(error), protocol
        assert vars(copy) == vars(error), protocol


def test_a_missing_extra_says_what_to_install() -> None:
    """The message is a command that can be pasted."""
    assert str(an_error(MissingExtra)) == (
        "dlq export needs the extra 'parquet', of which the package pyarrow is not installed; "
        "run: pip install 'celery_dlq[parquet]'"
    )


def test_too_many_deliveries_is_no_task_error() -> None:
    """``AsyncResult.get()`` of a poison message raises something that can be caught."""
    assert issubclass(MaxDeliveriesExceeded, Exception)
