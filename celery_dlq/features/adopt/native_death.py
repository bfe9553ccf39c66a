"""Reads a broker's own record of a death: RabbitMQ's ``x-death``, the receive count of SQS.

Headers come from other programs, so their shape is not trusted: unreadable parts are kept as
they are, and the message becomes a letter all the same.

Source: https://www.rabbitmq.com/docs/dlx#effects
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from celery_dlq.letters import json_codec

_FIRST_QUEUE, _FIRST_REASON = "x-first-death-queue", "x-first-death-reason"
_DEATH_HEADERS = (
    "x-death",
    _FIRST_QUEUE,
    _FIRST_REASON,
    "x-first-death-exchange",
    "x-last-death-queue",
    "x-last-death-reason",
    "x-last-death-exchange",
)
_MAX_DELIVERIES = 2**31 - 1  # the largest number that every reader of letters accepts
_SQS_COUNT = "ApproximateReceiveCount"
_SQS_SOURCE = "DeadLetterQueueSourceArn"

# Celery's delayed delivery on quorum queues lets messages "die" in these on their way.
_DELAY_QUEUE = re.compile(r"(?:^|_)celery_delayed_\d+$")


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDeath:
    """A death as the broker reports it."""

    # Queue of the first death, without Celery's delay queues; `None` if unknown
    queue: str | None = None
    # Name in SQS of the queue that SQS moved it from; `None` if unknown
    sqs_queue: str | None = None
    # The broker's reason for the last death, e.g. `expired`; `None` if unknown
    reason: str | None = None
    at: datetime | None = None  # Time of the last death, aware UTC; `None` if unknown
    deliveries: int = 0  # The broker's receive count; 0 if it does not count
    history: str | None = None  # The whole record as JSON text; `None` if there is none
    readable: bool = True  # True if the history has the shape that the broker documents

    @property
    def words(self) -> str:
        """A one-line description."""
        if self.history is None:
            return "the broker reports nothing about its death"
        if not self.readable:
            return "the broker's history of its death cannot be read; it is kept in native_death"
        if self.reason is None:
            return f"received {self.deliveries} times"
        where = f" in queue {self.queue!r}" if self.queue else ""
        when = "" if self.at is None else f" at {self.at.isoformat(timespec='seconds')}"
        return f"{self.reason}{where}{when}"


def native_death(headers: Mapping[str, Any], properties: Mapping[str, Any]) -> NativeDeath:
    """Read a broker's record of a message's death; never raises."""
    death_headers = {name: headers[name] for name in _DEATH_HEADERS if name in headers}
    return _from_rabbitmq(death_headers) if death_headers else _from_sqs(properties)


def _from_rabbitmq(death_headers: Mapping[str, Any]) -> NativeDeath:
    deaths = death_headers.get("x-death", [])
    readable = isinstance(deaths, list) and all(isinstance(one, Mapping) for one in deaths)
    deaths = [one for one in deaths if not _is_delay(one.get("queue"))] if readable else []
    newest, oldest = (deaths[0], deaths[-1]) if deaths else ({}, {})
    first = death_headers.get(_FIRST_QUEUE)
    return NativeDeath(
        queue=_name(None if _is_delay(first) else first) or _name(oldest.get("queue")),
        reason=_name(newest.get("reason")) or _name(death_headers.get(_FIRST_REASON)),
        at=_time(newest.get("time")),
        history=json_codec.dumps(_with_plain_times(death_headers)),
        readable=readable,
    )


def _from_sqs(properties: Mapping[str, Any]) -> NativeDeath:
    attributes = _sqs_attributes(properties)
    try:
        deliveries = min(max(0, int(attributes.get(_SQS_COUNT, 0))), _MAX_DELIVERIES)
    except (TypeError, ValueError, OverflowError):
        deliveries = 0
    if _SQS_COUNT not in attributes:
        return NativeDeath()
    source = _name(attributes.get(_SQS_SOURCE))
    return NativeDeath(
        sqs_queue=source.rpartition(":")[2] if source else None,
        deliveries=deliveries,
        history=json_codec.dumps(attributes),
    )


def _sqs_attributes(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the raw SQS message, which kombu keeps in the delivery information."""
    delivery = properties.get("delivery_info")
    raw = delivery.get("sqs_message") if isinstance(delivery, Mapping) else None
    found = raw.get("Attributes") if isinstance(raw, Mapping) else None
    attributes = dict(found) if isinstance(found, Mapping) else {}
    if _SQS_COUNT in properties:
        attributes.setdefault(_SQS_COUNT, properties[_SQS_COUNT])
    return attributes


def _is_delay(queue: object) -> bool:
    return isinstance(queue, str) and _DELAY_QUEUE.search(queue) is not None


def _name(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _time(value: object) -> datetime | None:
    """Parse a time: py-amqp returns naive UTC times; in JSON they are text or seconds."""
    try:
        if isinstance(value, str):
            value = json_codec.moment(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = datetime.fromtimestamp(value, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    if not isinstance(value, datetime):
        return None
    return value.replace(tzinfo=timezone.utc) if value.tzinfo is None else value


def _with_plain_times(value: Any) -> Any:
    """Replace times by text, for people to read; the headers keep the originals."""
    if isinstance(value, datetime):
        time = _time(value)
        return None if time is None else time.astimezone(timezone.utc).isoformat()
    if isinstance(value, Mapping):
        return {str(name): _with_plain_times(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_plain_times(item) for item in value]
    return value
