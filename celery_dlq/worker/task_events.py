"""Celery's event of a letter, for Flower and other receivers of a worker's events.

It is sent by Celery's own dispatcher, buffered with its events and lost when they are lost.
Source: ``EventDispatcher.send`` in
https://github.com/celery/celery/blob/main/celery/events/dispatcher.py
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_dlq.events import DeadLettered
from celery_dlq.letters.printable import shortened

TASK_EVENT = "task-dead-lettered"

_MAX_CHARS = 255  # of an id or name that anybody can publish


def send(dispatcher: Any, tasks: Mapping[str, Any], event: DeadLettered) -> None:
    """Send the event, unless the task of the letter sends none."""
    letter = event.letter
    task = tasks.get(letter.task_name)
    if task is None or task.send_events:
        dispatcher.send(
            TASK_EVENT,
            uuid=shortened(letter.task_id, _MAX_CHARS),
            name=shortened(letter.task_name, _MAX_CHARS),
            queue=letter.source_queue,
            reason=letter.reason.value,
            dead_letter_queue=letter.dead_letter_queue,
            letter_id=letter.id,
            fingerprint=letter.fingerprint,
            regressed=event.regressed,
        )
