"""A Redis that is loading its dataset answers, but does nothing yet."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator

import pytest
from builders import a_delivery, a_key, a_letter

from celery_dlq.errors import StoreUnavailable
from celery_dlq.store.connect import connect
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.store import Store

LOADING = b"-LOADING Redis is loading the dataset in memory\r\n"


class Loading(socketserver.StreamRequestHandler):
    """Answers every command as Redis does while it loads."""

    def handle(self) -> None:
        """One answer for each command, known by the ``*`` that begins it."""
        for line in self.rfile:
            if line.startswith(b"*"):
                self.wfile.write(LOADING)


class Server(socketserver.ThreadingTCPServer):
    """Each connection is answered on its own."""

    daemon_threads = True
    allow_reuse_address = True


@pytest.fixture
def url() -> Iterator[str]:
    """Give the address of a server that is loading."""
    with Server(("127.0.0.1", 0), Loading) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"redis://127.0.0.1:{server.server_address[1]}/0"
        server.shutdown()
        thread.join()


def test_a_loading_store_is_unavailable(url: str) -> None:
    """A letter waits; nobody takes the refusal for an answer."""
    backend = Store(url, timeout_seconds=1.0)
    letter = a_letter()
    for attempt in (
        backend.check,
        lambda: backend.letters.dead_letter(letter, a_key()),
        backend.letters.overviews.queues,
    ):
        with pytest.raises(StoreUnavailable, match=r"LOADING|loading"):
            attempt()
    backend.close()


def test_counting_on_a_loading_store_fails_at_once_and_stops_nothing(url: str) -> None:
    """A first delivery goes on; one that needs its count gets the error."""
    connection = PipelinedConnection(connect(url, 1.0, retries=0), url)
    counter = DeliveryCounter(connection, Keys(), 60.0)
    counter.count_first(a_key(), a_delivery())
    with pytest.raises(StoreUnavailable):
        counter.count_delivery(a_key(), a_delivery(), 3)
    counter.close()
