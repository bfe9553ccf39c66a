"""The dead-letter exchange of a policy: each letter is published there for other services."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from celery_dlq.policies.checks import expected
from celery_dlq.policies.policy import KeyValue

TYPES = ("direct", "fanout", "topic")
_KEYS = ("name", "type")
MAX_NAME_BYTES = 255  # AMQP short strings hold no more


@dataclass(frozen=True, slots=True, kw_only=True)
class DeadLetterExchange(KeyValue):
    """A durable exchange on the broker.

    Attributes:
        name: Its name. Empty: the broker's default exchange, where the routing key is the
            name of a queue.
        type: ``direct``, ``fanout`` or ``topic``.
    """

    name: str
    type: str = "direct"

    def __str__(self) -> str:
        return f"{self.name or 'default exchange'} ({self.type})"

    def to_json(self) -> dict[str, str]:
        """A JSON-ready mapping, as the policy takes it."""
        return {"name": self.name, "type": self.type}


def dead_letter_exchange(where: str, value: object) -> DeadLetterExchange:
    """Check an exchange: its name, or a mapping of ``name`` and ``type``.

    Raises:
        SettingsError: The value is something else.
    """
    if isinstance(value, DeadLetterExchange):
        value = value.to_json()
    if isinstance(value, str):
        value = {"name": value}
    if not isinstance(value, Mapping) or "name" not in value or set(value) - set(_KEYS):
        raise expected(where, "the name of an exchange, or a mapping of name and type", value)
    name, kind = value["name"], value.get("type", "direct")
    if not isinstance(name, str) or len(name.encode("utf-8", "replace")) > MAX_NAME_BYTES:
        raise expected(f"{where}['name']", f"text of at most {MAX_NAME_BYTES} bytes", name)
    if kind not in TYPES:
        raise expected(f"{where}['type']", f"one of {', '.join(TYPES)}", kind)
    if not name and kind != "direct":
        raise expected(f"{where}['type']", "direct for the broker's default exchange", kind)
    return DeadLetterExchange(name=name, type=str(kind))


def dead_letter_routing_key(where: str, value: object) -> str:
    """Check a routing key.

    Raises:
        SettingsError: The value is something else.
    """
    if (
        not isinstance(value, str)
        or not value
        or len(value.encode("utf-8", "replace")) > MAX_NAME_BYTES
    ):
        raise expected(where, f"text of 1 to {MAX_NAME_BYTES} bytes", value)
    return value
