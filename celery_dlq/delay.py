"""Default delays of queues: the publish side.

Every way of publishing ends in ``app.send_task``. A message without its own
countdown or eta gets its queue's ``default_delay`` there, as a countdown, before
Celery decides anything from it (native delayed delivery is decided in
``send_task``, before the signal ``before_task_publish``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from celery_dlq.config import Settings
from celery_dlq.decorators import policy_of
from celery_dlq.headers import DELAY_HEADER


def install(app: Any, settings: Callable[[], Settings]) -> None:
    """Give ``app.send_task`` the default delays.

    Args:
        app: The Celery app.
        settings: Gives the checked settings, at the first publish.
    """
    send_task = app.send_task
    delays = DefaultDelays(app, settings)

    @wraps(send_task)
    def delaying(
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: Any = None,
        eta: Any = None,
        *rest: Any,
        **options: Any,
    ) -> Any:
        if countdown is None and eta is None and delays.exist:
            seconds = delays.of(name, args, kwargs, options)
            if seconds:
                countdown = seconds
                options["headers"] = {**(options.get("headers") or {}), DELAY_HEADER: seconds}
        return send_task(name, args, kwargs, countdown, eta, *rest, **options)

    app.send_task = delaying


class DefaultDelays:
    """Knows the default delay of a message that is about to be published."""

    def __init__(self, app: Any, settings: Callable[[], Settings]) -> None:
        self._app = app
        self._settings = settings
        self._exist: bool | None = None

    @property
    def exist(self) -> bool:
        """Whether any queue or task has a default delay; found out once."""
        if self._exist is None:
            policies = list(self._settings().queues.values())
            policies += [p for t in self._app.tasks.values() if (p := policy_of(t)) is not None]
            self._exist = any(policy.default_delay for policy in policies)
        return self._exist

    def of(self, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> float:
        """The default delay in seconds, 0 for none."""
        task = options.get("task_type") or self._app.tasks.get(name)
        queue = self._queue(name, args, kwargs, options, task)
        policy = self._settings().policies.resolve(queue, policy_of(task) if task else None)
        return (policy.default_delay or 0.0) if policy else 0.0

    def _queue(
        self,
        name: str,
        args: Any,
        kwargs: Any,
        options: dict[str, Any],
        task: Any,
    ) -> str:
        amqp = self._app.amqp
        named = options.get("queue")
        if named is None:
            route = (options.get("router") or amqp.router).route
            named = route(dict(options), options.get("route_name") or name, args, kwargs, task)
            named = named.get("queue") or self._by_binding(named)
        return str(getattr(named, "name", named) or self._app.conf.task_default_queue)

    def _by_binding(self, options: dict[str, Any]) -> str | None:
        """The queue behind an exchange and routing key given by the publisher."""
        exchange, routing_key = options.get("exchange"), options.get("routing_key")
        if exchange is None and routing_key is None:
            return None
        exchange = str(getattr(exchange, "name", exchange) or "")
        for queue in self._app.amqp.queues.values():
            if (queue.exchange.name, queue.routing_key) == (exchange, routing_key):
                return str(queue.name)
        return routing_key
