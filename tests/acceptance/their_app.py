"""An app whose code is somebody else's: nothing in it knows the plugin."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import redis
from celery import Celery

URL = os.environ["POISON_REDIS"]

app = Celery("theirs", broker=f"{URL}/0", backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue="orders",
    broker_connection_retry_on_startup=True,
)


@app.task(name="theirs.killed", bind=True)
def killed(self: Any) -> None:
    with redis.Redis.from_url(f"{URL}/2") as client:
        client.rpush("theirs", f"{time.time()} {self.request.eta}")
    os.kill(os.getpid(), signal.SIGKILL)
