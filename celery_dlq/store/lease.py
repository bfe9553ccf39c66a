"""A lease: a right that one process of many has at a time, with a state that the next one finds.

Its holder renews it. One that does not loses it after a while, also if it is only paused: so
whoever must not write twice saves what it is about to do with `Lease.save_state`, which checks the
lease and keeps the state in one step.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from celery_dlq.store.part import Part

if TYPE_CHECKING:
    from celery_dlq.store.store import Store


class LeaseReply(NamedTuple):
    """Reply to a request for a lease."""

    acquired: bool  # True if the caller has the lease
    # The last state noted, if acquired; else `owner|end`, the end in milliseconds since 1970
    state: str


class Lease(Part):
    """One owner's lease about a dead-letter queue, by the clock of Redis.

    Another owner has a `Lease` of its own, of the same name: what it is the right to, e.g. the
    place that a queue is exported to. An owner is different for each run, and has no "|". The lease
    is free after so many seconds, unless renewed.
    """

    def __init__(
        self, store: Store, dead_letter_queue: str, name: str, owner: str, seconds: float
    ) -> None:
        super().__init__(store)
        self.dead_letter_queue = dead_letter_queue
        self.name, self.owner, self.seconds = name, owner, seconds

    def acquire(self) -> LeaseReply:
        """Acquire it, if nobody has it."""
        return self.request("take")

    def renew(self) -> bool:
        """Renew it; False if another process has it."""
        return self.request("keep").acquired

    def save_state(self, state: str) -> LeaseReply:
        """Keep a state for the next owner, if the lease is still held, and renew it."""
        return self.request("note", state)

    def release(self) -> None:
        """Let the next process have it."""
        self.request("end")

    def request(self, what: str, state: str = "") -> LeaseReply:
        """Take, keep, note, end or forget it; see ``lease.lua``."""
        args = (what, self.name, self.owner, int(self.seconds * 1000), state)
        acquired, noted = self._run_script("lease", *args, queue=self.dead_letter_queue)
        return LeaseReply(bool(acquired), noted.decode("utf-8", "backslashreplace"))
