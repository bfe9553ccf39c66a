"""A lease: a right that one process of many has at a time, with a state that the next one finds.

Its holder renews it. One that does not loses it after a while, also if it is only paused: so
whoever must not write twice saves what it is about to do with `Lease.note`, which checks the lease
and keeps the state in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from celery_dlq.store.part import Part


class LeaseReply(NamedTuple):
    """Reply to a request for a lease."""

    acquired: bool  # True if the caller has the lease
    # The last state noted, if acquired; else `owner|end`, the end in milliseconds since 1970
    state: str


class Leases(Part):
    """Grants leases about a dead-letter queue, by the clock of Redis."""

    def of(self, dead_letter_queue: str, name: str, owner: str, seconds: float) -> Lease:
        """Return an owner's lease; nothing is asked yet."""
        return Lease(self, dead_letter_queue, name, owner, seconds)

    def ask(
        self,
        lease: Lease,
        what: Literal["take", "keep", "note", "end"],
        state: str = "",
    ) -> LeaseReply:
        """Acquire, renew, annotate or end a lease."""
        args: list[str | int] = [what, lease.name, lease.owner, int(lease.seconds * 1000), state]
        acquired, noted = self._call("lease", *args, queue=lease.dead_letter_queue)
        return LeaseReply(bool(acquired), noted.decode("utf-8", "backslashreplace"))


@dataclass(frozen=True, slots=True)
class Lease:
    """One owner's lease; another owner has a `Lease` of its own, of the same name."""

    leases: Leases
    dead_letter_queue: str
    name: str  # What it is the right to, e.g. the place that a queue is exported to
    owner: str  # Its owner, different for each run; without "|"
    seconds: float  # It is free after this long, unless renewed

    def acquire(self) -> LeaseReply:
        """Acquire it, if nobody has it."""
        return self.leases.ask(self, "take")

    def renew(self) -> bool:
        """Renew it; False if another process has it."""
        return self.leases.ask(self, "keep").acquired

    def note(self, state: str) -> LeaseReply:
        """Keep a state for the next owner, if the lease is still held, and renew it."""
        return self.leases.ask(self, "note", state)

    def release(self) -> None:
        """Let the next process have it."""
        self.leases.ask(self, "end")
