"""Makes letters, with the reason ``adopted``, of messages that a broker dead-lettered.

Headers come from other programs, so their shape is not trusted: of the broker's own record of the
death (RabbitMQ's ``x-death``, the receive count of SQS) unreadable parts are kept as they are, and
the message becomes a letter all the same.

Source: https://www.rabbitmq.com/docs/dlx#effects
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any

from kombu.message import Message as KombuMessage

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters import json_codec
from celery_dlq.letters.copies import DEATH_HEADERS
from celery_dlq.letters.copies import letter_of as letter_of_copy
from celery_dlq.letters.fingerprint import fingerprint
from celery_dlq.letters.headers import RECORD_HEADER, REPLACED_TASK_NESTING, whole_number
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.policies.decisions import Die
from celery_dlq.policies.policy import DLQ_SUFFIX, policy_of
from celery_dlq.policies.queue_names import QueueNames
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.worker_records import MessageKey
from celery_dlq.writing.capture import Message, publication_of, wire_body
from celery_dlq.writing.letter import LetterMaker, history_of_adopted

logger = get_logger("celery_dlq.worker")

_JSON = "application/json"
_MAX_JSON_BYTES = 1024 * 1024

_FIRST_QUEUE, _FIRST_REASON = "x-first-death-queue", "x-first-death-reason"
_DEATH_HEADERS = (
    *("x-death", _FIRST_QUEUE, _FIRST_REASON, "x-first-death-exchange"),
    *("x-last-death-queue", "x-last-death-reason", "x-last-death-exchange"),
)
_MAX_DELIVERIES = 2**31 - 1  # the largest number that every reader of letters accepts
_SQS_COUNT = "ApproximateReceiveCount"
_SQS_SOURCE = "DeadLetterQueueSourceArn"

# Celery's delayed delivery on quorum queues lets messages "die" in these on their way.
_DELAY_QUEUE = re.compile(r"(?:^|_)celery_delayed_\d+$")

# These differ from one delivery to the next.
_TRAVEL_HEADERS = ("redelivered", "x-delivery-count", "x-acquired-count")


@dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a message."""

    task_id: str  # The task's id, the message's id, or a hash of the content
    certain: bool  # True for an id. If not, only a number distinguishes equal messages

    def numbered(self, number: int) -> Identity:
        """The identity of the next message with equal content; 0 is the first."""
        return replace(self, task_id=f"{self.task_id}-{number}") if number else self


class Adoption:
    """Makes letters of the messages of one queue."""

    def __init__(
        self,
        app: Any,
        policies: PolicyTable,
        queue: str,
        target: str | None,
        counter: DeliveryCounter,
        make: LetterMaker,
    ) -> None:
        self._app = app
        self._policies = policies
        self._queue_names = QueueNames(app.amqp.queues)
        self._queue = queue
        self._target = target
        self._counter = counter
        self._make = make

    def identity(self, message: Any) -> Identity:
        """The identity of a message, the same for each delivery."""
        headers, properties = _mapping(message.headers), _mapping(message.properties)
        task_id = request_fields(message, headers).get("id")
        # Not the correlation id: producers other than Celery may use one for many messages.
        named = task_id or properties.get("message_id") or _broker_tag(message, properties)
        if named:
            return Identity(str(named), certain=True)
        what = [
            {name: value for name, value in headers.items() if name not in _TRAVEL_HEADERS},
            {name: properties.get(name) for name in ("correlation_id", "timestamp", "type")},
            wire_body(message.body, None, message.content_encoding),
        ]
        digest = hashlib.sha256(json_codec.dumps(what).encode("utf-8", "backslashreplace"))
        return Identity(f"adopted-{digest.hexdigest()[:32]}", certain=False)

    def copied(self, message: Any) -> tuple[DeadLetter, MessageKey] | None:
        """Read a copy of a letter back, which its worker published; ``None`` if it is none.

        It goes to the dead-letter queue that it was in, with the id that it had.
        """
        headers = _mapping(message.headers)
        if RECORD_HEADER not in headers:
            return None
        kept = Message.of(message, request_fields(message, headers))
        own = {name: value for name, value in headers.items() if name not in DEATH_HEADERS}
        body, properties = kept.values["body"], kept.values["properties"]
        letter = letter_of_copy(headers[RECORD_HEADER], body, json_codec.dumps(own), properties)
        if letter is None:
            return None
        return letter, MessageKey(
            dead_letter_queue=letter.dead_letter_queue,
            task_id=letter.task_id,
            retries=letter.retries,
            redrives=letter.redrives,
            nesting=whole_number(_mapping(letter.decoded("headers")).get(REPLACED_TASK_NESTING)),
            publication=publication_of(message),
        )

    def letter(self, message: Any, identity: Identity) -> tuple[DeadLetter, MessageKey, MessageKey]:
        """Make the letter of a message, however malformed the message is; its key.

        The last is the key of the message's counts: its own policy names their queue, not the
        operator.
        """
        try:
            return self._make_letter(message, identity)
        except StoreUnavailable:
            raise
        except Exception:
            # The body is kept, even if the headers cannot be read.
            logger.exception("A message of %s is adopted without its headers", self._queue)
            return self._make_letter(KombuMessage(body=message.body), identity)  # type: ignore[no-untyped-call]

    def _make_letter(
        self, message: Any, identity: Identity
    ) -> tuple[DeadLetter, MessageKey, MessageKey]:
        headers = _mapping(message.headers)
        kept = Message.of(message, {**request_fields(message, headers), "id": identity.task_id})
        native = native_death(headers, _mapping(message.properties))
        queue = native.queue or self._infer_source(kept.letter, native)
        task = self._app.tasks.get(kept.task_name)
        own = None if task is None else policy_of(task)
        policy, of_policy = self._policies.resolve(queue, own), self._policies.dead_letter_queue_of
        target = self._target or of_policy(queue or self._queue, own)
        most = None if policy is None else policy.max_retries
        key = kept.identity.in_queue(target)
        counted = key.in_queue(of_policy(queue, own) if queue else target)
        # Only a task is counted, and the id of another message is no key of a task.
        history = history_of_adopted(self._counter, counted) if kept.task_name else ()
        numbers = [one.number for one in history if one.retries == key.retries]
        unknown = "" if queue else "; its original queue is not known"
        # It dies now, not when the broker says: retention would remove an old letter at once.
        letter = self._make(
            kept,
            ResolvedPolicy(queue, target, policy, most),
            Die(Reason.ADOPTED, f"adopted from {self._queue!r}: {native.words}{unknown}"),
            history=history,
            deliveries=max(numbers, default=native.deliveries),
        )
        cause = f"{Reason.ADOPTED}: {native.reason}" if native.reason else Reason.ADOPTED.value
        group = fingerprint(
            task_name=kept.task_name, reason=cause, exception_type=None, traceback=None
        )
        return replace(letter, native_death=native.history, fingerprint=group), key, counted

    def _infer_source(self, kept: DeadLetter, native: NativeDeath) -> str:
        """Infer the source queue if the broker does not report it; empty if unknown."""
        if kept.routing_key and kept.routing_key != self._queue:
            return self._queue_names.queue_of(kept.exchange, kept.routing_key)
        if native.sqs_queue:
            options = self._app.conf.broker_transport_options or {}
            return native.sqs_queue.removeprefix(options.get("queue_name_prefix") or "")
        if self._target and self._target.endswith(DLQ_SUFFIX):
            return self._target.removesuffix(DLQ_SUFFIX)
        return ""


def request_fields(message: Any, headers: Mapping[str, Any]) -> Mapping[str, Any]:
    """Celery's fields: the headers of protocol 2, the JSON body of protocol 1, or empty."""
    if "task" in headers:
        return headers
    if message.content_type != _JSON or len(message.body or b"") > _MAX_JSON_BYTES:
        return {}
    try:
        body = json.loads(message.body)
    except (TypeError, ValueError, RecursionError):
        return {}
    return body if isinstance(body, Mapping) and "task" in body else {}


def _broker_tag(message: Any, properties: Mapping[str, Any]) -> str | None:
    """The broker's permanent id of the message: Redis's tag, or the message id of SQS."""
    sqs = _sqs_message(properties)
    if sqs:  # its tag is a receipt, new for each delivery
        return str(sqs["MessageId"]) if sqs.get("MessageId") else None
    return message.delivery_tag if isinstance(message.delivery_tag, str) else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeDeath:
    """A death as the broker reports it."""

    # Queue of the first death, without Celery's delay queues; `None` if unknown
    queue: str | None = None
    # Name in SQS of the queue that SQS moved it from; `None` if unknown
    sqs_queue: str | None = None
    # The broker's reason for the last death, e.g. `expired`; `None` if unknown
    reason: str | None = None
    deliveries: int = 0  # The broker's receive count; 0 if it does not count
    history: str | None = None  # The whole record as JSON text; `None` if there is none
    words: str = "the broker reports nothing about its death"  # A description in one line


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
    queue = _name_or_none(None if _is_delay(first) else first) or _name_or_none(oldest.get("queue"))
    reason = _name_or_none(newest.get("reason")) or _name_or_none(death_headers.get(_FIRST_REASON))
    at = _parsed_time(newest.get("time"))
    where = f" in queue {queue!r}" if queue else ""
    when = "" if at is None else f" at {at.isoformat(timespec='seconds')}"
    unreadable = "the broker's history of its death cannot be read; it is kept in native_death"
    return NativeDeath(
        queue=queue,
        reason=reason,
        history=json_codec.dumps(_with_plain_times(death_headers)),
        words=f"{reason or 'dead-lettered'}{where}{when}" if readable else unreadable,
    )


def _from_sqs(properties: Mapping[str, Any]) -> NativeDeath:
    attributes = _sqs_attributes(properties)
    if _SQS_COUNT not in attributes:
        return NativeDeath()
    try:
        deliveries = min(max(0, int(attributes[_SQS_COUNT])), _MAX_DELIVERIES)
    except (TypeError, ValueError, OverflowError):
        deliveries = 0
    source = _name_or_none(attributes.get(_SQS_SOURCE))
    return NativeDeath(
        sqs_queue=source.rpartition(":")[2] if source else None,
        deliveries=deliveries,
        history=json_codec.dumps(attributes),
        words=f"received {deliveries} times",
    )


def _sqs_attributes(properties: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of the raw SQS message, which kombu keeps in the delivery information."""
    attributes = dict(_mapping(_sqs_message(properties).get("Attributes")))
    if _SQS_COUNT in properties:
        attributes.setdefault(_SQS_COUNT, properties[_SQS_COUNT])
    return attributes


def _sqs_message(properties: Mapping[str, Any]) -> Mapping[str, Any]:
    return _mapping(_mapping(properties.get("delivery_info")).get("sqs_message"))


def _is_delay(queue: object) -> bool:
    return isinstance(queue, str) and _DELAY_QUEUE.search(queue) is not None


def _name_or_none(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _parsed_time(value: object) -> datetime | None:
    """Parse a time: py-amqp returns naive UTC times; in JSON they are text or seconds."""
    try:
        if isinstance(value, str):
            value = json_codec.instant(value)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = datetime.fromtimestamp(value, timezone.utc)
    except (ValueError, OverflowError, OSError):
        return None
    if not isinstance(value, datetime):
        return None
    return json_codec.with_zone(value)


def _with_plain_times(value: Any) -> Any:
    """Replace times by text, for people to read; the headers keep the originals."""
    if isinstance(value, datetime):
        time = _parsed_time(value)
        return None if time is None else time.astimezone(timezone.utc).isoformat()
    if isinstance(value, Mapping):
        return {str(name): _with_plain_times(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_with_plain_times(item) for item in value]
    return value
