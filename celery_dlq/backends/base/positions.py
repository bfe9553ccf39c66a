"""Positions of letters in a store: their form, and the times in them."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from celery_dlq.record import from_micros, to_micros


def ordered(position: str) -> tuple[int, ...]:
    """A position as numbers, which sort as letters were stored.

    Raises:
        ValueError: It is no position.
    """
    return tuple(int(part) for part in position.split("-"))


def stored_at(position: str) -> datetime | None:
    """When a letter was stored: its position in Redis begins with the milliseconds since 1970."""
    with suppress(ValueError, OverflowError):
        return from_micros(ordered(position)[0] * 1000)
    return None


def position_at(moment: datetime) -> str:
    """The position before which nothing is that was stored at or after a moment."""
    return f"{max(0, to_micros(moment) // 1000)}-0"
