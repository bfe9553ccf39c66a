"""The lease that lets one export at a time write to a place."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable


class ExportLease(NamedTuple):
    """Result of asking for the lease on a place that a queue is exported to."""

    acquired: bool  # True if the caller holds the lease
    # The last state noted, if acquired; else `owner|end`, the end in milliseconds since 1970
    state: str


@runtime_checkable
class ExportLeaseStore(Protocol):
    """A store that all machines share and that can therefore grant export leases."""

    def identity(self) -> str:
        """Return a random id, made by the first call, that the store keeps for ever.

        A restarted or restored store, and a replica, have the same; an emptied one has not.
        """

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
        """Acquire, renew, annotate or end a lease."""
