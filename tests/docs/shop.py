"""The app behind pages that show commands and no app."""

from __future__ import annotations

import os

from celery import Celery

from celery_dlq import DeadLetters, RejectToDLQ, dead_letter_policy

app = Celery(
    "shop", broker=f"{os.environ['DOCS_REDIS']}/0", backend=f"{os.environ['DOCS_REDIS']}/1"
)
app.conf.task_default_queue = "orders"
app.conf.task_acks_late = True
app.conf.task_reject_on_worker_lost = True
app.conf.dlq_queues = {"orders": {"max_deliveries": 5}}
dlq = DeadLetters(app)


@app.task(name="shop.charge")
@dead_letter_policy(max_deliveries=3)
def charge(order_id: int, tenant: int = 0) -> int:
    """Charge an order."""
    if order_id < 0:
        raise RejectToDLQ("no such order")
    return order_id


@app.task(name="shop.render")
def render(image_id: int) -> int:
    """Draw an image."""
    return image_id
