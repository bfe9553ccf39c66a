"""Hold the messages of a task or a queue, and release them again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any
from uuid import uuid4

from celery_dlq.errors import DLQError, NotFound, StoreUnavailable
from celery_dlq.events import Action, Change, Events, on_behalf_of, whoami
from celery_dlq.features.redaction.masking import Redaction
from celery_dlq.letters import conditions
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.letters.record import iso
from celery_dlq.logs import get_logger
from celery_dlq.operations.job import DONE, FAILED, INTERRUPTED, RUNNING, WAITING, Job
from celery_dlq.operations.jobs import JobRun, Jobs
from celery_dlq.operations.reading import Progress
from celery_dlq.operations.redrive.message import RedriveOptions
from celery_dlq.operations.results import RedriveReport
from celery_dlq.operations.running import Running
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.store.base import MAX_TASKS, Backend, QueueSummary
from celery_dlq.store.instructions import MOST_HOLDS, Hold

logger = get_logger("celery_dlq.worker")

NOTICED = timedelta(seconds=3)
"""Workers notice the end of a hold within this time, and hold messages until then."""

RELEASE_RATE = 500.0
"""Messages a second of a release that workers do by themselves."""

_FORGOTTEN = timedelta(minutes=2)  # a worker that stood still may hold a message until then
_RETRY = timedelta(minutes=1)
_LONGEST = timedelta(days=30)
_MAX_REASON_CHARS = 500
_MAX_NAME_CHARS = 255

Names = Callable[[], Iterable[str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMessages:
    """A hold and its messages."""

    hold: Hold  # The hold
    # `holding`; of a circuit breaker `open` or `releasing`; `full`: it has `dlq_held_max`
    # messages, and workers do not consume the queues of the next ones; `ended`: it takes no more
    state: str
    held: int  # Number of its messages
    oldest_at: datetime | None = None  # When it took the oldest of them

    def shown(self, redaction: Redaction) -> HeldMessages:
        """These as people may see them: the hold's conditions and reason may quote messages."""
        return replace(self, hold=redaction.shown(self.hold, "where", "reason"))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping: the attributes of the hold, and these."""
        others = {**asdict(self), "oldest_at": iso(self.oldest_at)}
        del others["hold"]
        return {**self.hold.to_json(), **others}


class Holds:
    """Holds and releases messages; `DeadLetters` describes the arguments that its methods share."""

    def __init__(
        self,
        backend: Backend,
        running: Running,
        events: Events,
        *,
        most: int,
        tasks: Names,
        queues: Names,
        broker: Callable[[], str],
    ) -> None:
        self._store = backend.instructions
        self._held = backend.held
        self._registry = backend.workers
        self._jobs = Jobs(backend.jobs)
        self._running = running
        self._events = events
        self._most = most
        self._tasks = tasks
        self._queues = queues
        self._broker = broker

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
        where = _checked(task, queue, conditions, span)
        self._matching(task, queue)
        now = self._store.now()
        self._tidy(now)
        known = self._store.of(Hold)
        if len(known) >= MOST_HOLDS:
            raise DLQError(f"expected fewer than {MOST_HOLDS} holds, got {len(known)}; release one")
        hold = Hold(
            id=f"hold-{uuid4().hex[:8]}",
            task=task or "*",
            queue=queue or "*",
            where=where,
            since=now,
            until=None if span is None else now + span,
            reason=shortened(one_line(reason.strip()), _MAX_REASON_CHARS),
            actor=whoami(),
            broker=self._broker(),
        )
        self._store.replace(None, hold)
        self.record(Action.HELD, hold)
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
        _checked(task, queue, conditions, span)
        return self._matching(task, queue)

    def doubt(self, task: str | None) -> str:
        """Why nothing of a task may be held; empty if a live worker has it, or that is unknown."""
        workers = self._registry.workers()
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        tasks = {one for info in workers for one in info.tasks}
        if task is None or not workers or not listed:
            return ""
        if any(fnmatchcase(one, task) for one in tasks):
            return ""
        return f"No live worker has registered a task {task!r}; only the app knows it."

    def holds(self) -> list[HeldMessages]:
        """The holds that are in force, and those that have ended and still have messages."""
        now = self._store.now()
        queues = {queue.name: queue for queue in self._held.queues()}
        found = [self._seen(hold, queues.pop(hold.id, None), now) for hold in self._store.of(Hold)]
        # A worker that stood still for minutes put a message there: the hold itself is gone.
        gone = [Hold(id=name, since=now, until=now) for name in queues]
        found += [self._seen(hold, queues[hold.id], now) for hold in gone]
        return [one for one in found if one.held or one.hold.in_force(now)]

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
        is in the database of the Redis broker; elsewhere as `redrive`. A job: it can be watched,
        cancelled, and resumed after a crash. A message that would be lost stays, as in `redrive`.
        """
        options = RedriveOptions(rate=rate, limit=limit).to_json()
        hold = self._get(hold_id)
        if not self._is_ours(hold):
            raise DLQError(
                f"expected a hold of the broker {self._broker()!r}, got {hold_id} of "
                f"{hold.broker!r}; release it by an app that uses that broker"
            )
        if hold.circuit is not None:
            options["marker"] = hold.marker
        job = self._job(hold)
        if job is not None and job.state == RUNNING:
            raise DLQError(
                f"expected a hold that is not being released, got {hold_id}; job {job.id} of "
                f"{job.actor} runs"
            )
        ended = not hold.in_force(self._store.now())
        if (ended or limit is not None) and not self._count(hold):
            raise DLQError(
                f"expected a hold with messages, got {hold_id}, which has none"
                f"{' and has ended' if ended else ''}; there is nothing to release"
            )
        run = self._running.new_release(hold_id, options)
        if limit is None and not self._end(hold, run):
            raise DLQError(f"another process has just changed {hold_id}; try again")
        return self._run(hold, run, progress, scanned)

    def end(self, hold_id: str) -> Hold:
        """End a hold now; a worker releases its messages, 500 a second."""
        hold, now = self._get(hold_id), self._store.now()
        if not hold.in_force(now):
            return hold
        ended = replace(hold, until=now)
        if not self._store.replace(hold, ended):
            raise DLQError(f"another process has just changed {hold_id}; look at it again")
        self.record(Action.RELEASED, ended)
        return ended

    def release_ended(self, stopping: Callable[[], bool]) -> None:
        """Release the messages of holds that have ended, one after the other; for workers.

        Goes on with a release whose process died, and leaves one alone that was cancelled.
        """
        now = self._store.now()
        self._tidy(now)
        for hold in self._store.of(Hold):
            if stopping():
                return
            if hold.until is None or hold.until + 2 * NOTICED > now or not self._is_ours(hold):
                continue
            try:
                self._release_ended(hold, now, stopping)
            except StoreUnavailable:
                raise
            except DLQError as exc:  # what one hold has does not stop the others
                logger.warning("The messages of %s wait: %s", hold.id, exc)
            except Exception:
                logger.exception("The messages of %s wait", hold.id)

    def _release_ended(self, hold: Hold, now: datetime, stopping: Callable[[], bool]) -> None:
        if not self._count(hold):
            return
        with on_behalf_of(hold.actor):
            run = self._next_run(hold, now)
            if run is not None:
                run.stopping = stopping
                self._run(hold, run)

    def record(self, action: Action, hold: Hold) -> None:
        """Add a change of a hold to the audit, and tell the observers."""
        now, detail = self._store.now(), hold.to_json()
        change = Change(at=now, action=action, actor=whoami(), target=hold.id, detail=detail)
        self._registry.record(change)
        self._events.emit(change)

    def _matching(self, task: str | None, queue: str | None) -> tuple[list[str], list[str]]:
        """Refuse what holds nothing, because it is misspelt."""
        workers = self._registry.workers()
        # Else not all tasks of such a worker are listed.
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        tasks = {*self._tasks(), *(one for info in workers for one in info.tasks)}
        queues = {*self._queues(), *(one for info in workers for one in info.queues)}
        found = []
        for kind, name, known in (("task", task, tasks), ("queue", queue, queues)):
            fit = sorted(one for one in known if fnmatchcase(one, name or "*"))
            if name is not None and not fit and (listed or kind != "task"):
                raise NotFound(
                    f"expected a {kind} that the app or a live worker knows, got {name!r}"
                    f"{did_you_mean(name, known)}"
                )
            found.append(fit)
        return found[0], found[1]

    def _get(self, hold_id: str) -> Hold:
        holds = self._store.of(Hold)
        for hold in holds:
            if hold.id == hold_id:
                return hold
        if hold_id in self._held.names():
            now = self._store.now()
            return Hold(id=hold_id, since=now, until=now)
        known = ", ".join(hold.id for hold in holds) or "none"
        raise NotFound(f"expected the id of a hold, got {hold_id!r}; there are: {known}")

    def _seen(self, hold: Hold, queue: QueueSummary | None, now: datetime) -> HeldMessages:
        held = queue.letters if queue else 0
        state = "holding" if hold.circuit is None else hold.circuit.state
        state = "ended" if not hold.in_force(now) else "full" if held >= self._most else state
        oldest_at = queue.oldest_at if queue else None
        return HeldMessages(hold=hold, state=state, held=held, oldest_at=oldest_at)

    def _is_ours(self, hold: Hold) -> bool:
        return hold.broker in ("", self._broker())

    def _count(self, hold: Hold) -> int:
        return self._held.length(hold.id)

    def _job(self, hold: Hold) -> Job | None:
        """The release of a hold that has ended; ``None`` if there is none, or not any more."""
        try:
            return None if hold.job is None else self._jobs.get(hold.job)
        except NotFound:
            return None

    def _end(self, hold: Hold, run: JobRun) -> bool:
        """Let a run be the one that releases a hold; false if another process was faster."""
        now = self._store.now()
        until = now if hold.in_force(now) else hold.until
        ended = replace(hold, until=until, job=run.job.id)
        if not self._store.replace(hold, ended):  # or it has long been forgotten
            return all(one.id != hold.id for one in self._store.of(Hold))
        run.beat(now=True)  # or another worker would take it for one that died before it began
        while (left := (until or now) + NOTICED - self._store.now()) > timedelta(0):
            time.sleep(min(0.5, left.total_seconds()))
        return True

    def _next_run(self, hold: Hold, now: datetime) -> JobRun | None:
        """The release that a worker does; ``None`` if another does it, or nobody shall."""
        job = self._job(hold)
        failed = job is not None and (job.state == FAILED or (job.state == DONE and _left(job)))
        if job is not None and failed and now - job.updated_at < _RETRY:
            return None
        if job is None or (job.state == DONE and self._count(hold) > _left(job)):
            options = {"rate": RELEASE_RATE} if job is None else job.options
            run = self._running.new_release(hold.id, options)
            return run if self._end(hold, run) else None
        if job.state not in (INTERRUPTED, WAITING, FAILED):
            return None
        try:
            return self._jobs.again(job.id)
        except DLQError:  # another worker was faster
            return None

    def _run(
        self,
        hold: Hold,
        run: JobRun,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport:
        if run.job.until is None:
            run.tell(until=self._held.last_position(hold.id), total=self._count(hold))
        report: RedriveReport = self._running.run(run, progress, scanned)
        if not run.begun:  # it had no messages
            self.record(Action.RELEASED, hold)
        return report

    def _tidy(self, now: datetime) -> None:
        """Forget holds that ended a while ago and have no messages."""
        for hold in self._store.of(Hold):
            if hold.until is not None and hold.until + _FORGOTTEN < now and not self._count(hold):
                self._store.replace(hold, None)


def _left(job: Job) -> int:
    """The messages that a release could not publish; the next one could not either."""
    return sum(job.counts.get(name, 0) for name in ("refused", "corrupt", "failures"))


def _checked(
    task: str | None, queue: str | None, texts: Sequence[str], span: timedelta | None
) -> tuple[str, ...]:
    """The checked conditions."""
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
    return conditions.checked(texts)
