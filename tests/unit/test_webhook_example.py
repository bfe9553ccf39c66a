"""The example of a webhook, against a real HTTP server."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import ModuleType

import pytest
from builders import NOW, a_letter
from waiting import poll

from celery_dlq.events import DeadLettered
from celery_dlq.signals import relay, task_dead_lettered

EXAMPLE = Path(__file__).parents[2] / "examples/alerting/webhook.py"


@pytest.fixture
def webhook() -> ModuleType:
    spec = importlib.util.spec_from_file_location("webhook", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def posts() -> Iterator[tuple[str, list[str]]]:
    """Give the address of a server and the texts that it was sent."""
    texts: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            texts.append(body["text"])
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/T0/s3cret", texts
    server.shutdown()
    server.server_close()


def dies(**changes: object) -> None:
    relay(DeadLettered(at=NOW, letter=a_letter(**changes)))


def test_a_cause_is_announced_once_until_the_pause_is_over(
    webhook: ModuleType, posts: tuple[str, list[str]]
) -> None:
    """With the command that shows more, and without arguments."""
    url, texts = posts
    announcer = webhook.announce_to(url)
    try:
        for _ in range(50):
            dies(args_json='["s3cret"]')
        dies(fingerprint="another", task_name="shop.mail")
        poll(lambda: len(texts) == 2)
    finally:
        task_dead_lettered.disconnect(announcer)
    assert texts[0].startswith("*shop.charge* died after 1 deliveries: ValueError: bad order\n")
    assert "celery dlq show " in texts[0]
    assert texts[1].startswith("*shop.mail*")
    assert "s3cret" not in "".join(texts)


def test_a_webhook_that_is_down_harms_nothing(
    webhook: ModuleType, posts: tuple[str, list[str]], caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged without its address, and the next cause is tried again."""
    url, texts = posts
    announcer = webhook.announce_to("http://127.0.0.1:1/T0/s3cret", pause_seconds=0)
    try:
        with caplog.at_level(logging.WARNING):
            dies()
            poll(lambda: caplog.records)
        announcer.url = url
        dies()
        poll(lambda: texts)
    finally:
        task_dead_lettered.disconnect(announcer)
    assert "could not be announced" in caplog.text
    assert "s3cret" not in caplog.text
