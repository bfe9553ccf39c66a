"""Holds in Redis; also if the letters are on a broker."""

from __future__ import annotations

import json
from uuid import uuid4

from celery_dlq.logs import readable
from celery_dlq.store.base import Hold
from celery_dlq.store.connect import translated
from celery_dlq.store.keys import Keys, spelled
from celery_dlq.store.part import RedisPart
from celery_dlq.store.scripts import DropHeldReply, ReplaceHoldReply


class RedisHolds(RedisPart):
    """The `HoldStore` in Redis."""

    def all(self) -> list[Hold]:
        """Return all holds."""
        with translated(self._url):
            texts = self._client.hvals(self._keys.holds())
        found = [hold for hold in map(_read, texts) if hold is not None]
        return sorted(found, key=lambda hold: (hold.created_at, hold.id))

    def replace(self, known: Hold | None, hold: Hold | None) -> bool:
        """Add, change or remove a hold."""
        target = known or hold
        if target is None:
            return False
        name = spelled(target.id)
        with translated(self._url):
            # Its own text: that of a later version may have more keys.
            text = self._client.hget(self._keys.holds(), name)
            if (None if text is None else _read(text)) != known:
                return False
            if hold is None and not self._dropped(target.id):
                return False
            reply = self._scripts.replace_hold(
                keys=[self._keys.holds(), self._keys.overrides()],
                args=[name, text or "", "" if hold is None else _text(hold)],
            )
        return bool(reply == ReplaceHoldReply.REPLACED)

    def _dropped(self, hold_id: str) -> bool:
        """Remove the queue of a hold, if it is empty."""
        keys = Keys(f"{self._keys.prefix}:held")
        if self._scripts.drop_held(keys=[keys.letters(hold_id)]) != DropHeldReply.DROPPED:
            return False
        self._client.srem(keys.queues(), spelled(hold_id))
        return True


def _text(hold: Hold) -> str:
    """The text of a hold, which no other call writes: what is there is known as our own."""
    stored = {**hold.to_stored(), "written": uuid4().hex}
    return json.dumps(stored, separators=(",", ":"), sort_keys=True)


def _read(text: bytes) -> Hold | None:
    return readable("a hold", lambda: Hold.from_stored(json.loads(text)))
