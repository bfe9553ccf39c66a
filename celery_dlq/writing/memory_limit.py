"""Keeps letters from filling the server that keeps them, which is usually the broker too."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from enum import IntEnum
from typing import Any

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import get_logger, shortened
from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.worker_records import ServerMemory

logger = get_logger("celery_dlq.worker")

READINGS_OF_ROOM = 100
"""A worker reads again after it has written this part of the room that was left."""

_SMALLEST_STEP = 64 * 1024
_LOG_SECONDS = 60.0
_IDLE_SECONDS = 600.0  # between two readings of a worker that stores no letter
_OLD_SECONDS = 2.0  # after which a letter asks first
_CUT_CHARS = 200
_OVERHEAD_BYTES = 1_000


class MemoryLimitReached(StoreUnavailable):
    """The server has no room for a letter: it waits as if the store did not answer."""


class _Level(IntEnum):
    """How much room there is for a letter."""

    ROOM = 0
    SHORT = 1
    FULL = 2


_SHOWN = {
    _Level.ROOM: "are stored whole again",
    _Level.SHORT: "are stored without their texts",
    _Level.FULL: "wait outside of it",
}


class MemoryLimit:
    """Decides if a letter may be stored whole, without its descriptive text, or not now.

    Letters lose their text between the limit and halfway to the server's maximum, and wait above
    that. The memory is read once a second, and again whenever this worker has written a hundredth
    of the room that was left. N workers, who do not see each other's letters in between, overshoot
    by at most N hundredths of the room that was left a second before, or by 64 kB (or a letter)
    each where that is more.
    """

    def __init__(
        self,
        read: Callable[[], ServerMemory | None],
        share: float,
        warnings: Callable[[ServerMemory], Sequence[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._share = share
        self._warnings = warnings
        self._clock = clock
        self._lock = threading.Lock()  # pools of threads store letters in several
        self._memory: ServerMemory | None = None
        self._written = self._step = 0
        self._read_at = float("-inf")
        self._logged, self._logged_at = _Level.ROOM, -_LOG_SECONDS

    def tick(self) -> None:
        """Read the memory; called once a second. A worker that stores nothing reads it seldom."""
        if self._share or self._warnings is not None:
            with self._lock:
                if self._written or self._logged or self._seconds_since_read() >= _IDLE_SECONDS:
                    self._read_now()

    def fitted(self, letter: DeadLetter, *, whole: bool = False) -> DeadLetter:
        """Return the letter as it may be stored now."""
        size = _size(letter)
        with self._lock:
            if self._memory is not None and self._is_old(size):
                try:
                    self._read_now()
                except StoreUnavailable:
                    self._memory = None  # storing the letter will tell; ask again at the next tick
            level = self._level_after(size)
            if level is _Level.FULL or (level is _Level.SHORT and whole):
                raise self._reached()
            self._written += size
        return without_text(letter) if level is _Level.SHORT else letter

    def _level_after(self, more: int = 0) -> _Level:
        """How much room there is after so many bytes more."""
        if self._memory is None:
            return _Level.ROOM
        if self._free_bytes() < more or self._free_bytes() <= 0:
            return _Level.FULL
        used = self._memory.used + self._written + more
        return _Level.SHORT if used > self._share * self._memory.maximum else _Level.ROOM

    def _is_old(self, size: int) -> bool:
        """True if the reading says too little: of before a pause, or of before many letters."""
        if self._seconds_since_read() >= _OLD_SECONDS:
            return True
        return self._free_bytes() > 0 and self._written + size > self._step

    def _seconds_since_read(self) -> float:
        return self._clock() - self._read_at

    def _free_bytes(self) -> int:
        """Bytes until letters wait."""
        assert self._memory is not None  # noqa: S101 - the callers checked
        full = (self._share + 1) / 2
        return int(full * self._memory.maximum) - self._memory.used - self._written

    def _read_now(self) -> None:
        self._read_at = float("-inf")  # until it is known again
        memory = self._read()
        self._read_at = self._clock()
        if memory is not None and self._warnings is not None:
            for warning in self._warnings(memory):
                logger.warning("%s", warning)
        self._warnings = None
        self._memory = memory if memory is not None and memory.maximum and self._share else None
        self._written = 0
        if self._memory is not None:
            self._step = max(_SMALLEST_STEP, self._free_bytes() // READINGS_OF_ROOM)
            self._log_change(self._level_after(), self._clock())

    def _log_change(self, level: _Level, now: float) -> None:
        """Say when letters begin to be cut or to wait, and when that is over."""
        recent = now - self._logged_at < _LOG_SECONDS
        if level == self._logged or (level < self._logged and recent):
            return
        self._logged, self._logged_at = level, now
        log = logger.error if level is _Level.FULL else logger.warning
        log("%s: letters %s", self._reached(), _SHOWN[level])

    def _reached(self) -> MemoryLimitReached:
        share = (self._memory.share if self._memory else None) or 0.0
        return MemoryLimitReached(
            f"the store uses {share:.0%} of its maxmemory (dlq_memory_limit is {self._share:g})"
        )


def without_text(letter: DeadLetter) -> DeadLetter:
    """Cut what describes a death: the traceback, the history, long messages; never the message.

    The arguments stay, which are stored as places in the body, but not those of a compressed one.
    """
    message = letter.exception_message
    long = (name for name, text in _outside(letter).items() if len(text) > _CUT_CHARS)
    outside: dict[str, Any] = dict.fromkeys(long)
    return replace(
        letter,
        description=shortened(letter.description, _CUT_CHARS),
        exception_message=None if message is None else shortened(message, _CUT_CHARS),
        traceback=None,
        history=(),
        **outside,
    )


def _size(letter: DeadLetter) -> int:
    """Roughly the bytes of a letter in the store: the texts are compressed there."""
    parts = (letter.body, letter.headers, letter.properties, letter.traceback, letter.description)
    texts = (*parts, *_outside(letter).values())
    return _OVERHEAD_BYTES + sum(len(part) for part in texts if part)


def _outside(letter: DeadLetter) -> dict[str, str]:
    """The arguments that are no part of the body as it is stored."""
    texts = {"args_json": letter.args_json, "kwargs_json": letter.kwargs_json}
    return {
        name: text
        for name, text in texts.items()
        if text and text.encode("utf-8", "backslashreplace") not in letter.body
    }
