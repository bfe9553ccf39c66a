"""What a worker holds of a broker's messages, whatever the broker: the book, and who keeps it.

A held message is idle until its pool gets it, or, where tasks run in this process, until its thread
or greenlet begins; then it is at work until it ends. A lost connection gives back the idle ones.
The start and the lost connection, which may be in different threads, take an idle message in one
atomic step. So nothing starts that goes back, and nothing goes back that starts.

A thread of the operating system renews what is held while the worker's event loop is busy, in
every pool. gevent and eventlet replace `threading`: there, a thread is a greenlet, and waits for
the others. No error ends it. Should it be gone, or stand still for a quarter of the lease, the
worker's tick lets another one take its place (`WatchedFetch.look_after`).
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from celery_dlq.letters.printable import get_logger
from celery_dlq.registry import Metric
from celery_dlq.store.endless import LOG_SECONDS, repeat_until
from celery_dlq.store.metrics import INTERNAL_ERRORS, Counts

logger = get_logger("celery_dlq.transport")

_CLOSE_SECONDS = 5.0
MOST_STANDING = 5

LOOP_GOES_ON = frozenset(f"celery.concurrency.{name}" for name in ("prefork", "thread"))
"""The modules of the pools whose tasks run beside the worker's event loop."""


def start_thread(run: Callable[[], None]) -> None:
    """Run a function in a thread of the operating system, as a daemon."""
    _original("_thread", "start_new_thread")(run, ())


def sleep(seconds: float) -> None:
    """Sleep in such a thread."""
    _original("time", "sleep")(seconds)


def _original(module: str, name: str) -> Any:
    # To be imported is not to be in use: sentry_sdk imports both where they are installed.
    eventlet = sys.modules.get("eventlet.patcher")
    if eventlet is not None and eventlet.is_monkey_patched("thread"):
        return getattr(eventlet.original(module), name)
    gevent = sys.modules.get("gevent.monkey")
    if gevent is not None:
        return gevent.get_original(module, name)
    return getattr(import_module(module), name)


def seconds_since_boot() -> float:
    """A clock that nobody sets and that goes on while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


class LeasedMessages:
    """The messages that one worker holds, by their delivery tags."""

    def __init__(self) -> None:
        self.taken = 0  # How many were lost to other workers
        self.held: dict[str, Any] = {}
        self._idle: set[str] = set()
        self._orphans: set[str] = set()  # at work, and their connection is lost

    def is_own(self, tag: object) -> bool:
        """True if this worker keeps the book on a message."""
        raise NotImplementedError

    def drop_message(self, tag: str) -> None:
        """Hold a message no longer."""
        self.held.pop(tag, None)
        self._forget(tag)

    def begin(self, tag: str) -> bool:
        """Let a message start; False if a lost connection gives it back at this moment."""
        return not self.is_own(tag) or self._take_idle(tag)

    def put_off(self, tag: str) -> bool:
        """Let a message wait again; False if it goes back, because its connection is lost."""
        if tag not in self.held:
            return not self.is_own(tag)
        self._idle.add(tag)
        if tag not in self._orphans or not self._is_to_go_back(tag):
            return True
        self._give_back(tag)
        return False

    def _give_back(self, tag: str) -> None:
        """Let the thread give a message back."""
        raise NotImplementedError

    def _goes_back(self, tag: str) -> bool:
        """Whether a message whose connection is lost goes back; else it stays at work."""
        self._orphans.add(tag)  # first: `put_off` may run at the same time
        return self._is_to_go_back(tag)

    def _forget(self, tag: str) -> None:
        self._idle.discard(tag)
        self._orphans.discard(tag)

    def _is_to_go_back(self, tag: str) -> bool:
        if not self._take_idle(tag):
            return False
        self._orphans.discard(tag)
        return True

    def _take_idle(self, tag: str) -> bool:
        try:
            self._idle.remove(tag)
        except KeyError:
            return False
        return True


class LeaseThread:
    """The thread that keeps what is held, on a connection of its own."""

    what = ""  # What is not done while it fails
    expected_errors: tuple[type[Exception], ...] = ()
    refusals: tuple[type[Exception], ...] = ()  # After these, the connection goes on
    quiet_failures = 0  # So many in a row are not logged

    def __init__(self) -> None:
        self.errors = 0
        self._failures = 0  # in a row
        self._started = self.stopped = self.ended = False
        self._logged_at = -LOG_SECONDS
        self._lived_at = seconds_since_boot()
        self._looked_at = float("-inf")  # what `_lived_at` was at the last look

    def start(self) -> None:
        """Start the thread; a second call changes nothing."""
        if not self._started:
            self.give_sign_of_life()
            start_thread(self._run)  # may fail, and is tried again with the next connection
            self._started = True

    def stop(self) -> None:
        """End the thread; waits at most 5 seconds for it."""
        self.stopped = True
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._started and not self.ended and time.monotonic() < deadline:
            time.sleep(0.01)

    def successor(self) -> LeaseThread:
        """Another one with connections of its own, to take the place of this one."""
        raise NotImplementedError

    def patience(self) -> float:
        """Seconds of silence after which another one takes its place."""
        raise NotImplementedError

    def give_sign_of_life(self) -> None:
        """Give a sign of life: in each round, and in between where a round has slow steps."""
        self._lived_at = seconds_since_boot()

    def silent_seconds(self) -> float:
        """For how long the thread stands still, or is gone; 0 if it lives.

        Twice in a row the same sign of life: both threads stand still together, with their process.
        """
        lived_at, before = self._lived_at, self._looked_at
        self._looked_at = lived_at
        silent = seconds_since_boot() - lived_at
        gone = self.ended or (lived_at == before and silent > self.patience())
        return silent if self._started and not self.stopped and gone else 0.0

    def tick(self) -> None:
        """Do what is due."""
        try:
            self._give_sign_of_life()
            self._failures = 0
        except BaseException as exc:  # noqa: BLE001 - nothing may end the thread
            self._failed(exc)

    def _run(self) -> None:
        repeat_until(self._run_round, lambda: self.stopped, self.what, sleep)
        try:
            with suppress(Exception):
                self._finish()
                self.disconnect()
        finally:
            self.ended = True

    def _run_round(self) -> None:
        self.give_sign_of_life()
        sleep(self._pause_seconds())
        self.tick()

    def _pause_seconds(self) -> float:
        raise NotImplementedError

    def _give_sign_of_life(self) -> None:
        raise NotImplementedError

    def _finish(self) -> None:
        """Do what is left when the thread ends."""

    def disconnect(self) -> None:
        """Close the connection of its own; the next call opens another."""
        raise NotImplementedError

    def _failed(self, exc: BaseException) -> None:
        if not isinstance(exc, self.refusals):
            self.disconnect()
        self.errors += 1
        self._failures += 1
        now = seconds_since_boot()
        if self._failures > self.quiet_failures and now - self._logged_at >= LOG_SECONDS:
            self._logged_at = now
            bug = None if isinstance(exc, self.expected_errors) else exc
            logger.error("%s: %s: %s", self.what, type(exc).__name__, exc, exc_info=bug)


class WatchedFetch:
    """A fetch of our own in place of kombu's, for the connections of one worker's consumer."""

    loop_goes_on = False  # the event loop, while tasks run
    told: Callable[[], bool] = staticmethod(bool)  # True if the broker tells of instructions

    def __init__(self, keeper: LeaseThread) -> None:
        self._keeper = keeper
        self._standing: list[LeaseThread] = []  # replaced, and not ended yet
        self._counted: Mapping[Metric, int] = {}
        self._logged: set[tuple[Any, ...]] = set()

    def watch(self, consumer: Any) -> None:
        """Wrap what connects the consumer; a second call changes nothing.

        Its other connections (events, remote control, gossip) stay kombu's: they are made by
        the same method, but not while the consumer connects.

        Source: ``Consumer.connect`` and ``Consumer.ensure_connected`` in
        https://github.com/celery/celery/blob/main/celery/worker/consumer/consumer.py
        """
        if getattr(consumer, "dlq_fetches", None) is not None:
            return
        consumer.dlq_fetches = self
        connect, ensure_connected = consumer.connect, consumer.ensure_connected

        def connect_reliably() -> Any:
            consumer.ensure_connected = lambda conn: self._connect(conn, ensure_connected)
            try:
                return connect()
            finally:
                consumer.ensure_connected = ensure_connected

        consumer.connect = connect_reliably

    def count(self, counts: Counts) -> None:
        """Count what the thread did since the last call."""
        totals = self._totals_so_far()
        for metric, total in totals.items():
            more = total - self._counted.get(metric, 0)
            if more:
                counts.count(metric, *("lease" for _ in metric.labels), by=more)
        self._counted = totals

    def look_after(self, counts: Counts) -> None:
        """Let another thread take the place of one that is gone or stands still."""
        old = self._keeper
        silent = old.silent_seconds()
        if not silent:
            return
        standing = [one for one in self._standing if not one.ended]
        if len(standing) == MOST_STANDING:
            text = "%s: %d threads stand still"
            self._log_once(text, old.what, MOST_STANDING, level=logging.CRITICAL)
            return
        self._standing = [*standing, old]
        counts.count(INTERNAL_ERRORS, "lease")
        logger.critical(
            "%s: their thread %s for %.1f s, another one takes its place",
            old.what,
            "is gone" if old.ended else "stands still",
            silent,
        )
        self._keeper = old.successor()
        old.stopped = True
        self._keeper.start()

    def close(self) -> None:
        """End what runs in the background."""
        raise NotImplementedError

    def _connect(self, connection: Any, ensure_connected: Callable[[Any], Any]) -> Any:
        raise NotImplementedError

    def _totals_so_far(self) -> Mapping[Metric, int]:
        raise NotImplementedError

    def _log_once(self, text: str, *args: Any, level: int = logging.INFO) -> None:
        """Log once, not at every reconnection."""
        if (text, args) not in self._logged:
            self._logged.add((text, args))
            logger.log(level, text, *args)
