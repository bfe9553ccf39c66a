"""Redrive in one step, where the broker's queues and the letters are on one Redis server.

A batch of letters is published and removed by one script, so that a letter is either in its
dead-letter queue or published, wherever the redrive is killed. Claims are not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY
from celery_dlq.operations.job import CancelledError
from celery_dlq.operations.redrive.claimed import ByClaims
from celery_dlq.operations.redrive.publisher import Publisher, not_published
from celery_dlq.operations.redrive.work import TAKEN, RedriveWork
from celery_dlq.store.claims import ClaimState, RedriveCall
from celery_dlq.store.records import QueueEntry
from celery_dlq.transport.redis.envelopes import Envelopes

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.message import Prepared
    from celery_dlq.operations.redrive.select import RawEntry

MOST_LETTERS = 100
"""Letters in one step: Redis serves nobody else for about three milliseconds."""

MOST_BYTES = 6 * 1024 * 1024
"""Bytes of bodies and headers in one step; in Base64 a third more. A larger letter goes alone."""


class OneStep:
    """Redrives batches of letters, each in one step; the next is prepared meanwhile.

    What cannot go in one step is redriven by claims: a queue whose messages expire, or all that
    is left if Redis refuses the script.
    """

    batch_size = MOST_LETTERS
    max_bytes = MOST_BYTES

    def __init__(
        self, work: RedriveWork, publisher: Publisher, envelopes: Envelopes, claimed: ByClaims
    ) -> None:
        self._work = work
        self._publisher = publisher
        self._envelopes = envelopes
        self._claimed = claimed
        self._refused = False
        self._batch: Sequence[Prepared] = ()
        self._call: RedriveCall | None = None

    @classmethod
    def of(cls, work: RedriveWork, publisher: Publisher, claimed: ByClaims) -> OneStep | None:
        """One if the broker's client sees a key that the store has just written for it."""
        envelopes = publisher.envelopes()
        with suppress(StoreUnavailable, *publisher.errors):
            key = envelopes and work.store.claims.marker(envelopes.database)
            if envelopes and key and envelopes.reaches(key):
                return cls(work, publisher, envelopes, claimed)
        return None

    def redrive_batch(self, batch: Sequence[RawEntry]) -> None:
        """Prepare some letters while the batch before is on its way, then send them."""
        if self._refused:
            self._claimed.redrive_batch(batch)
            return
        ready: list[Prepared] = []
        entries: list[QueueEntry] = []
        for prepared in self._work.prepared(batch):
            try:
                entries.append(self._queue_entry(prepared))
            except (TypeError, ValueError) as exc:
                why = not_published(prepared.message, exc)
                self._work.report.record_failure(prepared.found.key, why)
            else:
                ready.append(prepared)
        self._count_batch()
        queues = {prepared.message.queue for prepared in ready}
        if self._refused or not self._can_take(queues):
            self._claimed.redrive_batch([prepared.found for prepared in ready])
        elif ready:
            run = self._work.run
            self._call = self._work.store.claims.redrive(
                run.job.queue,
                entries,
                job_id=run.job.id,
                owner=run.owner,
                database=self._envelopes.database,
                previous_run_prefix=run.previous_run_prefix,
            )
            self._batch = ready
            self._call.send()

    def wait_for_batch(self) -> None:
        """Wait for the last batch."""
        self._count_batch()
        self._claimed.wait_for_batch()

    def close(self) -> None:
        """Count a batch that was on its way when an error or Ctrl-C ended the redrive."""
        with suppress(DLQError, CancelledError):  # the first error is the one to raise
            batch, states = self._wait_for_reply()
            if batch and states is not None:
                self.count_sent(batch, states)
                self._work.send_heartbeat()
        self._claimed.close()

    def _can_take(self, queues: set[str]) -> bool:
        """Declare queues as for a publish; true if messages to them can go in one step."""
        try:
            known = self._publisher.declare(queues)
        except self._publisher.errors:
            return False
        return not any(map(self._envelopes.expires, known))

    def _queue_entry(self, prepared: Prepared) -> QueueEntry:
        """What the letter becomes."""
        found, message, seed = prepared
        queue, properties = message.queue, message.properties
        entry: str | bytes = message.body
        if message.content_type != CONTENT_TYPE_OF_ENTRY:
            entry = self._envelopes.entry_text(
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

    def _wait_for_reply(self) -> tuple[Sequence[Prepared], Sequence[ClaimState] | None]:
        """Wait for the last batch; the states in which its letters were found, if it was taken."""
        if not self._batch:
            return (), ()
        states = None if self._call is None else self._call.wait_for_states()
        batch, self._batch = self._batch, ()
        return batch, states

    def _count_batch(self) -> None:
        """Count the last batch; if it was refused, it goes by claims, and so do the next ones."""
        if self._refused:
            return
        batch, states = self._wait_for_reply()
        if states is None:
            self._refused = True
            self._claimed.redrive_batch([prepared.found for prepared in batch])
        else:
            self.count_sent(batch, states)

    def count_sent(self, batch: Sequence[Prepared], states: Sequence[ClaimState]) -> None:
        """Report what the script did with each letter of a batch."""
        report = self._work.report
        done = [prepared for prepared, state in zip(batch, states, strict=True) if state in TAKEN]
        report.published += len(done)
        report.maybe_twice += states.count(ClaimState.RECLAIMED)
        report.finished += states.count(ClaimState.PUBLISHED)
        report.gone += states.count(ClaimState.GONE)
        report.skipped += states.count(ClaimState.HELD) + states.count(ClaimState.GONE)
        self._work.published(done)
