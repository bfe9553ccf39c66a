"""Waiting without sleeping for a guess: ask again until it is so, or until the deadline."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def poll(
    until: Callable[[], T], *, timeout_seconds: float = 10.0, every_seconds: float = 0.01
) -> T:
    """Call ``until`` again and again until it returns something true.

    Args:
        until: Asked at once and then every ``every_seconds``. What it raises is not caught.
        timeout_seconds: Longest wait. Defaults to 10.
        every_seconds: Pause between two questions. Defaults to 0.01.

    Returns:
        The first true value.

    Raises:
        AssertionError: The deadline passed; the message shows the last value.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        value = until()
        if value:
            return value
        if time.monotonic() >= deadline:
            name = getattr(until, "__qualname__", repr(until))
            raise AssertionError(
                f"expected {name} to become true in {timeout_seconds:g} s, got {value!r}"
            )
        time.sleep(every_seconds)
