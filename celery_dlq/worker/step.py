"""Bootsteps: start the guard with the worker, tick with its timer, close it at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NoReturn

import click
from celery import bootsteps, signals
from celery.worker import state

from celery_dlq.errors import DLQError
from celery_dlq.logs import get_logger
from celery_dlq.worker.dropped import watch
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.request import guarded_request_class

logger = get_logger("celery_dlq.worker")

TICK_SECONDS = 1.0

# Transports that mark a message which was delivered before. On all others every
# count is waited for.
FLAGS_REDELIVERY = frozenset({"amqp", "redis"})

MakeGuard = Callable[..., Guard]


class GuardStep(bootsteps.StartStopStep):
    """Worker bootstep: check settings and store, then guard every task of the app.

    Runs before the consumer builds its strategies, which is when Celery looks at
    ``Task.Request``.
    """

    make_guard: MakeGuard

    def __init__(self, worker: Any, **kwargs: Any) -> None:
        super().__init__(worker, **kwargs)
        try:
            self.guard = type(self).make_guard(
                hostname=worker.hostname,
                pid=os.getpid(),
                flags_redelivery=_driver_type(worker) in FLAGS_REDELIVERY,
            )
        except DLQError as exc:
            _refuse(exc)
        worker.dead_letter_guard = self.guard
        worker.dead_letter_waiting_room = WaitingRoom()
        guard_tasks(worker.app, self.guard, worker.dead_letter_waiting_room)
        signals.worker_shutdown.connect(self._close, sender=worker, weak=False)

    def terminate(self, worker: Any) -> None:  # noqa: ARG002 - Celery's signature
        """A cold shutdown: what still runs is given up, not charged."""
        for request in list(state.active_requests):
            if hasattr(request, "dlq_tracked"):
                _quietly(self.guard.interrupted, request)
        self._close()

    def _close(self, **_: Any) -> None:
        """Sent when the pool is gone, so that the last outcomes are written too."""
        _quietly(self.guard.close)


class TickStep(bootsteps.StartStopStep):
    """Consumer bootstep: tick once a second, and watch for messages that Celery drops."""

    requires = ("celery.worker.consumer.connection:Connection",)

    def __init__(self, consumer: Any, **kwargs: Any) -> None:
        super().__init__(consumer, **kwargs)
        self._entry: Any = None
        watch(consumer, consumer.controller.dead_letter_guard)

    def start(self, consumer: Any) -> None:
        """Tick with the consumer's timer; also after a lost connection."""
        guard = consumer.controller.dead_letter_guard
        room = consumer.controller.dead_letter_waiting_room
        room.opened(consumer)

        def tick() -> None:
            _quietly(guard.tick)
            _quietly(guard_more_tasks, consumer, guard, room)
            _quietly(room.tick)

        _quietly(read_before_put_back, consumer.pool)
        # The first sign of life before the first message.
        _quietly(guard.tick)
        self._entry = consumer.timer.call_repeatedly(TICK_SECONDS, tick)

    def stop(self, consumer: Any) -> None:
        """Stop ticking, with one last tick."""
        if self._entry is not None:
            self._entry.cancel()
            self._entry = None
            _quietly(consumer.controller.dead_letter_guard.tick)


class WaitingRoom:
    """Requests that are given to the pool again at the next tick.

    A redelivered message may still run on a worker that is alive, or its worker may
    just have died; a few seconds tell. Bounded by the prefetch count: the messages
    in here are not acknowledged.
    """

    def __init__(self) -> None:
        self._consumer: Any = None
        self._requests: list[Any] = []

    def opened(self, consumer: Any) -> None:
        """A connection is there; messages of an earlier one are delivered anew."""
        self._consumer = consumer
        self._requests.clear()

    def add(self, request: Any) -> None:
        """Let a request wait for the next tick."""
        self._requests.append(request)

    def tick(self) -> None:
        """Give all to the pool again."""
        requests, self._requests = self._requests, []
        for request in requests:
            self._consumer.on_task_request(request)


def guard_tasks(app: Any, guard: Guard, room: WaitingRoom) -> None:
    """Mix the guard into the Request class of every task, and of tasks to come."""
    classes: dict[tuple[Any, bool], type] = {}
    for task in [app.Task, *app.tasks.values()]:
        kind = (task.Request, guard.may_guard(task))
        if kind not in classes:
            classes[kind] = guarded_request_class(task, guard, room.add)
        task.Request = classes[kind]


def guard_more_tasks(consumer: Any, guard: Guard, room: WaitingRoom) -> None:
    """Guard tasks that nothing guarded when the worker started: an override does now."""
    if not guard.guards_all and guard.may_guard(None):
        guard.guards_all = True
        guard_tasks(consumer.app, guard, room)
        consumer.update_strategies()


def read_before_put_back(pool: Any) -> None:
    """Let a prefork pool read that a lost process had begun its job before it gives the job away.

    When two processes die at once, billiard looks at the second one's job before it has
    read that the job was accepted, and Celery hands it to another process: a second start
    that nobody counts.

    Source: ``AsynPool.on_partial_read`` in
    https://github.com/celery/celery/blob/main/celery/concurrency/asynpool.py
    """
    inner: Any = getattr(pool, "_pool", None)
    put_back = getattr(inner, "on_partial_read", None)
    if put_back is None or getattr(inner, "dlq_reads_first", False):
        return
    inner.dlq_reads_first = True

    def on_partial_read(job: Any, process: Any) -> None:
        if not job._accepted:  # noqa: SLF001 - as the pool itself asks
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


def _refuse(exc: DLQError) -> NoReturn:
    """One line and exit code 1 on the command line; the error itself for embedded workers."""
    if click.get_current_context(silent=True) is None:
        raise exc
    raise click.ClickException(str(exc)) from exc
