"""The queue of a message, found from its exchange and routing key."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

# Celery's native delayed delivery puts the delay before the routing key, bit by bit.
# Source: calculate_routing_key in
# https://github.com/celery/kombu/blob/main/kombu/transport/native_delayed_delivery.py
_DELAYED = re.compile(r"^(?:[01]\.){28}")


class QueueNames:
    """Finds the source queue of a message from its exchange and routing key.

    They equal the queue only for direct routing. Other messages are matched with the bindings
    of the queues that the app knows.
    """

    def __init__(self, queues: Any) -> None:
        self._queues = queues

    def queue_of(self, exchange: str, routing_key: str) -> str:
        """The name of the queue, or the routing key when no known queue fits."""
        if _DELAYED.match(routing_key):
            # The message waited in RabbitMQ and lost the exchange it was published to.
            return self._bound_to(self._exchanges(), _DELAYED.sub("", routing_key))
        if not exchange and routing_key in self._queues:
            return routing_key
        return self._bound_to([exchange], routing_key)

    def _bound_to(self, exchanges: list[str], routing_key: str) -> str:
        known = list(self._queues.values())
        for fits in (_is_bound, _bound_by_pattern, _on_exchange):
            for exchange in exchanges:
                found = [queue for queue in known if fits(queue, exchange, routing_key)]
                if found:
                    # Of kombu's Broadcast, each worker has a queue of its own, bcast.<uuid>.
                    return str(getattr(found[0], "alias", None) or found[0].name)
        return routing_key

    def _exchanges(self) -> list[str]:
        return sorted({on for queue in self._queues.values() for on, _key in _bindings(queue)})


@dataclass(frozen=True, slots=True)
class KnownQueues:
    """The queues in an app's configuration."""

    # Declared, routed to, of a task or an entry of `beat_schedule`, and the default
    names: frozenset[str]
    complete: bool  # False if a route is a function, which may name any other

    @classmethod
    def from_app(cls, app: Any) -> KnownQueues:
        """Read an app's configuration; no route is called.

        Source: ``prepare`` in https://github.com/celery/celery/blob/main/celery/app/routes.py
        """
        routes = app.conf.task_routes or ()
        routes = routes if isinstance(routes, (list, tuple)) else (routes,)
        maps = [route for route in routes if isinstance(route, (Mapping, list, tuple))]
        entries = (app.conf.beat_schedule or {}).values()
        named = [
            *(target for route in maps for target in _targets(route)),
            *(entry.get("options") for entry in entries if isinstance(entry, Mapping)),
            *({"queue": getattr(task, "queue", None)} for task in app.tasks.values()),
        ]
        found = (one.get("queue") if isinstance(one, Mapping) else one for one in named)
        names = {str(getattr(queue, "name", queue)) for queue in found if queue}
        names |= {*app.amqp.queues, app.conf.task_default_queue}
        return cls(frozenset(names), complete=len(maps) == len(routes))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean 'x'?`` if a known name is close or ends with this one, else nothing."""
    names = sorted({*known} - {name})
    ending = [one for one in names if one.endswith(f".{name}")]
    close = ending or difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _targets(route: Any) -> list[Any]:
    """The queues or options to which a mapping, or a list of pairs, routes."""
    pairs = route.items() if isinstance(route, Mapping) else route
    return [target for _name, target in pairs]


def _is_bound(queue: Any, exchange: str, routing_key: str) -> bool:
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
