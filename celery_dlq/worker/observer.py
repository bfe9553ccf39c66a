"""The seam between the guard and the features: an observer is what one feature does in a worker.

A feature names a function in its ``FEATURE``, ``observer="observer:made"``; the function gets the
`WorkerParts` and returns an `Observer`, or ``None`` if the settings want nothing of it. The guard
calls the observers in the order of `celery_dlq.registry.FEATURES`:

1. `on_guard_made` once, when the guard is made and before the pool starts; `on_task` for each task.
2. `before_start` of each message, and at the first `Verdict` no other; the request carries it out.
3. `before_end` of each delivery that failed for good; a `Die` takes the place of the policy's.
4. `on_letter` when a letter is made, `before_store` each time before it is stored.
5. `after_end` once the end of a delivery is decided and its letter, if any, is stored.

`instructed` gets what operators say to all workers, in the tick that read it. What is periodic is a
`Task` in `tasks`; what must talk to the broker with the consumer's connection is in `in_loop`. An
error of an observer is logged and counted; it neither fails a task nor acknowledges a message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.record import DeadLetter
from celery_dlq.policies.decisions import Die, Verdict
from celery_dlq.store.instructions import Instruction

if TYPE_CHECKING:
    from celery_dlq.config import Settings
    from celery_dlq.events import Events
    from celery_dlq.letters.redaction import Redaction
    from celery_dlq.policies.resolved import PolicyCache
    from celery_dlq.store.metrics import Counts
    from celery_dlq.store.store import Store
    from celery_dlq.store.worker_records import Clock
    from celery_dlq.worker.housekeeping import LongTask, Task
    from celery_dlq.writing.letter import LetterMaker
    from celery_dlq.writing.lifecycle import GuardedRequest, InFlight
    from celery_dlq.writing.memory_limit import MemoryLimit


Keeps = Callable[[Any, dict[str, Any], Any], bool]
"""True if an exception of a task, from a queue, will end in a letter; also in pool processes."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How the delivery of a guarded message ended."""

    succeeded: bool
    letter: DeadLetter | None = None  # Its letter, which is stored, if it died


SUCCEEDED, FAILED = Ended(succeeded=True), Ended(succeeded=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """What an observer may be made of."""

    dlq: Any  # The operator's API, with the connections of this worker's main process
    app: Any
    settings: Settings
    backend: Store  # Of this worker's main process
    policies: PolicyCache
    events: Events
    counts: Counts
    clock: Clock
    hostname: str
    pid: int
    redaction: Redaction | None  # Masks what `dlq_redact` names; `None` if that is nothing
    limit: MemoryLimit
    make: LetterMaker
    # As `dlq`, on connections of its own, for long work in a thread
    separate: Callable[[], AbstractContextManager[Any]]
    # The observers of the features before this one, by name
    made: dict[str, Observer] = field(default_factory=dict)


class Observer:
    """What a feature does in a worker; each method does nothing."""

    name = ""
    """The name of the feature: of its internal errors in metrics and log."""

    watching = True
    """False while there is nothing to do at starts and ends: every task pays for these calls."""

    @property
    def tasks(self) -> Sequence[Task | LongTask]:
        """The periodic work."""
        return ()

    def on_guard_made(self, keeps: Keeps) -> None:
        """The guard is made; the pool has not started."""

    def on_task(self, task: Any) -> None:
        """A task is guarded, before Celery builds its tracer; may be called again."""

    def on_error(self, info: Any, task: Any, delivery_info: dict[str, Any]) -> None:
        """Add facts to billiard's ``ExceptionInfo`` of an error in this process."""

    def before_start(self, request: GuardedRequest) -> Verdict | None:
        """Whether a message may start; ``None`` for no opinion."""

    def before_end(self, request: GuardedRequest) -> Die | None:
        """Whether a delivery that failed for good, or was terminated, dies of something else."""

    def after_end(self, request: GuardedRequest, in_flight: InFlight, ended: Ended) -> None:
        """A delivery has ended, and its message is about to be settled."""

    def on_letter(self, letter: DeadLetter) -> DeadLetter:
        """Change a letter that was just made; what is left out here, nobody keeps or logs."""
        return letter

    def before_store(self, letter: DeadLetter) -> DeadLetter:
        """Change a letter, or record it elsewhere first; called at every attempt to store it."""
        return letter

    def gives_up(self, letter: DeadLetter) -> str:  # noqa: ARG002
        """Why a message is not redriven any more by what redrove it; empty if that goes on."""
        return ""

    def instructed(self, found: Sequence[Instruction], now: datetime) -> None:
        """Keep to the instructions of operators, in place of those before; store's clock."""

    def connected(self) -> None:
        """The consumer has a new connection: the broker redelivers what is not acknowledged."""

    def in_loop(self, consumer: Any) -> None:
        """Once a second in the consumer's loop, where the broker answers."""

    def close(self) -> None:
        """The worker stops; never raises."""
