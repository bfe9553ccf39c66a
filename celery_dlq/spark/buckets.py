"""Widths of time buckets: how they are written, and which one suits a span."""

from __future__ import annotations

import re
from datetime import timedelta

from celery_dlq.errors import DLQError

BUCKETS = (
    "1 second",
    "10 seconds",
    "1 minute",
    "10 minutes",
    "1 hour",
    "6 hours",
    "1 day",
    "7 days",
    "30 days",
)
"""The widths that `bucket_for` chooses from."""

MOST_BUCKETS = 60

_UNIT_SECONDS = {"second": 1, "minute": 60, "hour": 3600, "day": 86400}
_WIDTH = re.compile(r"([1-9]\d{0,4}) (second|minute|hour|day)s?")


def bucket_for(seconds: float) -> str:
    """A width of time buckets that shows a span in at most `MOST_BUCKETS` steps.

    Args:
        seconds: From the first letter to the last.

    Returns:
        One of `BUCKETS`; the widest one also for spans that would need more steps.
    """
    for bucket in BUCKETS:
        if seconds <= bucket_width(bucket).total_seconds() * MOST_BUCKETS:
            return bucket
    return BUCKETS[-1]


def bucket_width(bucket: str) -> timedelta:
    """The width that a bucket such as ``"10 minutes"`` names.

    Raises:
        DLQError: It names none.
    """
    found = _WIDTH.fullmatch(bucket)
    if found is None:
        raise DLQError(f"expected bucket to be a width such as '10 minutes', got {bucket!r}")
    return timedelta(seconds=int(found[1]) * _UNIT_SECONDS[found[2]])
