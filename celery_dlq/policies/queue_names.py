"""The queue of a message, found from its exchange and routing key."""

from __future__ import annotations

import re
from typing import Any

# Celery's native delayed delivery puts the delay before the routing key, bit by bit.
# Source: calculate_routing_key in
# https://github.com/celery/kombu/blob/main/kombu/transport/native_delayed_delivery.py
_DELAYED = re.compile(r"^(?:[01]\.){28}")


class QueueNames:
    """Finds the source queue of a message from its exchange and routing key.

    They equal the queue only for direct routing. Other messages are matched with the bindings
    of the queues that the app knows.

    Args:
        queues: ``app.amqp.queues``.
    """

    def __init__(self, queues: Any) -> None:
        self._queues = queues

    def of(self, exchange: str, routing_key: str) -> str:
        """The name of the queue, or the routing key when no known queue fits."""
        if _DELAYED.match(routing_key):
            # The message waited in RabbitMQ and lost the exchange it was published to.
            return self._bound_to(self._exchanges(), _DELAYED.sub("", routing_key))
        if not exchange and routing_key in self._queues:
            return routing_key
        return self._bound_to([exchange], routing_key)

    def _bound_to(self, exchanges: list[str], routing_key: str) -> str:
        known = list(self._queues.values())
        for fits in (_bound, _bound_by_pattern, _on_exchange):
            for exchange in exchanges:
                found = [queue for queue in known if fits(queue, exchange, routing_key)]
                if found:
                    return str(found[0].name)
        return routing_key

    def _exchanges(self) -> list[str]:
        return sorted({on for queue in self._queues.values() for on, _key in _bindings(queue)})


def known_queues(app: Any) -> set[str]:
    """The names of the queues in an app's configuration: declared, routed to, and the default."""
    routes = app.conf.task_routes
    routed = routes.values() if isinstance(routes, dict) else ()
    named = {
        r if isinstance(r, str) else r.get("queue") for r in routed if isinstance(r, (str, dict))
    }
    names = {str(getattr(queue, "name", queue)) for queue in named if queue is not None}
    return {*names, *app.amqp.queues, app.conf.task_default_queue}


def _bound(queue: Any, exchange: str, routing_key: str) -> bool:
    return (exchange, routing_key) in _bindings(queue)


def _bound_by_pattern(queue: Any, exchange: str, routing_key: str) -> bool:
    """Match as a topic exchange does: ``*`` is one word, ``#`` any number of words."""
    return any(
        on == exchange and re.fullmatch(_pattern(key), routing_key) for on, key in _bindings(queue)
    )


def _on_exchange(queue: Any, exchange: str, _routing_key: str) -> bool:
    """Match as a fanout exchange does: the routing key is ignored."""
    return any(on == exchange for on, _key in _bindings(queue))


def _bindings(queue: Any) -> list[tuple[str, str]]:
    bound = [queue, *(queue.bindings or ())]
    return [(_exchange(one), str(one.routing_key or "")) for one in bound]


def _pattern(key: str) -> str:
    words = [{"*": r"[^.]+", "#": r".*"}.get(word, re.escape(word)) for word in key.split(".")]
    # "sport.#" also binds "sport".
    return r"\.".join(words).replace(r"\..*", r"(\..*)?")


def _exchange(bound: Any) -> str:
    return str(bound.exchange.name or "") if bound.exchange is not None else ""
