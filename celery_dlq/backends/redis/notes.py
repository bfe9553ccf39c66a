"""Notes on groups, in Redis; also if the letters are on a broker."""

from __future__ import annotations

import json

from celery_dlq.backends.base.notes import KEPT_DAYS, MAX_NOTES, Note
from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.keys import spelled
from celery_dlq.backends.redis.part import RedisPart
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.store")

_KEPT_MILLIS = KEPT_DAYS * 24 * 3600 * 1000


class RedisNotes(RedisPart):
    """The `GroupNotes` in Redis.

    Notes that are overdue are removed when the next one is written in their queue. For letters on
    a broker, Redis does not know the groups: their notes are kept for `KEPT_DAYS` after the last.
    """

    def add(self, dead_letter_queue: str, fingerprint: str, note: Note) -> None:
        """Add a note."""
        keys, name = self._keys, dead_letter_queue
        with translated(self._url):
            self._scripts.note(
                keys=[keys.notes(name), keys.noted(name), keys.groups(name)],
                args=[spelled(fingerprint), json.dumps(note.to_stored()), MAX_NOTES, _KEPT_MILLIS],
            )

    def notes(self, dead_letter_queue: str, fingerprint: str) -> list[Note]:
        """Return the notes on a group."""
        with translated(self._url):
            text = self._client.hget(self._keys.notes(dead_letter_queue), spelled(fingerprint))
        found = []
        for line in reversed((text or b"").splitlines()):
            try:
                found.append(Note.from_stored(json.loads(line)))
            except (KeyError, ValueError, TypeError) as exc:  # for example from a later version
                logger.warning("Skipped a note on %s that cannot be read: %r", fingerprint, exc)
        return found
