"""The canary: a redrive first redrives a few letters and watches how they end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import islice
from typing import Any

from celery_dlq.errors import DLQError
from celery_dlq.operations.redrive.selection import RawEntry
from celery_dlq.store.records import RedriveOutcome

_MAX_LETTERS = 1000
_MAX_ENTRIES_SCANNED = 100_000
_MAX_GROUPS = 1000

PASSED = "passed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Canary:
    """The options of a canary."""

    letters: int  # Number of letters to redrive first
    max_failures: int = 0  # Continue if at most this many of them die again or do not end in time
    wait_seconds: float = 60.0  # Seconds to watch them

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
        """The canary of a resumed job; ``None`` if it has none, or if the canary passed."""
        if not isinstance(value, Mapping) or value.get("passed"):
            return None
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryResult:
    """The outcome of a canary, in numbers of letters."""

    redriven: int  # Redriven and watched
    succeeded: int  # Their tasks succeeded
    died: int  # They have a new letter
    open: int  # They had not ended when the watch did
    held: int = 0  # Of these, the number that a hold has, or an open circuit breaker
    holds: tuple[str, ...] = ()  # The ids of those holds

    @classmethod
    def of(cls, outcomes: Sequence[RedriveOutcome], holds: Sequence[str] = ()) -> CanaryResult:
        """Count outcomes, and the holds that have some of the messages."""
        return cls(
            redriven=len(outcomes),
            succeeded=outcomes.count(RedriveOutcome.SUCCEEDED),
            died=outcomes.count(RedriveOutcome.DIED),
            open=outcomes.count(RedriveOutcome.OPEN),
            held=len(holds),
            holds=tuple(sorted(set(holds))),
        )

    def verdict(self, max_failures: int) -> str:
        """One of ``passed``, ``died again``, ``held`` and ``not finished``."""
        if self.died + self.open <= max_failures:
            return PASSED
        if self.died > max_failures:
            return "died again"
        return "held" if self.died + self.open - self.held <= max_failures else "not finished"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {**asdict(self), "holds": list(self.holds)}


def why_stopped(canary: Mapping[str, Any]) -> str:
    """Why a canary stopped its redrive, from its job."""
    letters, verdict = canary.get("letters", 0), canary.get("verdict")
    if verdict == "died again":
        return f"{canary['died']:,} of {letters:,} letters of the canary died again"
    if verdict == "held":
        holds = ", ".join(canary["holds"])
        return f"the canary is held by {holds}; after its release, resume this job"
    unfinished, seconds = canary.get("open", 0), canary.get("wait_seconds", 0)
    return f"{unfinished:,} of {letters:,} letters of the canary did not end in {seconds:g} s"


def too_late(options: Mapping[str, Any]) -> dict[str, int]:
    """A delay that lets no canary end in time, as `DryRun.waits_for` has it."""
    canary, delay = Canary.from_json(options.get("canary")), options.get("delay_seconds", 0)
    if canary is None or delay < canary.wait_seconds:
        return {}
    watched = f"longer than the canary is watched, {canary.wait_seconds:g} s"
    return {f"the delay of {delay:g} s, which is {watched}": canary.letters}


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
