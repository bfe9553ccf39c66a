"""What operations say of themselves when they are done."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

_MOST_TOLD = 1000


@dataclass(slots=True)
class RedriveReport:
    """What a redrive did.

    Attributes:
        redrive_id: Its id, also in the header ``dlq_redrive`` of every message; the id of its job.
        published: Letters whose message the broker took, removed afterwards.
        finished: Letters that an interrupted redrive had published; now only removed.
        maybe_twice: Of those published, how many an interrupted redrive may have published
            before; their header ``dlq_letter`` makes the second copy visible.
        skipped: Letters that another operator holds, or that were gone.
        corrupt: Entries that are no letters; passed over.
        failed: Letters whose message the broker did not take, with the error; they stay. The
            first thousand are named.
        failures: How many those are.
        doubtful: Of those, how many the broker may have taken all the same.
        canary: What became of the canary, if there was one.
        state: ``done``, ``cancelled`` or ``stopped`` (by the canary).
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
    canary: dict[str, int] | None = None
    state: str = "done"

    @property
    def touched(self) -> int:
        """How many letters were looked at."""
        return self.published + self.finished + self.skipped + self.corrupt + self.failures

    def fail(self, letter_id: str, error: str) -> None:
        """Note a letter that stays."""
        self.failures += 1
        if len(self.failed) < _MOST_TOLD:
            self.failed[letter_id] = error

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


@dataclass(slots=True)
class DiscardReport:
    """What a discard or purge did.

    Attributes:
        job_id: The id of its job.
        removed: Letters that are gone from their queue.
        kept_until: Whether they lie in the bin, and until when; ISO 8601, or ``None``.
        skipped: Letters that another operator holds, or that were gone.
        exported: Letters that were written to ``export_path`` before.
        export_path: The Parquet file, if one was asked for.
        state: ``done`` or ``cancelled``.
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
        """How many letters were looked at."""
        return self.removed + self.skipped

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
