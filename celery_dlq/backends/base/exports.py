"""The lease that lets one export at a time write to a place."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, runtime_checkable


class ExportLease(NamedTuple):
    """Result of asking for the lease on a place that a queue is exported to.

    Attributes:
        acquired: True if the caller holds the lease.
        state: The last state noted, if acquired; else ``owner|end``, the end in milliseconds
            since 1970.
    """

    acquired: bool
    state: str


@runtime_checkable
class ExportLeaseStore(Protocol):
    """A store that all machines share and that can therefore grant export leases."""

    def identity(self) -> str:
        """Return a random id, made by the first call, that the store keeps for ever.

        A restarted or restored store, and a replica, have the same; an emptied one has not.

        Raises:
            StoreUnavailable: The store does not answer.
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
        """Acquire, renew, annotate or end a lease.

        Args:
            dead_letter_queue: The queue that is exported.
            what: ``take``: acquire it if it is free; ``keep``: renew it; ``note``: renew it and
                store ``state``; ``end``: give it up. The last three need the lease.
            place: Where the files go.
            owner: The caller's name, without ``|``.
            lease_seconds: Time after which the lease is free unless renewed.
            state: Text to store; every later owner gets it.

        Raises:
            StoreUnavailable: The store does not answer.
        """
