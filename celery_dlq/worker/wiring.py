"""Puts a worker's guard together: the one place that knows all parts of a worker."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import datetime
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.protection import warn_of_weaknesses
from celery_dlq.operations.retention_round import RetentionRound
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.resolved import PolicyCache
from celery_dlq.policies.table import NOTHING_GUARDED
from celery_dlq.registry import features
from celery_dlq.store.instructions import Instruction, Override
from celery_dlq.store.metrics import INTERNAL_ERRORS, WorkerGauges
from celery_dlq.store.scripts import read_all
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.heartbeat import Heartbeat, StartCheck, worker_info
from celery_dlq.worker.housekeeping import LongTask, Task, WorkerJobs
from celery_dlq.worker.observer import Observer, WorkerParts
from celery_dlq.writing.letter import LetterMaker
from celery_dlq.writing.writer import LetterWriter

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.policies.table import PolicyTable

logger = get_logger("celery_dlq")

_LOG_MASKS = "celery_dlq.worker.masked_log"
_SCRIPTS = ("celery_dlq.store", "celery_dlq.transport.redis")


def guard_of(
    dlq: Assembly,
    *,
    hostname: str,
    pid: int,
    flags_redelivery: bool,
    gives_back: bool = False,
) -> Guard:
    """Make the guard of one worker, and check its settings and its store."""
    dlq.validate()
    read_all(_SCRIPTS + tuple(f"celery_dlq.features.{one.name}" for one in features()))
    own, settings = dlq.separated(), dlq.settings  # with connections of this worker
    check = StartCheck(
        partial(own.backend.check, own.dead_letter_queues()),
        settings.start_timeout or None,
        own.measuring.counts,
    )
    check.run()
    table = own.policy_table()
    _warn_of_weaknesses(dlq, table)
    parts = _parts_of(own, dlq, table, hostname=hostname, pid=pid)
    for feature in features():
        made = feature.load(feature.observer)(parts) if feature.observer else None
        if made is not None:
            made.name = feature.name
            parts.made[feature.name] = made
    writer = _writer_of(own, parts, gives_back=gives_back)
    guard = Guard(parts, writer, flags_redelivery=flags_redelivery)
    guard.housekeeping.add(
        Task(name="start_check", work=check.tick), *_housekeeping_of(dlq, own, parts, guard)
    )
    return guard


def _parts_of(
    own: Assembly,
    dlq: Assembly,
    table: PolicyTable,
    *,
    hostname: str,
    pid: int,
) -> WorkerParts:
    app, counts = own.app, own.measuring.counts
    redaction = own.redaction if own.settings.redact else None
    made: dict[str, Observer] = {}  # filled while the observers are made

    def change(letter: DeadLetter) -> DeadLetter:
        if redaction is not None:
            letter = redaction.captured(letter)
        for one in made.values():
            letter = one.on_letter(letter)
        return letter

    if redaction is not None or _LOG_MASKS in sys.modules:  # masks of an app before are replaced
        import_module(_LOG_MASKS).install(redaction)
    return WorkerParts(
        dlq=own,
        app=app,
        settings=own.settings,
        backend=own.backend,
        policies=PolicyCache(table, app.amqp.queues, app.conf.task_default_queue),
        events=own.events,
        counts=counts,
        clock=own.clock,
        hostname=hostname,
        pid=pid,
        redaction=redaction,
        limit=own.memory_limit(warns=True),
        make=LetterMaker(
            clock=own.clock,
            hostname=hostname,
            pid=pid,
            release=own.settings.release,
            change=change,
            counts=counts,
        ),
        separate=dlq.separate,
        made=made,
    )


def _writer_of(own: Assembly, parts: WorkerParts, *, gives_back: bool) -> LetterWriter:
    settings = own.settings

    def change(letter: DeadLetter) -> DeadLetter:
        for one in parts.made.values():
            try:
                letter = one.before_store(letter)
            except StoreUnavailable:
                raise
            except Exception:
                parts.counts.count(INTERNAL_ERRORS, one.name)
                logger.exception("Letter %s is stored without what %s adds", letter.id, one.name)
        return letter

    writer = LetterWriter(
        own.backend.new_letters,
        own.spool(),
        limit=parts.limit,
        durable_spool=settings.spool_dir is not None,
        gives_back=gives_back,
        forget=own.backend.counter.record_death,
        change=change,
        events=own.events,
        counts=parts.counts,
    )
    own.measuring.gauges = lambda: WorkerGauges(
        worker=parts.hostname, spool=writer.spooled, waiting=len(writer)
    )
    return writer


def _housekeeping_of(
    dlq: Assembly, own: Assembly, parts: WorkerParts, guard: Guard
) -> Sequence[Task | LongTask]:
    """The periodic work; what waits for servers of its own comes last."""
    backend, policies = own.backend, parts.policies
    info = worker_info(
        own.app,
        own.settings,
        hostname=parts.hostname,
        pid=parts.pid,
        started_at=own.clock(),
    )
    jobs = WorkerJobs(dlq.separate)

    def apply(found: Sequence[Instruction], now: datetime) -> None:
        overrides = [one for one in found if isinstance(one, Override) and one.in_force(now)]
        policies.apply_overrides(overrides, now)
        for one in guard.observers:
            one.instructed(found, now)

    heartbeat = Heartbeat(
        backend.registrations,
        info,
        backend.current_instructions,
        apply,
        job_waits=jobs.wake,
        queues=lambda: guard.queues,
        told=lambda: guard.told(),  # noqa: PLW0108 - it is set later
    )
    retention = partial(own.retention, parts.hostname)
    trim = RetentionRound(retention, backend.new_letters, lambda: policies.policies)
    return [
        Task(name="heartbeat", work=heartbeat.tick, close=heartbeat.close),
        Task(name="revocations", work=guard.revocations.send_to_store),
        *(task for one in guard.observers for task in one.tasks),
        Task(name="metrics", work=own.measuring.tick, close=own.measuring.close),
        Task(name="memory limit", work=parts.limit.tick),
        Task(name="trim", work=trim.tick),
        LongTask(name="jobs", is_due=jobs.is_due, work=jobs.run),
    ]


def _warn_of_weaknesses(dlq: Assembly, table: PolicyTable) -> None:
    """Say what weakens the guarantees, and which queues in policies this app does not know."""
    if not (table or table.tasks):
        logger.warning(NOTHING_GUARDED)
    warn_of_weaknesses(dlq.app, table)
    for name, hint in table.unknown_queues(KnownQueues.from_app(dlq.app)).items():
        logger.warning(
            "dlq_queues[%r] is a policy for a queue that this app does not know; %s", name, hint
        )
    if why := dlq.spool().unusable():
        logger.error(
            "While the store is away, letters cannot wait on disk: this user cannot write to %s. "
            "Let it, or set dlq_spool_dir",
            why,
        )
