"""The policy key ``auto_redrive``: when letters are redriven without an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.record import Reason
from celery_dlq.policies.checks import (
    expected,
    integer,
    mapping,
    number,
    positive_seconds,
    some_of,
)
from celery_dlq.policies.policy import KeyValue

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.select import RawEntry

MOST_TIMES = 100
MOST_BACKOFF = 100.0
MOST_CANARY = 1000
MAX_WAIT = timedelta(days=366)
"""A letter never waits longer, however often it has died."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoRedrive(KeyValue):
    """When the letters of a dead-letter queue are redriven automatically.

    Attributes:
        after: Seconds that a letter waits before its first redrive.
        times: A message is redriven at most this often; redrives by operators count, too.
        backoff: After each redrive a letter waits this many times as long; 1 or more.
        reasons: Only letters with these reasons; ``None`` for all but ``operator``: what an
            operator does not want to run is not redriven without one.
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

    def redrives_reason(self, reason: str) -> bool:
        """True if letters with this reason are redriven."""
        if self.reasons is None:
            return reason != Reason.OPERATOR
        return reason in self.reasons

    def due_filter(self, redrives: int) -> dict[str, Any]:
        """The letters that a job takes: those of messages that were redriven so often."""
        reasons = None if self.reasons is None else sorted(map(str, self.reasons))
        return {"redrives": redrives, "reasons": reasons}

    def takes_letter(self, found: RawEntry, redrives: int) -> bool:
        """True for a letter of a message that was redriven so often, if its reason is allowed."""
        return (
            found.is_letter
            and found.fields.get(b"redrives", b"0") == b"%d" % redrives
            and self.redrives_reason(found.text("reason"))
        )

    def chooses(self, due: Mapping[str, Any] | None) -> Callable[[RawEntry], bool] | None:
        """The letters that it redrives, or that its job takes unless it has changed since."""
        if due is None:
            return lambda found: any(
                self.takes_letter(found, number) for number in range(self.times)
            )
        redrives: int = due["redrives"]
        if redrives >= self.times or due != self.due_filter(redrives):
            return None
        return lambda found: self.takes_letter(found, redrives)

    def used_up(self, redrives: int, reason: Reason) -> str:
        """What the letter of a message says that is redriven no more; empty if it will be."""
        if redrives < self.times or not self.redrives_reason(reason):
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


def auto_redrive(where: str, value: object) -> AutoRedrive:
    """Check the key: a mapping with ``after`` and ``times``."""
    given = value.to_json() if isinstance(value, AutoRedrive) else value
    return AutoRedrive(**_KEYS(where, given))


def _some_reasons(where: str, value: object) -> frozenset[Reason]:
    if not (found := some_of(Reason, "reasons")(where, value)):
        raise expected(where, "at least one reason, or left out for all", value)
    return found


_KEYS = mapping(
    {
        "after": positive_seconds,
        "times": integer(1, MOST_TIMES),
        "backoff": number(1, MOST_BACKOFF, f"a factor of 1 to {MOST_BACKOFF:.0f}"),
        "reasons": _some_reasons,
        "canary": integer(1, MOST_CANARY),
    },
    required=("after", "times"),
    what="off, or a mapping such as {'after': '30m', 'times': 3}",
)
