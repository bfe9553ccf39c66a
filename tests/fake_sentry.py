"""A Sentry that is a real HTTP server: it takes envelopes apart and keeps their events."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeSentry:
    """A context manager; ``dsn`` is what ``sentry_sdk.init`` takes.

    Attributes:
        events: The error events that came, in order.
        transactions: What tracing sent, in order.
        status: What it answers with; 500 is a Sentry that is broken.
    """

    def __init__(self, status: int = 200) -> None:
        self.events: list[dict[str, Any]] = []
        self.transactions: list[dict[str, Any]] = []
        self.status = status
        sentry = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if sentry.status == 200:
                    for kind, payload in items_of(body):
                        if kind == "event":
                            sentry.events.append(payload)
                        elif kind == "transaction":
                            sentry.transactions.append(payload)
                answer = b"{}"
                self.send_response(sentry.status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.dsn = f"http://public@127.0.0.1:{self._server.server_port}/42"

    def __enter__(self) -> FakeSentry:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def of(self, fingerprint: str) -> list[dict[str, Any]]:
        """The events with one of our fingerprints."""
        return [event for event in self.events if event.get("fingerprint") == [fingerprint]]


def items_of(envelope: bytes) -> Iterator[tuple[str, dict[str, Any]]]:
    """Type and payload of an envelope's items, which follow a header line; each has its own."""
    _header, rest = envelope.split(b"\n", 1)
    while rest.strip():
        line, rest = rest.split(b"\n", 1)
        item = json.loads(line)
        length = item.get("length")
        payload, rest = (
            (rest[:length], rest[length + 1 :])
            if length is not None
            else [*rest.split(b"\n", 1), b""][:2]
        )
        if item["type"] in ("event", "transaction"):
            yield item["type"], json.loads(payload)
