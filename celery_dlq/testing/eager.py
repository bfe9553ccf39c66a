"""Guard eager executions as a worker would.

``task_always_eager`` and ``task.apply()`` have no message, no queue and no Request. This
module makes the message that would have been published, and calls the worker's guard before
and after each execution: policies, limits, history and fingerprint are those of a worker.
Eager mode cannot show everything:

- Nothing is delivered again. A task that raises ``Reject(requeue=True)`` has run once
  and is neither done nor dead. Apply it again with the same ``task_id``, as the
  broker would deliver it again, and the guard counts a second delivery.
- No process dies, and no time limit applies.
- Calling a task as a function (``charge(1)``) sends no message, so nothing is dead-lettered.
- Errbacks of a message that the guard refuses do not run.
"""

from __future__ import annotations

import inspect
import os
import socket
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import wraps
from typing import Any
from unittest.mock import patch

from billiard.einfo import ExceptionInfo
from celery import current_task, signals, states
from celery.app.task import Task
from celery.result import EagerResult
from celery.utils import uuid
from kombu.exceptions import EncodeError
from kombu.message import Message
from kombu.serialization import dumps

from celery_dlq.plugin import DeadLetters, app_itself
from celery_dlq.policies.decisions import Die, Run
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.settling import refusal_error
from celery_dlq.worker.wiring import guard_of
from celery_dlq.writing.failure import failure_of
from celery_dlq.writing.lifecycle import DeliveryState, GuardedRequest, InFlight

_FOR_ROUTING = ("queue", "exchange", "routing_key")


class EagerRequest:
    """The part of Celery's Request that the guard uses, for one eager execution."""

    def __init__(self, task: Any, message: Message) -> None:
        self.task = task
        self.message = message
        self.request_dict: dict[str, Any] = dict(message.headers)
        self.id = str(self.request_dict["id"])
        self.delivery_info: dict[str, Any] = message.delivery_info
        self.expires = None
        self.worker_pid = os.getpid()
        self.time_start: float | None = None
        self.acknowledged = False
        self.dlq_state = DeliveryState.NEW
        self.dlq_in_flight: InFlight | None = None

    def dlq_move(self, state: DeliveryState) -> None:
        """Change the state; nothing else depends on it here."""
        self.dlq_state = state

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """Change the state; there is no message to acknowledge."""
        self.dlq_state = state

    def error_of(self, verdict: Die) -> Exception:
        """The error of a message that is not executed."""
        assert self.dlq_in_flight is not None  # noqa: S101 - it was counted
        where = self.dlq_in_flight.key.dead_letter_queue
        return refusal_error(f"{self.task.name}[{self.id}]", verdict, where)


_: type[GuardedRequest] = EagerRequest  # checked by mypy


class EagerGuards:
    """Guards the eager executions of all watched apps."""

    def __init__(self) -> None:
        self.used = False
        self.problems: list[Exception] = []
        self._apps: dict[int, DeadLetters] = {}
        self._guards: dict[int, Guard] = {}
        self._running: dict[str, EagerRequest] = {}
        self._places: dict[str, dict[str, Any]] = {}

    def guard_until_closed(self, stack: ExitStack) -> None:
        """Guard eager executions until the stack is closed."""
        apply = Task.apply
        signature = inspect.signature(apply)

        @wraps(apply)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            if not self._concerns(bound.arguments["self"]):
                return apply(*args, **kwargs)
            return self._execute(bound, apply)

        stack.enter_context(patch.object(Task, "apply", guarded))
        signals.task_postrun.connect(self._record_end, weak=False)
        stack.callback(signals.task_postrun.disconnect, self._record_end)
        stack.callback(self._stop_guarding)

    def guard_app(self, app: Any, dlq: DeadLetters) -> None:
        """Guard the tasks of one more app."""
        self._apps[id(app)] = dlq

    def _concerns(self, task: Any) -> bool:
        """True for a guarded call; ``apply()`` inside a task is one in eager mode only."""
        app = app_itself(task.app)
        return id(app) in self._apps and (not current_task or bool(app.conf.task_always_eager))

    def _execute(self, bound: inspect.BoundArguments, apply: Callable[..., Any]) -> Any:
        given = bound.arguments
        given["task_id"] = task_id = given.get("task_id") or uuid()
        task = given["self"]
        task = task.app.tasks.get(task.name, task)
        self.used = True
        request = EagerRequest(task, self._message(task, given))
        guard = self._guard_of(task.app)
        for one in guard.observers:
            one.on_task(task)
        verdict = guard.count_start(request)
        if isinstance(verdict, Die):
            guard.dead_letter(request, verdict)
            return _refused(request, verdict, throw=given.get("throw"))
        assert isinstance(verdict, Run)  # noqa: S101 - no other execution to wait for
        self._running[task_id] = request
        try:
            return apply(*bound.args, **bound.kwargs)
        finally:
            if self._running.get(task_id) is request:
                del self._running[task_id]

    def _record_end(self, task_id: str, task: Any, retval: Any, state: Any, **_: Any) -> None:
        request = self._running.pop(task_id, None)
        if request is None:
            return
        # Without a state, Celery is passing an exception to the caller.
        exc = sys.exc_info()[1] if state is None else retval
        try:
            if state == states.SUCCESS:
                self._guard_of(task.app).record_success(request)
            elif isinstance(exc, Exception):  # else the process is exiting
                info = ExceptionInfo((type(exc), exc, exc.__traceback__))
                guard = self._guard_of(task.app)
                for one in guard.observers:
                    one.on_error(info, task, request.delivery_info)
                failure = failure_of(info, tuple(task.throws or ()))
                guard.decide_end(request, failure, requeued=False)
        except Exception as problem:  # noqa: BLE001 - raised by the next assertion
            self.problems.append(problem)

    def _guard_of(self, app: Any) -> Guard:
        app = app_itself(app)
        guard = self._guards.get(id(app))
        if guard is None:
            hostname = f"eager@{socket.gethostname()}"
            # The broker flags nothing here, so the guard checks every count.
            guard = guard_of(
                self._apps[id(app)].assembly,
                hostname=hostname,
                pid=os.getpid(),
                flags_redelivery=False,
            )
            for one in guard.observers:
                if one.name == "exceptions":
                    one.place = self._place_of  # type: ignore[attr-defined]
            self._guards[id(app)] = guard
        return guard

    def _place_of(self, request: Any) -> dict[str, Any]:
        """Exchange and routing key; Celery's eager request has none."""
        return self._places.get(request.id) or request.delivery_info or {}

    def _stop_guarding(self) -> None:
        for guard in self._guards.values():
            for one in guard.observers:
                one.close()

    def _message(self, task: Any, given: dict[str, Any]) -> Message:
        """The message that would have been published."""
        args, kwargs = tuple(given.get("args") or ()), dict(given.get("kwargs") or {})
        own = {name: getattr(task, name, None) for name in (*_FOR_ROUTING, "serializer")}
        options = {**own, **given.get("options", {})}
        made = task.app.amqp.as_task_v2(
            given["task_id"],
            task.name,
            args,
            kwargs,
            retries=given.get("retries") or 0,
            root_id=options.get("root_id"),
            parent_id=options.get("parent_id"),
            group_id=options.get("group_id"),
        )
        content_type, content_encoding, body = "", "", b""
        with suppress(EncodeError):  # publishing would have failed
            serializer = options.get("serializer") or task.app.conf.task_serializer
            content_type, content_encoding, body = dumps(made.body, serializer)  # type: ignore[no-untyped-call]
        return Message(  # type: ignore[no-untyped-call]
            body=body,
            delivery_tag=given["task_id"],
            content_type=content_type,
            content_encoding=content_encoding,
            delivery_info=self._delivery_info(task, args, kwargs, given["task_id"], options),
            properties=made.properties,
            headers={**(given.get("headers") or {}), **made.headers},
        )

    def _delivery_info(
        self, task: Any, args: Any, kwargs: Any, task_id: str, options: dict[str, Any]
    ) -> dict[str, Any]:
        """Exchange and routing key; a retry keeps those of the first message."""
        if task_id not in self._places:
            given = {name: options[name] for name in _FOR_ROUTING if options.get(name)}
            route = task.app.amqp.router.route(given, task.name, args, kwargs, task)
            queue = route.get("queue")
            place = ("", queue) if queue else (route.get("exchange"), route.get("routing_key"))
            exchange, routing_key = (str(getattr(one, "name", one) or "") for one in place)
            self._places[task_id] = {"exchange": exchange, "routing_key": routing_key}
        return dict(self._places[task_id])


def _refused(request: EagerRequest, verdict: Die, *, throw: bool | None) -> EagerResult:
    """The result of a message that was not executed."""
    task, exc = request.task, request.error_of(verdict)
    if task.app.conf.task_eager_propagates if throw is None else throw:
        raise exc
    return EagerResult(request.id, exc, states.FAILURE, name=task.name)
