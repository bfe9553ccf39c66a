"""The canary: a few letters first, and a look at what becomes of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from celery_dlq.backends.base import RedriveOutcome
from celery_dlq.errors import DLQError
from celery_dlq.operations.selection import RawEntry

_MOST_LETTERS = 1000
_MOST_LOOKED_AT = 100_000
_MOST_GROUPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """How a redrive tries itself out.

    Attributes:
        letters: How many to redrive first.
        max_failures: Go on when at most so many of them die again, or have not ended in time.
        wait_seconds: How long to watch them.
    """

    letters: int
    max_failures: int = 0
    wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.letters <= _MOST_LETTERS:
            raise DLQError(
                f"expected canary to be 1 to {_MOST_LETTERS} letters, got {self.letters}"
            )
        if self.max_failures < 0:
            raise DLQError(f"expected max_failures to be 0 or more, got {self.max_failures}")
        if not 0 < self.wait_seconds < float("inf"):
            raise DLQError(
                f"expected canary_wait to be more than 0 seconds, got {self.wait_seconds}"
            )

    def to_json(self) -> dict[str, Any]:
        """What a job keeps of it."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Canary | None:
        """What a resumed job has still to try out; ``None`` if nothing.

        Args:
            value: As `to_json` made it, with ``passed`` once it went well.
        """
        if not isinstance(value, Mapping) or value.get("passed"):
            return None
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """What became of a canary.

    Attributes:
        redriven: How many were redriven and watched.
        succeeded: How many ended well.
        died: How many have a new letter.
        open: How many had not ended when the watch did.
    """

    redriven: int
    succeeded: int
    died: int
    open: int

    @classmethod
    def of(cls, outcomes: Sequence[RedriveOutcome]) -> CanaryResult:
        """Count outcomes."""
        return cls(
            redriven=len(outcomes),
            succeeded=outcomes.count(RedriveOutcome.SUCCEEDED),
            died=outcomes.count(RedriveOutcome.DIED),
            open=outcomes.count(RedriveOutcome.OPEN),
        )

    def to_json(self) -> dict[str, int]:
        """A JSON-ready mapping with the attribute names."""
        return asdict(self)


def chosen(entries: Iterable[RawEntry], letters: int) -> list[str]:
    """Ids of letters in turn from every group; looks at a bounded number of them."""
    groups: dict[str, list[str]] = {}
    for found in islice(entries, _MOST_LOOKED_AT):
        if not found.is_letter:
            continue
        fingerprint = found.text("fingerprint")
        if fingerprint not in groups and len(groups) >= _MOST_GROUPS:
            continue
        group = groups.setdefault(fingerprint, [])
        if len(group) < letters:
            group.append(found.key)
    picked: list[str] = []
    for place in range(letters):
        for group in groups.values():
            if place < len(group) and len(picked) < letters:
                picked.append(group[place])
    return picked
