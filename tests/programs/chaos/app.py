"""The app of the chaos test: every kind of task, and marks that outlive every server.

Imported by the runner and by the workers it starts; ``CHAOS_*`` in the environment
say where the servers and the folder of the marks are. With ``CHAOS_PLAIN`` the app is Celery's
alone: what nothing would end there gives up by itself.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from typing import Any

import billiard.pool
from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.signals import after_setup_logger
from chaos.facts import HEADER
from kombu import Exchange, Queue

from celery_dlq import DeadLetters, RejectToDLQ

QUEUE = "work"
DEAD_LETTER_QUEUE = "work-DLQ"
MAX_DELIVERIES = int(os.environ.get("CHAOS_LIMIT", "3"))
MAX_RETRIES = 2
PLAIN = bool(os.environ.get("CHAOS_PLAIN"))
RELIABLE_FETCH = not PLAIN and not os.environ.get("CHAOS_PLAIN_FETCH")
# Of letters; a clock that is an hour ahead must not trim them.
TTL_SECONDS = float(os.environ.get("CHAOS_TTL", "1800"))
SOON_ENOUGH = 1  # which retry of `retries` succeeds

URL = os.environ.get("CHAOS_REDIS", "redis://127.0.0.1:6379")
BROKER = os.environ.get("CHAOS_BROKER", f"{URL}/0")
FOLDER = Path(os.environ.get("CHAOS_FOLDER", "."))
QUEUE_TYPE = os.environ.get("CHAOS_QUEUE_TYPE", "")
SKEW_SECONDS = float(os.environ.get("CHAOS_SKEW") or 0.0)  # how far this worker's clock is ahead

# How often a pool process that is to end asks, every 0.1 s, whether its last result was read; the
# main process cannot read it, because it waits for that one. Celery's 300 make a deploy take 30 s.
billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = 10

VISIBILITY_SECONDS = float(os.environ.get("CHAOS_VISIBILITY", "8"))

app = Celery("chaos", broker=BROKER, backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=4,
    task_default_queue=QUEUE,
    broker_connection_retry_on_startup=True,
    broker_connection_max_retries=None,
    worker_cancel_long_running_tasks_on_connection_loss=False,
    result_expires=600,
    worker_enable_remote_control=BROKER[:3] != "sqs",
)
if not PLAIN:
    app.conf.update(
        dlq_url=f"{URL}/0",
        dlq_queues={QUEUE: {"max_deliveries": MAX_DELIVERIES, "dead_letter_ttl": TTL_SECONDS}},
        dlq_spool_dir=str(FOLDER / "spool"),
        dlq_reliable_fetch=RELIABLE_FETCH,
    )
if BROKER.startswith("redis"):
    app.conf.broker_transport_options = {
        # With reliable fetch it is the lease, too.
        "visibility_timeout": VISIBILITY_SECONDS,
        "max_connections": 100,  # with gevent a greenlet each
        # A worker killed while it gives messages back must not stop all others for long.
        "unacked_mutex_expire": 2,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
elif BROKER.startswith("sqs"):
    app.conf.broker_transport_options = {
        "visibility_timeout": int(VISIBILITY_SECONDS),
        **json.loads(os.environ["CHAOS_OPTIONS"]),
    }
else:
    app.conf.broker_transport_options = {"confirm_publish": True}
if QUEUE_TYPE == "quorum":
    app.conf.task_queues = [
        Queue(
            QUEUE,
            Exchange(f"{QUEUE}-topic", "topic"),
            QUEUE,
            queue_arguments={"x-queue-type": "quorum"},
        ),
    ]
dlq = None if PLAIN else DeadLetters(app)


# Opened here: a process that has no file descriptor left makes its marks all the same.
MARKS = {
    name: os.open(FOLDER / name, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
    for name in ("starts", "ends")
}


class MainThreadOnly(logging.Handler):
    """A home-made log handler, to a database say, that works in its own thread only."""

    def emit(self, record: logging.LogRecord) -> None:
        """Fail as sqlite3 does; only at lines of the plugin, else Celery's own threads fail."""
        ours = record.name.startswith("celery_dlq")
        if ours and threading.current_thread() is not threading.main_thread():
            raise sqlite3.ProgrammingError("SQLite objects can only be used in their own thread")


if os.environ.get("CHAOS_RAISING_LOG"):

    @after_setup_logger.connect(weak=False)
    def add_handler(logger: logging.Logger, **_: Any) -> None:
        """The last one, so that the others have written the line."""
        logger.addHandler(MainThreadOnly())


def name_of(request: Any) -> str:
    """The name of the publication; a task id may be used again."""
    return str(request.get(HEADER) or request.id)


def mark(name: str, request: Any) -> None:
    """Add one line to a file: publication, retries, process, worker, time; whole or not at all.

    The runner makes each worker the leader of a group, so the group's id is the worker's.
    """
    at = time.time() - SKEW_SECONDS
    what = f"{name_of(request)} {int(request.retries or 0)}"
    os.write(MARKS[name], f"{what} {os.getpid()} {os.getpgrp()} {at:.6f}\n".encode())


def begin(request: Any) -> None:
    """Mark a start of a task that cannot succeed; plain Celery would start some without end."""
    mark("starts", request)
    if not PLAIN:
        return
    marks = os.pread(MARKS["starts"], os.fstat(MARKS["starts"]).st_size, 0).decode("ascii")
    starts = f"\n{marks}".count(f"\n{name_of(request)} {request.retries} ")
    if starts >= MAX_DELIVERIES:
        mark("ends", request)
        raise Ignore


def ends_here(request: Any) -> None:
    """Mark the end where plain Celery leaves nothing else of one."""
    if PLAIN:
        mark("ends", request)


@app.task(bind=True)
def quick(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    mark("ends", self.request)


@app.task(bind=True)
def later(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    mark("ends", self.request)


@app.task(bind=True)
def slow(self: Any, seconds: float, *_: Any) -> None:
    mark("starts", self.request)
    time.sleep(seconds)
    mark("ends", self.request)


@app.task(bind=True)
def long(self: Any, seconds: float, *_: Any) -> None:
    mark("starts", self.request)
    time.sleep(seconds)
    mark("ends", self.request)


@app.task(bind=True)
def killed(self: Any, *_: Any) -> None:
    begin(self.request)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def segfault(self: Any, *_: Any) -> None:
    begin(self.request)
    ctypes.string_at(0)


@app.task(bind=True)
def exits(self: Any, *_: Any) -> None:
    begin(self.request)
    os._exit(7)


@app.task(bind=True)
def requeues(self: Any, *_: Any) -> None:
    begin(self.request)
    raise Reject("not now", requeue=True)


@app.task(bind=True)
def fails(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    ends_here(self.request)
    raise LookupError("no price")


@app.task(bind=True, autoretry_for=(LookupError,), max_retries=MAX_RETRIES, default_retry_delay=0)
def autoretries(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    if self.request.retries == MAX_RETRIES:
        ends_here(self.request)
    raise LookupError("partner is down")


@app.task(bind=True, max_retries=MAX_RETRIES, default_retry_delay=0)
def retries(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    if self.request.retries < SOON_ENOUGH:
        raise self.retry()
    mark("ends", self.request)


@app.task(bind=True)
def to_dlq(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    ends_here(self.request)
    raise Reject("no such order", requeue=False) if PLAIN else RejectToDLQ("no such order")


@app.task(bind=True, time_limit=1)
def too_long(self: Any, *_: Any) -> None:
    mark("starts", self.request)
    ends_here(self.request)
    time.sleep(60)


@app.task(bind=True)
def kills_worker(self: Any, *_: Any) -> None:
    begin(self.request)
    if os.getpgrp() in (os.getpid(), os.getppid()):  # a worker that the runner started
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
