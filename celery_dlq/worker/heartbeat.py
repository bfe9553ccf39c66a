"""A worker and its store: the check at the start, then a heartbeat every twelve seconds.

The heartbeat registers the worker, applies instructions, and warns of other workers' policies. Of
new instructions Redis tells in between, or is asked once a second.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Any

from celery_dlq import __version__, timing
from celery_dlq.config import Settings
from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import EPOCH
from celery_dlq.policies.policy import task_policies
from celery_dlq.store.instructions import CurrentInstructions, Instruction, Override
from celery_dlq.store.metrics import STORE_ERRORS, Counts
from celery_dlq.store.registrations import Registrations
from celery_dlq.store.worker_records import MAX_TASKS, TASK_PREFIX, WorkerInfo
from celery_dlq.worker.housekeeping import Pause

logger = get_logger("celery_dlq.worker")

TICKS_PER_BEAT = 12
TICKS_PER_LOOK, COMPARED = 60, 10
"""Ticks between two comparisons with the policies of those many whose heartbeat came last."""

_MAX_WARNINGS = 1000
_FIRST_PAUSE, _LONGEST_PAUSE = 4, 32  # ticks, between checks of a store that cannot be used


class StartCheck:
    """Checks the store at the start; a store that was away then, again when it is back."""

    def __init__(
        self, check: Callable[[], None], wait_seconds: float | None, counts: Counts
    ) -> None:
        self._check = check
        self._wait = wait_seconds
        self._counts = counts
        self._away = False
        self._pause = Pause(_FIRST_PAUSE, _LONGEST_PAUSE)

    def run(self) -> None:
        """Check before the worker starts."""
        deadline = time.monotonic() + (self._wait or 0.0)
        while True:
            try:
                return self._check()
            except StoreUnavailable as exc:
                if self._wait is None:
                    return self._start_without(exc)
                if time.monotonic() >= deadline:
                    raise
                logger.warning("Waiting for the dead-letter store: %s", exc)
            time.sleep(min(timing.current.start_look, max(0.0, deadline - time.monotonic())))

    def tick(self) -> None:
        """Check a store that was away, until it has passed; called once a second."""
        if not (self._away and self._pause.count_tick()):
            return
        try:
            self._check()
        except SettingsError as exc:
            self._pause.failed()
            logger.error("The dead-letter store is back, but cannot be used: %s", exc)  # noqa: TRY400 - no traceback needed
            return
        self._away = False
        logger.warning("The dead-letter store is back: this worker counts, and stores letters")

    def _start_without(self, exc: StoreUnavailable) -> None:
        self._away = True
        self._counts.count(STORE_ERRORS, "start")
        logger.error(
            "The dead-letter store is away, and this worker starts without it. Until it is back, "
            "deliveries are not counted, and letters wait in memory and in dlq_spool_dir: %s",
            exc,
        )


Apply = Callable[[Sequence[Instruction], datetime], None]
"""Applies the instructions of the app, in place of those before, at a time of the store's clock."""


class Heartbeat:
    """Keeps one worker registered, and instructed within a tick, which is a second."""

    def __init__(
        self,
        registry: Registrations,
        info: WorkerInfo,
        instructions: CurrentInstructions,
        apply: Apply,
        clock: Callable[[], float] = time.monotonic,
        *,
        job_waits: Callable[[], object] = bool,
        queues: Callable[[], tuple[str, ...] | None] = lambda: None,
        told: Callable[[], bool] = bool,
    ) -> None:
        self._registry = registry
        self._info = info
        self._instructions = instructions
        self._apply = apply
        self._clock = clock
        self._job_waits = job_waits
        self._queues = queues
        self._told = told  # True if Redis would have told of a new revision, and did not
        self._asks = self._beats = True
        self._ticks = 0
        self._registered = False
        self._revision = 0
        self._next_end: float | None = None
        self._warned: set[str] = set()

    def tick(self) -> None:
        """Send a heartbeat, apply instructions, compare with other workers: what is due."""
        self._ticks += 1
        self._asks = not self._told() or self._asks
        if (
            self._ticks % TICKS_PER_BEAT == 1
            or self._instruction_changes_now()
            or self._has_other_queues()
        ):
            self._beats = True
        elif self._asks and not self._beats:
            self._beats = self._instructions.revision() != self._revision
        if self._beats:
            self._send()
        self._asks = self._beats = False  # at the end: what failed is done at the next tick
        if self._ticks % TICKS_PER_LOOK == 1:
            self._compare_workers()
        elif not self._ticks % TICKS_PER_BEAT:
            self._registry.close_idle_connections()

    def close(self) -> None:
        """Deregister this worker; never raises."""
        try:
            self._registry.deregister(self._info.hostname)
        except StoreUnavailable as exc:
            logger.debug("This worker stays registered until its heartbeat expires: %s", exc)

    def _send(self) -> None:
        known, revision, job_waits = self._registry.heartbeat(self._info.hostname)
        if job_waits:
            self._job_waits()
        if self._has_other_queues():
            self._info = replace(self._info, queues=self._queues() or ())
            self._registered = False
        if not (known and self._registered):  # known may be a dead worker of the same node name
            self._registry.register(self._info)
            self._registered = True
        if revision != self._revision or self._instruction_changes_now():
            found, now = self._instructions.all(), self._instructions.now()
            ends = [end for one in found for end in _change_times(one) if end > now]
            self._next_end = self._clock() + (min(ends) - now).total_seconds() if ends else None
            self._apply(found, now)
            self._revision = revision  # at the end: what could not be applied is applied again

    def _has_other_queues(self) -> bool:
        return self._queues() not in (None, self._info.queues)

    def _instruction_changes_now(self) -> bool:
        """True if an instruction begins or ends about now; the store's clock decides."""
        return self._next_end is not None and self._next_end <= self._clock()

    def _compare_workers(self) -> None:
        for other in self._registry.workers(with_tasks=False, some=COMPARED):
            if other.hostname != self._info.hostname:
                from celery_dlq.policies.registered import differences  # noqa: PLC0415 - alone: none

                for difference in differences(self._info, other):
                    if difference not in self._warned and len(self._warned) < _MAX_WARNINGS:
                        self._warned.add(difference)
                        logger.warning("%s; each worker applies its own", difference)


def _change_times(instruction: Instruction) -> Iterator[datetime]:
    """When something about an instruction changes by itself."""
    if isinstance(instruction, Override):
        yield instruction.since
    if instruction.until is not None:
        yield instruction.until


def worker_info(
    app: Any, settings: Settings, *, hostname: str = "", pid: int = 0, started_at: datetime = EPOCH
) -> WorkerInfo:
    """What a worker says of itself in its registration."""
    policies = {
        **settings.queues,
        **{f"{TASK_PREFIX}{name}": policy for name, policy in task_policies(app).items()},
    }
    tasks = sorted(name for name in app.tasks if not name.startswith("celery."))
    return WorkerInfo(
        hostname=hostname,
        pid=pid,
        version=__version__,
        started_at=started_at,
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        tasks=tuple(tasks[:MAX_TASKS]),
        release=settings.release or "",
        policies={name: policy.to_json() for name, policy in policies.items()},
    )
