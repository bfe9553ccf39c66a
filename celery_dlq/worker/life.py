"""Signs of life that depend on no event loop: what runs here is not dead.

The tick shows that this worker lives. It ends with the consumer's connection, and waits for all
that the consumer waits for: Celery sleeps between two attempts to connect, a closing worker waits
for its pool, a solo worker is its task. Meanwhile a thread shows it, over a connection of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from celery_dlq import timing
from celery_dlq.errors import DLQError
from celery_dlq.store.store import Store
from celery_dlq.transport.held import LeaseThread

_LATE_BEATS = 1.5


class LifeKeeper(LeaseThread):
    """Sends the counter's heartbeats while the tick is late and something runs."""

    what = "Signs of life are not sent"
    expected_errors = (DLQError,)
    quiet_failures = 1  # the first may only mean that Redis closed the connection

    def __init__(
        self, store: Store, running: Callable[[], Collection[str]], note_crashes: Callable[[], None]
    ) -> None:
        super().__init__()
        self.beat_at = time.monotonic()  # by the tick, or here
        self._counter = store.counter
        self._store = store.separate()
        self._running = running  # The dead-letter queues of the messages that run
        self._note_crashes = note_crashes  # Of those that do not run any more

    def _pause_seconds(self) -> float:
        return timing.current.counter_beat / 4

    def _give_sign_of_life(self) -> None:
        if time.monotonic() - self.beat_at < _LATE_BEATS * timing.current.counter_beat:
            return
        self._note_crashes()
        for command in self._counter.heartbeats(self._running()):
            self.beat_at = time.monotonic()
            self._store.connection.send_and_wait(*command)

    def disconnect(self) -> None:
        """Close the connection, if one is open."""
        self._store.close()
