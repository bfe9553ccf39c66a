"""The app of the fuzz: the same tasks in a plain worker and in a guarded one.

``FUZZ_*`` in the environment say where the servers and the folder of the marks are, and
whether the plugin is installed.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from celery import Celery, signals
from kombu import Exchange, Queue
from kombu.messaging import Consumer

from celery_dlq import DeadLetters

QUEUE = "work"
MAX_DELIVERIES = 2
TOKEN = re.compile(r"case-\d+-\d+")
"""What tells one message from all others, wherever it is found in it."""

URL = os.environ.get("FUZZ_REDIS", "redis://127.0.0.1:6379")
BROKER = os.environ.get("FUZZ_BROKER", f"{URL}/0")
QUEUE_TYPE = os.environ.get("FUZZ_QUEUE_TYPE", "")
FOLDER = Path(os.environ.get("FUZZ_FOLDER", "."))
GUARDED = os.environ.get("FUZZ_GUARDED") == "1"

app = Celery("fuzz", broker=BROKER, backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    worker_prefetch_multiplier=1,  # the last one received is the one that kills or blocks
    task_default_queue=QUEUE,
    broker_connection_retry_on_startup=True,
    result_expires=600,
    task_default_retry_delay=0,
)
if BROKER.startswith("redis"):
    visibility = float(os.environ.get("FUZZ_VISIBILITY", "3600"))
    app.conf.broker_transport_options = {"visibility_timeout": visibility}
if QUEUE_TYPE == "quorum":
    app.conf.task_queues = [
        Queue(
            QUEUE,
            Exchange(f"{QUEUE}-topic", "topic"),
            QUEUE,
            queue_arguments={"x-queue-type": "quorum"},
        ),
    ]
dlq: DeadLetters | None = None
if GUARDED:
    app.conf.update(
        dlq_url=f"{URL}/0",
        dlq_queues={"*": {"max_deliveries": MAX_DELIVERIES}},
        dlq_spool_dir=str(FOLDER / "spool"),
    )
    dlq = DeadLetters(app)


def mark(what: str, *places: Any) -> None:
    """Add one line to the marks: what happened, and to which message."""
    found = next((m for m in map(TOKEN.search, map(_text, places)) if m), None)
    line = f"{what} {found[0] if found else '?'}\n"
    handle = os.open(FOLDER / "marks", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(handle, line.encode())
    finally:
        os.close(handle)


def _text(place: Any) -> str:
    if isinstance(place, bytes | memoryview):
        return bytes(place).decode("latin-1")
    return repr(place)


def _begins(task: Any, args: tuple[Any, ...]) -> None:
    mark("start", args[:1], vars(task.request).get("fuzz_case"), task.request.id, args)


def _succeeds(sender: Any, **_: Any) -> None:
    """Not at the task's own end: what follows it, a chord's part say, can still fail it."""
    request = sender.request
    mark("SUCCESS", request.args, vars(request).get("fuzz_case"), request.id)


def _fails_outside(request: Any, args: Any, **_: Any) -> None:
    """An error beside the task's body, which Celery may report to the main process as a success."""
    mark("OUTSIDE", args, request)


@app.task(bind=True)
def echo(self: Any, *args: Any, **kwargs: Any) -> str:
    _begins(self, args)
    return "done"


@app.task(bind=True)
def fails(self: Any, *args: Any, **kwargs: Any) -> None:
    _begins(self, args)
    raise LookupError("no price")


@app.task(bind=True, max_retries=3)
def retries(self: Any, *args: Any, **kwargs: Any) -> None:
    _begins(self, args)
    if self.request.retries < 1:
        raise self.retry(countdown=0)


def _tell_what_is_received() -> None:
    """Mark each message before anybody looks at it: one that ends the worker is the last."""
    receive = Consumer._receive_callback

    def received(self: Any, message: Any) -> Any:
        mark("received", message.properties, message.headers, message.body)
        return receive(self, message)

    Consumer._receive_callback = received


if "FUZZ_FOLDER" in os.environ:
    signals.task_success.connect(_succeeds)
    signals.task_internal_error.connect(_fails_outside)
    _tell_what_is_received()
