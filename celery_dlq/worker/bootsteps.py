"""Bootsteps: start the guard with the worker, tick with its timer, close it on shutdown."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import click
from celery import bootsteps, signals
from celery.worker import state

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, DLQError
from celery_dlq.events import DeadLettered, Event
from celery_dlq.letters.printable import get_logger
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.transport.held import LOOP_GOES_ON
from celery_dlq.transport.redis.broker import UPGRADE, mismatch
from celery_dlq.worker.dispatched import Jobs, Results, shorten_reports, starts_here
from celery_dlq.worker.dropped import watch_dropped_messages
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.request import (
    DeadLetterRequest,
    guarded_request_class,
    kind_of_request,
)
from celery_dlq.worker.revoked import listen_for_revocations
from celery_dlq.worker.shutdown_signals import install
from celery_dlq.worker.wiring import guard_of

logger = get_logger("celery_dlq.worker")

# Transports that mark redelivered messages. On others, the worker waits for every count.
FLAGS_REDELIVERY = frozenset({"amqp", "redis"})


def assembly_of(app: Any) -> Any:
    """The `Assembly` of an app."""
    return app._celery_dlq.assembly  # noqa: SLF001 - our own attribute


class GuardStep(bootsteps.StartStopStep):
    """Worker bootstep: check settings and store, then guard every task of the app.

    Runs before the consumer builds its strategies, which read ``Task.Request``.
    """

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        try:
            _refuse_a_mismatch(worker.app)
            self.guard: Guard = guard_of(
                assembly_of(worker.app),
                hostname=worker.hostname,
                pid=os.getpid(),
                flags_redelivery=_driver_type(worker) in FLAGS_REDELIVERY,
                gives_back=_driver_type(worker) == "amqp",
            )
        except DLQError as exc:
            refuse_to_start(exc)
        if worker.pool_cls.__module__ == "celery.concurrency.thread":
            from celery_dlq.store.without_switch import writev  # noqa: PLC0415 - in this pool only

            self.guard.counter.connection.writev = writev
        if not starts_here(worker.pool_cls):
            shorten_reports()
        worker.dead_letter_guard = self.guard
        worker.dead_letter_tasks = TaskGuard(self.guard, kind_of_request(worker.pool_cls))
        worker.dead_letter_tasks(worker.app)
        guarded = any(map(self.guard.may_guard, [None, *worker.app.tasks.values()]))
        if guarded and _driver_type(worker) == "amqp":
            from celery_dlq.transport.amqp import read_leniently  # noqa: PLC0415 - on RabbitMQ only

            read_leniently()
        signals.worker_shutdown.connect(self._close, sender=worker, weak=False)
        listen_for_revocations()

    def start(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Wrap the handlers of shutdowns: Celery has just installed them."""
        install()

    def terminate(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """Uncharge running tasks at a cold shutdown, before the pool is terminated."""
        for request in list(state.active_requests):
            if hasattr(request, "dlq_in_flight"):
                _quietly(self.guard.record_interrupted, request)

    def _close(self, **_: Any) -> None:
        """Close the guard when the pool is gone, so that the last outcomes are written too."""
        _quietly(self.guard.close)


class TickStep(bootsteps.StartStopStep):
    """Consumer bootstep: tick once a second, and watch for messages that Celery drops."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._connection: Any = None  # whose ticks these are
        self._requested = False
        worker = consumer.controller
        watch_dropped_messages(consumer, worker.dead_letter_guard)
        self._read_ahead: Callable[[Any], None] = lambda _consumer: None
        if _driver_type(worker) == "amqp":
            from celery_dlq.transport.amqp import keep_prefetch_count, read_ahead  # noqa: PLC0415 - on RabbitMQ only

            keep_prefetch_count(worker)
            self._read_ahead = read_ahead
        self._fetch = worker.dead_letter_guard.parts.dlq.reliable_fetch()
        if self._fetch is not None:
            self._fetch.loop_goes_on = worker.pool_cls.__module__ in LOOP_GOES_ON
            self._fetch.watch(consumer)
            worker.dead_letter_guard.told = self._fetch.told
        worker.dead_letter_tasks.watch(consumer)
        self._warned = False
        self._events = assembly_of(worker.app).events
        self._send_event: Callable[[Event], None] = partial(send_event, consumer)
        self._events.subscribe(self._send_event, lambda kind: kind is DeadLettered)

    def start(self, consumer: Any) -> None:
        """Tick with the consumer's timer; called again after a lost connection."""
        guard = consumer.controller.dead_letter_guard
        connection = self._connection = consumer.connection
        guard.connected()
        self._requested = False  # the loop of a lost connection may have forgotten
        if not self._warned:
            self._warned = True
            _quietly(_warn_of_low_limits, consumer)

        def tick() -> None:
            if self._connection is connection:  # else the last one of a connection that is lost
                _quietly(look)
                consumer.timer.call_after(timing.current.tick, tick)

        def look() -> None:
            if consumer.task_consumer is not None:
                # Not `consume_from` of the app: before Celery 5.7 that has all it published to.
                guard.queues = tuple(sorted(one.name for one in consumer.task_consumer.queues))
            if self._fetch is not None:
                _quietly(self._fetch.look_after, guard.counts)
                _quietly(self._fetch.count, guard.counts)
            _quietly(guard.tick)
            if not self._requested:
                self._requested = True
                consumer.call_soon(in_its_loop)

        def in_its_loop() -> None:
            # The timer may have a greenlet or a thread of its own: there, a read from the broker
            # takes the consumer's, and a pool without room stops the heartbeat.
            self._requested = False
            _quietly(guard.look_for_missing_ends, consumer.pool)
            _quietly(consumer.controller.dead_letter_tasks.guard_more_tasks, consumer)
            _quietly(guard.start_later, consumer)
            _quietly(guard.in_loop, consumer)

        _quietly(read_before_put_back, consumer.pool, consumer.hub)
        _quietly(write_at_once, consumer.pool, consumer.hub, guard.counter.connection)
        if self._fetch is not None:
            _quietly(self._read_ahead, consumer)
        # The first heartbeat before the first message.
        _quietly(guard.tick)
        consumer.timer.call_after(timing.current.tick, tick)

    def stop(self, consumer: Any) -> None:
        """Stop ticking, after a last tick."""
        if self._connection is not None:
            self._connection = None
            consumer.controller.dead_letter_guard.counter.connection.send_gathered()
            consumer.controller.dead_letter_guard.disconnected()
            _quietly(consumer.controller.dead_letter_guard.tick)

    def shutdown(self, consumer: Any) -> None:
        """Uncount what never started, and close the guard: the pool is gone.

        Source: ``WorkController.on_stopped`` in
        https://github.com/celery/celery/blob/main/celery/worker/worker.py
        """
        guard = consumer.controller.dead_letter_guard
        _quietly(lambda: guard.uncount_never_started(guard.at_work.all_dispatched()))
        _quietly(guard.close)
        self._events.unsubscribe(self._send_event)
        if self._fetch is not None:
            _quietly(self._fetch.close)


class LongWorkStep(bootsteps.StartStopStep):
    """Worker bootstep: end long work before the pool, which may wait long for its tasks."""

    requires = ("celery.worker.components:Pool",)

    def stop(self, worker: Any) -> None:
        """Stop long work; another worker, or the next start, goes on."""
        _quietly(worker.dead_letter_guard.housekeeping.stop)

    terminate = stop


def send_event(consumer: Any, event: Event) -> None:
    """Send Celery's event of a letter, while the worker sends events of tasks."""
    dispatcher = consumer.event_dispatcher
    if isinstance(event, DeadLettered) and dispatcher is not None and dispatcher.enabled:
        from celery_dlq.worker.task_events import send  # noqa: PLC0415 - few workers send any

        send(dispatcher, consumer.app.tasks, event)


class TaskGuard:
    """Mixes the guard into the Request class of every task, also of tasks registered later."""

    def __init__(self, guard: Guard, kind: type[DeadLetterRequest]) -> None:
        self._guard = guard
        self._kind = kind
        self._classes: dict[tuple[Any, bool], type] = {}

    def __call__(self, app: Any) -> None:
        """Guard all tasks that are registered now."""
        for task in [app.Task, *list(app.tasks.values())]:
            own = (task.Request, self._guard.may_guard(task))
            made = self._classes.get(own)
            if made is None:
                made = guarded_request_class(task, self._guard, self._kind)
                self._classes[own] = self._classes[made, own[1]] = made
            task.Request = made
            if task is not app.Task:
                for one in self._guard.observers:
                    one.on_task(task)

    def watch(self, consumer: Any) -> None:
        """Guard newly registered tasks whenever the consumer updates its strategies.

        A custom task class has Celery's Request, not the app's. The consumer updates at every
        (re)connection and when its pool restarts.
        """
        if "update_strategies" in vars(consumer):
            return
        update = consumer.update_strategies

        def update_strategies() -> None:
            _quietly(self, consumer.app)
            update()

        consumer.update_strategies = update_strategies

    def guard_more_tasks(self, consumer: Any) -> None:
        """Guard tasks that no policy guarded at the start, but that an override guards now."""
        if not self._guard.guards_all and self._guard.may_guard(None):
            self._guard.guards_all = True
            consumer.update_strategies()


def write_at_once(pool: Any, hub: Any, counted: PipelinedConnection) -> None:
    """Let the processes of a prefork pool have their jobs as soon as these are counted."""
    inner: Any = getattr(pool, "_pool", None)
    if hasattr(inner, "dlq_results") and not hasattr(inner, "dlq_jobs"):
        inner.dlq_jobs = Jobs(inner, hub, counted)


def read_before_put_back(pool: Any, hub: Any) -> None:
    """Let a prefork pool read that a dead process accepted its job before it reassigns the job.

    When two processes die at once, billiard handles the second one's job before it has read that
    the job was accepted, and Celery hands it to another process: a second, uncounted start.
    Celery 5.4 never reads it, not even when one dies alone.

    Source: ``AsynPool.on_partial_read`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py
    """
    inner: Any = getattr(pool, "_pool", None)
    put_back = getattr(inner, "on_partial_read", None)
    if put_back is None or hub is None or hasattr(inner, "dlq_results"):
        return  # without a hub, it is no `AsynPool`
    inner.dlq_results = Results(inner)

    def on_partial_read(job: Any, process: Any) -> None:
        _quietly(inner.process_flush_queues, process)
        put_back(job, process)

    inner.on_partial_read = on_partial_read


def _quietly(act: Callable[..., None], *args: Any) -> None:
    try:
        act(*args)
    except Exception:
        logger.exception("The dead-letter guard failed in the background")


def _driver_type(worker: Any) -> str:
    return str(worker.app.connection_for_read().transport.driver_type)


def _warn_of_low_limits(consumer: Any) -> None:
    if _driver_type(consumer.controller) != "redis":
        from celery_dlq.operations.broker_limits import warn_of_low_limits  # noqa: PLC0415 - Redis has no such limits

        warn_of_low_limits(assembly_of(consumer.app), consumer.connection)


def _refuse_a_mismatch(app: Any) -> None:
    why = mismatch(app.connection_for_read().get_transport_cls())
    if why is not None:
        raise BrokerUnavailable(f"{why}. Run: {UPGRADE}")


def refuse_to_start(exc: DLQError) -> NoReturn:
    """Exit with one line and code 1 on the command line; raise in an embedded worker.

    ``Celery.worker_main``, with which Airflow starts its workers, lets click's own exceptions out
    as tracebacks.
    """
    if click.get_current_context(silent=True) is None:
        raise exc
    error = click.ClickException(str(exc))
    error.show()
    raise SystemExit(error.exit_code) from exc
