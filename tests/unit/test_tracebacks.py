"""Taking tracebacks apart."""

from __future__ import annotations

import traceback

import pytest
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.letters.tracebacks import MAX_FRAMES, raised_exceptions


class OddError(Exception):
    """With a text of many lines."""


def down(depth: int) -> None:
    if depth:
        down(depth - 1)
    raise OddError('first line\n  File "a.py", line 1, in nobody\nlast: line')


def text_of(depth: int) -> str:
    try:
        try:
            {}["nothing"]
        except KeyError:
            down(depth)
    except OddError as exc:
        return "".join(traceback.format_exception(exc))
    raise AssertionError


def test_a_chain_is_taken_apart_the_one_that_escaped_last() -> None:
    """With file, line, function and code of each frame."""
    first, last = raised_exceptions(text_of(1))
    assert (first.name, first.message) == ("KeyError", "'nothing'")
    assert first.frames[0].code == '{}["nothing"]'
    assert [frame.function for frame in last.frames[:3]] == ["text_of", "down", "down"]
    assert {frame.file for frame in first.frames} == {__file__}
    assert all(frame.own for frame in first.frames)


def test_name_and_text_of_an_exception() -> None:
    """The text may have lines of its own."""
    (one,) = raised_exceptions(
        'Traceback (most recent call last):\n  File "/srv/shop.py", line 7, in charge\n'
        "    a / b\n    ~~^~~\nshop.PriceError: none\n\nnot even one\n"
    )
    assert (one.name, one.message) == ("shop.PriceError", "none\n\nnot even one")
    assert (one.frames[0].line, one.frames[0].function, one.frames[0].code) == (
        7,
        "charge",
        "a / b",
    )


def test_frames_of_libraries_are_not_the_applications() -> None:
    """By the same rule as the fingerprint."""
    text = '  File "/venv/lib/python3.11/site-packages/celery/app/trace.py", line 1, in trace\nX\n'
    assert raised_exceptions(text)[0].frames[0].own is False


def test_a_deep_recursion_is_bounded() -> None:
    """The outermost frame and the innermost ones stay."""
    lines = "".join(f'  File "a.py", line {n}, in f\n    f()\n' for n in range(5_000))
    (one,) = raised_exceptions(
        f"Traceback (most recent call last):\n{lines}RecursionError: too deep\n"
    )
    assert len(one.frames) == MAX_FRAMES
    assert (one.frames[0].line, one.frames[-1].line) == (0, 4_999)


@pytest.mark.parametrize("text", ["", "\n", "Traceback (most recent call last):\n"])
def test_no_traceback_is_nothing(text: str) -> None:
    """Some deaths have none."""
    assert raised_exceptions(text) == []


@given(st.text())
def test_no_text_makes_it_fail(text: str) -> None:
    """A traceback may have been cut anywhere."""
    raised_exceptions(text)
    raised_exceptions(f'Traceback (most recent call last):\n  File "{text}", line 1, in f\n{text}')
