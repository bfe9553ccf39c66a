"""How one export at a time writes to a place."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable


class ExportLease(NamedTuple):
    """Whose turn it is to export a queue to a place.

    Attributes:
        acquired: Whether it is the asker's.
        state: What was noted last if it is; else who has it, and until when.
    """

    acquired: bool
    state: str


@runtime_checkable
class ExportLeaseStore(Protocol):
    """What a store can do that all machines share: let one export at a time write to a place."""

    def export_lease(
        self,
        dead_letter_queue: str,
        what: Literal["take", "keep", "note", "end"],
        place: str,
        *,
        owner: str,
        lease_seconds: float,
        state: str = "",
    ) -> ExportLease:
        """Take the turn if it is free, keep it, note something if it is still ours, or end it.

        Args:
            dead_letter_queue: What is exported.
            what: What to do.
            place: Where the files go.
            owner: Who asks.
            lease_seconds: How long the turn is kept without a heartbeat.
            state: What to note; it is there for every later owner.
        """
