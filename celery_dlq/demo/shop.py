"""A small shop with bugs: the app of the demo, as a user would write it.

Run by ``celery-dlq demo``, which sets the two environment variables.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from celery import Celery
from celery.exceptions import Reject

from celery_dlq import DeadLetters, RejectToDLQ, dead_letter_policy

BROKER = os.environ.get("CELERY_DLQ_DEMO_REDIS", "redis://localhost:6379")
FIXED = Path(os.environ.get("CELERY_DLQ_DEMO_FLAG", "bug-is-fixed"))
QUEUES = ("orders", "images", "mails")

app = Celery("shop", broker=f"{BROKER}/0", backend=f"{BROKER}/1")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
    task_default_queue="orders",
    task_routes={
        "shop.render": {"queue": "images"},
        "shop.thumbnail": {"queue": "images"},
        "shop.invoice": {"queue": "mails"},
    },
    broker_connection_retry_on_startup=True,
    result_expires=3600,
    dlq_queues={
        "orders": {"max_deliveries": 5},
        "images": {"max_deliveries": 3},
        "mails": {"max_deliveries": 3, "default_delay": 1},
    },
)
dlq = DeadLetters(app)


@app.task(name="shop.pack")
def pack(order_id: int) -> str:
    """Healthy."""
    time.sleep(0.02)
    return f"order {order_id} packed"


@app.task(
    name="shop.charge", autoretry_for=(ZeroDivisionError,), max_retries=2, default_retry_delay=0
)
def charge(order_id: int, amount: float, parts: int) -> float:
    """Has the bug that the demo fixes: it divides by the number of parts, which may be 0."""
    if FIXED.exists():
        parts = max(1, parts)
    return amount / parts


@app.task(name="shop.ship")
def ship(order_id: int, country: str) -> str:
    """Rejects impossible orders, with a description for the operator."""
    if country not in {"DE", "FR", "PL"}:
        raise RejectToDLQ(f"we do not ship to {country}")
    return f"order {order_id} shipped"


@app.task(name="shop.reserve", bind=True)
@dead_letter_policy(max_deliveries=4)
def reserve(self: Any, order_id: int) -> None:
    """Requeues forever, in the hope of new stock."""
    raise Reject("out of stock", requeue=True)


@app.task(name="shop.render")
def render(image_id: int) -> None:
    """Needs too much memory: the kernel kills the pool process."""
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(name="shop.thumbnail")
def thumbnail(image_id: int) -> None:
    """Calls a C library with a bug."""
    ctypes.string_at(0)


@app.task(name="shop.invoice")
def invoice(order_id: int) -> str:
    """Healthy; its queue delays every mail, so that the customer can change the order."""
    return f"invoice for order {order_id} sent"


def publish() -> tuple[list[str], dict[str, list[str]]]:
    """Publish the tasks of the demo: ids of those that will succeed, and of the others by name."""
    healthy = [pack.delay(number).id for number in range(60)]
    healthy += [invoice.delay(number).id for number in range(5)]
    countries = ("GB", "US", "BR", "JP")
    dying = {
        "charge": [charge.delay(number, 19.9 + number, 0).id for number in range(12)],
        "ship": [ship.delay(number, countries[number % 4]).id for number in range(8)],
        "reserve": [reserve.delay(number).id for number in range(5)],
        "render": [render.delay(number).id for number in range(5)],
        "thumbnail": [thumbnail.delay(number).id for number in range(3)],
    }
    return healthy, dying


def succeeded(ids: Sequence[str]) -> int:
    """How many of these tasks have succeeded."""
    metas = app.backend.client.mget([app.backend.get_key_for_task(task_id) for task_id in ids])
    return sum(b'"SUCCESS"' in meta for meta in metas if meta)
