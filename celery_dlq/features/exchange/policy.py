"""The dead-letter exchange of a policy: each letter is published there, for other services."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from celery_dlq.policies.checks import expected, mapping, one_of, true_or_false
from celery_dlq.policies.policy import KeyValue

TYPES = ("direct", "fanout", "topic")
MAX_NAME_BYTES = 255  # AMQP short strings hold no more


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterExchange(KeyValue):
    """A durable exchange on the broker.

    Attributes:
        name: Its name. Empty: the broker's default exchange, where the routing key is the
            name of a queue.
        type: ``direct``, ``fanout`` or ``topic``.
        routing_key: Routing key of what is published there. Unset: the name of the queue that
            the message came from.
        before_ack: The broker confirms the copy before the message is acknowledged, and the copy
            has the whole letter; RabbitMQ only.
    """

    name: str
    type: str = "direct"
    routing_key: str | None = None
    before_ack: bool = False

    def __str__(self) -> str:
        return f"{self.name or 'default exchange'} ({self.type})"

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, as the policy takes it; without what is not set."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {key: value for key, value in found.items() if value not in (None, False)}


def dead_letter_exchange(where: str, value: object) -> DeadLetterExchange:
    """Check an exchange: its name, or a mapping."""
    if isinstance(value, DeadLetterExchange):
        value = value.to_json()
    if isinstance(value, str):
        value = {"name": value}
    found = _CHECK(where, value)
    exchange = DeadLetterExchange(**found)
    if not exchange.name and exchange.type != "direct":
        what = "direct for the broker's default exchange"
        raise expected(f"{where}['type']", what, exchange.type)
    return exchange


def dead_letter_task(where: str, value: object) -> str:
    """Check the name of a task."""
    if not isinstance(value, str) or not value.strip():
        raise expected(where, "the name of a task, such as ops.on_letter", value)
    return _checked_name(where, value)


def _checked_name(where: str, value: object) -> str:
    if not isinstance(value, str) or len(value.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise expected(where, f"text of at most {MAX_NAME_BYTES} bytes", value)
    return value


def _routing_key(where: str, value: object) -> str:
    if value == "":
        raise expected(where, f"text of 1 to {MAX_NAME_BYTES} bytes", value)
    return _checked_name(where, value)


_CHECK = mapping(
    {
        "name": _checked_name,
        "type": one_of(TYPES),
        "routing_key": _routing_key,
        "before_ack": true_or_false,
    },
    required=("name",),
    what="the name of an exchange, or a mapping of name, type, routing_key and before_ack",
)
