"""RabbitMQ's confirmations, waited for in steps, and its alarms, which block those who publish.

py-amqp waits for a confirmation without end, and kombu publishes a second time when the connection
is lost meanwhile. Who publishes for an operator must be asked every second whether it still may.

Source: ``Channel.basic_publish_confirm`` in
https://github.com/celery/py-amqp/blob/main/amqp/channel.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from amqp.exceptions import MessageNacked  # type: ignore[import-untyped]
from amqp.spec import Basic  # type: ignore[import-untyped]

from celery_dlq.errors import BrokerUnavailable, RedriveError
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq")

MOST_SECONDS = 60.0
"""Longest wait for the end of an alarm, and for one confirmation."""

BLOCKED = "RabbitMQ blocks publishers: it is short of memory or disk, see `rabbitmqctl status`"

_STEP_SECONDS = 1.0
_REPLY_SECONDS = 10.0
"""Longest wait for any other reply; a job without a heartbeat for 15 seconds counts as dead."""

Waiting = Callable[[str], object]
"""Called about every second of a wait with what is waited for, if that is an alarm; may raise."""


class Confirms:
    """What one connection to RabbitMQ that publishes knows of alarms and confirmations."""

    def __init__(self) -> None:
        self._blocked = False
        self._changed_at = 0.0

    def transport_options(self) -> dict[str, Any]:
        """What the connection is to be opened with."""
        return {
            "confirm_publish": False,  # py-amqp's own wait
            "read_timeout": _REPLY_SECONDS,
            "write_timeout": _REPLY_SECONDS,
            "on_blocked": self._on_blocked,
            "on_unblocked": self._on_unblocked,
        }

    def ready(self, connection: Any, waiting: Waiting) -> None:
        """Wait while the connection is blocked: what is written to it is published afterwards."""
        began = time.monotonic()
        while _heard(connection, _STEP_SECONDS if self._blocked else 0.0) or self._blocked:
            if self._blocked:
                self._wait(began, waiting)

    def wait(self, channel: Any, waiting: Waiting) -> None:
        """Wait until the broker has confirmed the message that was just published."""
        began = time.monotonic()
        while True:
            try:
                channel.wait([Basic.Ack, Basic.Nack], _refused_or_not, timeout=_STEP_SECONDS)
            except TimeoutError:
                self._wait(began, waiting)
            except MessageNacked:
                raise RedriveError("the queue refused it: is it full?") from None
            else:
                return

    def _wait(self, began: float, waiting: Waiting) -> None:
        waiting(BLOCKED if self._blocked else "")
        if time.monotonic() - max(began, self._changed_at) < MOST_SECONDS:
            return
        if self._blocked:
            raise BrokerUnavailable(f"{BLOCKED}; it has done so for {MOST_SECONDS:g} seconds")
        raise TimeoutError(f"RabbitMQ has not confirmed it within {MOST_SECONDS:g} seconds")

    def _on_blocked(self, _reason: str) -> None:
        self._blocked, self._changed_at = True, time.monotonic()
        logger.warning("%s. Waiting up to %g seconds", BLOCKED, MOST_SECONDS)

    def _on_unblocked(self) -> None:
        self._blocked, self._changed_at = False, time.monotonic()


def _heard(connection: Any, timeout: float) -> bool:
    """Read what the broker has said; false if that was nothing."""
    try:
        connection.drain_events(timeout=timeout)
    except TimeoutError:
        return False
    return True


def _refused_or_not(method: Any, *_: object) -> None:
    if method == Basic.Nack:
        raise MessageNacked
