"""Exports in Redis: how far a queue is exported, and leases on the places exported to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from uuid import uuid4

from celery_dlq.store.connect import translated
from celery_dlq.store.part import Part
from celery_dlq.store.records import ExportLease, ordered
from celery_dlq.store.scripts import ExportLeaseReply


class Exports(Part):
    """Export positions and leases, wherever the letters are kept."""

    def note(self, dead_letter_queue: str, position: str) -> None:
        """Record how far a queue is exported; see `Letters.note_exported`."""
        with translated(self._url):
            self._scripts.note_exported(
                keys=[self._keys.exported(dead_letter_queue)], args=[position]
            )

    def until(
        self, dead_letter_queue: str, last_position: Callable[[str], str | None]
    ) -> str | None:
        """Return how far a queue is exported; see `Letters.exported_until`."""
        with translated(self._url):
            noted = self._client.get(self._keys.exported(dead_letter_queue))
        if noted is None:
            return None
        position, last = str(noted.decode()), last_position(dead_letter_queue)
        return None if last is None or ordered(last) < ordered(position) else position

    def identity(self) -> str:
        """Return a random id, made by the first call, that the store keeps for ever.

        A restarted or restored store, and a replica, have the same; an emptied one has not.
        """
        with translated(self._url):
            found = self._scripts.identity(keys=[self._keys.identity()], args=[uuid4().hex])
        return str(found.decode("utf-8", "backslashreplace"))

    def export_lease(
        self,
        dead_letter_queue: str,
        what: str,
        place: str,
        *,
        owner: str,
        lease_seconds: float,
        state: str = "",
    ) -> ExportLease:
        """Acquire, renew, annotate or end a lease."""
        args: list[Any] = [what, place, owner, int(lease_seconds * 1000), state]
        with translated(self._url):
            reply, noted = self._scripts.export_lease(
                keys=[self._keys.export_leases(dead_letter_queue)], args=args
            )
        return ExportLease(
            reply == ExportLeaseReply.ACQUIRED, noted.decode("utf-8", "backslashreplace")
        )
