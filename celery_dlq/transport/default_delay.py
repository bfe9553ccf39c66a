"""Default delays of queues: the publish side.

Every publish calls ``app.send_task``. A message without its own countdown or eta gets
its queue's ``default_delay`` there, as a countdown. The signal ``before_task_publish``
would be too late: ``send_task`` decides on native delayed delivery before it.

Source: ``Celery.send_task`` in
https://github.com/celery/celery/blob/main/celery/app/base.py
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import lru_cache, wraps
from inspect import signature
from typing import Any

from celery import VERSION, Celery
from celery.app.routes import MapRoute

from celery_dlq.config import Settings
from celery_dlq.letters.headers import DELAY_HEADER, DELAY_SOURCE_HEADER
from celery_dlq.letters.printable import get_logger
from celery_dlq.policies.policy import DefaultDelay, Policy, policy_of, task_policies
from celery_dlq.policies.queue_names import QueueNames
from celery_dlq.policies.table import PolicyTable

logger = get_logger("celery_dlq.transport.default_delay")

MAX_CACHED_NAMES = 4096
"""Queues and tasks whose rule is cached; only apps that make up names have more."""

_DESTINATION = ("queue", "exchange", "routing_key")
PARAMETERS = tuple(signature(Celery.send_task).parameters)[2:-1]
"""Parameters of ``Celery.send_task`` after ``name``; a subclass's signature may name none."""
# Since Celery 5.7, a message sent by name gets the options of its registered task.
MERGES_OPTIONS = VERSION >= (5, 7)


def install(app: Any, owner: Any) -> None:
    """Give ``app.send_task`` the default delays.

    Looks up the original ``send_task`` at each call, so that a later replacement of
    ``Celery.send_task``, by an SDK or a test, is called too.
    """
    replaced = vars(app).get("send_task")  # on this app alone, before us
    delays: DefaultDelays | None = None

    @wraps(app.send_task, updated=())
    def delaying(name: str, *given: Any, **options: Any) -> Any:
        nonlocal delays
        settings = owner.settings
        if delays is None or delays.settings is not settings:
            delays = DefaultDelays(app, settings)
        changes = delays.changes(name, given, options)
        if changes:
            # Keep named arguments named: an override of send_task may accept no others.
            options = {**dict(zip(PARAMETERS[2:], given[2:], strict=False)), **options, **changes}
            given = given[:2]
        send_task = replaced or _class_method(app, "send_task")
        return send_task(name, *given, **options)

    app.send_task = delaying


def task_queues(app: Any) -> dict[str, str]:
    """The queue of each task with a policy of its own, when its publisher names none."""
    delays = DefaultDelays(app, Settings())
    return {name: delays.queue_of(app.tasks[name]) for name in task_policies(app)}


def _class_method(target: Any, name: str) -> Any:
    """The bound method ``name`` of the class of ``target``; ignores instance attributes."""
    for kind in type(target).__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            bind = getattr(type(found), "__get__", None)  # a mock has none
            return found if bind is None else bind(found, target, type(target))
    raise AttributeError(name)


@dataclass(frozen=True, slots=True)
class DelayRule:
    """The delay rule for messages of one task to one queue."""

    seconds: float = 0.0  # Delay of a message without its own; 0 for none
    source: str = ""  # The policy that sets it, e.g. `dlq_queues['orders']`
    always: bool = False  # Replace a message's own delay


class DefaultDelays:
    """Decides the delay of each message that is about to be published."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self._app = app
        self._amqp = app.amqp  # kept, because looking it up takes about 2 µs
        self.settings = settings
        self._queues_say_delay = any(p.says_delay for p in settings.queues.values())
        self.rule = lru_cache(MAX_CACHED_NAMES)(self._find_rule)
        self.mapped_queue = lru_cache(MAX_CACHED_NAMES)(self._find_mapped_queue)

    def changes(
        self, name: str, given: tuple[Any, ...], options: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The arguments of ``send_task`` to replace for the message's delay."""
        task = options.get("task_type") or self._registered(name)
        policy = policy_of(task) if task is not None else None
        if not self._queues_say_delay and not (policy and policy.says_delay):
            return {}
        if given[2:]:  # rare: most publishers name all but args and kwargs
            options = {**dict(zip(PARAMETERS[2:], given[2:], strict=False)), **options}
        if options.get("retries"):  # Task.retry() sets its own delay
            return {}
        app_router = self._amqp.router
        own_router = options.get("router") or app_router
        router = routed_once(own_router, name, given, options, task)
        routed_as, destination = options.get("route_name") or name, _destination(options, task)
        if router is app_router:
            queue = self.mapped_queue(routed_as, frozenset(destination.items()))
        else:
            queue = _queue_of(router, routed_as, destination)
        changes = {} if router is own_router else {"router": router}
        rule = self.rule(queue, getattr(task, "name", ""), policy)
        own = options.get("countdown") is not None or options.get("eta") is not None
        if own and rule.always:
            logger.debug("Task %s: default_delay of queue %s replaces its delay", name, queue)
            changes |= {"countdown": None, "eta": None}
        if rule.seconds and (rule.always or not own):
            changes["countdown"] = rule.seconds
            changes["headers"] = {
                **(options.get("headers") or {}),
                DELAY_HEADER: rule.seconds,
                DELAY_SOURCE_HEADER: rule.source,
            }
        if options.get("expires") is not None:
            self._warn_of_expiry(name, {**options, **changes})
        return changes

    def queue_of(self, task: Any) -> str:
        """The queue of a task whose publisher names none."""
        options = {part: getattr(task, part, None) for part in _DESTINATION}
        options["task_type"] = task
        router = routed_once(self._amqp.router, task.name, (), options, task)
        return _queue_of(router, task.name, _destination(options, task))

    def _registered(self, name: str) -> Any:
        """The registered task; finalizes the app unless ``autofinalize`` is off."""
        app = self._app
        if not (app.finalized or app.autofinalize):
            return None
        try:  # a registry of one's own may have no ``get``; `Celery.send_task` asks so, too
            return app.tasks[name]
        except KeyError:
            return None

    def _find_mapped_queue(self, name: str, destination: frozenset[tuple[str, Any]]) -> str:
        return _queue_of(self._amqp.router, name, dict(destination))

    def _find_rule(self, queue: str, task_name: str, policy: Policy | None) -> DelayRule:
        table = PolicyTable(self.settings.queues, {task_name: policy} if policy else {})
        explained = table.explain(queue, task_name)
        found = explained["default_delay"]
        delay = DefaultDelay.of(found.value)
        return DelayRule(delay.seconds, found.source, delay.always)

    def _warn_of_expiry(self, name: str, options: Mapping[str, Any]) -> None:
        expires, countdown, eta = map(options.get, ("expires", "countdown", "eta"))
        if not isinstance(expires, (int, float, datetime, timedelta)) or not (countdown or eta):
            return
        now = datetime.now(self._app.timezone)
        end, start = _moment_of(expires, now), _moment_of(countdown if eta is None else eta, now)
        if end is not None and start is not None and end <= start:
            logger.warning(
                "Task %s will never run: it expires at %s, and its delay ends at %s; a worker "
                "will dead-letter it as expired",
                name,
                end.isoformat(timespec="seconds"),
                start.isoformat(timespec="seconds"),
            )


def routed_once(
    router: Any, name: str, given: tuple[Any, ...], options: Mapping[str, Any], task: Any
) -> Any:
    """A router that evaluates its routes for this message once, now.

    A route may be a function of the arguments, or random. Evaluated again by Celery, it could
    name another queue than the one whose delay the message got.
    """
    if all(isinstance(route, MapRoute) for route in router.routes):
        return router
    extra = {key: value for key, value in options.items() if key not in PARAMETERS}
    called_with = {**dict(zip(PARAMETERS, given, strict=False)), **options}
    answer = router.lookup_route(
        called_with.get("route_name") or name,
        called_with.get("args"),
        called_with.get("kwargs") or {},
        router.expand_destination({**extra, **_destination(options, task)}),
        task if MERGES_OPTIONS else options.get("task_type"),
    )
    once = copy(router)
    # A copy of the answer each time, because routing modifies it.
    once.routes = [lambda *_, **__: dict(answer) if isinstance(answer, Mapping) else answer]
    return once


def _queue_of(router: Any, name: str, destination: dict[str, Any]) -> str:
    """The name of a message's queue, from a router that needs only the task's name."""
    routed = router.route(destination, name)
    queue, exchange = routed.get("queue"), routed.get("exchange")
    routing_key = routed.get("routing_key")
    bound_to = getattr(queue, "exchange", None)
    kind = routed.get("exchange_type") or getattr(bound_to, "type", None) or "direct"
    if (not exchange or not routing_key) and kind == "direct":
        # Celery publishes to the queue itself.
        return str(getattr(queue, "name", queue) or "")
    exchange = exchange or bound_to
    key = routing_key or getattr(queue, "routing_key", None) or ""
    return QueueNames(router.queues).queue_of(
        str(getattr(exchange, "name", exchange) or ""), str(key)
    )


def _destination(options: Mapping[str, Any], task: Any) -> dict[str, Any]:
    """Queue, exchange and routing key, as far as the publisher or the task sets them."""
    named = {part: options[part] for part in _DESTINATION if part in options}
    if MERGES_OPTIONS and task is not None and options.get("task_type") is None:
        named = {**{part: getattr(task, part, None) for part in _DESTINATION}, **named}
    return {part: value for part, value in named.items() if value is not None}


def _moment_of(value: Any, now: datetime) -> datetime | None:
    if isinstance(value, (int, float)):
        return now + timedelta(seconds=value)
    if isinstance(value, timedelta):
        return now + value
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=now.tzinfo)
    return None
