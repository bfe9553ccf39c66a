"""Each publication of a message is named, so that a copy can be told from another message.

People give ids to tasks, and use them again. What a broker delivers twice is one publication; on
RabbitMQ nothing else tells it from an equal message that was published later.

Source: ``before_task_publish`` in
https://docs.celeryq.dev/en/stable/userguide/signals.html#before-task-publish
"""

from __future__ import annotations

import random
import time
from typing import Any

from celery import signals

from celery_dlq.letters.headers import PUBLICATION_HEADER, publication


def install() -> None:
    """Name what this process publishes from now on; again without effect."""
    signals.before_task_publish.connect(
        name_publication, weak=False, dispatch_uid="celery_dlq.publication"
    )


def name_publication(headers: Any = None, **_: Any) -> None:
    """Name a message that is about to be published; a retry has the headers of its message."""
    if isinstance(headers, dict):
        headers[PUBLICATION_HEADER] = publication(time.time_ns() // 1000, random.getrandbits(16))
