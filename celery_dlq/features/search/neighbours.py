"""The letter of the same cause before another one, and the one after it."""

from __future__ import annotations

from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.keys import spelled, text_of
from celery_dlq.store.part import Part
from celery_dlq.web.http import Call, Panel

MOST, MOST_BYTES = 500, 4 * 1024 * 1024
"""Letters, and their bytes, among which Redis looks for each of the two."""


class Neighbours(Part):
    """Finds the next letter of a cause; bodies stay in Redis."""

    lua = "celery_dlq.features.search"

    def next_letter(self, queue: str, letter: DeadLetter, *, older: bool) -> str | None:
        """Return its id; empty if there is none, ``None`` if it is far away."""
        place = self._client.hget(self._keys.ids(queue), spelled(letter.id))
        if place is None:
            return ""
        args = (text_of(place), int(older), letter.fingerprint, MOST, MOST_BYTES)
        found = self._run_script("next", *args, queue=queue)
        return text_of(found) if isinstance(found, bytes) else None if found else ""


def links(call: Call, letter: DeadLetter) -> Panel:
    """Links to both; to the list where one is too far away."""
    part, queue = call.dlq.assembly.backend.part(Neighbours), call.parts["queue"]
    found = {
        way: part.next_letter(queue, letter, older=way == "older") for way in ("newer", "older")
    }
    return "neighbours.html", {"found": found, "fingerprint": letter.fingerprint}
