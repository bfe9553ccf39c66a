"""The app of the acceptance tests after the plugin was uninstalled: Celery and nothing else.

Its settings still have the plugin's; nobody cleans up everything at once.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import redis
from celery import Celery

assert importlib.util.find_spec("celery_dlq") is None, "expected celery_dlq to be uninstalled"

URL = os.environ["POISON_REDIS"]

app = Celery("poison", broker=f"{URL}/0", backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    task_default_queue="orders",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    dlq_url=f"{URL}/0",
    dlq_queues={"orders": {"max_deliveries": 3}, "slow": {"default_delay": 1.5}},
)


def traced(task: Any, key: str) -> str:
    with redis.Redis.from_url(f"{URL}/2") as client:
        client.rpush(f"plain:{key}", task.request.retries)
    return key


@app.task(name="poison_app.fails", bind=True)
def fails(self: Any, key: str) -> str:
    return traced(self, key)


@app.task(name="poison_app.delayed", bind=True)
def delayed(self: Any, key: str) -> str:
    return traced(self, key)


@app.task(name="poison_app.retries", bind=True, max_retries=1, default_retry_delay=0)
def retries(self: Any, key: str) -> str:
    traced(self, key)
    if not self.request.retries:
        raise self.retry()
    return key
