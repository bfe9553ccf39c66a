"""Positions of letters in a store: their format and the times in them."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime

from celery_dlq.letters.record import from_micros, to_micros


def ordered(position: str) -> tuple[int, ...]:
    """Return a position as numbers, which sort in the order of storing."""
    return tuple(int(part) for part in position.split("-"))


def stored_at(position: str) -> datetime | None:
    """Return the time in a position, which begins with milliseconds since 1970, or ``None``."""
    with suppress(ValueError, OverflowError):
        return from_micros(ordered(position)[0] * 1000)
    return None


def position_at(moment: datetime) -> str:
    """Return the first position of a moment: letters before it were stored earlier."""
    return f"{max(0, to_micros(moment) // 1000)}-0"
