"""A shop with a bug and a killer: the smallest app with a guarded queue."""

import json
import os
import signal
from pathlib import Path

from celery import Celery

from celery_dlq import DeadLetters, RejectToDLQ

REDIS = os.environ.get("SHOP_REDIS", "redis://localhost:6379/0")

app = Celery("shop", broker=REDIS, backend=REDIS)
app.conf.update(
    task_acks_late=True,  # a message outlives its worker …
    task_reject_on_worker_lost=True,  # … and its pool process
    task_default_queue="orders",
    broker_connection_retry_on_startup=True,
    dlq_queues={"orders": {"max_deliveries": 3}},
)
dlq = DeadLetters(app)


@app.task(name="shop.charge")
def charge(order_id, currency):
    if order_id < 0:
        raise RejectToDLQ("no such order")  # straight to the dead-letter queue
    rates = json.loads(Path("rates.json").read_text())
    return 10 * rates[currency]  # a currency without a rate is a bug


@app.task(name="shop.render")
def render(image_id):
    os.kill(os.getpid(), signal.SIGKILL)  # takes more memory than there is


def main():
    sent = [charge.delay(order_id, "EUR") for order_id in range(3)]
    sent += [charge.delay(order_id, "CHF") for order_id in range(3, 5)]
    sent += [charge.delay(-1, "EUR"), render.delay(1)]
    for result in sent:
        result.get(propagate=False, timeout=60)
    died = sum(result.failed() for result in sent)
    print(f"{len(sent)} tasks: {len(sent) - died} succeeded, {died} died")


if __name__ == "__main__":
    main()
