"""A shop whose letters the notebook looks at: one bug, one bad provider, one killer image.

celery -A shop worker &
python shop.py                       # publishes orders
celery -A shop dlq export letters/
celery -A shop dlq export successes/ --successes
"""

from __future__ import annotations

import os
import signal
from random import Random

from celery import Celery

from celery_dlq import DeadLetters

REDIS = os.environ.get("SHOP_REDIS", "redis://localhost:6379/0")
ORDERS = 240

app = Celery("shop", broker=REDIS)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue="orders",
    task_ignore_result=True,
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
    dlq_queues={"orders": {"max_deliveries": 2}},
    dlq_sample_successes=1.0,  # few orders; an app with many records one in a thousand
)
dlq = DeadLetters(app)

RATES = {"EUR": 1.0, "USD": 0.9, "GBP": 1.2}


class CardDeclined(Exception):
    """What the payment provider says."""


@app.task(name="shop.charge")
def charge(*, order_id: int, currency: str, provider: str, customer: dict[str, str]) -> float:
    """Charge an order: currencies without a rate are a bug, and one provider declines a lot."""
    amount = 10 * RATES[currency]
    if provider == "lastpay" and order_id % 2:
        raise CardDeclined(f"card of order {order_id} was declined")
    return amount


@app.task(name="shop.render")
def render(image_id: int) -> None:
    """Takes more memory than there is."""
    os.kill(os.getpid(), signal.SIGKILL)


def publish() -> int:
    """Publish some orders; returns how many of them will die."""
    dice, deaths = Random(11), 0
    for order_id in range(ORDERS):
        currency = "CHF" if order_id % 5 == 0 else dice.choice(list(RATES))
        provider = dice.choice(["firstpay", "lastpay", "midpay"])
        kind = dice.choice(["private", "business"])
        charge.delay(
            order_id=order_id, currency=currency, provider=provider, customer={"kind": kind}
        )
        deaths += currency == "CHF" or (provider == "lastpay" and order_id % 2 == 1)
    render.delay(image_id=1)
    return deaths + 1


if __name__ == "__main__":
    print(f"published {ORDERS} orders, of which {publish()} will die")
