"""Wires a worker's guard: counter, store, policies, and what it does in the background."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from celery_dlq.backends.base import Clock, DeadLetterStore, WorkerInfo
from celery_dlq.config import Settings
from celery_dlq.decorators import policy_of
from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Events
from celery_dlq.logs import get_logger
from celery_dlq.metrics import Measuring
from celery_dlq.observers import WorkerObservers
from celery_dlq.operations.retention import Retention, RetentionRound
from celery_dlq.parts import WorkerParts, make_worker_parts, shown_place
from celery_dlq.policies.drift import TASK_PREFIX
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.publishing.default_delay import DefaultDelays
from celery_dlq.record import EPOCH
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.heartbeat import Heartbeat
from celery_dlq.worker.letter_writer import Announcer, LetterWriter
from celery_dlq.worker.policy_cache import PolicyCache
from celery_dlq.worker.sampling import Sampler
from celery_dlq.worker.spool import Spool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

logger = get_logger("celery_dlq")

_MOST_TASKS = 5000


def make_guard(
    app: Any,
    settings: Settings,
    clock: Clock,
    events: Events,
    *,
    measuring: Measuring,
    memory: WorkerParts | None,
    announcer: Callable[[], Announcer | None],
    hostname: str,
    pid: int,
    flags_redelivery: bool,
    version: str,
) -> Guard:
    """The guard of one worker, once its store answers.

    Args:
        app: The Celery app.
        settings: Its checked settings.
        clock: The present, aware UTC.
        events: Told of what happens.
        measuring: This process's part in the metrics.
        memory: The parts to use if letters are kept in memory.
        announcer: Gives what keeps the outbox of dead-letter exchanges; asked once the store
            answers.
        hostname: Node name of the worker.
        pid: Its main process.
        flags_redelivery: Whether the broker marks redelivered messages.
        version: Version of this package.

    Raises:
        StoreUnavailable: The store did not answer in ``dlq_start_timeout``.
    """
    broker_url = app.conf.broker_url
    parts = memory or make_worker_parts(settings, broker_url, app.connection_for_write)
    wait_for(parts.store, settings.start_timeout)
    table = policy_table_of(app, settings)
    policy_cache = PolicyCache(table, app.amqp.queues, app.conf.task_default_queue)
    _warn_of_unknown_queues(app, table)
    place = shown_place(settings, broker_url)  # without the password: that may change
    observers = WorkerObservers(settings, broker_url, events, measuring)
    letter_writer = LetterWriter(
        parts.store,
        Spool(settings.spool_dir, f"{place} {settings.key_prefix}"),
        announcer=announcer(),
        events=events,
        mark=observers.marked,
        counts=measuring.counts,
    )
    sampler = None
    if settings.sample_successes and parts.samples is not None:
        sampler = Sampler(
            parts.samples,
            settings.sample_successes,
            clock,
            hostname=hostname,
            release=settings.release,
        )
    guard = Guard(
        policy_cache,
        letter_writer,
        parts.counter,
        clock,
        hostname=hostname,
        pid=pid,
        flags_redelivery=flags_redelivery,
        release=settings.release,
        counts=measuring.counts,
        sampler=sampler,
    )
    observers.watch(guard, letter_writer, hostname)
    if parts.metrics is not None:
        measuring.use(parts.metrics)
    retention = Retention(parts.store, parts.registry, events, hostname)
    info = replace(
        card_of(app, settings), hostname=hostname, pid=pid, version=version, started_at=clock()
    )
    guard.periodic_tasks.add(
        Heartbeat(parts.registry, info, policy_cache.obey),
        *_trimming(parts.store, retention, policy_cache),
        observers,
        *([sampler] if sampler is not None else []),
    )
    return guard


def _trimming(
    store: DeadLetterStore, retention: Retention, policy_cache: PolicyCache
) -> list[RetentionRound]:
    if store.capabilities.random_access:
        return [RetentionRound(retention, store, lambda: policy_cache.policies)]
    table = policy_cache.policies
    policies = [*table.queues.values(), *table.tasks.values()]
    if any(p.dead_letter_ttl or p.dead_letter_max_length for p in policies):
        logger.warning(
            "dlq_store is 'broker', so workers trim nothing: dead_letter_ttl and "
            "dead_letter_max_length are obeyed when `celery dlq trim` runs"
        )
    return []


def policy_table_of(app: Any, settings: Settings) -> PolicyTable:
    """The policies of an app's queues and of its registered tasks."""
    return PolicyTable(settings.queues, task_policies(app))


def task_policies(app: Any) -> dict[str, Policy]:
    """The policies of task decorators, by task name."""
    found = ((task.name, policy_of(task)) for task in list(app.tasks.values()))
    return {name: policy for name, policy in found if policy is not None}


def card_of(app: Any, settings: Settings) -> WorkerInfo:
    """What any worker of an app tells the others; who it is, is left open."""
    policies: Mapping[str, Policy] = {
        **settings.queues,
        **{f"{TASK_PREFIX}{name}": policy for name, policy in task_policies(app).items()},
    }
    tasks = sorted(name for name in app.tasks if not name.startswith("celery."))
    return WorkerInfo(
        hostname="",
        pid=0,
        version="",
        started_at=EPOCH,
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        tasks=tuple(tasks[:_MOST_TASKS]),
        policies={name: policy.to_json() for name, policy in policies.items()},
    )


def known_queues(app: Any) -> set[str]:
    """The queues that an app's configuration names."""
    routes = app.conf.task_routes
    routed = routes.values() if isinstance(routes, dict) else ()
    named = {
        r if isinstance(r, str) else r.get("queue") for r in routed if isinstance(r, (str, dict))
    }
    names = {str(getattr(queue, "name", queue)) for queue in named if queue is not None}
    return {*names, *app.amqp.queues, app.conf.task_default_queue}


def queue_of_tasks(app: Any) -> dict[str, str]:
    """The queue to which each task with a policy of its own is published."""
    delays = DefaultDelays(app, Settings())
    return {name: delays.queue_of(app.tasks[name]) for name in task_policies(app)}


def wait_for(store: DeadLetterStore, timeout_seconds: float) -> None:
    """Wait until a store answers.

    Raises:
        StoreUnavailable: It did not in time.
    """
    deadline = time.monotonic() + timeout_seconds
    while True:
        try:
            return store.check()
        except StoreUnavailable as exc:
            if time.monotonic() >= deadline:
                raise
            logger.warning("Waiting for the dead-letter store: %s", exc)
            time.sleep(min(1.0, max(0.0, deadline - time.monotonic())))


def _warn_of_unknown_queues(app: Any, table: PolicyTable) -> None:
    for name, hint in table.unknown_queues(known_queues(app)).items():
        logger.warning(
            "dlq_queues[%r] is a policy for a queue that this app does not know; %s", name, hint
        )
