"""The reports of finished operations."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from itertools import islice
from typing import Any

from celery_dlq.letters.printable import one_line, shortened

_MAX_FAILURES_LISTED = 1000
_MOST_FAILED = 20
_MAX_ERROR_CHARS = 300

REDRIVE_COUNTS = (
    "published",
    "finished",
    "maybe_twice",
    "skipped",
    "corrupt",
    "failures",
    "refused",
)
"""The numbers of a redrive that its job keeps for a later run."""

MOST_COUNTED = 10_000
"""The letters that a change of a policy would remove or redrive are counted up to here."""


@dataclass(slots=True)
class RedriveReport:
    """The result of a redrive, in numbers of letters.

    Attributes:
        redrive_id: Id of the redrive and of its job, also in the header ``dlq_redrive`` of every
            message.
        published: Published, then removed.
        finished: Published by an interrupted redrive; now only removed.
        maybe_twice: Of those published, how many may be there twice: an interrupted redrive may
            have published them before, or the broker's reply to an earlier attempt was lost.
            Their header ``dlq_letter`` identifies the second copy.
        skipped: Claimed by another operator, or gone.
        corrupt: Entries that are no letters; skipped.
        failed: Errors by letter id, for letters whose message the broker did not take; they
            stay. The first 1,000 are listed.
        failures: Number of all such letters.
        doubtful: Of those failures, how many the broker may have taken nevertheless.
        refused: Number of letters that stay because their message would be lost.
        refused_by: Such letters by queue or task, with the reason. The first 1,000 are listed.
        canary: Result of the canary, if there was one: numbers of letters, the ids of the
            ``holds`` that have some, and the ``verdict`` (``passed``, ``died again``, ``held`` or
            ``not finished``).
        state: ``done``, ``cancelled``, ``stopped`` (by the canary), ``failed`` (the broker
            refused every batch, or blocks publishers) or ``interrupted`` (another process goes
            on with the job).
    """

    redrive_id: str
    published: int = 0
    finished: int = 0
    maybe_twice: int = 0
    skipped: int = 0
    corrupt: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    failures: int = 0
    doubtful: int = 0
    refused: int = 0
    refused_by: dict[str, int] = field(default_factory=dict)
    canary: dict[str, Any] | None = None
    state: str = "done"

    @property
    def touched(self) -> int:
        """Number of letters processed."""
        return self.published + self.finished + self.skipped + self.corrupt + self.failures

    def counts(self) -> dict[str, int]:
        """The numbers, for the job."""
        return {name: getattr(self, name) for name in REDRIVE_COUNTS}

    def first_failures(self) -> dict[str, str]:
        """The first errors, short, for the job."""
        first = islice(self.failed.items(), _MOST_FAILED)
        return {key: shortened(one_line(error), _MAX_ERROR_CHARS) for key, error in first}

    def fail(self, letter_id: str, error: str) -> None:
        """Record a letter that stays."""
        self.failures += 1
        if len(self.failed) < _MAX_FAILURES_LISTED:
            self.failed[letter_id] = error

    def refuse(self, why: str) -> None:
        """Record a letter that stays because its message would be lost."""
        self.refused += 1
        if why in self.refused_by or len(self.refused_by) < _MAX_FAILURES_LISTED:
            self.refused_by[why] = self.refused_by.get(why, 0) + 1

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True)
class DiscardReport:
    """The result of a discard or purge, in numbers of letters.

    Attributes:
        job_id: Id of its job.
        removed: Removed from their queue.
        kept_until: Time until which the bin keeps them, ISO 8601; ``None`` if it does not.
        skipped: Claimed by another operator, or gone.
        exported: Written to ``export_path`` first.
        export_path: The Parquet file, if an export was requested.
        state: ``done``, ``cancelled`` or ``interrupted`` (another process goes on with the job).
    """

    job_id: str
    removed: int = 0
    kept_until: str | None = None
    skipped: int = 0
    exported: int = 0
    export_path: str | None = None
    state: str = "done"

    @property
    def touched(self) -> int:
        """Number of letters processed."""
        return self.removed + self.skipped

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyEffect:
    """What a change of a policy would do to the letters that are there now."""

    dead_letter_queue: str  # Their queue
    removed: int = 0  # Letters that retention would remove
    redriven: int = 0  # Letters that would be redriven automatically, sooner or later

    def __str__(self) -> str:
        """In words; empty for nothing."""
        counts = {"removes": self.removed, "redrives": self.redriven}
        return " and ".join(
            f"{verb} {'at least ' * (number >= MOST_COUNTED)}{number:,} letter{'s' * (number > 1)} "
            f"of {self.dead_letter_queue}"
            for verb, number in counts.items()
            if number
        )
