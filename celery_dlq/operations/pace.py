"""How fast an operation goes."""

from __future__ import annotations

import time
from collections.abc import Callable

_BEAT_SECONDS = 2.0


class Pace:
    """Lets at most ``rate`` letters pass a second.

    Args:
        rate: Letters a second; ``None`` for no limit.
        beat: Called at least every two seconds while it waits; may raise to end the wait.
    """

    def __init__(self, rate: float | None, beat: Callable[[], object]) -> None:
        self._gap = 0.0 if rate is None else 1.0 / rate
        self._beat = beat
        self._next = time.monotonic()

    def wait(self, letters: int) -> None:
        """Wait until so many may pass."""
        if not self._gap:
            return
        while (left := self._next - time.monotonic()) > 0:
            time.sleep(min(left, _BEAT_SECONDS))
            self._beat()
        self._next = max(time.monotonic(), self._next) + letters * self._gap
