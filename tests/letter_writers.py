"""Letters of several queues, stored at once, while something happens to their store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from builders import a_letter, key_of
from waiting import poll

from celery_dlq.errors import StoreUnavailable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.store.store import Store

QUEUES = [f"orders{n}-DLQ" for n in range(6)]


class Writer(threading.Thread):
    """Stores letters like a worker: a letter that is not confirmed is stored again later."""

    def __init__(self, backend: Store, queue: str) -> None:
        super().__init__()
        self._backend = backend
        self._queue = queue
        self.stop = threading.Event()
        self.confirmed: list[str] = []
        self.refused = 0
        self.error: BaseException | None = None

    def run(self) -> None:
        """Store until told to stop."""
        try:
            while not self.stop.is_set():
                letter = a_letter(dead_letter_queue=self._queue)
                while not self._stored(letter):
                    time.sleep(0.02)
        except BaseException as exc:
            self.error = exc

    def _stored(self, letter: DeadLetter) -> bool:
        try:
            self._backend.letters.dead_letter(letter, key_of(letter))
        except StoreUnavailable:
            self.refused += 1
            return self.stop.is_set()
        self.confirmed.append(letter.id)
        return True


@contextmanager
def writing(make: Callable[[], Store]) -> Iterator[list[Writer]]:
    """Letters of several queues are stored; in the end, each that was confirmed is there once."""
    backends = [make() for _ in QUEUES]
    writers = [Writer(backend, queue) for backend, queue in zip(backends, QUEUES, strict=True)]
    for writer in writers:
        writer.start()
    try:
        poll(lambda: all(len(writer.confirmed) > 20 for writer in writers), timeout_seconds=30)
        yield writers
    finally:
        for writer in writers:
            writer.stop.set()
        for writer in writers:
            writer.join()
        for backend in backends:
            backend.close()
    assert [writer.error for writer in writers] == [None] * len(writers)
    reader = make()
    for writer, queue in zip(writers, QUEUES, strict=True):
        found = [stored.letter.id for stored in reader.letters.letters(queue, newest_first=False)]
        assert len(found) == len(set(found))
        assert set(writer.confirmed) - set(found) == set()
        assert len(found) - len(writer.confirmed) <= 1  # stopped before it was confirmed
    assert set(QUEUES) <= set(reader.letters.names())
    reader.close()


def more(writers: list[Writer], letters: int = 20) -> None:
    """Wait until each has stored more letters."""
    wanted = [len(writer.confirmed) + letters for writer in writers]
    pairs = list(zip(writers, wanted, strict=True))
    poll(lambda: all(len(one.confirmed) >= n for one, n in pairs), timeout_seconds=60)
