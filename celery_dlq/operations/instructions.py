"""Instructions for operators: what they may name, what they hold, and the audit of what was done.

The features that give instructions (`hold`, `circuit_breaker`, `dead_letter`) share this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, NotFound, StoreUnavailable
from celery_dlq.events import Action, Change, Events, whoami
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.letters.record import iso
from celery_dlq.letters.redaction import Redaction
from celery_dlq.logs import get_logger
from celery_dlq.operations.job import FAILED, INTERRUPTED, WAITING, Job, JobRun
from celery_dlq.operations.redrive.publisher import broker_name
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.store.instructions import Hold
from celery_dlq.store.records import MAX_TASKS, QueueSummary
from celery_dlq.store.workers import WorkerRegistry

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs

logger = get_logger("celery_dlq.worker")

_MAX_REASON_CHARS = 500
RETRY = timedelta(minutes=1)
MOST_HELD = 100_000
"""About how many messages a hold takes; workers do not consume the queues of the next ones."""

Names = Callable[[], Iterable[str]]


def reason_of(text: str) -> str:
    """The reason of an instruction, for people."""
    return shortened(one_line(text.strip()), _MAX_REASON_CHARS)


class Audit:
    """Writes changes into the audit log, and lets observers see them."""

    def __init__(self, registry: WorkerRegistry, events: Events) -> None:
        self._registry = registry
        self._events = events

    def record(self, action: Action, target: str, detail: Mapping[str, Any]) -> datetime:
        """Record what is about to be done, before it is: so no change is untraceable."""
        now = self._registry.now()
        change = Change(at=now, action=action, actor=whoami(), target=target, detail=detail)
        self._registry.record(change)
        self._events.emit(change)
        return now


class KnownNames:
    """The tasks and queues that the app or a live worker knows."""

    def __init__(self, registry: WorkerRegistry, *, tasks: Names, queues: Names) -> None:
        self._registry = registry
        self._tasks = tasks
        self._queues = queues

    def matching(self, task: str | None, queue: str | None) -> tuple[list[str], list[str]]:
        """The tasks and queues that patterns match; refuses a pattern that matches none."""
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

    def doubt(self, task: str | None) -> str:
        """Why a pattern may match no task; empty if a live worker has one, or that is unknown."""
        workers = self._registry.workers()
        listed = all(len(info.tasks) < MAX_TASKS for info in workers)
        tasks = {one for info in workers for one in info.tasks}
        if task is None or not workers or not listed:
            return ""
        if any(fnmatchcase(one, task) for one in tasks):
            return ""
        return f"No live worker has registered a task {task!r}; only the app knows it."


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldMessages:
    """A hold and its messages."""

    hold: Hold  # The hold
    # `holding`; of a circuit breaker `open` or `releasing`; `full`: it has `MOST_HELD`
    # messages, and workers do not consume the queues of the next ones; `ended`: it takes no more
    state: str
    held: int  # Number of its messages
    oldest_at: datetime | None = None  # When it took the oldest of them

    def shown(self, redaction: Redaction) -> HeldMessages:
        """These as people may see them: the hold's conditions and reason may quote messages."""
        return replace(self, hold=redaction.shown(self.hold, "where", "reason"))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping: the attributes of the hold, and these."""
        others = {"state": self.state, "held": self.held, "oldest_at": iso(self.oldest_at)}
        return {**self.hold.to_json(), **others}


class HeldQueues:
    """The holds of an app, and the queues of their messages."""

    def __init__(self, jobs: Jobs, *, most: int) -> None:
        self._store = jobs.backend.instructions
        self._held = jobs.backend.held
        self._jobs = jobs
        self._most = most

    def broker(self) -> str:
        """The app's broker, as holds name it."""
        return broker_name(self._jobs.app)

    def all(self) -> list[HeldMessages]:
        """The holds that are in force, and those that have ended and still have messages."""
        now = self._store.now()
        queues = {queue.name: queue for queue in self._held.overviews.queues()}
        found = [self._seen(hold, queues.pop(hold.id, None), now) for hold in self._store.of(Hold)]
        # A worker that stood still for minutes put a message there: the hold itself is gone.
        gone = [Hold(id=name, since=now, until=now) for name in queues]
        found += [self._seen(hold, queues[hold.id], now) for hold in gone]
        return [one for one in found if one.held or one.hold.in_force(now)]

    def get(self, hold_id: str) -> Hold:
        """A hold by its id."""
        holds = self._store.of(Hold)
        for hold in holds:
            if hold.id == hold_id:
                return hold
        if hold_id in self._held.names():
            now = self._store.now()
            return Hold(id=hold_id, since=now, until=now)
        known = ", ".join(hold.id for hold in holds) or "none"
        raise NotFound(f"expected the id of a hold, got {hold_id!r}; there are: {known}")

    def each(self, act: Callable[[Hold], object]) -> None:
        """Do something for each hold of the app's broker; an error of one stops no other."""
        for hold in self._store.of(Hold):
            if not self.is_ours(hold):
                continue
            try:
                act(hold)
            except StoreUnavailable:
                raise
            except DLQError as exc:
                logger.warning("The messages of %s wait: %s", hold.id, exc)
            except Exception:
                logger.exception("The messages of %s wait", hold.id)

    def is_ours(self, hold: Hold) -> bool:
        """True for a hold of the app's own broker."""
        return hold.broker in ("", self.broker())

    def length(self, hold: Hold) -> int:
        """The number of its messages."""
        return self._held.length(hold.id)

    def is_full(self, hold: Hold) -> bool:
        """True if workers put no more messages into it."""
        return self.length(hold) >= self._most

    def begin(self, run: JobRun, hold: Hold) -> None:
        """Let a release take the messages that are there now."""
        if run.job.until is None:
            run.tell(until=self._held.last_position(hold.id), total=self.length(hold))

    def job(self, hold: Hold) -> Job | None:
        """The release of a hold that has ended; ``None`` if there is none, or not any more."""
        try:
            return None if hold.job is None else self._jobs.get(hold.job)
        except NotFound:
            return None

    def resumed(self, job: Job) -> JobRun | None:
        """A release whose process died, or that failed a while ago; ``None`` of another one."""
        waits = job.state == FAILED and self._store.now() - job.updated_at > RETRY
        if not waits and job.state not in (INTERRUPTED, WAITING):
            return None
        try:
            return self._jobs.again(job.id)
        except DLQError:  # another worker was faster
            return None

    def _seen(self, hold: Hold, queue: QueueSummary | None, now: datetime) -> HeldMessages:
        held = queue.letters if queue else 0
        state = "holding" if hold.circuit is None else hold.circuit.state
        state = "ended" if not hold.in_force(now) else "full" if held >= self._most else state
        oldest_at = queue.oldest_at if queue else None
        return HeldMessages(hold=hold, state=state, held=held, oldest_at=oldest_at)
