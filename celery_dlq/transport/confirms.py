"""RabbitMQ's confirmations and alarms, waited for in steps: who waits may give up in between.

py-amqp waits for a confirmation without end.

Source: ``Channel.basic_publish_confirm`` in
https://github.com/celery/py-amqp/blob/main/amqp/channel.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from amqp.exceptions import MessageNacked  # type: ignore[import-untyped]
from amqp.spec import Basic  # type: ignore[import-untyped]

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable
from celery_dlq.letters.printable import get_logger

logger = get_logger("celery_dlq")

BLOCKED = "RabbitMQ blocks publishers: it is short of memory or disk, see `rabbitmqctl status`"


class Confirms:
    """What one connection to RabbitMQ that publishes knows of alarms and confirmations."""

    def __init__(self, longest: float) -> None:
        self._blocked, self._changed_at = False, 0.0
        self._longest, self._step = longest, timing.current.job_beat

    def transport_options(self) -> dict[str, Any]:
        """What the connection is to be opened with."""
        return {
            "confirm_publish": False,  # py-amqp's own wait
            "read_timeout": timing.current.publish_reply,
            "write_timeout": timing.current.publish_reply,
            "on_blocked": self._on_blocked,
            "on_unblocked": self._on_unblocked,
        }

    def wait_until_writable(self, connection: Any, waiting: Callable[[str], object]) -> None:
        """Wait while the connection is blocked: what is written to it is published afterwards."""
        began = time.monotonic()
        while True:
            try:
                connection.drain_events(timeout=self._step if self._blocked else 0.0)
            except TimeoutError:
                if not self._blocked:
                    return
            if self._blocked:
                self._wait(began, waiting)

    def wait_for_confirm(self, channel: Any, waiting: Callable[[str], object]) -> None:
        """Wait until the broker has confirmed what was just published; raises `MessageNacked`."""
        began = time.monotonic()
        while True:
            try:
                channel.wait([Basic.Ack, Basic.Nack], _refused_or_not, timeout=self._step)
                break
            except TimeoutError:
                self._wait(began, waiting)

    def _wait(self, began: float, waiting: Callable[[str], object]) -> None:
        waiting(BLOCKED if self._blocked else "")
        if time.monotonic() - max(began, self._changed_at) < self._longest:
            return
        if self._blocked:
            raise BrokerUnavailable(f"{BLOCKED}; it has done so for {self._longest:g} seconds")
        raise TimeoutError(f"RabbitMQ has not confirmed it within {self._longest:g} seconds")

    def _on_blocked(self, _reason: str) -> None:
        self._blocked, self._changed_at = True, time.monotonic()
        logger.warning("%s. Waiting up to %g seconds", BLOCKED, self._longest)

    def _on_unblocked(self) -> None:
        self._blocked, self._changed_at = False, time.monotonic()


def _refused_or_not(method: Any, *_: object) -> None:
    if method == Basic.Nack:
        raise MessageNacked
