"""Builders: whole objects with sensible values, of which a test names what matters to it."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery import Celery
from kombu import Queue
from kombu.message import Message as KombuMessage

from celery_dlq.letters.record import DeadLetter, Delivery, Outcome, Reason, letter_id
from celery_dlq.store.worker_records import MessageKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from celery_dlq.store.letters import Letters

NOW = datetime(2026, 3, 4, 5, 6, 7, 891011, tzinfo=timezone.utc)
"""The present of tests that need one."""

DLQ = "orders-DLQ"
"""The dead-letter queue of whatever does not name another."""


def a_delivery(**changes: Any) -> Delivery:
    """A delivery that has begun."""
    values: dict[str, Any] = {
        "number": 1,
        "started_at": NOW,
        "worker_hostname": "celery@web-1",
        "worker_pid": 4711,
    }
    return Delivery(**{**values, **changes})


def an_ended_delivery(**changes: Any) -> Delivery:
    """A delivery that failed after a second and a half."""
    values: dict[str, Any] = {
        "ended_at": NOW + timedelta(seconds=1.5),
        "outcome": Outcome.FAILED,
        "exception_type": "ValueError",
        "exception_message": "bad order",
    }
    return a_delivery(**{**values, **changes})


def a_key(**changes: Any) -> MessageKey:
    """The key of a message; each call makes another task."""
    values: dict[str, Any] = {"dead_letter_queue": DLQ, "task_id": str(uuid4())}
    return MessageKey(**{**values, **changes})


def a_letter(**changes: Any) -> DeadLetter:
    """A letter as most are; each call makes another task, the id follows from the message."""
    values: dict[str, Any] = {
        "task_id": str(uuid4()),
        "task_name": "shop.charge",
        "source_queue": "orders",
        "dead_letter_queue": DLQ,
        "reason": Reason.FAILED,
        "description": "bad order",
        "dead_lettered_at": NOW,
        "deliveries": 1,
        "exception_type": "ValueError",
        "exception_message": "bad order",
        "fingerprint": "0123456789abcdef",
        "routing_key": "orders",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "body": b'[[1], {}, {"callbacks": null}]',
        "args_json": "[1]",
        "kwargs_json": "{}",
        **changes,
    }
    if "id" not in values:
        values["id"] = letter_id(
            values["dead_letter_queue"],
            values["task_id"],
            values.get("retries", 0),
            values.get("redrives", 0),
        )
    return DeadLetter(**values)


def key_of(letter: DeadLetter) -> MessageKey:
    """The key of the message that a letter keeps."""
    return MessageKey(
        dead_letter_queue=letter.dead_letter_queue,
        task_id=letter.task_id,
        retries=letter.retries,
        redrives=letter.redrives,
    )


def exported_to(
    store: Letters,
    folder: str,
    position: str | None,
    *,
    dead_letter_queue: str = DLQ,
    of: str | None = None,
    **known: Any,
) -> None:
    """Leave in the store what an export to a folder leaves there."""
    lease = store.lease(dead_letter_queue, folder, "an export", 0)
    lease.acquire()
    lease.save_state(json.dumps({"name": folder, "of": of, "position": position, **known}))
    lease.release()


def a_message(**changes: Any) -> KombuMessage:
    """A message as kombu hands it to a worker."""
    values: dict[str, Any] = {
        "body": b'[[1], {"a": 2}, {"callbacks": null}]',
        "delivery_tag": "1",
        "content_type": "application/json",
        "content_encoding": "utf-8",
        "delivery_info": {"exchange": "", "routing_key": "orders"},
        "properties": {"correlation_id": "t-1", "delivery_mode": 2},
        "headers": a_request(),
    }
    return KombuMessage(**{**values, **changes})


def a_request(**changes: Any) -> dict[str, Any]:
    """The headers of a task message of protocol 2."""
    values: dict[str, Any] = {
        "lang": "py",
        "task": "shop.charge",
        "id": "t-1",
        "root_id": "t-1",
        "parent_id": None,
        "group": None,
        "retries": 0,
        "argsrepr": "(1,)",
        "kwargsrepr": "{'a': 2}",
        "origin": "gen1@laptop",
        "eta": None,
        "expires": None,
        "timelimit": [None, None],
    }
    return {**values, **changes}


def an_app(**settings: Any) -> Celery:
    """A Celery app of its own, on kombu's in-memory broker."""
    app = Celery(f"app_{uuid4().hex}", broker="memory://", set_as_current=False)
    app.conf.update(settings)
    return app


def sent_message(
    app: Celery,
    name: str,
    args: Any = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> KombuMessage:
    """Publish a task through the app's broker and take the message out again.

    Args:
        app: An app of `an_app`.
        name: The task's name; it need not exist.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        **options: Of ``send_task``, e.g. ``serializer="pickle"``.
    """
    queue = f"q-{uuid4().hex}"
    with app.connection_for_write() as connection:
        app.send_task(name, args, dict(kwargs or {}), queue=queue, connection=connection, **options)
        message = Queue(queue).bind(connection.default_channel).get(accept=None)
    assert message is not None, "expected the message that was just sent"
    return message
