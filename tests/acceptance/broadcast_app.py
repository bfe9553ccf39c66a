"""An app whose workers each get every message of a queue: kombu's Broadcast."""

from __future__ import annotations

import json
import os
import signal

from celery import Celery
from kombu.common import Broadcast

from celery_dlq import DeadLetters

URL = os.environ.get("POISON_REDIS", "redis://127.0.0.1:6379")

app = Celery("broadcast", broker=os.environ.get("POISON_BROKER", f"{URL}/0"), backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    task_queues=[Broadcast("refresh")],
    task_default_queue="refresh",
    task_routes={"broadcast_app.*": {"queue": "refresh"}},
    broker_connection_retry_on_startup=True,
    dlq_url=f"{URL}/0",
    dlq_queues={"*": {"max_deliveries": 3}},
    **json.loads(os.environ.get("POISON_CONF", "{}")),
)
dlq = DeadLetters(app)


@app.task
def refresh() -> None:
    raise LookupError("nothing to refresh")


@app.task
def dies() -> None:
    print("dies here", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
