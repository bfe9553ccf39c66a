"""The canary: a redrive first redrives a few letters and watches how they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from celery_dlq.backends.base import RedriveOutcome
from celery_dlq.errors import DLQError
from celery_dlq.operations.selection import RawEntry

_MAX_LETTERS = 1000
_MAX_ENTRIES_SCANNED = 100_000
_MAX_GROUPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The options of a canary.

    Attributes:
        letters: Number of letters to redrive first.
        max_failures: Continue if at most this many of them die again or do not end in time.
        wait_seconds: Seconds to watch them.
    """

    letters: int
    max_failures: int = 0
    wait_seconds: float = 60.0

    def __post_init__(self) -> None:
        if not 1 <= self.letters <= _MAX_LETTERS:
            raise DLQError(f"expected canary to be 1 to {_MAX_LETTERS} letters, got {self.letters}")
        if self.max_failures < 0:
            raise DLQError(f"expected max_failures to be 0 or more, got {self.max_failures}")
        if not 0 < self.wait_seconds < float("inf"):
            raise DLQError(
                f"expected canary_wait to be more than 0 seconds, got {self.wait_seconds}"
            )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, for the job."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: object) -> Canary | None:
        """The canary of a resumed job; ``None`` if it has none, or if the canary passed.

        Args:
            value: The result of `to_json`, with ``passed`` once the canary passed.
        """
        if not isinstance(value, Mapping) or value.get("passed"):
            return None
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The outcome of a canary, in numbers of letters.

    Attributes:
        redriven: Redriven and watched.
        succeeded: Their tasks succeeded.
        died: They have a new letter.
        open: They had not ended when the watch did.
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
    """Ids of letters, one group after the other in turn; scans a bounded number of entries."""
    groups: dict[str, list[str]] = {}
    for found in islice(entries, _MAX_ENTRIES_SCANNED):
        if not found.is_letter:
            continue
        fingerprint = found.text("fingerprint")
        if fingerprint not in groups and len(groups) >= _MAX_GROUPS:
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
