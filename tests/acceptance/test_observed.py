"""Metrics, signals and traces of real workers, as their receivers get them."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client.parser import text_string_to_metric_families
from servers import RedisServer
from waiting import poll
from workers import HERE, Worker, environment, run_python

EXPORTER = ("-m", "celery", "-A", "observed_app", "dlq", "exporter")

HEALTHY = 200

Samples = dict[tuple[str, ...], float]


class Exporter:
    """``celery -A observed_app dlq exporter`` as a process."""

    def __init__(self, url: str, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *EXPORTER, *arguments],
            env=environment(url),
            cwd=HERE,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def __enter__(self) -> Exporter:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, self.process.stderr and self.process.stderr.read()
        self.url = line.split(" at ")[1].strip()
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()

    def scrape(self) -> Samples:
        """All samples: name and values of the labels, by the labels' names, to the value."""
        with urllib.request.urlopen(self.url, timeout=10) as answer:  # noqa: S310 - our own server
            text = answer.read().decode()
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }


def letters_there(app: ModuleType, count: int) -> bool:
    return any(queue.letters >= count for queue in app.dlq.queues())


def test_one_exporter_serves_the_metrics_of_all_workers(
    observed: ModuleType, redis_url: str, tmp_path: Path
) -> None:
    """Signals are sent too, a broken receiver hurts nobody, and no Sentry costs nothing."""
    said = tmp_path / "signals"
    worker = Worker(
        redis_url, tmp_path / "worker.log", app="observed_app", env={"OBSERVED_SIGNALS": str(said)}
    )
    with redis.Redis.from_url(redis_url) as client:
        client.config_resetstat()
    with worker, Exporter(redis_url, "--port", "0") as exporter:
        for number in range(HEALTHY):
            observed.healthy.delay(f"h{number}")
        observed.fails.delay("a")
        observed.rejects.delay("b")
        assert observed.works_at_last.delay("c").get(timeout=30) == "c"
        poll(lambda: letters_there(observed, 2), timeout_seconds=30)
        worker.stop()  # its last counts are written on the way out
        (letter,) = observed.dlq.letters("orders-DLQ", reason="failed")

        found = exporter.scrape()
        assert found["celery_dlq_up",] == 1
        assert found["celery_dlq_workers",] == 1
        outcomes = {k[1:]: v for k, v in found.items() if k[0] == "celery_dlq_deliveries_total"}
        assert outcomes == {
            ("failed", "orders", "observed_app.fails"): 1,
            ("rejected", "orders", "observed_app.rejects"): 1,
            ("retried", "orders", "observed_app.works_at_last"): 2,
            ("succeeded", "orders", "observed_app.works_at_last"): 1,
            ("succeeded", "orders", "observed_app.healthy"): HEALTHY,
        }
        dead = ("celery_dlq_dead_letters_total", "orders-DLQ", "orders", "failed")
        assert found[(*dead, "observed_app.fails")] == 1
        assert found["celery_dlq_letters", "orders-DLQ", "rejected"] == 1
        assert found["celery_dlq_queue_length", "orders-DLQ"] == 2
        assert 0 < found["celery_dlq_oldest_letter_age_seconds", "orders-DLQ"] < 600
        assert found["celery_dlq_spool_letters", f"celery@{socket.gethostname()}"] == 0

        observed.dlq.redrive("orders-DLQ", task_name="observed_app.fails")
        with Worker(redis_url, tmp_path / "again.log", app="observed_app"):
            poll(lambda: letters_there(observed, 2), timeout_seconds=30)
        found = exporter.scrape()
        assert found["celery_dlq_redriven_total", "orders-DLQ"] == 1
        again = ("celery_dlq_died_again_total", "orders-DLQ", "orders", "observed_app.fails")
        assert found[again] == 1

        exporter.process.send_signal(signal.SIGTERM)
        assert exporter.process.wait(30) == 0

    assert said.read_text() == f"observed_app.fails {letter.id}\n"
    assert "this receiver is broken" in worker.output
    assert letter.sentry_event_id is None
    with redis.Redis.from_url(redis_url) as client:
        assert client.keys("dlq:*:report:*") == []
        # One for each start, as without metrics, and one for each series every few seconds.
        assert client.info("commandstats")["cmdstat_hincrby"]["calls"] < HEALTHY + 100


def test_a_store_that_is_down_is_a_metric_and_the_exporter_stays() -> None:
    """``celery_dlq_up`` is 0, and 1 again once Redis is back."""
    with RedisServer() as server, Exporter(server.url, "--port", "0") as exporter:
        assert exporter.scrape()["celery_dlq_up",] == 1
        server.kill()
        assert exporter.scrape() == {("celery_dlq_up",): 0}
        server.start()
        poll(lambda: exporter.scrape()["celery_dlq_up",] == 1, timeout_seconds=30)


def test_a_port_that_is_taken_is_one_clear_line(redis_url: str) -> None:
    """Exit code 1, no traceback."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_python(redis_url, *EXPORTER, "--port", port)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"expected 127.0.0.1:{port} to be free for the exporter" in line


@pytest.fixture
def traced() -> Iterator[Callable[[str], str]]:
    """Publish under OpenTelemetry: gives the trace id of a span around the publishing."""
    provider = TracerProvider()
    instrumentor = CeleryInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    tracer = provider.get_tracer("test")

    def publish(task: object, key: str) -> str:
        with tracer.start_as_current_span("test") as span:
            task.delay(key)  # type: ignore[attr-defined]
            return trace.format_trace_id(span.get_span_context().trace_id)

    yield publish  # type: ignore[misc]
    instrumentor.uninstrument()


def test_a_redriven_task_continues_its_trace(
    observed: ModuleType, redis_url: str, tmp_path: Path, traced: Callable[..., str]
) -> None:
    """The letter keeps ``traceparent``; both executions are spans of the publisher's trace."""
    spans = tmp_path / "spans"
    worker = Worker(
        redis_url,
        tmp_path / "worker.log",
        app="observed_app",
        pool="solo",
        env={"OBSERVED_SPANS": str(spans)},
    )
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client, worker:
        client.set("poison:a", 1)
        trace_id = traced(observed.healthy, "a")
        poll(lambda: letters_there(observed, 1), timeout_seconds=30)
        (letter,) = observed.dlq.letters("orders-DLQ")
        assert letter.decoded("headers")["traceparent"].split("-")[1] == trace_id
        client.delete("poison:a")
        observed.dlq.redrive("orders-DLQ")
        poll(lambda: client.llen("ran:a") == 1, timeout_seconds=30)

        def runs() -> list[dict[str, object]]:
            found = map(json.loads, spans.read_text().splitlines())
            return [span for span in found if span["name"] == "run/observed_app.healthy"]

        poll(lambda: len(runs()) == 2, timeout_seconds=30)
    assert [span["context"]["trace_id"] for span in runs()] == [f"0x{trace_id}"] * 2  # type: ignore[index]
    assert [span["status"]["status_code"] for span in runs()] == ["ERROR", "UNSET"]  # type: ignore[index]
