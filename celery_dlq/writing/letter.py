"""Makes the letter of a death."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any

from celery_dlq.features.redaction.masking import NO_REDACTION, Redaction
from celery_dlq.letters.fingerprint import fingerprint
from celery_dlq.letters.record import DeadLetter, Delivery, Reason
from celery_dlq.policies.decisions import Die
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.records import MessageKey
from celery_dlq.writing.capture import Message
from celery_dlq.writing.failure import MESSAGE_LIMIT, SENTRY_TRACE, Failure

_FROM_MESSAGE = (
    "task_id",
    "task_name",
    "exchange",
    "routing_key",
    "content_type",
    "content_encoding",
    "headers",
    "properties",
    "body",
    "args_json",
    "kwargs_json",
    "argsrepr",
    "kwargsrepr",
    "root_id",
    "parent_id",
    "group_id",
    "origin",
    "eta",
    "expires",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The facts of a death."""

    resolved: ResolvedPolicy  # The policy and queues that apply
    key: MessageKey  # The message's identity
    message: Message  # The captured message
    verdict: Die  # Reason and description
    failure: Failure | None  # The end of its last delivery; `None` if no delivery led to the death
    history: tuple[Delivery, ...]  # Its deliveries, oldest first
    deliveries: int  # Number of deliveries
    now: datetime  # Time of death, aware UTC
    hostname: str  # Node name of the worker that dead-letters it
    pid: int | None  # Process of the last delivery, else of the worker
    release: str | None  # Version of the user's code that ran the last delivery, if it is known
    redaction: Redaction = NO_REDACTION  # Masks the letter's descriptive fields


def letter_of(death: Death) -> DeadLetter:
    """Make the letter of a death; its fingerprint is that of the unmasked traceback."""
    key, failure, policy = death.key, death.failure, death.resolved.policy
    exception_type = failure.exception_type if failure else None
    traceback = failure.traceback if failure else None
    reason = death.verdict.reason
    letter = DeadLetter(
        **{name: getattr(death.message, name) for name in _FROM_MESSAGE},
        id=key.letter_id,
        source_queue=death.resolved.queue,
        dead_letter_queue=key.dead_letter_queue,
        reason=reason,
        description=_description(death)[:MESSAGE_LIMIT],
        dead_lettered_at=death.now,
        first_delivered_at=death.history[0].started_at if death.history else None,
        deliveries=death.deliveries,
        retries=key.retries,
        redrives=key.redrives,
        max_deliveries=policy.max_deliveries if policy else None,
        max_retries=death.resolved.max_retries,
        exception_type=exception_type,
        exception_message=failure.exception_message if failure else None,
        traceback=traceback,
        fingerprint=fingerprint(
            task_name=death.message.task_name,
            reason=reason.value,
            exception_type=exception_type,
            traceback=traceback,
        ),
        history=death.history,
        worker_hostname=death.hostname,
        worker_pid=death.pid,
        release=death.release,
        sentry_event_id=failure.sentry_event_id if failure else None,
        # The reporter takes it off before the letter is stored.
        extra={SENTRY_TRACE: failure.sentry_trace.encode()}
        if failure and failure.sentry_trace
        else {},
    )
    return death.redaction.captured(letter)


def bare(death: Death) -> Death:
    """Strip a death to its message and reason."""
    details = ("args_json", "kwargs_json", "argsrepr", "kwargsrepr", "eta", "expires")
    nothing: dict[str, Any] = dict.fromkeys(details)
    message = replace(death.message, properties="{}", **nothing)
    return replace(death, message=message, failure=None, history=())


def plain(letter: DeadLetter) -> DeadLetter:
    """Strip a letter to message, reason and time, in ASCII, which every store accepts."""
    changes: dict[str, Any] = {
        field.name: value.encode("ascii", "backslashreplace").decode()
        for field in fields(letter)
        if isinstance(value := getattr(letter, field.name), str) and not isinstance(value, Reason)
    }
    details = (
        "traceback",
        "exception_message",
        "args_json",
        "kwargs_json",
        "argsrepr",
        "kwargsrepr",
        "eta",
        "expires",
        "first_delivered_at",
        "sentry_event_id",
    )
    return replace(
        letter, **{**changes, **dict.fromkeys(details), "history": (), "properties": "{}"}
    )


def _description(death: Death) -> str:
    """The verdict's text, after the last delivery's outcome, which is what people look for."""
    if death.failure is not None or not death.history:
        return death.verdict.description
    last = death.history[-1]
    said = f": {last.exception_message.rstrip('.')}" if last.exception_message else ""
    return f"{last.outcome}{said}; {death.verdict.description}"


assert set(_FROM_MESSAGE) <= {f.name for f in fields(Message)}  # noqa: S101 - checked at import
