"""Events for Sentry, made of letters and of circuit breakers that open."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4, uuid5

from celery_dlq.events import Change
from celery_dlq.features.sentry.reports import Report
from celery_dlq.letters.record import DeadLetter, iso
from celery_dlq.letters.tracebacks import Raised, raised_exceptions

_TRACE_HEADER = re.compile(r"([0-9a-f]{32})-([0-9a-f]{16})(-[01])?")
_EVENT_NAMESPACE = UUID("f0a4f0a6-0a33-5d0e-8a35-9f6f8c1d8d57")
_MAX_BODY_BYTES = 8_192


def event_id_of(letter: DeadLetter) -> str:
    """The id of a letter's event, derived from the letter's: a second report is the same event."""
    return uuid5(_EVENT_NAMESPACE, letter.id).hex


def event_of(letter: DeadLetter, report: Report, *, with_values: bool) -> dict[str, Any]:
    """The Sentry event of a letter and its group."""
    tags = {
        "task": letter.task_name,
        "queue": letter.source_queue,
        "dead_letter_queue": letter.dead_letter_queue,
        "reason": letter.reason,
        "deliveries": letter.deliveries,
        "redrives": letter.redrives,
        "group": report.why,
        "celery_task_id": letter.task_id,
        "release": letter.release,
        "worker": letter.worker_hostname,
    }
    context = {
        "letter_id": letter.id,
        "letter_ids": list(report.letter_ids),
        "letters_in_group": report.number,
        "description": letter.description,
        "retries": letter.retries,
        "dead_lettered_at": iso(letter.dead_lettered_at),
        "first_delivered_at": iso(letter.first_delivered_at),
        "show": f"celery dlq show {letter.id}",
        "redrive": f"celery dlq redrive {letter.dead_letter_queue} "
        f"--fingerprint {letter.fingerprint}",
    }
    event = _event_of(letter.dead_lettered_at, letter.task_name, tags, {"dead_letter": context})
    event |= {"event_id": letter.sentry_event_id, "fingerprint": [letter.fingerprint]}
    if letter.release is not None:
        event["release"] = letter.release
    if letter.exception_type is not None:
        event["exception"] = {"values": _exceptions(letter)}
    else:
        text = f"{letter.task_name} dead-lettered: {letter.reason}: {letter.description}"
        event["logentry"] = {"message": text, "formatted": text}
    if with_values:  # as far as they are readable without unpickling
        event["extra"] = {
            "args": letter.args_json or letter.argsrepr,
            "kwargs": letter.kwargs_json or letter.kwargsrepr,
            "body": letter.body[:_MAX_BODY_BYTES].decode("utf-8", "backslashreplace"),
        }
    return event


def event_of_opening(change: Change) -> dict[str, Any]:
    """The Sentry event of a circuit breaker that opened."""
    detail = change.detail
    task, queue = str(detail.get("task")), str(detail.get("queue"))
    text = f"Circuit breaker of {task} opened: {detail.get('reason')}"
    tags = {"task": task, "queue": queue, "hold": change.target}
    return {
        **_event_of(change.at, task, tags, {"circuit_breaker": dict(detail.get("circuit") or {})}),
        "fingerprint": ["celery_dlq.circuit_opened", task, queue],
        "logentry": {"message": text, "formatted": text},
    }


def _event_of(
    at: datetime, task: str, tags: Mapping[str, object], contexts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "timestamp": at,
        "level": "error",
        "platform": "python",
        "logger": "celery_dlq",
        "transaction": task,
        "tags": {name: str(value) for name, value in tags.items() if value is not None},
        "contexts": contexts,
    }


def trace_of(letter: DeadLetter, trace: str) -> dict[str, dict[str, str]]:
    """The context ``trace``: that of the task, or a new span in that of its message."""
    if found := _TRACE_HEADER.match(trace):
        return {"trace": {"trace_id": found[1], "span_id": found[2]}}
    headers = letter.decoded("headers")
    inner = headers.get("headers")  # where Sentry's integration reads it
    header = (inner if isinstance(inner, Mapping) else headers).get("sentry-trace")
    if found := _TRACE_HEADER.match(str(header)):
        span = {"span_id": uuid4().hex[:16], "parent_span_id": found[2]}
        return {"trace": {"trace_id": found[1], **span}}
    return {}


def _exceptions(letter: DeadLetter) -> list[dict[str, Any]]:
    """The chain of exceptions; the last one has type and text from the letter."""
    chain = raised_exceptions(letter.traceback or "") or [Raised(name="", message="", frames=())]
    last = replace(
        chain[-1], name=letter.exception_type or "", message=letter.exception_message or ""
    )
    return [_exception(one) for one in (*chain[:-1], last)]


def _exception(one: Raised) -> dict[str, Any]:
    module, _, name = one.name.rpartition(".")
    value: dict[str, Any] = {
        "type": name or "Exception",
        "module": module or None,
        "value": one.message,
        "mechanism": {"type": "celery_dlq", "handled": False},
    }
    if one.frames:
        value["stacktrace"] = {
            "frames": [
                {
                    "filename": frame.file,
                    "abs_path": frame.file,
                    "function": frame.function,
                    "lineno": frame.line,
                    "context_line": frame.code,
                    "in_app": frame.own,
                }
                for frame in one.frames
            ]
        }
    return value


def sends_values(options: Mapping[str, Any]) -> bool:
    """True if the app's ``sentry_sdk.init`` allows personal data."""
    collection = options.get("data_collection") or {}
    newer = collection.get("provided_by_user")
    return bool(collection.get("queues") if newer else options.get("send_default_pii"))
