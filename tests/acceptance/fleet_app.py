"""The app of a mixed fleet: plain workers, and with ``FLEET_GUARDED`` guarded ones.

Imports nothing of the plugin in plain workers, which may run another version of Celery.
"""

from __future__ import annotations

import json
import os
import socket
import time
from typing import Any

import redis
from celery import Celery
from kombu import Exchange, Queue
from kombu.common import Broadcast

URL = os.environ["FLEET_REDIS"]

app = Celery("fleet", broker=f"{URL}/0", backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    task_default_queue="orders",
    worker_prefetch_multiplier=4,
    broker_connection_retry_on_startup=True,
    task_queues=[
        Queue("orders", Exchange(""), routing_key="orders"),
        Queue("short", Exchange(""), routing_key="short", expires=600),
        Broadcast("news", exchange=Exchange("news", type="fanout")),
    ],
    task_routes={"fleet.news": {"exchange": "news", "queue": "news"}},
)
app.conf.broker_transport_options = {
    "visibility_timeout": 6,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
}
app.conf.update(json.loads(os.environ.get("FLEET_CONF", "{}")))
if os.environ.get("FLEET_GUARDED"):
    from celery_dlq import DeadLetters

    app.conf.update(dlq_queues={"*": {"max_deliveries": 9}}, dlq_lease=5)
    dlq = DeadLetters(app)


def trace(key: str, request: Any) -> None:
    with redis.Redis.from_url(f"{URL}/2") as client:
        client.rpush(f"ran:{key}", request.hostname or socket.gethostname())


@app.task(name="fleet.healthy", bind=True)
def healthy(self: Any, key: str, seconds: float = 0) -> str:
    trace(key, self.request)
    time.sleep(seconds)
    return key


@app.task(name="fleet.stuck", bind=True)
def stuck(self: Any, key: str) -> None:
    """Until its worker is killed; the next one ends it at once."""
    trace(key, self.request)
    if not self.request.delivery_info.get("redelivered"):
        time.sleep(60)


@app.task(name="fleet.limited", bind=True, rate_limit="2/s")
def limited(self: Any, key: str) -> str:
    trace(key, self.request)
    return key


@app.task(name="fleet.news", bind=True, ignore_result=True)
def news(self: Any, key: str) -> None:
    trace(key, self.request)
