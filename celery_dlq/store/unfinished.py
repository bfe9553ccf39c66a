"""The messages of a redrive that have not ended, in the hash of what its job did."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict

from celery_dlq.store.keys import text_of
from celery_dlq.store.part import Part
from celery_dlq.store.worker_records import MessageKey

_NAME = "open:"  # begins the names of the fields
_KEPT_MILLIS = 30 * 86_400_000


class UnfinishedMessages(Part):
    """Keeps them for whoever resumes the job: a killed process takes no note with it."""

    def note(self, queue: str, operation_id: str, key: MessageKey, letter_id: str) -> None:
        """Note a message that is about to be published, and of which letter it is."""
        place = self._keys.operation(queue, operation_id)
        pipe = self._client.pipeline(transaction=False)
        pipe.hset(place, _name(key), letter_id)
        pipe.pexpire(place, _KEPT_MILLIS)
        pipe.execute()

    def noted(self, queue: str, operation_id: str) -> dict[MessageKey, str]:
        """Return the messages that were noted, and the ids of their letters."""
        found = self._client.hgetall(self._keys.operation(queue, operation_id)).items()
        fields = ((text_of(name), text_of(letter_id)) for name, letter_id in found)
        return {
            MessageKey(**json.loads(name.removeprefix(_NAME))): letter_id
            for name, letter_id in fields
            if name.startswith(_NAME)
        }

    def forget(self, queue: str, operation_id: str, keys: Collection[MessageKey]) -> None:
        """Take messages off the list: they have ended, or were not published."""
        if keys:
            self._client.hdel(self._keys.operation(queue, operation_id), *map(_name, keys))


def _name(key: MessageKey) -> str:
    return _NAME + json.dumps(asdict(key))
