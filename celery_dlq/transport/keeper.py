"""The thread that renews a worker's leases while its event loop is busy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from celery.worker import state
from redis.exceptions import RedisError, ResponseError

from celery_dlq.backends.redis.scripts import script_text
from celery_dlq.logs import get_logger
from celery_dlq.transport.broker import SCRIPTS, Broker, restore
from celery_dlq.transport.leases import Leases
from celery_dlq.transport.native import seconds_since_boot, sleep, start_thread

logger = get_logger("celery_dlq.transport")

_RESTORED_PER_CALL = 100
_TICK_SECONDS = 0.25
_CONFIRM_SECONDS = 1.0
_MAX_RESTORE_SECONDS = 5.0
_CLOSE_SECONDS = 5.0
_LOG_SECONDS = 10.0


class Keeper:
    """Renews, confirms and restores, on a connection of its own.

    Args:
        leases: What the worker holds.
    """

    def __init__(self, leases: Leases) -> None:
        self._leases = leases
        self._broker: Broker | None = None
        self._connection: Any = None
        self._connected_to: Broker | None = None
        self._stopped = False
        self._ended = False
        self._due: dict[str, float] = {}
        self._restore_from = 0.0
        self._logged_at = -_LOG_SECONDS

    def connected(self, broker: Broker) -> None:
        """Use the broker of a new connection; the first starts the thread."""
        first, self._broker = self._broker is None, broker
        if first:
            start_thread(self._run)

    def stop(self) -> None:
        """End the thread; waits at most 5 seconds for it."""
        self._stopped = True
        if self._broker is None:
            return
        deadline = time.monotonic() + _CLOSE_SECONDS
        while not self._ended and time.monotonic() < deadline:
            time.sleep(0.01)

    def _run(self) -> None:
        while not self._stopped:
            sleep(_TICK_SECONDS)
            try:
                if self._broker is not None:
                    self._tick(self._broker)
            except (RedisError, OSError) as exc:
                self._disconnect()
                # After an outage, live workers renew first.
                self._restore_from = time.monotonic() + self._leases.lease_seconds / 2
                self._log("Leases are not renewed now: %s: %s", type(exc).__name__, exc)
            except Exception:
                self._disconnect()
                logger.exception("Leases are not renewed now")
        self._disconnect()
        self._ended = True

    def _tick(self, broker: Broker) -> None:
        if self._connected_to is not broker:
            self._disconnect()
            self._connected_to = broker
        leases, lease = self._leases, self._leases.lease_seconds
        every = min(_MAX_RESTORE_SECONDS, lease / 6)
        if self._is_due("confirm", _CONFIRM_SECONDS):
            leases.confirm(self._call_all, broker)
            self._restore_ended(broker)
        if self._is_due("renew", lease / 3):
            leases.renew(self._call, broker)
        if time.monotonic() >= self._restore_from and self._is_due("restore", every):
            self._restore_expired(broker)

    def _is_due(self, what: str, every: float) -> bool:
        # By a clock that goes on during a suspension: then everything is due at once.
        now = seconds_since_boot()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    def _restore_expired(self, broker: Broker) -> None:
        script = script_text("expired", SCRIPTS)
        while not self._stopped:
            tags = self._call(
                "EVAL", script.text, len(broker.keys), *broker.keys, _RESTORED_PER_CALL
            )
            done = sum(
                bool(restore(self._call, broker, tag.decode(), expired=True)) for tag in tags
            )
            if done:
                logger.warning(
                    "%d messages are back in their queues: their worker gave no sign of life "
                    "until their leases ended",
                    done,
                )
            if not done or len(tags) < _RESTORED_PER_CALL:
                return

    def _restore_ended(self, broker: Broker) -> None:
        for tag in self._leases.restore_ended(
            lambda request: request in state.active_requests or request in state.reserved_requests
        ):
            if self._leases.give_up(tag):
                restore(self._call, broker, tag)

    def _call(self, *command: Any) -> Any:
        return self._call_all([command])[0]

    def _call_all(self, commands: Sequence[Any]) -> list[Any]:
        if self._connection is None and self._connected_to is not None:
            self._connection = self._connected_to.client.connection_pool.make_connection()
        connection = self._connection
        connection.send_packed_command(connection.pack_commands(commands), check_health=False)
        replies, error = [], None
        for _ in commands:
            try:
                replies.append(connection.read_response())
            except ResponseError as exc:
                error = exc
        if error is not None:
            raise error
        return replies

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it is gone either way
                connection.disconnect()

    def _log(self, text: str, *args: Any) -> None:
        now = time.monotonic()
        if now - self._logged_at >= _LOG_SECONDS:
            self._logged_at = now
            logger.error(text, *args)
