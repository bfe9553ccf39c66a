"""New letters in Redis; a worker that runs tasks stores letters, and reads none.

`celery_dlq.store.letters` reads and removes them.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import quote

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import DeadLetter, end_of, to_micros
from celery_dlq.store.keys import Keys, spelled
from celery_dlq.store.part import QueueNames
from celery_dlq.store.pipelined import Command
from celery_dlq.store.worker_records import MessageKey, Stored

if TYPE_CHECKING:
    from celery_dlq.store.store import Store

_MAX_KNOWN_QUEUES = 1000
_MAX_DOUBTFUL = 10_000
_MAX_RELEASE_CHARS = 100

FACTS = ("task_name", "reason", "exception_type")
"""The fields of a letter that its group keeps."""


class NewLetters(QueueNames):
    """Stores letters."""

    def __init__(
        self, store: Store, keys: Keys | None = None, ttl_seconds: float | None = None
    ) -> None:
        super().__init__(store, keys)
        ttl = store.count_ttl if ttl_seconds is None else ttl_seconds
        self._ttl_millis = int(ttl * 1000)
        self._named: set[str] = set()
        # Ids of letters that may be stored: a reply was lost, or no replica has it.
        self._doubtful: set[str] = set()

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter and delete the message's counters, in one atomic step.

        A letter whose id is there already is not stored again.
        The first letter of a resolved group makes it regressed; see ``lua/parts/state.lua``.
        """
        name = letter.dead_letter_queue
        entry = [part for pair in packed(letter.to_fields()).items() for part in pair]
        end = end_of(letter)
        args = [
            letter.id,
            letter.reason.value,
            letter.fingerprint,
            to_micros(letter.dead_lettered_at),
            json.dumps({fact: getattr(letter, fact) for fact in FACTS}),
            key.place,
            self._ttl_millis,
            "" if end is None else to_micros(end),
            release_text(letter.release),
        ]
        # Else a letter whose reply was lost would be taken for another worker's, and not told.
        more = [*args, 1, *entry]
        args += [int(letter.id in self._doubtful), *entry]
        add: Command = ("SADD", self._keys.queues(), spelled(name))
        self._connection.raise_if_away()
        try:
            if name not in self._named:  # operators never find a letter in a queue not listed
                self._connection.send_and_wait(*add)
                if len(self._named) < _MAX_KNOWN_QUEUES:
                    self._named.add(name)
            run = self._keys.run(key)
            reply = self._written("dead_letter", *args, before=add, again=more, queue=name, run=run)
            self._connection.wait_for_replica(run)
        except StoreUnavailable:
            if len(self._doubtful) < _MAX_DOUBTFUL:
                self._doubtful.add(letter.id)
            raise
        self._doubtful.discard(letter.id)
        return Stored(reply)

    def length(self, dead_letter_queue: str) -> int:
        """Return the number of letters in a queue."""
        return int(self._client.xlen(self._keys.letters(dead_letter_queue)))


def release_text(release: str | None) -> str:
    """Return a release as it is written into the value of a group."""
    return quote((release or "")[:_MAX_RELEASE_CHARS], safe="+@ ", errors="backslashreplace")
