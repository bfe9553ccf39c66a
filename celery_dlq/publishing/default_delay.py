"""Default delays of queues: the publish side.

Every way of publishing ends in ``app.send_task``. A message without its own
countdown or eta gets its queue's ``default_delay`` there, as a countdown, before
Celery decides anything from it (native delayed delivery is decided in
``send_task``, before the signal ``before_task_publish``).

Source: ``Celery.send_task`` in
https://github.com/celery/celery/blob/main/celery/app/base.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from functools import wraps
from typing import Any

from celery.app import base
from celery.app.routes import MapRoute

from celery_dlq import decorators
from celery_dlq.config import Settings
from celery_dlq.decorators import policy_of
from celery_dlq.headers import DELAY_HEADER, DELAY_SOURCE_HEADER
from celery_dlq.logs import get_logger
from celery_dlq.policies.queue_names import QueueNames
from celery_dlq.policies.table import PolicyTable

logger = get_logger("celery_dlq.publishing.default_delay")

_MOST_REMEMBERED = 4096
_PLACE = ("queue", "exchange", "routing_key")
_PARAMETERS = (
    "args",
    "kwargs",
    "countdown",
    "eta",
    "task_id",
    "producer",
    "connection",
    "router",
    "result_cls",
    "expires",
    "publisher",
    "link",
    "link_error",
    "add_to_parent",
    "group_id",
    "group_index",
    "retries",
    "chord",
    "reply_to",
    "time_limit",
    "soft_time_limit",
    "root_id",
    "parent_id",
    "route_name",
    "shadow",
    "chain",
    "task_type",
    "replaced_task_nesting",
)
"""Of ``Celery.send_task``, behind the name; not inspected, because a subclass may name none."""
_UP_TO_ETA = 4
# By name: Celery 5.7 gives the message its task's own options.
_MERGES_OPTIONS = hasattr(base, "_OMITTED")


def install(app: Any, owner: Any) -> None:
    """Give ``app.send_task`` the default delays.

    What it goes on to is looked up at each call, so that whatever replaces
    ``Celery.send_task`` later, an SDK or a test, is asked too.

    Args:
        app: The Celery app.
        owner: Its `DeadLetters`; gives the checked settings, at the first publish.
    """
    replaced = vars(app).get("send_task")  # on this app alone, before us
    delays = DefaultDelays(app, lambda: owner.settings)
    said = decorators.SAYS_DELAY

    @wraps(app.send_task, updated=())
    def delaying(name: str, *given: Any, **options: Any) -> Any:
        if (
            # No look at an app without delays: a publisher pays for the lookup below only.
            (said or delays.queues_have or owner._settings is not delays.seen)  # noqa: SLF001
            and delays.exist
            and (len(given) > _UP_TO_ETA or delays.concern(name, options))
        ):
            given, options = delays.apply(name, given, options)
        send_task = replaced or _method(app, "send_task")
        return send_task(name, *given, **options)

    app.send_task = delaying


def _method(target: Any, name: str) -> Any:
    """What ``target.name`` is without an attribute of this one object: its class's, bound."""
    for kind in type(target).__mro__:
        if name in kind.__dict__:
            found = kind.__dict__[name]
            bind = getattr(type(found), "__get__", None)  # a mock has none
            return found if bind is None else bind(found, target, type(target))
    raise AttributeError(name)


@dataclass(frozen=True, slots=True)
class DelayRule:
    """What happens to the delay of messages for one queue.

    Attributes:
        seconds: Delay of a message without its own; 0 for none.
        source: Where that is said, e.g. ``dlq_queues['orders']``.
        ignores: Whether a message's own delay is dropped.
    """

    seconds: float = 0.0
    source: str = ""
    ignores: bool = False


class DefaultDelays:
    """Gives each message that is about to be published its delay.

    Args:
        app: The Celery app.
        settings: Gives the checked settings.
    """

    def __init__(self, app: Any, settings: Callable[[], Settings]) -> None:
        self._app = app
        self._settings = settings
        self.seen: Settings | None = None
        self.queues_have = True
        self._remembered: dict[tuple[Any, ...], DelayRule] = {}
        self._rules: dict[tuple[str, str], DelayRule] = {}

    @property
    def exist(self) -> bool:
        """Whether any queue or task has something to say about delays."""
        settings = self._settings()
        if settings is not self.seen:
            self.seen = settings
            self.queues_have = any(p.says_delay for p in settings.queues.values())
            self._remembered.clear()
            self._rules.clear()
        return self.queues_have or bool(decorators.SAYS_DELAY)

    def concern(self, name: str, options: dict[str, Any]) -> bool:
        """Whether this message has to be looked at; quick for one like an earlier one."""
        known = self._remembered.get(_kind(name, options))
        return known is not _NOTHING or options.get("expires") is not None

    def apply(
        self, name: str, given: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments behind the name with which the message is to be published."""
        # Those that came by name go on by name: an override of send_task may know no others.
        given, more = given[:2], given[2:]
        if more:
            options = {**dict(zip(_PARAMETERS[2:], more, strict=False)), **options}
        if options.get("retries"):  # Task.retry() knows its own delay
            return given, options
        own = options.get("countdown") is not None or options.get("eta") is not None
        rule, options = self._rule(name, given, options)
        if own and rule.ignores and not rule.seconds:
            logger.debug(
                "Task %s: its countdown or eta is dropped, as its queue's policy says "
                "(ignore_message_delay)",
                name,
            )
            return given, {**options, "countdown": None, "eta": None}
        if not own and rule.seconds:
            options["countdown"] = rule.seconds
            options["headers"] = {
                **(options.get("headers") or {}),
                DELAY_HEADER: rule.seconds,
                DELAY_SOURCE_HEADER: rule.source,
            }
        self._warn_of_expiry(name, options)
        return given, options

    def queue_of(self, task: Any) -> str:
        """The queue to which a task is published when its publisher names none."""
        place = self._place({}, task)
        return RoutedOnce(self._app.amqp.router).queue(place, task.name, (), {}, task)

    def _rule(
        self, name: str, given: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[DelayRule, dict[str, Any]]:
        key = _kind(name, options)
        known = self._remembered.get(key)
        if known is not None:
            return known, options
        task = options.get("task_type") or self._app.tasks.get(name)
        router = options.get("router") or self._app.amqp.router
        routed_as = options.get("route_name") or name
        told = {**options, **dict(zip(_PARAMETERS, given, strict=False))}
        args, kwargs = told.get("args"), told.get("kwargs")
        place = self._place(options, task)
        once = RoutedOnce(router)
        queue = once.queue(place, routed_as, args, kwargs, task)
        rule = self._rule_of(queue, task)
        if all(isinstance(route, MapRoute) for route in router.routes):
            _remember(self._remembered, key, rule)
            return rule, options
        # A route may be a function that looks at arguments or draws lots: asked once.
        return rule, {**options, "router": once}

    def _place(self, options: Mapping[str, Any], task: Any) -> dict[str, Any]:
        """Queue, exchange and routing key as far as publisher or task name them."""
        place = {part: options[part] for part in _PLACE if options.get(part) is not None}
        if _MERGES_OPTIONS and "task_type" not in options and task is not None:
            for part in _PLACE:
                found = getattr(task, part, None)
                if found is not None:
                    place.setdefault(part, found)
        return place

    def _rule_of(self, queue: str, task: Any) -> DelayRule:
        name = getattr(task, "name", "")
        rule = self._rules.get((queue, name))
        if rule is None:
            policy = policy_of(task) if task is not None else None
            table = PolicyTable(self._settings().queues, {name: policy} if policy else {})
            explained = table.explain(queue, name)
            delay, ignores = explained["default_delay"], explained["ignore_message_delay"]
            rule = _NOTHING
            if delay.value or ignores.value:
                rule = DelayRule(delay.value or 0.0, delay.source, bool(ignores.value))
            _remember(self._rules, (queue, name), rule)
        return rule

    def _warn_of_expiry(self, name: str, options: dict[str, Any]) -> None:
        expires, countdown, eta = (
            options.get("expires"),
            options.get("countdown"),
            options.get("eta"),
        )
        if not isinstance(expires, (int, float, datetime, timedelta)) or not (countdown or eta):
            return
        now = datetime.now(self._app.timezone)
        end, start = _moment(expires, now), _moment(eta if eta is not None else countdown, now)
        if end is not None and start is not None and end <= start:
            logger.warning(
                "Task %s will never run: it expires at %s, and its delay ends at %s; a worker "
                "will dead-letter it as expired",
                name,
                end.isoformat(timespec="seconds"),
                start.isoformat(timespec="seconds"),
            )


class RoutedOnce:
    """A router that asks the app's routes once, however often it is asked.

    Args:
        router: The router of the app, or the publisher's own.
    """

    def __init__(self, router: Any) -> None:
        self._router = router
        self._found: Any = None
        self._asked = False

    def queue(self, place: dict[str, Any], name: str, args: Any, kwargs: Any, task: Any) -> str:
        """The name of the queue to which a message goes."""
        routed = self.route(dict(place), name, args, kwargs, task)
        queue, exchange = routed.get("queue"), routed.get("exchange")
        routing_key = routed.get("routing_key")
        queue_name = str(getattr(queue, "name", queue) or "")
        bound_to = getattr(queue, "exchange", None)
        kind = routed.get("exchange_type") or getattr(bound_to, "type", None) or "direct"
        if (not exchange or not routing_key) and kind == "direct":
            return queue_name  # Celery publishes to the queue itself
        exchange = exchange or bound_to
        key = routing_key or getattr(queue, "routing_key", None) or ""
        known = QueueNames(self._router.queues)
        return known.of(str(getattr(exchange, "name", exchange) or ""), str(key))

    def route(
        self, options: Any, name: str, args: Any = (), kwargs: Any = None, task_type: Any = None
    ) -> dict[str, Any]:
        """As ``celery.app.routes.Router.route``."""
        return dict(type(self._router).route(self, options, name, args, kwargs, task_type))

    def lookup_route(self, *args: Any, **kwargs: Any) -> Any:
        """The answer of the routes; a copy, because routing takes it apart."""
        if not self._asked:
            self._asked, self._found = True, self._router.lookup_route(*args, **kwargs)
        return dict(self._found) if isinstance(self._found, Mapping) else self._found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)


_NOTHING = DelayRule()


def _kind(name: str, options: dict[str, Any]) -> tuple[Any, ...]:
    """What routing looks at, as long as no route is a function."""
    get = options.get
    queue, exchange = get("queue"), get("exchange")
    return (
        name,
        queue if queue is None else getattr(queue, "name", queue),
        exchange if exchange is None else getattr(exchange, "name", exchange),
        get("routing_key"),
        get("route_name"),
        get("router"),
        "task_type" in options,
    )


def _remember(memory: dict[Any, DelayRule], key: Any, rule: DelayRule) -> None:
    if len(memory) >= _MOST_REMEMBERED:  # names made up at run time
        memory.clear()
    memory[key] = rule


def _moment(value: Any, now: datetime) -> datetime | None:
    if isinstance(value, (int, float)):
        return now + timedelta(seconds=value)
    if isinstance(value, timedelta):
        return now + value
    if isinstance(value, datetime):
        return value if value.tzinfo else value.replace(tzinfo=now.tzinfo)
    return None
