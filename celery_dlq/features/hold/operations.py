"""Hold the messages of a task or a queue, and release them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import DLQError
from celery_dlq.events import Action, on_behalf_of, whoami
from celery_dlq.features.hold.unread import Unread
from celery_dlq.letters.conditions import all_hold, checked
from celery_dlq.letters.printable import shortened
from celery_dlq.operations.instructions import Audit
from celery_dlq.operations.job import DONE, RUNNING, Job, JobRun
from celery_dlq.operations.redrive.checks import Waits
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions
from celery_dlq.operations.redrive.select import Progress, RawEntry
from celery_dlq.operations.redrive.work import RedriveReport
from celery_dlq.operations.release import HeldMessages, new_release
from celery_dlq.store.holds import MOST_HOLDS, Hold
from celery_dlq.store.instructions import reason_of
from celery_dlq.store.worker_records import MessageKey
from celery_dlq.transport.publications import broker_name

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.store.store import Store

RELEASE_RATE = 500.0
"""Messages a second of a release that workers do by themselves."""

_FORGOTTEN = timedelta(minutes=2)  # a worker that stood still may hold a message until then
_LONGEST = timedelta(days=30)
_MAX_NAME_CHARS = 255


class Holds:
    """Holds and releases messages; `DeadLetters` describes the arguments that its methods share."""

    def __init__(self, assembly: Assembly) -> None:
        self._store = assembly.backend.instructions
        self._held = assembly.held_queues()
        self._unread = assembly.backend.part(Unread)
        self._names = assembly.known_names()
        self._jobs = assembly.jobs()
        self._audit = Audit(assembly.backend.workers, assembly.events)

    def hold(
        self,
        task: str | None = None,
        *,
        queue: str | None = None,
        conditions: Sequence[str] = (),
        span: timedelta | None = None,
        reason: str = "",
    ) -> Hold:
        """Let no worker execute certain messages until `release`.

        Workers know it within 2 seconds. A message whose turn it is then leaves its queue for that
        of the hold, in order, and is neither counted nor dead-lettered, and its task gets no
        result. Tasks that run already go on. A worker that cannot reach the store executes.
        """
        self.preview(task, queue=queue, conditions=conditions, span=span)
        now = self._store.now()
        self.forget_old(now)
        known = self._store.of(Hold)
        if len(known) >= MOST_HOLDS:
            raise DLQError(f"expected fewer than {MOST_HOLDS} holds, got {len(known)}; release one")
        hold = Hold(
            id=f"hold-{uuid4().hex[:8]}",
            task=task or "*",
            queue=queue or "*",
            where=checked(conditions),
            since=now,
            until=None if span is None else now + span,
            reason=reason_of(reason),
            actor=whoami(),
            broker=self._held.broker(),
        )
        self._store.replace(None, hold)
        self._audit.record(Action.HELD, hold.id, hold.for_audit())
        return hold

    def preview(
        self,
        task: str | None = None,
        *,
        queue: str | None = None,
        conditions: Sequence[str] = (),
        span: timedelta | None = None,
    ) -> tuple[list[str], list[str]]:
        """What `hold` would hold: names of tasks and of queues, of those known. Holds nothing."""
        _check(task, queue, span)
        checked(conditions)
        return self._names.matching(task, queue)

    def holds(self) -> list[HeldMessages]:
        """The holds that are in force, and those that have ended and still have messages."""
        found = self._held.held_messages()
        unread = self._unread.counts_by_hold() if any(one.hold.where for one in found) else {}
        return [replace(one, unread=unread.get(one.hold.id, 0)) for one in found]

    def release(
        self,
        hold_id: str,
        *,
        rate: float | None = None,
        limit: int | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport:
        """End a hold and send its messages back to their queues, in the order of their arrival.

        They are as they came: id, arguments, retries, ETA, priority. Exactly once where the store
        is on the server of the Redis broker; elsewhere as `redrive`. A job: it can be watched,
        cancelled, and resumed after a crash. A message that would be lost stays, as in `redrive`.
        """
        hold = self._held.hold_by_id(hold_id)
        if why_not := self._why_not_released(hold, limit):
            raise DLQError(why_not)
        options = RedriveOptions(rate=rate, limit=limit, marker=hold.marker if hold.circuit else "")
        run = new_release(self._jobs, hold_id, options)
        if limit is None and not self._begin_releasing(hold, run):
            raise DLQError(f"another process has just changed {hold_id}; try again")
        return self._run_release(hold, run, progress, scanned)

    def _why_not_released(self, hold: Hold, limit: int | None) -> str:
        """Why an operator cannot release a hold now; empty if nothing is in the way."""
        if not self._held.is_ours(hold):
            what = f"of the broker {self._held.broker()!r}, got {hold.id} of {hold.broker!r}"
            return f"expected a hold {what}; release it by an app that uses that broker"
        job = self._held.release_of(hold)
        if job is not None and job.state == RUNNING:
            what = f"got {hold.id}; job {job.id} of {job.actor} runs"
            return f"expected a hold that is not being released, {what}"
        ended = not hold.in_force(self._store.now())
        if (ended or limit is not None) and not self._held.length(hold):
            what = f"got {hold.id}, which has none{' and has ended' if ended else ''}"
            return f"expected a hold with messages, {what}; there is nothing to release"
        return ""

    def end(self, hold_id: str) -> Hold:
        """End a hold now; a worker releases its messages, 500 a second."""
        hold, now = self._held.hold_by_id(hold_id), self._store.now()
        if not hold.in_force(now):
            return hold
        ended = replace(hold, until=now)
        if not self._store.replace(hold, ended):
            raise DLQError(f"another process has just changed {hold_id}; look at it again")
        self._audit.record(Action.RELEASED, ended.id, ended.for_audit())
        return ended

    def release_ended(self, stopping: Callable[[], bool]) -> None:
        """Release the messages of holds that have ended, one after the other; for workers.

        Goes on with a release whose process died, and leaves one alone that was cancelled.
        """
        now = self._store.now()
        self.forget_old(now)

        def release(hold: Hold) -> None:
            waits = hold.until is None or hold.until + 2 * timing.current.hold_noticed > now
            if stopping() or waits or not self._held.length(hold):
                return
            with on_behalf_of(hold.actor):
                run = self._next_run(hold)
                if run is not None:
                    run.stopping = stopping
                    self._run_release(hold, run)

        self._held.for_each(release)

    def _begin_releasing(self, hold: Hold, run: JobRun) -> bool:
        """Let a run be the one that releases a hold; false if another process was faster."""
        now = self._store.now()
        until = now if hold.in_force(now) else hold.until
        # Or it has long been forgotten.
        if not self._store.replace(hold, replace(hold, until=until, job=run.job.id)):
            return all(one.id != hold.id for one in self._store.of(Hold))
        # Or another worker would take it for one that died before it began.
        run.send_heartbeat(now=True)
        noticed = (until or now) + timing.current.hold_noticed
        while (left := noticed - self._store.now()) > timedelta(0):
            time.sleep(min(0.5, left.total_seconds()))
        return True

    def _next_run(self, hold: Hold) -> JobRun | None:
        """The release that a worker does; ``None`` if another does it, or nobody shall."""
        job = self._held.release_of(hold)
        if job is None or (job.state == DONE and self._held.length(hold) > _left_of(job)):
            again = {"rate": RELEASE_RATE} if job is None else job.options
            run = new_release(self._jobs, hold.id, RedriveOptions.from_json(again))
            return run if self._begin_releasing(hold, run) else None
        return self._held.resumed(job)

    def _run_release(self, hold: Hold, run: JobRun, *told: Progress | None) -> RedriveReport:
        self._held.begin_release(run, hold)
        report: RedriveReport = self._jobs.run(run, *told)
        if not run.is_begun:  # it had no messages
            self._audit.record(Action.RELEASED, hold.id, hold.for_audit())
        return report

    def forget_old(self, now: datetime) -> None:
        """Forget holds that ended a while ago and have no messages."""
        for hold in self._store.of(Hold):
            is_over = hold.until is not None and hold.until + _FORGOTTEN < now
            if is_over and not self._held.length(hold):
                self._store.replace(hold, None)
        self._unread.keep_only({hold.id for hold in self._store.of(Hold)})


class WaitsInHolds(Waits):
    """The holds that have messages, or would have; those in force are read once."""

    def __init__(self, app: Any, backend: Store) -> None:
        self._app = app
        self._instructions = backend.instructions
        self._held = backend.held
        self._in_force: Sequence[Hold] | None = None

    def waits_for(self, found: RawEntry, task: str, queue: str) -> Iterator[str]:
        """The holds that would take the message of a letter."""
        if self._in_force is None:
            now, brokers = self._instructions.now(), ("", broker_name(self._app))
            holds = self._instructions.of(Hold)
            self._in_force = [h for h in holds if h.in_force(now) and h.broker in brokers]
        for hold in self._in_force:
            if hold.covers(task, queue) and all_hold(hold.where, found.text):
                yield _end_of(hold)

    def have(self, messages: Sequence[tuple[MessageKey, Outgoing | None]]) -> list[str]:
        """The ids of the holds that have some of these messages, one for each of them.

        A hold that has ended gives its messages back by itself.
        """
        now, known = self._instructions.now(), self._instructions.of(Hold) if messages else ()
        holds = [hold for hold in known if hold.in_force(now)]
        found = (next((h.id for h in holds if self._has(h, *one)), None) for one in messages)
        return [hold_id for hold_id in found if hold_id is not None]

    def _has(self, hold: Hold, key: MessageKey, message: Outgoing | None) -> bool:
        covers = message is None or hold.covers(str(message.headers.get("task")), message.queue)
        entry = key.in_queue(hold.id).letter_id
        return covers and self._held.entry(hold.id, entry) is not None


def _end_of(hold: Hold) -> str:
    """The end of a hold; its reason and conditions may quote messages, which a plan must not."""
    if hold.circuit is not None:
        what = f"task {hold.circuit.task!r}, queue {hold.circuit.queue!r}"
        return f"the circuit breaker of {what}, which is {hold.circuit.state}"
    until = "is released" if hold.until is None else f"ends at {hold.until:%Y-%m-%d %H:%M} UTC"
    return f"{hold.id} of {hold.actor}, until it {until}"


def held(assembly: Assembly) -> Iterator[tuple[tuple[str, ...], float]]:
    """The messages of each hold, for an exporter."""
    found = assembly.held_queues().held_messages()
    return (((one.hold.id, one.hold.task or ""), one.held) for one in found)


def _left_of(job: Job) -> int:
    """The messages that a release could not publish; the next one could not either."""
    return sum(job.counts.get(name, 0) for name in ("refused", "corrupt", "failures"))


def _check(task: str | None, queue: str | None, span: timedelta | None) -> None:
    """Refuse what names nothing to hold, or a time that is too long."""
    if task is None and queue is None:
        raise DLQError("expected the task or the queue to hold, got neither")
    for kind, name in (("task", task), ("queue", queue)):
        if name is not None and not 0 < len(name.strip()) <= _MAX_NAME_CHARS:
            raise DLQError(
                f"expected {kind} to be a name of at most {_MAX_NAME_CHARS} characters, got "
                f"{shortened(name, 40)!r}"
            )
    if span is not None and not timedelta(0) < span <= _LONGEST:
        raise DLQError(
            f"expected a time of more than 0 s and at most {_LONGEST.days} days, got "
            f"{span.total_seconds():,.10g} s"
        )
