"""A shop on RabbitMQ's quorum queues: letters in Redis, delays in RabbitMQ itself."""

import os
import time

from celery import Celery
from kombu import Exchange, Queue

from celery_dlq import DeadLetters

RABBIT = os.environ.get("SHOP_RABBIT", "amqp://guest:guest@localhost:5672//")
REDIS = os.environ.get("SHOP_REDIS", "redis://localhost:6379/0")


def quorum_queue(name):
    """RabbitMQ delays messages natively only for queues on a topic exchange."""
    return Queue(
        name,
        Exchange(name, type="topic"),
        routing_key=name,
        queue_arguments={
            "x-queue-type": "quorum",
            # RabbitMQ's own limit counts prefetched messages too: neighbours of a crash would
            # die with it. celery_dlq counts starts, so its limit is the one to reach first.
            "x-delivery-limit": 50,
        },
    )


app = Celery("shop", broker=RABBIT, backend=REDIS)
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue="orders",
    task_queues=[quorum_queue("orders"), quorum_queue("mails")],
    task_routes={"shop.mail": {"queue": "mails"}},
    broker_connection_retry_on_startup=True,
    dlq_url=REDIS,  # the broker is no Redis: counts and letters need one
    dlq_queues={
        "orders": {"max_deliveries": 3},
        "mails": {"max_deliveries": 3, "default_delay": 2},  # waits in RabbitMQ, not in a worker
    },
)
dlq = DeadLetters(app)


@app.task(name="shop.render")
def render(image_id):
    os._exit(1)  # takes its worker process with it


@app.task(name="shop.mail")
def mail(sent_at):
    return time.time() - sent_at


def main():
    sent, killer = mail.delay(time.time()), render.delay(1)
    print(f"the mail was sent {sent.get(timeout=60):.0f} seconds after it was published")
    killer.get(propagate=False, timeout=60)
    print(f"rendering: {killer.state}")


if __name__ == "__main__":
    main()
