"""Numbers that change while somebody looks: read once for all who listen.

Only numbers and ids are sent, never what a message holds. A stream that breaks needs no replay,
because every event is the whole state.
"""

from __future__ import annotations

import json
import threading
import time
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError
from celery_dlq.letters.printable import printable
from celery_dlq.letters.record import iso
from celery_dlq.logs import get_logger

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly

logger = get_logger("celery_dlq.web")

SECONDS = 2.0
"""Time between two readings of the store."""
MAX_STREAMS = 100
MAX_QUEUES = 200
MAX_JOBS = 50
_ENDED_SECONDS = 60.0
_CANARY = ("letters", "succeeded", "died", "open", "held", "verdict")
_LIVE_STATES = ("planned", "running", "waiting", "interrupted")


class Live:
    """The state that pages are told, read while somebody listens."""

    def __init__(
        self, assembly: Assembly, *, seconds: float = SECONDS, most: int = MAX_STREAMS
    ) -> None:
        self._assembly = assembly
        self._seconds = seconds
        self._most = most
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._streams = 0
        self._latest = (0.0, b"")
        self._found: dict[str, Any] = {}
        self._changed_at = 0.0
        self.closed = False

    def join(self) -> bool:
        """Begin to listen; false if there are too many streams, or the server ends."""
        with self._lock:
            if self.closed or self._streams >= self._most:
                return False
            self._streams += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="dlq-live", daemon=True)
                self._thread.start()
            return True

    def leave(self) -> None:
        """Listen no more."""
        with self._lock:
            self._streams -= 1

    def close(self) -> None:
        """End all streams."""
        self.closed = True
        self._wake.set()

    @property
    def latest(self) -> bytes:
        """The newest state as JSON; empty if there is none of the last seconds."""
        at, state = self._latest
        return state if time.monotonic() - at < 3 * self._seconds else b""

    def read(self) -> bytes:
        """The state as JSON, at most one interval old. Never raises."""
        with self._reading:  # who waited for another's reading takes that
            at, state = self._latest
            if time.monotonic() - at < self._seconds * 0.9:
                return state
            begun = time.time()
            try:
                found = _state(self._assembly)
            except DLQError:
                found = {"away": True}
            except Exception:
                logger.exception("The live numbers could not be read")
                found = {"away": True}
            if found != self._found:  # a page that is younger than the change knows it already
                self._found, self._changed_at = found, begun
            found = {"at": self._changed_at, **found}
            state = json.dumps(found, separators=(",", ":")).encode()
            self._latest = (time.monotonic(), state)
            return state

    def _run(self) -> None:
        while True:
            with self._lock:
                if self.closed or not self._streams:
                    self._thread = None
                    return
            self.read()
            self._wake.wait(self._seconds)


def _state(assembly: Assembly) -> dict[str, Any]:
    queues = sorted(assembly.reading().queues(), key=lambda q: (-q.last_hour, -q.letters, q.name))
    # The overview shows those too; names as templates print them.
    shown = {printable(queue.name): queue for queue in queues[:MAX_QUEUES]}
    now = assembly.clock()
    jobs = [
        job
        for job in assembly.operations().jobs()
        if job.state in _LIVE_STATES or (now - job.updated_at).total_seconds() < _ENDED_SECONDS
    ]
    return {
        "letters": {name: queue.letters for name, queue in shown.items()},
        "hour": {name: queue.last_hour for name, queue in shown.items()},
        "jobs": {
            job.id: {
                "state": job.state,
                "ended_at": iso(job.ended_at),
                "counts": {**job.counts, "handled": job.handled},
                "total": job.total,
                "canary": {name: job.canary[name] for name in _CANARY if name in job.canary},
            }
            for job in jobs[:MAX_JOBS]
        },
    }
