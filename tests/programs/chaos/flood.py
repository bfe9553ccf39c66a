"""The app of the flood: each of its messages dies at its first delivery."""

from __future__ import annotations

import os

from celery import Celery

from celery_dlq import DeadLetters, RejectToDLQ

QUEUE = "flood"
DEAD_LETTER_QUEUE = "flood-DLQ"
URL = os.environ.get("FLOOD_REDIS", "redis://127.0.0.1:6379/0")

os.fsync = lambda _: None  # no power failure is tried here, and each takes milliseconds

app = Celery("flood", broker=URL)
app.conf.update(
    task_default_queue=QUEUE,
    task_ignore_result=True,
    broker_connection_retry_on_startup=True,
    dlq_queues={QUEUE: {"max_deliveries": 3}},
    dlq_memory_limit=float(os.environ.get("FLOOD_LIMIT", "0.8")),
    dlq_spool_dir=os.environ.get("FLOOD_SPOOL"),
)
dlq = DeadLetters(app)


@app.task(acks_late=True)
def late(*_: str) -> None:
    raise RejectToDLQ("no price " + "for this order " * 50)


@app.task
def early(*_: str) -> None:
    raise RejectToDLQ("no price " + "for this order " * 50)
