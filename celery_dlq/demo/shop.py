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
MOST_PIXELS = 10_000

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
    dlq_sample_successes=1.0,  # a shop with many orders samples one in a thousand
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
def reserve(self: Any, order_id: int, product: str) -> str:
    """Requeues what is out of stock forever, in the hope of new stock."""
    if product == "lamp":
        raise Reject("out of stock", requeue=True)
    return f"{product} reserved for order {order_id}"


@app.task(name="shop.render")
def render(image_id: int, width: int) -> str:
    """Needs too much memory for wide images: the kernel kills the pool process."""
    if width > MOST_PIXELS:
        os.kill(os.getpid(), signal.SIGKILL)
    return f"image {image_id} rendered"


@app.task(name="shop.thumbnail")
def thumbnail(image_id: int) -> None:
    """Calls a C library with a bug."""
    ctypes.string_at(0)


@app.task(name="shop.invoice")
def invoice(order_id: int) -> str:
    """Healthy; its queue delays every mail, so that the customer can change the order."""
    return f"invoice for order {order_id} sent"


def publish() -> tuple[list[str], dict[str, list[str]]]:
    """Publish the tasks of the demo: ids of those that will succeed, and of the others by name.

    Of each task that has a bug some succeed, so that one sees what the others have in common.
    """
    healthy = [pack.delay(number) for number in range(20)]
    healthy += [invoice.delay(number) for number in range(5)]
    countries, products = ("DE", "FR", "PL"), ("chair", "desk", "shelf")
    for number in range(24):
        third = number % 3
        order = {"order_id": number, "amount": 19.9 + number}
        healthy += [
            charge.delay(**order, parts=1 + third),
            ship.delay(order_id=number, country=countries[third]),
            reserve.delay(order_id=number, product=products[third]),
            render.delay(image_id=number, width=400 * (1 + third)),
        ]
    orders = range(100, 112)
    dying = {
        "charge": [charge.delay(order_id=n, amount=19.9 + n, parts=0).id for n in orders],
        "ship": [ship.delay(order_id=n, country="GB").id for n in orders[:8]],
        "reserve": [reserve.delay(order_id=n, product="lamp").id for n in orders[:5]],
        "render": [render.delay(image_id=n, width=40_000).id for n in orders[:5]],
        "thumbnail": [thumbnail.delay(n).id for n in orders[:3]],
    }
    return [one.id for one in healthy], dying


def samples() -> int:
    """How many successes workers have sampled."""
    sampled = dlq.assembly.backend.sampled
    return sum(sampled.length(f"{queue}-DLQ") for queue in QUEUES)


def succeeded(ids: Sequence[str]) -> int:
    """How many of these tasks have succeeded."""
    metas = app.backend.client.mget([app.backend.get_key_for_task(task_id) for task_id in ids])
    return sum(b'"SUCCESS"' in meta for meta in metas if meta)
