"""Celery's event ``task-dead-lettered``, for Flower and other receivers of a worker's events."""

from __future__ import annotations

from typing import Any

from celery_dlq.events import DeadLettered, Event
from celery_dlq.letters.printable import shortened

NAME = "task-dead-lettered"

_MAX_CHARS = 255  # of an id or name that anybody can publish


class TaskEvents:
    """Sends the event of each letter while the worker sends events of tasks.

    It is sent by Celery's own dispatcher, buffered with its events and lost when they are lost.
    Source: ``EventDispatcher.send`` in
    https://github.com/celery/celery/blob/main/celery/events/dispatcher.py
    """

    def __init__(self, consumer: Any) -> None:
        self._consumer = consumer

    def __call__(self, event: Event) -> None:
        """Observe events."""
        dispatcher = self._consumer.event_dispatcher
        if not isinstance(event, DeadLettered) or dispatcher is None:
            return
        letter = event.letter
        task = self._consumer.app.tasks.get(letter.task_name)
        if task is None or task.send_events:
            dispatcher.send(
                NAME,
                uuid=shortened(letter.task_id, _MAX_CHARS),
                name=shortened(letter.task_name, _MAX_CHARS),
                queue=letter.source_queue,
                reason=letter.reason.value,
                dead_letter_queue=letter.dead_letter_queue,
                letter_id=letter.id,
                fingerprint=letter.fingerprint,
                regressed=event.regressed,
            )
