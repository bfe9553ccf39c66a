"""The app of the acceptance tests: every way to die, and a trace of every execution in Redis.

Imported by the tests and by the workers they start; ``POISON_REDIS``, ``POISON_CONF`` (JSON) and
``POISON_CONSTANTS`` (JSON, ``module:NAME`` to value) come from the environment, and the intervals
of the test that starts it, see ``intervals.py`` in the folder above.
"""

from __future__ import annotations

import asyncio
import builtins
import ctypes
import importlib
import json
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any

import billiard.pool
import redis
from celery import Celery
from celery.exceptions import Ignore, Reject
from celery.signals import worker_process_shutdown
from celery.worker.request import Request
from kombu import Exchange, Queue

from celery_dlq import DeadLetters, RejectToDLQ, dead_letter_policy, timing

for place, value in json.loads(os.environ.get("POISON_CONSTANTS", "{}")).items():
    module, _, constant = place.partition(":")
    setattr(importlib.import_module(module), constant, value)
if "TEST_TIMING" in os.environ:
    timing.current = pickle.loads(bytes.fromhex(os.environ["TEST_TIMING"]))

URL = os.environ.get("POISON_REDIS", "redis://127.0.0.1:6379")
BROKER = os.environ.get("POISON_BROKER", f"{URL}/0")
QUEUE_TYPE = os.environ.get("POISON_QUEUE_TYPE", "classic")
QUEUE_ARGUMENTS = json.loads(os.environ.get("POISON_QUEUE_ARGUMENTS", "{}"))
NAMES = ("orders", "slow", "patient", "unguarded")
CONF: dict[str, Any] = {
    "task_acks_late": True,
    "task_reject_on_worker_lost": True,
    "worker_prefetch_multiplier": 1,
    "task_default_queue": "orders",
    "broker_connection_retry_on_startup": True,
    "accept_content": ["json", "yaml"],
    "dlq_url": f"{URL}/0",
    "broker_transport_options": {
        **({"visibility_timeout": 3600} if BROKER[:5] == "redis" else {}),
        **json.loads(os.environ.get("POISON_OPTIONS", "{}")),
    },
    "worker_enable_remote_control": BROKER[:3] != "sqs",
    "task_routes": {
        "poison_app.retries_for_ever": {"queue": "patient"},
        "poison_app.to_dlq_unguarded": {"queue": "unguarded"},
        "poison_app.delayed": {"queue": "slow"},
        "poison_app.notes_delay": {"queue": "slow"},
    },
    "dlq_queues": {"orders": {"max_deliveries": 3}, "slow": {"default_delay": 1.5}},
    **json.loads(os.environ.get("POISON_CONF", "{}")),
}

if CONF["broker_transport_options"].get("visibility_timeout", 3600) < 2:
    CONF["dlq_queues"].pop("slow", None)  # its delay would outlast that, which is refused

app = Celery("poison", broker=BROKER, backend=f"{URL}/1")
app.conf.update(CONF)
if QUEUE_TYPE == "quorum":
    app.conf.task_queues = [
        Queue(
            name,
            Exchange(f"{name}-topic", "topic"),
            name,
            queue_arguments={"x-queue-type": "quorum", **QUEUE_ARGUMENTS.get(name, {})},
        )
        for name in NAMES
    ]
dlq = DeadLetters(app)


# How often a child that is to end asks, every 0.1 s, whether its last result was read; the main
# process cannot read it, because it waits for that child. Celery's 300 take 30 s.
billiard.pool.GUARANTEE_MESSAGE_CONSUMPTION_RETRY_LIMIT = 10


def trace(name: str, key: str) -> None:
    """Leave a mark of this execution where the test can count it."""
    with redis.Redis.from_url(f"{URL}/2") as client:
        client.rpush(f"{name}:{key}", os.getpid())


def neighbours_are_fetched() -> None:
    """Wait until no message is on its way into the worker.

    Kombu's Redis transport loses a message whose process dies after BRPOP took it and
    before HSET noted it (docs/guarantees.md); a test that kills a worker among its
    neighbours would meet that now and then. ``POISON_MESSAGES`` says how many there are.
    """
    messages = int(os.environ.get("POISON_MESSAGES", "0"))
    deadline = time.monotonic() + 10
    with redis.Redis.from_url(f"{URL}/0") as broker, redis.Redis.from_url(f"{URL}/2") as traces:
        while broker.hlen("unacked") + traces.llen("ran:healthy") < messages:
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)


@app.task
def healthy(key: str) -> str:
    trace("ran", key)
    return key


@app.task
def calls_downstream(key: str) -> str:
    """Fail while the test says that another service is away."""
    trace("ran", key)
    with redis.Redis.from_url(f"{URL}/2") as client:
        if client.exists("outage"):
            raise ConnectionError("the service is away")
        client.rpush("succeeded", key)
    return key


@app.task(rate_limit="1/h")
def limited(key: str) -> str:
    trace("ran", key)
    return key


@app.task
def killed(key: str) -> None:
    trace("ran", key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
def killed_later(key: str) -> None:
    trace("ran", key)
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def replaced_by_killed(self: Any, key: str) -> None:
    trace("ran", f"{key} before")
    raise self.replace(killed.si(key))


@app.task
def segfault(key: str) -> None:
    trace("ran", key)
    ctypes.string_at(0)


@app.task
def exits(key: str) -> None:
    trace("ran", key)
    os._exit(7)


def _leaving(how: str) -> BaseException:
    if how == "group":
        kind = vars(builtins)["BaseExceptionGroup"]  # Python 3.11
        return kind("two", [KeyboardInterrupt(), SystemExit(1)])
    made: dict[str, BaseException] = {
        "exit": SystemExit("config is broken"),
        "exit 0": SystemExit(0),
        "interrupt": KeyboardInterrupt("by hand"),
        "cancelled": asyncio.CancelledError("by its loop"),
        "generator": GeneratorExit("closed"),
    }
    return made[how]


@app.task
def leaves(key: str) -> None:
    """Leave in a way that no ``except Exception`` sees."""
    trace("ran", key)
    raise _leaving(key)


@app.task(time_limit=60)
def leaves_by_timeout(key: str) -> None:
    """Use gevent's own time limit, below Celery's, which gevent's raises too."""
    trace("ran", key)
    with importlib.import_module("gevent").Timeout(0.1):
        time.sleep(60)


@app.task
def requeues(key: str) -> None:
    trace("ran", key)
    raise Reject("not now", requeue=True)


@app.task(acks_late=False)
def requeues_early(key: str) -> None:
    trace("ran", key)
    raise Reject("not now", requeue=True)


@app.task
def requeues_late(key: str, seconds: float) -> None:
    trace("ran", key)
    time.sleep(seconds)
    raise Reject("not now", requeue=True)


@app.task
def drops(key: str) -> None:
    trace("ran", key)
    raise Reject("not mine", requeue=False)


@app.task
def to_dlq(key: str) -> None:
    trace("ran", key)
    raise RejectToDLQ("no such order")


@app.task
def to_dlq_unguarded(key: str) -> None:
    trace("ran", key)
    raise RejectToDLQ("nobody guards me")


@app.task
def fails(key: str, *, fixed: bool = False) -> str:
    trace("ran", key)
    with redis.Redis.from_url(f"{URL}/2") as client:
        if fixed or client.get("fixed"):
            return f"{key} done"
    raise LookupError("no price")


@app.task(acks_late=False)
def fails_early(key: str) -> None:
    trace("ran", key)
    raise LookupError("no price")


@app.task(autoretry_for=(ConnectionError,), max_retries=2, default_retry_delay=0)
def autoretries(key: str) -> None:
    trace("ran", key)
    raise ConnectionError("partner is down")


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def retries(self: Any, key: str) -> None:
    trace("ran", key)
    raise self.retry()


@app.task(bind=True, max_retries=None)
def retries_for_ever(self: Any, key: str) -> None:
    trace("ran", key)
    raise self.retry(countdown=0)


@app.task(throws=(KeyError,))
def expected(key: str) -> None:
    trace("ran", key)
    raise KeyError("as planned")


@app.task
def ignored(key: str) -> None:
    trace("ran", key)
    raise Ignore


@app.task
def delayed(key: str) -> str:
    trace("ran", key)
    return key


@app.task(bind=True)
def notes_delay(self: Any, *_: object) -> None:
    """Leave a note of how long this message was held back, and on whose word."""
    headers = self.request.headers or {}
    note = {
        "eta": self.request.eta,
        "seconds": headers.get("dlq_default_delay"),
        "source": headers.get("dlq_default_delay_source"),
        "routing_key": self.request.delivery_info["routing_key"],
        "now": time.time(),
    }
    with redis.Redis.from_url(f"{URL}/2") as client:
        client.rpush("delays", json.dumps(note))


@app.task
@dead_letter_policy(max_deliveries=1)
def once(key: str) -> None:
    trace("ran", key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def kills_worker(self: Any, key: str) -> None:
    trace("ran", key)
    neighbours_are_fetched()
    os.kill(os.getppid(), signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(time_limit=1)
def too_long(key: str) -> None:
    trace("ran", key)
    time.sleep(60)


@app.task(time_limit=1, acks_on_failure_or_timeout=False)
def too_long_requeued(key: str) -> None:
    trace("ran", key)
    time.sleep(60)


@app.task(time_limit=1, acks_late=False)
def too_long_early(key: str) -> None:
    trace("ran", key)
    time.sleep(60)


@app.task(reject_on_worker_lost=False)
def killed_acked(key: str) -> None:
    trace("ran", key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(acks_late=False)
def killed_early(key: str) -> None:
    trace("ran", key)
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(bind=True)
def retry_not_published(self: Any, key: str) -> None:
    trace("ran", key)
    raise self.retry(kwargs={"key": object()}, args=())


@app.task(bind=True, acks_late=False)
def retry_not_published_early(self: Any, key: str) -> None:
    trace("ran", key)
    raise self.retry(kwargs={"key": object()}, args=())


@app.task
def out_of_memory(key: str) -> None:
    trace("ran", key)
    raise MemoryError("no more")


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("I will not say")


@app.task
def unspeakable(key: str) -> None:
    trace("ran", key)
    raise UnspeakableError


@app.task
def deep(key: str) -> None:
    trace("ran", key)
    sys.setrecursionlimit(20_000)

    def down(n: int) -> None:
        if n:
            down(n - 1)
        raise LookupError("ten thousand frames down")

    down(10_000)


@app.task(name="with spaces and 🦄")
def unicorn(key: str) -> None:
    trace("ran", key)
    raise LookupError("🦄")


@app.task
def sleeps(key: str, seconds: float) -> str:
    trace("ran", key)
    time.sleep(seconds)
    return key


@app.task
def fails_late(key: str, seconds: float) -> None:
    trace("ran", key)
    time.sleep(seconds)
    raise LookupError("no price")


@app.task
def fails_first(key: str, seconds: float) -> str:
    """Fail late at the first start, and succeed at the second."""
    with redis.Redis.from_url(f"{URL}/2") as client:
        if client.rpush(f"ran:{key}", os.getpid()) > 1:
            return key
    time.sleep(seconds)
    raise LookupError("no price")


@app.task(bind=True, max_retries=1)
def retries_when_told(self: Any, key: str) -> str:
    """Retry once, when the test says so."""
    trace("ran", key)
    if self.request.retries:
        return key
    with redis.Redis.from_url(f"{URL}/2") as client:
        while not client.exists("retry"):
            time.sleep(0.01)
    raise self.retry(countdown=0)


@app.task(resultrepr_maxsize=1 << 20)
def returns_much(key: str) -> str:
    """Stop the worker, and this process while it reports its result through a full pipe."""
    trace("ran", key)
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGSTOP)).start()
    os.kill(os.getppid(), signal.SIGSTOP)
    return "x" * (1 << 17)


@app.task
def retires_slowly(key: str, seconds: float) -> str:
    """Keep this process for some time after the last of its tasks."""
    trace("ran", key)

    def linger(**_: Any) -> None:
        trace("retires", key)
        time.sleep(seconds)

    worker_process_shutdown.connect(linger, weak=False)
    return key


@app.task
def blocks(key: str, seconds: float) -> str:
    """Keep the thread busy, without a word to gevent."""
    trace("ran", key)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return key


@app.task(acks_late=False)
def sleeps_early(key: str, seconds: float) -> str:
    trace("ran", key)
    time.sleep(seconds)
    return key


class StopsAtReceipt(Request):
    """A request whose making is when the worker is told to stop at once."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGQUIT)


@app.task
def stops_at_receipt(key: str) -> None:
    trace("ran", key)


stops_at_receipt.Request = StopsAtReceipt


def die_after_storing() -> None:
    """Make the worker SIGKILL itself between storing a letter and acknowledging the message."""
    from celery_dlq.store.new_letters import NewLetters

    store = NewLetters.dead_letter

    def dead_letter(self: NewLetters, *args: Any) -> Any:
        stored = store(self, *args)
        with redis.Redis.from_url(f"{URL}/2") as client:
            if client.incr("stored") == 1:
                os.kill(os.getpid(), signal.SIGKILL)
        return stored

    NewLetters.dead_letter = dead_letter  # type: ignore[method-assign]


if os.environ.get("POISON_DIE_AFTER_STORING"):
    die_after_storing()
