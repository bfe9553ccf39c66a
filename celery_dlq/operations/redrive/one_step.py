"""Redrive in one step, where the broker's queues and the letters are in one Redis database.

A batch of letters is published and removed by one script, so that a letter is either in its
dead-letter queue or published, wherever the redrive is killed. Claims are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY
from celery_dlq.operations.jobs import JobRun
from celery_dlq.operations.redrive.message import Outgoing
from celery_dlq.operations.redrive.publisher import Publisher
from celery_dlq.operations.redrive.selection import RawEntry
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import ClaimState, QueueEntry, Seed
from celery_dlq.store.redriven import RedriveCall
from celery_dlq.transport.redis.envelope import Envelopes

MOST_LETTERS = 100
"""Letters in one step: Redis serves nobody else for about three milliseconds."""

MOST_BYTES = 6 * 1024 * 1024
"""Bytes of bodies and headers in one step; in Base64 a third more. A larger letter goes alone."""


class Prepared(NamedTuple):
    """A letter that is ready to be redriven."""

    found: RawEntry
    message: Outgoing
    seed: Seed | None


class OneStep:
    """Redrives batches of letters, each in one step; the next is prepared meanwhile."""

    def __init__(self, store: Letters, run: JobRun, envelopes: Envelopes) -> None:
        self._store = store
        self._run = run
        self._envelopes = envelopes
        self._batch: Sequence[Prepared] = ()
        self._call: RedriveCall | None = None

    @classmethod
    def of(cls, store: Letters, run: JobRun, publisher: Publisher) -> OneStep | None:
        """Return one if the broker's client sees a key that the store has just written."""
        envelopes = publisher.envelopes()
        with suppress(StoreUnavailable, *publisher.errors):
            key = None if envelopes is None else store.marker()
            if envelopes is not None and key is not None and envelopes.reaches(key):
                return cls(store, run, envelopes)
        return None

    def takes(self, publisher: Publisher, queues: set[str]) -> bool:
        """Declare queues as for a publish; return True if messages to them can go in one step."""
        try:
            publisher.declare(queues)
        except publisher.errors:
            return False
        return not any(map(self._envelopes.expires, queues))

    def entry(self, prepared: Prepared) -> QueueEntry:
        """Return what the letter becomes."""
        found, message, seed = prepared
        queue, properties = message.queue, message.properties
        entry: str | bytes = message.body
        if message.content_type != CONTENT_TYPE_OF_ENTRY:
            entry = self._envelopes.text(
                message.body,
                queue=queue,
                content_type=message.content_type,
                content_encoding=message.content_encoding,
                headers=message.headers_text or message.headers,
                properties=properties,
            )
        key = self._envelopes.list_key(queue, properties.get("priority"))
        fields = found.fields
        return QueueEntry(
            found.key, found.position, fields[b"reason"], fields[b"fingerprint"], key, entry, seed
        )

    def start(
        self,
        batch: Sequence[Prepared],
        entries: Sequence[QueueEntry],
    ) -> None:
        """Redrive a batch; `finish` must have returned the one before."""
        run = self._run
        self._call = self._store.redrive(
            run.job.queue,
            entries,
            job_id=run.job.id,
            owner=run.owner,
            previous_run_prefix=run.previous_run_prefix,
        )
        self._batch = batch
        if self._call is not None:
            self._call.send()

    def finish(self) -> tuple[Sequence[Prepared], Sequence[ClaimState] | None]:
        """Wait for the last batch; return it with the states in which its letters were found."""
        if not self._batch:
            return (), ()
        states = None if self._call is None else self._call.states()
        batch, self._batch = self._batch, ()
        return batch, states
