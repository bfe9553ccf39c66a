"""A redrive that is bound by running tasks: so many of its messages have not ended, and no more.

1. A message is noted as unfinished, in the store, before it is published: whoever resumes the job
   counts those of a process that was killed.
2. A place is free once its message has succeeded or died, as a canary sees it. Retries of it, and
   deliveries that a crash ended, go on in the same place.
3. A message whose end nobody sees keeps its place, so the bound is never passed. The job stops
   when no message has ended for a while, or all wait for a hold. Those that are open then are in
   doubt: they may still run. Who resumes it has looked at them, and they are counted no more.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.operations.job import STOPPED, CancelledError
from celery_dlq.store.records import RedriveOutcome
from celery_dlq.store.unfinished import UnfinishedMessages
from celery_dlq.store.worker_records import MessageKey

if TYPE_CHECKING:
    from celery_dlq.operations.redrive.message import Outgoing
    from celery_dlq.operations.redrive.work import RedriveWork
    from celery_dlq.store.store import Store


class NothingEndsError(CancelledError):
    """The messages that a redrive may have open do not end."""

    state = STOPPED


def has_result(app: Any, task_id: str) -> bool:
    """True if a task succeeded by its result: queues without a policy record no successes."""
    try:
        return bool(app.AsyncResult(task_id).state == "SUCCESS")
    except Exception:  # noqa: BLE001 - no result backend, or no answer: unknown
        return False


class Unfinished:
    """The messages of a redrive that have not ended; at most so many as its option says."""

    def __init__(self, work: RedriveWork, backend: Store) -> None:
        self._work = work
        self._kept = UnfinishedMessages(backend)
        self._place = (work.run.job.queue, work.run.operation)
        self._letters = {*self._kept.noted(*self._place).values()}  # Of a process that was killed
        self._new: list[MessageKey] = []
        work.note = self._note

    def room_for(self, letter_id: str) -> int:
        """Wait until a letter may be published; one that was noted before keeps its place."""
        if letter_id in self._letters and letter_id in self._left(0).values():
            return 1
        return self.wait_for_room()

    def wait_for_room(self) -> int:
        """Wait until a message may be published; returns how many may be."""
        work, most = self._work, self._work.options.at_most or 0
        patience, fewest, since = timing.current.unfinished, most + 1, time.monotonic()
        while True:
            left = self._left(most)
            if len(left) < fewest:
                fewest, since = len(left), time.monotonic()
            waited = round(time.monotonic() - since, 1)
            self._show(open=len(left), waited_seconds=waited, holds=[], wait_seconds=patience)
            if len(left) < most:
                return most - len(left)
            keys = [(key, None) for key in left]  # the first of them is held, or not all are
            holds = work.matching_holds(keys[:1]) and work.matching_holds(keys)
            if waited >= patience or len(holds) == len(left):
                self._stop(left, sorted(set(holds or work.matching_holds(keys))))
            work.send_heartbeat()
            time.sleep(timing.current.short_look)

    def settle(self, done: Sequence[Outgoing]) -> None:
        """Forget messages that were noted, and not published after all."""
        published = {*map(self._work.key_of, done)}
        if not self._work.report.doubtful:  # else the broker may have taken one of them
            self._kept.forget(*self._place, [key for key in self._new if key not in published])
        self._new.clear()

    def _note(self, key: MessageKey, letter_id: str) -> None:
        self._new.append(key)
        self._kept.note(*self._place, key, letter_id)

    def _left(self, most: int) -> dict[MessageKey, str]:
        """The messages that have not ended, and their letters; those that have are forgotten."""
        noted, claims = self._kept.noted(*self._place), self._work.store.claims
        ends = zip(noted, claims.outcomes([*noted]) if noted else (), strict=True)
        left = {key: noted[key] for key, end in ends if end is RedriveOutcome.OPEN}
        if len(left) >= most:  # else nobody waits for them
            left = {k: one for k, one in left.items() if not has_result(self._work.app, k.task_id)}
        self._kept.forget(*self._place, noted.keys() - left.keys())
        return left

    def _show(self, **known: Any) -> None:
        run = self._work.run
        run.update(unfinished={**run.job.unfinished, **known})

    def _stop(self, left: Collection[MessageKey], holds: Sequence[str]) -> None:
        text = f"{len(left):,} of its messages have not ended"
        if holds:
            text += f": {', '.join(holds)} holds them; release that first, then resume this job"
            self._show(holds=[*holds])
        else:
            text += ", and none did lately: they are in doubt, and may still run"
            self._kept.forget(*self._place, left)
            self._show(in_doubt=self._work.run.job.unfinished.get("in_doubt", 0) + len(left))
        self._work.run.update(note=text)
        raise NothingEndsError
