"""The app of the tests of Sentry and OpenTelemetry: as users write one, with both initialised."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

from celery import Celery, signals

from celery_dlq import DeadLetters, RejectToDLQ
from celery_dlq.signals import task_dead_lettered

URL = os.environ.get("POISON_REDIS", "redis://127.0.0.1:6379")
SENTRY: dict[str, Any] = json.loads(os.environ.get("OBSERVED_SENTRY", "{}"))
SPANS = os.environ.get("OBSERVED_SPANS")
SIGNALS = os.environ.get("OBSERVED_SIGNALS")

app = Celery("observed", broker=f"{URL}/0", backend=f"{URL}/1")
app.conf.update(
    task_acks_late=True,
    task_default_queue="orders",
    task_routes={"observed_app.fails_unguarded": {"queue": "unguarded"}},
    broker_connection_retry_on_startup=True,
    dlq_queues={"orders": {"max_deliveries": 3}},
    **json.loads(os.environ.get("POISON_CONF", "{}")),
)
dlq = DeadLetters(app)

if SENTRY:

    @signals.celeryd_init.connect
    def init_sentry(**_: Any) -> None:
        import sentry_sdk

        sentry_sdk.init(**SENTRY)


def trace_to_file(path: str) -> None:
    """Let OpenTelemetry write each span as a line of JSON."""
    from opentelemetry import trace
    from opentelemetry.instrumentation.celery import CeleryInstrumentor
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor

    provider = TracerProvider()
    exporter = ConsoleSpanExporter(
        out=Path(path).open("a", encoding="utf-8"),  # noqa: SIM115 - as long as the process lives
        formatter=lambda span: " ".join(span.to_json().split()) + "\n",
    )
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    CeleryInstrumentor().instrument()


if SPANS:
    trace_to_file(SPANS)

if SIGNALS:

    @task_dead_lettered.connect(weak=False)
    def broken(**_: Any) -> None:
        raise LookupError("this receiver is broken")

    @task_dead_lettered.connect(sender="observed_app.fails", weak=False)
    def count_letter(sender: str, letter: Any, **_: Any) -> None:
        with Path(SIGNALS).open("a", encoding="utf-8") as file:
            file.write(f"{sender} {letter.id}\n")


def look_up(secret: str) -> None:
    prices: dict[str, int] = {}
    raise LookupError(f"no price, asked with {len(secret) + len(prices)} letters")


@app.task
def fails(secret: str) -> None:
    try:
        {}["nothing"]
    except KeyError:
        look_up(secret)


@app.task(bind=True, max_retries=2, default_retry_delay=0)
def works_at_last(self: Any, key: str) -> str:
    if self.request.retries < 2:
        raise self.retry(exc=LookupError("not yet"))
    return key


@app.task(reject_on_worker_lost=True)
def killed(key: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@app.task
def rejects(key: str) -> None:
    raise RejectToDLQ("no such order")


@app.task
def fails_unguarded(key: str) -> None:
    raise LookupError("nobody guards me")


@app.task
def healthy(key: str) -> str:
    from redis import Redis

    with Redis.from_url(f"{URL}/2") as client:
        if client.get(f"poison:{key}"):
            raise LookupError("not mended yet")
        client.rpush(f"ran:{key}", os.getpid())
    return key


@app.task(bind=True, max_retries=1, default_retry_delay=0)
def charges(self: Any, card: dict[str, str], *, note: str = "") -> None:
    with_card = f"cannot charge {card['number']} {note}"
    if os.environ.get("OBSERVED_RETRIES") and not self.request.retries:
        raise self.retry(exc=LookupError(with_card))
    from redis import Redis

    with Redis.from_url(f"{URL}/2") as client:
        if client.get("mended"):
            client.set("charged", json.dumps([card, note]))
            return
    raise LookupError(with_card)
