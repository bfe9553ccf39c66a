"""Redrive where broker and letters do not share a Redis server: claim, publish, mark, remove.

Each batch is claimed, so that no other operator publishes it; published and confirmed; marked as
published; and removed. After a crash the next run finds what was marked, and only removes it. One
batch at most is uncertain: its letters are published again, and counted as ``maybe_twice``.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from celery_dlq import timing
from celery_dlq.operations.redrive.publisher import PublishResult
from celery_dlq.operations.redrive.select import MAX_BATCH_BYTES
from celery_dlq.operations.redrive.work import TAKEN, RedriveWork
from celery_dlq.store.claims import ClaimState

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.message import Prepared
    from celery_dlq.operations.redrive.publisher import Publisher
    from celery_dlq.operations.redrive.select import RawEntry


class RunClaims(PublishResult):
    """The letters of a batch that are ours while their messages are published.

    A slow broker may let a batch outlast its lease, and a paused machine the patience of others
    with its job: both are renewed between two messages.
    """

    def __init__(self, work: RedriveWork, letter_ids: Sequence[str]) -> None:
        super().__init__()
        self._work = work
        self._states = self._claimed(letter_ids)
        self.reclaimed = self.found_in_state(ClaimState.RECLAIMED)
        self.lost: set[str] = set()

    def found_in_state(self, state: ClaimState) -> list[str]:
        """The letters that were found in a state at first."""
        return [letter_id for letter_id, found in self._states.items() if found is state]

    def owns(self, letter_id: str) -> bool:
        """True for a letter that is ours."""
        return self._states[letter_id] in TAKEN and letter_id not in self.lost

    def renew_when_due(self, waiting_for: str = "") -> None:
        """Renew job and claims when it is time."""
        self._work.run.update(note=waiting_for)
        self._work.send_heartbeat()
        if time.monotonic() - self._claimed_at < timing.current.claim / 4:
            return
        ours = [letter_id for letter_id in self._states if self.owns(letter_id)]
        for letter_id, state in self._claimed(ours).items():
            if state is ClaimState.HELD:
                self.lost.add(letter_id)

    def count_again(self, messages: int) -> None:
        """Save the number first: after a crash, nobody could tell how many copies there are."""
        super().count_again(messages)
        report = self._work.report
        report.maybe_twice += messages
        if self.doubtful:  # of those that were reclaimed, the store knows
            self._work.run.send_heartbeat(report.counts(), now=True)

    def _claimed(self, letter_ids: Sequence[str]) -> dict[str, ClaimState]:
        self._claimed_at = time.monotonic()  # before the store's clock starts the lease
        return self._work.run.claimed(self._work.store, letter_ids, timing.current.claim)


class ByClaims:
    """Redrives batches of letters; their claims record every result for the next run.

    The letters of a batch are removed in the background, while the next one is prepared.
    """

    def __init__(self, work: RedriveWork, publisher: Publisher) -> None:
        self._work = work
        self._publisher = publisher
        self._background = ThreadPoolExecutor(1, thread_name_prefix="dlq-background")
        self._removal: Future[object] | None = None
        self.batch_size = publisher.batch_size
        self.max_bytes = MAX_BATCH_BYTES

    def redrive_batch(self, batch: Sequence[RawEntry]) -> None:
        """Redrive a batch; its letters may be removed in the background."""
        work = self._work
        queue, owner = work.run.job.queue, work.run.owner
        claims = RunClaims(work, [found.key for found in batch])
        finished = claims.found_in_state(ClaimState.PUBLISHED)
        ours = [found for found in batch if claims.owns(found.key)]
        work.report.finished += len(finished)
        work.report.gone += len(claims.found_in_state(ClaimState.GONE))
        work.report.skipped += len(batch) - len(finished) - len(ours)
        ready: list[Prepared] = []
        try:
            for prepared in work.prepared(ours):
                if prepared.seed is not None:
                    claims.renew_when_due()
                    work.store.claims.seed_count(*prepared.seed)
                ready.append(prepared)
            self._publisher.publish([prepared.message for prepared in ready], claims)
        finally:  # also on Ctrl-C
            self.mark_and_remove(claims, finished)
            confirmed = claims.confirmed_set
            work.published([one for one in ready if one.found.key in confirmed])
            unused = [found.key for found in ours if found.key not in confirmed]
            doubtful = [key for key in unused if key in claims.doubtful]
            certain = [key for key in unused if key not in claims.doubtful]
            work.store.claims.release(queue, certain, owner=owner)
            work.store.claims.release(queue, doubtful, owner=owner, doubtful=True)

    def wait_for_batch(self) -> None:
        """Wait until the letters of the last batch are removed; raises the error of that."""
        if self._removal is not None:
            self._removal.result()
            self._removal = None

    def close(self) -> None:
        """End, after an error too: the next run removes what this one could not."""
        self._background.shutdown(wait=True)

    def mark_and_remove(self, sent: RunClaims, finished: list[str]) -> None:
        """Mark first, remove second: after a crash in between, only the removal is left."""
        work, over = self._work, [*finished, *sent.confirmed]
        report, queue, owner = work.report, work.run.job.queue, work.run.owner
        report.published += len(sent.confirmed)
        report.doubtful += len(sent.doubtful)
        report.skipped += len(sent.lost - sent.confirmed_set)
        for letter_id, error in (*sent.refused.items(), *sent.doubtful.items()):
            report.record_failure(letter_id, error)
        work.store.claims.mark_published(queue, over, owner=owner)
        self.wait_for_batch()
        operation = work.run.operation
        self._removal = self._background.submit(
            work.store.remove, queue, over, owner=owner, operation=operation
        )
