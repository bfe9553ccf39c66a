"""The policy key ``auto_redrive``: when letters are redriven without an operator."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any

from celery_dlq.errors import SettingsError
from celery_dlq.letters.json_codec import safe_repr
from celery_dlq.letters.record import Reason

MOST_TIMES = 100
MOST_BACKOFF = 100.0
MOST_CANARY = 1000
MAX_WAIT = timedelta(days=366)
"""A letter never waits longer, however often it has died."""

_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRedrive:
    """When the letters of a dead-letter queue are redriven automatically.

    Attributes:
        after: Seconds that a letter waits before its first redrive.
        times: A message is redriven at most this often; redrives by operators count, too.
        backoff: After each redrive a letter waits this many times as long; 1 or more.
        reasons: Only letters with these reasons; ``None`` for all.
        canary: First redrive this many letters, and watch them; the others wait for another
            ``after`` if one of them dies again. ``None``: no canary.
    """

    after: float
    times: int
    backoff: float = 2.0
    reasons: frozenset[Reason] | None = None
    canary: int | None = None

    def __str__(self) -> str:
        values = {**self.to_json(), "after": timedelta(seconds=self.after)}
        if self.reasons is not None:
            values["reasons"] = " or ".join(values["reasons"])
        return ", ".join(
            f"{name} {value:g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in values.items()
        )

    def wait_seconds(self, redrives: int) -> float:
        """Seconds that a letter waits whose message was redriven this often."""
        return min(self.after * self.backoff ** min(redrives, MOST_TIMES), MAX_WAIT.total_seconds())

    def keeps(self, reason: Reason) -> bool:
        """True if letters with this reason are redriven."""
        return self.reasons is None or reason in self.reasons

    def used_up(self, redrives: int, reason: Reason) -> str:
        """What the letter of a message says that is redriven no more; empty if it will be."""
        if redrives < self.times or not self.keeps(reason):
            return ""
        if redrives == self.times:
            return f"redriven {redrives} of {self.times} times by auto_redrive"
        return f"redriven {redrives} times, and auto_redrive ends at {self.times}"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping of what is set, as the policy takes it."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        if self.reasons is not None:
            found["reasons"] = sorted(str(reason) for reason in self.reasons)
        return {name: value for name, value in found.items() if value is not None}


Checks = Mapping[str, Callable[[str, object], Any]]


def auto_redrive(where: str, value: object, checks: Checks) -> AutoRedrive:
    """Check the key: a mapping with ``after`` and ``times``.

    Args:
        where: What to call the key in an error.
        value: The value.
        checks: A check for each key of the mapping.

    Raises:
        SettingsError: The value is something else.
    """
    if isinstance(value, AutoRedrive):
        value = value.to_json()
    if not isinstance(value, Mapping):
        raise _unexpected(where, "off, or a mapping such as {'after': '30m', 'times': 3}", value)
    for key in value:
        if key not in checks:
            close = difflib.get_close_matches(str(key), checks, n=1)
            known = ", ".join(checks)
            hint = f"did you mean {close[0]!r}?" if close else f"expected one of {known}"
            raise SettingsError(f"expected only known keys in {where}, got {key!r}; {hint}")
    for key in ("after", "times"):
        if value.get(key) is None:
            raise _unexpected(where, f"a mapping with {key!r}", value)
    return AutoRedrive(
        **{
            key: checks[key](f"{where}[{key!r}]", given)
            for key, given in value.items()
            if given is not None
        }
    )


def backoff(where: str, value: object) -> float:
    """Check the factor by which the wait grows.

    Raises:
        SettingsError: The value is something else.
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 1 <= value <= MOST_BACKOFF
    ):
        raise _unexpected(where, f"a factor of 1 to {MOST_BACKOFF:.0f}", value)
    return float(value)


def count(most: int) -> Callable[[str, object], int]:
    """A check of a whole number from 1 to ``most``."""

    def check(where: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise _unexpected(where, f"a whole number of 1 to {most}", value)
        return value

    return check


def _unexpected(where: str, what: str, got: object) -> SettingsError:
    shown = " ".join(safe_repr(got, _SHOWN_CHARS).split())
    return SettingsError(f"expected {where} to be {what}, got {shown}")
