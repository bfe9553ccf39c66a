"""The app under test: the broker comes from the environment, as in its container."""

import os
import signal

from celery import Celery

from celery_dlq import DeadLetters, RejectToDLQ

app = Celery("shop", broker=os.environ["CELERY_BROKER_URL"])
app.conf.update(
    result_backend=os.environ["CELERY_RESULT_BACKEND"],
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    task_default_queue="orders",
    dlq_queues={"orders": {"max_deliveries": 3}},
)
dlq = DeadLetters(app)


@app.task
def charge(order_id):
    if order_id < 0:
        raise RejectToDLQ("no such order")
    return order_id


@app.task
def render(order_id):
    os.kill(os.getpid(), signal.SIGKILL)  # a bug that ends its process
