"""The app whose letters the browser looks at; its task leaves a trace of each run in Redis.

``SHOP_REDIS`` and ``SHOP_CONF`` (JSON) come from the environment.
"""

from __future__ import annotations

import json
import os
from typing import Any

import redis
from celery import Celery

from celery_dlq import DeadLetters

URL = os.environ.get("SHOP_REDIS", "redis://127.0.0.1:6379")

app = Celery("shop", broker=f"{URL}/0", backend=f"{URL}/1")
app.conf.update(
    {
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "task_default_queue": "orders",
        "task_routes": {"shop.send_mail": {"queue": "mails"}, "shop.report": {"queue": "reports"}},
        "broker_connection_retry_on_startup": True,
        "worker_prefetch_multiplier": 1,
        "dlq_url": f"{URL}/0",
        "dlq_queues": {
            "orders": {"max_deliveries": 5, "dead_letter_ttl": 14 * 86400},
            "mails": {"max_deliveries": 3, "max_retries": 4},
            "reports": {"max_deliveries": 2},
        },
        **json.loads(os.environ.get("SHOP_CONF", "{}")),
    }
)
dlq = DeadLetters(app)


class GatewayTimeout(Exception):  # noqa: N818 - as in many shops
    """The payment gateway was slow."""


def ran(name: str, key: object) -> redis.Redis:
    """Leave a mark of this run."""
    client = redis.Redis.from_url(f"{URL}/2")
    client.rpush(f"{name}:{key}", os.getpid())
    return client


@app.task(name="shop.charge")
def charge(order: Any, **_: object) -> None:
    with ran("charge", order) as client:
        if client.sismember("unpayable", str(order)):
            raise GatewayTimeout("payment gateway did not answer within 10 s")


@app.task(name="shop.render_invoice")
def render_invoice(order: Any, **_: object) -> None:
    ran("render_invoice", order).close()


@app.task(name="shop.reserve_stock")
def reserve_stock(order: Any, **_: object) -> None:
    ran("reserve_stock", order).close()


@app.task(name="shop.send_mail")
def send_mail(address: str, **_: object) -> None:
    ran("send_mail", address).close()


@app.task(name="shop.report")
def report(month: str, **_: object) -> None:
    ran("report", month).close()
