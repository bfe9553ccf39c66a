"""Letters of the app ``poison_app`` that are there before a worker starts."""

from __future__ import annotations

import json
from types import ModuleType
from typing import Any

from builders import a_letter, a_request, key_of

from celery_dlq import DeadLetter

QUEUE = "orders-DLQ"


def put(poison: ModuleType, task: str = "healthy", **changes: Any) -> DeadLetter:
    """A letter of a task of the app, as if a worker had stored it."""
    letter = a_letter(task_name=f"poison_app.{task}", **changes)
    headers = a_request(id=letter.task_id, root_id=letter.task_id, task=f"poison_app.{task}")
    letter = a_letter(
        **{
            "task_name": f"poison_app.{task}",
            "body": json.dumps([[letter.task_id], {}, {"callbacks": None}]).encode(),
            "headers": json.dumps(headers),
            "properties": json.dumps({"correlation_id": letter.task_id, "priority": 0}),
            **changes,
            "task_id": letter.task_id,
        }
    )
    poison.dlq.store.dead_letter(letter, key_of(letter))
    return letter


def left(poison: ModuleType) -> list[DeadLetter]:
    """The letters that are still there."""
    return list(poison.dlq.letters(QUEUE)) if QUEUE in poison.dlq.store.names() else []
