"""One call in the background, while the next is prepared."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class Background:
    """Makes calls in a thread of its own, one at a time; a context manager."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="dlq-background")
        self._last: Future[Any] | None = None

    def __enter__(self) -> Background:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:  # else keep the first error; the next run removes the letters
            self.wait()

    def start(self, call: Callable[[], object]) -> None:
        """Make a call, after waiting for the one before."""
        self.wait()
        self._last = self._pool.submit(call)

    def wait(self) -> Any:
        """Wait for the last call and return its result; ``None`` if there is none.

        Raises the error of the call. A result is returned once.
        """
        if self._last is None:
            return None
        last, self._last = self._last, None
        try:
            return last.result()
        except KeyboardInterrupt:
            self._last = last
            raise
