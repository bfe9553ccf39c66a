"""Each publication of a message is named, so that a copy can be told from another message.

People give ids to tasks, and use them again. What a broker delivers twice is one publication; on
RabbitMQ nothing else tells it from an equal message that was published later.

Source: ``before_task_publish`` in
https://docs.celeryq.dev/en/stable/userguide/signals.html#before-task-publish
"""

from __future__ import annotations

import os
import time
from typing import Any

from celery import signals

from celery_dlq.letters.headers import PUBLICATION_HEADER, is_publication, publication


def install() -> None:
    """Name what this process publishes from now on; again without effect."""
    signals.before_task_publish.connect(
        name_publication, weak=False, dispatch_uid="celery_dlq.publication"
    )


def name_publication(headers: Any = None, **_: Any) -> None:
    """Name a message that is about to be published.

    A retry has the headers of its message, and keeps the name: a message that is delivered twice
    and retried twice has one retry, and its history is found by the name.
    """
    if not isinstance(headers, dict):
        return
    is_retry = headers.get("retries") and is_publication(headers.get(PUBLICATION_HEADER))
    if not is_retry:
        # Not from `random`, whose seed is the user's.
        number = int.from_bytes(os.urandom(2), "big")
        headers[PUBLICATION_HEADER] = publication(time.time_ns() // 1000, number)


def broker_name(app: Any) -> str:
    """The broker of an app, as jobs and holds name it: two hosts may call it differently."""
    with app.connection_for_write() as connection:
        place = str(connection.virtual_host or "").strip("/")
        return f"{connection.transport.driver_type} /{place}"
