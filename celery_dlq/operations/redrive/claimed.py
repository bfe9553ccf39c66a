"""Redrive where broker and letters do not share a Redis database: claim, publish, mark, remove.

Each batch is claimed, so that no other operator publishes it; published and confirmed; marked as
published; and removed. After a crash the next run finds what was marked, and only removes it. One
batch at most is uncertain: its letters are published again, and counted as ``maybe_twice``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from celery_dlq.operations.redrive.publisher import Sent
from celery_dlq.store.records import ClaimState

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.publisher import Publisher
    from celery_dlq.operations.redrive.redrive import Prepared, Redrive
    from celery_dlq.operations.redrive.select import RawEntry

LEASE_SECONDS = 60.0
TAKEN = (ClaimState.CLAIMED, ClaimState.RECLAIMED)


class Background:
    """Makes calls in a thread of its own, one at a time; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dlq-background")
        self._last: Future[Any] | None = None

    def __enter__(self) -> Background:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:  # else keep the first error; the next run removes the letters
            self.wait()

    def start(self, call: Callable[[], object]) -> None:
        """Make a call, after waiting for the one before."""
        self.wait()
        self._last = self._pool.submit(call)

    def wait(self) -> None:
        """Wait for the last call; raises its error."""
        if self._last is None:
            return
        last, self._last = self._last, None
        try:
            last.result()
        except KeyboardInterrupt:
            self._last = last
            raise


class Claims:
    """The letters of a batch that are ours while their messages are published.

    A slow broker may let a batch outlast its lease, and a paused machine the patience of others
    with its job: so both are renewed, and asked for again, between two messages.
    """

    def __init__(self, redrive: Redrive, letter_ids: Sequence[str], lease_seconds: float) -> None:
        self._redrive = redrive
        self._lease = lease_seconds
        self._states = self._claimed(letter_ids)
        self.reclaimed = self.of(ClaimState.RECLAIMED)
        self.lost: set[str] = set()

    def of(self, state: ClaimState) -> list[str]:
        """The letters that were found in a state at first."""
        return [letter_id for letter_id, found in self._states.items() if found is state]

    def has(self, letter_id: str) -> bool:
        """True for a letter that is ours."""
        return self._states[letter_id] in TAKEN and letter_id not in self.lost

    def keep(self, waiting_for: str = "") -> None:
        """Renew job and claims when it is time."""
        self._redrive.run.tell(note=waiting_for)
        self._redrive.beat()
        if time.monotonic() - self._claimed_at < self._lease / 4:
            return
        ours = [letter_id for letter_id in self._states if self.has(letter_id)]
        for letter_id, state in self._claimed(ours).items():
            if state is ClaimState.HELD:
                self.lost.add(letter_id)

    def _claimed(self, letter_ids: Sequence[str]) -> dict[str, ClaimState]:
        self._claimed_at = time.monotonic()  # before the store's clock starts the lease
        run = self._redrive.run
        states = self._redrive.store.claims.claim(
            run.job.queue,
            letter_ids,
            owner=run.owner,
            lease_seconds=self._lease,
            previous_run_prefix=run.previous_run_prefix,
        )
        return dict(zip(letter_ids, states, strict=True))


class Claimed:
    """Redrives batches of letters; their claims record every result for the next run."""

    def __init__(
        self, redrive: Redrive, publisher: Publisher, background: Background, lease_seconds: float
    ) -> None:
        self._redrive = redrive
        self._publisher = publisher
        self._background = background  # removes the letters of a batch, while we prepare the next
        self._lease_seconds = lease_seconds
        self.batch_size = publisher.batch_size

    def start(self, batch: Sequence[RawEntry]) -> None:
        """Redrive a batch; its letters may be removed in the background."""
        redrive, sent = self._redrive, Sent()
        queue, owner = redrive.run.job.queue, redrive.run.owner
        claims = Claims(redrive, [found.key for found in batch], self._lease_seconds)
        finished = claims.of(ClaimState.PUBLISHED)
        ours = [found for found in batch if claims.has(found.key)]
        redrive.report.finished += len(finished)
        redrive.report.skipped += len(batch) - len(finished) - len(ours)
        ready: list[Prepared] = []
        try:
            for prepared in redrive.prepared(ours):
                if prepared.seed is not None:
                    claims.keep()
                    redrive.store.claims.seed(*prepared.seed)
                ready.append(prepared)
            self._publisher.publish([prepared.message for prepared in ready], sent, claims)
        finally:  # also on Ctrl-C
            self._settle(claims, finished, sent)
            confirmed = sent.confirmed_set
            redrive.published([one for one in ready if one.found.key in confirmed])
            unused = [found.key for found in ours if found.key not in confirmed]
            doubtful = [key for key in unused if key in sent.doubtful]
            certain = [key for key in unused if key not in sent.doubtful]
            redrive.store.claims.release(queue, certain, owner=owner)
            redrive.store.claims.release(queue, doubtful, owner=owner, doubtful=True)

    def wait(self) -> None:
        """Wait until the letters of the last batch are removed."""
        self._background.wait()

    def interrupted(self) -> None:
        """Do nothing: `start` has counted its batch, whatever ended it."""

    def _settle(self, claims: Claims, finished: list[str], sent: Sent) -> None:
        """Mark first, remove second: after a crash in between, only the removal is left."""
        redrive, over = self._redrive, [*finished, *sent.confirmed]
        report, queue, owner = redrive.report, redrive.run.job.queue, redrive.run.owner
        report.published += len(sent.confirmed)
        report.maybe_twice += len(sent.again.union(claims.reclaimed) & sent.confirmed_set)
        report.doubtful += len(sent.doubtful)
        report.skipped += len(claims.lost - sent.confirmed_set)
        for letter_id, error in (*sent.refused.items(), *sent.doubtful.items()):
            report.fail(letter_id, error)
        redrive.store.claims.mark_published(queue, over, owner=owner)
        self._background.start(lambda: redrive.store.remove(queue, over, owner=owner))
