"""A guarded app for containers: its broker and its settings come from the environment."""

import os
import time
from pathlib import Path

from celery import Celery, bootsteps

from celery_dlq import DeadLetters, RejectToDLQ

# The broker is in CELERY_BROKER_URL, which Celery reads by itself.
app = Celery("shop")
app.conf.update(
    task_acks_late=True,  # a message outlives its worker …
    task_reject_on_worker_lost=True,  # … and its pool process
    task_default_queue="orders",
    broker_connection_retry_on_startup=True,
    # How long tasks may go on after SIGTERM; what is not done then goes back to the queue, and is
    # not charged. The container's grace period must be longer.
    worker_soft_shutdown_timeout=float(os.environ.get("SOFT_SHUTDOWN_SECONDS", "60")),
    dlq_queues={"orders": {"max_deliveries": 3}},
)
dlq = DeadLetters(app)


class Alive(bootsteps.StartStopStep):
    """Touches a file every 10 seconds from the loop that takes messages; the probes look at it.

    A loop that hangs, or that has no broker, does not touch it.
    """

    requires = ("celery.worker.consumer.tasks:Tasks",)  # so: when the worker consumes

    def __init__(self, consumer, **options):
        super().__init__(consumer, **options)
        self.file = Path(os.environ.get("ALIVE_FILE", "alive"))
        self.entry = None

    def start(self, consumer):
        self.file.touch()
        self.entry = consumer.timer.call_repeatedly(10, self.file.touch)

    def stop(self, consumer):
        if self.entry is not None:
            self.entry.cancel()


app.steps["consumer"].add(Alive)


@app.task(name="shop.charge")
def charge(order_id):
    if order_id < 0:
        raise RejectToDLQ("no such order")  # straight to the dead-letter queue
    return order_id


@app.task(name="shop.render")
def render(seconds):
    time.sleep(seconds)
