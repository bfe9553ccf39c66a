"""A fetch of our own in place of kombu's, for the connections of one worker's consumer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from celery_dlq.logs import get_logger
from celery_dlq.metrics import Counts, Metric

logger = get_logger("celery_dlq.transport")


class WatchedFetch:
    """The part that does not depend on the broker; subclasses connect."""

    def __init__(self) -> None:
        self._counted: Mapping[Metric, int] = {}
        self._told: set[tuple[Any, ...]] = set()

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
        totals = self._totals()
        for metric, total in totals.items():
            more = total - self._counted.get(metric, 0)
            if more:
                counts.count(metric, *("lease" for _ in metric.labels), by=more)
        self._counted = totals

    def close(self) -> None:
        """End what runs in the background."""
        raise NotImplementedError

    def _connect(self, connection: Any, ensure_connected: Callable[[Any], Any]) -> Any:
        raise NotImplementedError

    def _totals(self) -> Mapping[Metric, int]:
        raise NotImplementedError

    def _tell(self, text: str, *args: Any, level: int = logging.INFO) -> None:
        """Log once, not at every reconnection."""
        if (text, args) not in self._told:
            self._told.add((text, args))
            logger.log(level, text, *args)
