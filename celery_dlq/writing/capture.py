"""The part of a Celery message that a letter keeps; bytes and headers stay untouched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import Any
from uuid import uuid4

from kombu.compression import compress
from kombu.exceptions import KombuError

from celery_dlq.letters import json_codec
from celery_dlq.letters.arguments import hides_nothing, json_parts
from celery_dlq.letters.headers import (
    PUBLICATION_HEADER,
    REDRIVES_HEADER,
    REPLACED_TASK_NESTING,
    is_publication,
    named_after,
    published_at,
    whole_number,
)
from celery_dlq.letters.record import EPOCH, DeadLetter, Reason
from celery_dlq.store.worker_records import MessageKey

_NO_END: dict[str, Any] = {
    **dict.fromkeys(("id", "source_queue", "dead_letter_queue", "fingerprint"), ""),
    "reason": Reason.FAILED,
    "dead_lettered_at": EPOCH,
}
"""What a letter must have and no message says; each is set when the letter is made."""
_TOLD_APART = ("eta", "expires", "origin", "root_id", "parent_id", "group", "timelimit")  # headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """The part of the original message that a letter keeps."""

    identity: MessageKey
    values: Mapping[str, Any]  # Of the letter's fields that the message has

    @classmethod
    def of(
        cls, message: Any, request: Mapping[str, Any], identity: MessageKey | None = None
    ) -> Message:
        """Capture a message; ``request`` has Celery's fields, in the form of protocol 2."""
        delivery = message.delivery_info or {}
        headers = dict(_headers_of(message))
        compression = headers.get("compression")
        body = plain = wire_body(message.body, None, message.content_encoding)
        content_type = _text_or_none(message.content_type) or ""
        args_json, kwargs_json = (None, None)
        # kombu has decompressed it, or has noted that it could not.
        if not (compression and message.errors):
            body = compressed(plain, compression)
            if hides_nothing(compression):
                args_json, kwargs_json = json_parts(plain, content_type)
        identity = identity or message_key_of(message, request)
        values = {
            "task_id": identity.task_id,
            "task_name": _text_or_none(request.get("task")) or "",
            "retries": identity.retries,
            "redrives": identity.redrives,
            "published_at": published_at(headers.get(PUBLICATION_HEADER)),
            "exchange": _text_or_none(delivery.get("exchange")) or "",
            "routing_key": _text_or_none(delivery.get("routing_key")) or "",
            "content_type": content_type,
            "content_encoding": _text_or_none(message.content_encoding) or "",
            "headers": json_codec.dumps(headers),
            "properties": json_codec.dumps(dict(message.properties or {})),
            "body": body,
            "args_json": args_json,
            "kwargs_json": kwargs_json,
            "argsrepr": _text_or_none(request.get("argsrepr")),
            "kwargsrepr": _text_or_none(request.get("kwargsrepr")),
            "root_id": _text_or_none(request.get("root_id")),
            "parent_id": _text_or_none(request.get("parent_id")),
            "group_id": _text_or_none(request.get("group")),
            "origin": _text_or_none(request.get("origin")),
            "eta": parsed_time(request.get("eta")),
            "expires": parsed_time(request.get("expires")),
        }
        return cls(identity=identity, values=values)

    @property
    def letter(self) -> DeadLetter:
        """A letter with the fields that the message has, and none of its end."""
        return DeadLetter(**_NO_END, **self.values)

    @property
    def task_id(self) -> str:
        """Id of the task, or what the message is called by instead."""
        return self.identity.task_id

    @property
    def task_name(self) -> str:
        """Name of the task; empty if the message has none."""
        return str(self.values["task_name"])


def message_key_of(
    message: Any, request: Mapping[str, Any], dead_letter_queue: str = ""
) -> MessageKey:
    """The identity of a message, as it is counted and as its letter is named.

    ``request`` has Celery's fields, in the form of protocol 2. Every task pays for this.
    """
    headers = _headers_of(message)
    return MessageKey(
        dead_letter_queue=dead_letter_queue,
        task_id=_message_id(message, request),
        publication=publication_of(message),
        retries=whole_number(request.get("retries")),
        redrives=whole_number(headers.get(REDRIVES_HEADER)),  # protocol 1 has no place in its body
        nesting=whole_number(request.get(REPLACED_TASK_NESTING)),
    )


def _message_id(message: Any, request: Mapping[str, Any]) -> str:
    """The task's id, else another id that stays the same when the message is redelivered."""
    task_id = request.get("id")
    if task_id and type(task_id) is str:  # nearly always
        return task_id
    properties = message.properties or {}
    known = request.get("id") or properties.get("correlation_id") or properties.get("message_id")
    # In kombu's envelopes the tag stays with the message; AMQP has none there.
    return str(known or sqs_message_id(message) or properties.get("delivery_tag") or uuid4())


def publication_of(message: Any) -> str:
    """What tells a message from others with its task id; the same for each of its deliveries.

    Its publisher says it, if that has the plugin; else the broker, if the message keeps its id
    there; else the content: two equal messages of a plain publisher on RabbitMQ are one.
    """
    given = _given_publication(message)
    if given is not None:
        return given
    headers = _headers_of(message)
    message_id = (message.properties or {}).get("message_id")
    told_apart = [message_id, *map(headers.get, _TOLD_APART)]
    content = wire_body(message.body, None, message.content_encoding)
    return named_after(content, repr(told_apart).encode("utf-8", "backslashreplace"))


def is_named_after_content(message: Any) -> bool:
    """True if neither its publisher nor its broker tells a message from an equal one."""
    return _given_publication(message) is None


def _headers_of(message: Any) -> Mapping[str, Any]:
    headers = message.headers
    return headers if isinstance(headers, (dict, Mapping)) else {}  # a dict is found sooner


def _given_publication(message: Any) -> str | None:
    given = _headers_of(message).get(PUBLICATION_HEADER)
    if is_publication(given):
        return str(given)
    known = sqs_message_id(message) or (message.properties or {}).get("delivery_tag")
    if isinstance(known, str):
        return named_after(known.encode("utf-8", "backslashreplace"))
    return None


def another(message: Message) -> Message:
    """The same, as a publication of its own."""
    identity = replace(message.identity, publication=named_after(uuid4().bytes))
    return replace(message, identity=identity)


def sqs_message_id(message: Any) -> str | None:
    """The id that Amazon SQS gave a message; its tag is a receipt, new for each delivery."""
    delivery = message.delivery_info
    raw = delivery.get("sqs_message") if isinstance(delivery, (dict, Mapping)) else None
    found = raw.get("MessageId") if raw and isinstance(raw, Mapping) else None
    return str(found) if found else None


def wire_body(body: Any, compression: str | None, encoding: Any = "utf-8") -> bytes:
    """The body as sent: py-amqp decodes it on arrival and kombu decompresses it; undo both."""
    data = _encoded(body, encoding) if isinstance(body, str) else bytes(body or b"")
    return compressed(data, compression)


def compressed(data: bytes, compression: str | None) -> bytes:
    """The data as kombu compresses it; as it is, if it cannot."""
    if not compression:
        return data
    try:
        return bytes(compress(data, compression)[0])  # type: ignore[no-untyped-call]
    except (KeyError, KombuError, ValueError):
        return data


def _encoded(body: str, encoding: Any) -> bytes:
    try:
        return body.encode(encoding)
    except (LookupError, TypeError, ValueError):  # it is no encoding, or no text of it
        return body.encode("utf-8", "surrogatepass")


def _text_or_none(value: object) -> str | None:
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else json_codec.safe_repr(value)


def parsed_time(value: object) -> datetime | None:
    """Parse an ISO time to aware UTC; ``None`` for anything else."""
    if not isinstance(value, str):
        return None
    try:
        return json_codec.instant(value).astimezone(timezone.utc)
    except (ValueError, OverflowError):  # no time, or before the year 1 or after 9999 in UTC
        return None
