"""The thread that renews a worker's leases while its event loop is busy."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from redis.exceptions import RedisError, ResponseError

from celery_dlq.logs import get_logger
from celery_dlq.store.scripts import script_text
from celery_dlq.transport.held import Keeper, seconds_since_boot
from celery_dlq.transport.redis.broker import SCRIPTS, Broker, restore
from celery_dlq.transport.redis.leases import Leases

logger = get_logger("celery_dlq.transport")

_RESTORED_PER_CALL = 100
_TICK_SECONDS = 0.25
_RETRY_SECONDS = 1.0
_CONFIRM_SECONDS = 1.0
_MAX_LOOK_SECONDS = 3.0  # also keeps the connection from being closed for being idle
_MAX_LOOP_SECONDS = 1.0
_MAX_HOLD_OFF_SECONDS = 10.0
_REPLY_SECONDS = 5.0


class LeaseKeeper(Keeper):
    """Renews, confirms and restores."""

    what = "Leases are not renewed"
    expected_errors = (RedisError, OSError)
    quiet_failures = 1  # the first may only mean that Redis closed the connection

    def __init__(self, leases: Leases) -> None:
        super().__init__()
        self._leases = leases
        self._broker: Broker | None = None
        self._connection: Any = None
        self._connected_to: Broker | None = None
        self._due: dict[str, float] = {}
        self._replied_at = float("-inf")
        self._restore_from = 0.0
        self.restored = 0

    def connected(self, broker: Broker) -> None:
        """Use the broker of a new connection; the first starts the thread."""
        self._broker = broker
        self.start()

    def _pause_seconds(self) -> float:
        # Soon again after a failure: other workers take what is not renewed.
        if self._failures <= self.quiet_failures:
            return _TICK_SECONDS
        return min(_RETRY_SECONDS, self._leases.lease_seconds / 8)

    def _failed(self, exc: Exception) -> None:
        super()._failed(exc)
        self._due.clear()
        self._hold_off()

    def _tick(self) -> None:
        broker, leases, lease = self._broker, self._leases, self._leases.lease_seconds
        if broker is None:
            return
        if self._connected_to is not broker:
            self._disconnect()
            self._connected_to = broker
        if self._is_due("renew", lease / 3):
            leases.renew(self._call, broker)
        if self._is_due("confirm", _CONFIRM_SECONDS):
            leases.confirm(self._call_all, broker)
        self._return(broker)
        if self._is_due("look", min(_MAX_LOOK_SECONDS, lease / 6)):
            self._restore_expired(broker)

    def _is_due(self, what: str, every: float) -> bool:
        # By a clock that goes on during a suspension: then everything is due at once.
        now = seconds_since_boot()
        if now < self._due.get(what, 0.0):
            return False
        self._due[what] = now + every
        return True

    def _return(self, broker: Broker) -> None:
        """Give back what this worker fetched and does not execute."""
        tags, until = self._leases.to_return(), self._loop_until()
        try:
            while tags and time.monotonic() < until:
                restore(self._call, broker, tags[-1])  # so that the oldest is fetched first
                tags.pop()
        finally:
            self._leases.return_later(tags)

    def _restore_expired(self, broker: Broker) -> None:
        script, restored, until = script_text("expired", SCRIPTS), 0, self._loop_until()
        while not self._stopped:
            tags = self._call(
                "EVAL", script.text, len(broker.keys), *broker.keys, _RESTORED_PER_CALL
            )
            if self._holds_off():
                break
            done = 0
            for tag in tags:
                done += self._restored(broker, tag.decode())
                if time.monotonic() > until:
                    break
            restored += done
            if not done or len(tags) < _RESTORED_PER_CALL:
                break
            if time.monotonic() > until:
                self._due.pop("look", None)
                break
        if restored:
            self.restored += restored
            logger.warning(
                "%d messages are back in their queues: their worker gave no sign of life until "
                "their leases ended",
                restored,
            )

    def _loop_until(self) -> float:
        """When a loop goes on in the next tick: own leases come first."""
        return time.monotonic() + min(_MAX_LOOP_SECONDS, self._leases.lease_seconds / 10)

    def _restored(self, broker: Broker, tag: str) -> bool:
        try:
            return bool(restore(self._call, broker, tag, expired=True))
        except (RedisError, OSError):
            raise
        except Exception:
            logger.exception("The message %s is left to kombu, which restores it later", tag)
            self._call("ZREM", broker.leases, tag)
            return False

    def _holds_off(self) -> bool:
        """True if live workers may have had no chance to renew: Redis, or all of them, stood still.

        They renew within seconds; then it is known who is dead.
        """
        now = seconds_since_boot()
        silence, self._replied_at = now - self._replied_at, now
        if silence > self._leases.lease_seconds / 3:
            self._hold_off()
        return now < self._restore_from

    def _hold_off(self) -> None:
        hold_off = min(self._leases.lease_seconds / 2, _MAX_HOLD_OFF_SECONDS)
        self._restore_from = seconds_since_boot() + hold_off

    def _call(self, *command: Any) -> Any:
        return self._call_all([command])[0]

    def _call_all(self, commands: Sequence[Any]) -> list[Any]:
        if self._connection is None and self._connected_to is not None:
            self._connection = self._connected_to.client.connection_pool.make_connection()
            # A connection that hangs must not cost the leases.
            most = min(_REPLY_SECONDS, max(1.0, self._leases.lease_seconds / 4))
            for name in ("socket_timeout", "socket_connect_timeout"):
                setattr(self._connection, name, min(most, getattr(self._connection, name) or most))
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
