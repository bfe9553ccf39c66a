"""A worker among the others: its info, the overrides it obeys, the differences it sees."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

from celery_dlq.backends.base import WorkerInfo, WorkerRegistry
from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.policies.drift import differences
from celery_dlq.policies.overrides import by_queue
from celery_dlq.policies.policy import Policy

logger = get_logger("celery_dlq.worker")

REST_TICKS = 2
"""How many ticks pass between two heartbeats."""

LOOK_TICKS = 4
"""The other workers' policies are looked at with every so many heartbeats."""

_MOST_TOLD = 1000
_SECOND = timedelta(seconds=1)

Obey = Callable[[Mapping[str, tuple[Policy, str]]], None]


class Heartbeat:
    """Keeps one worker's info up to date; ticks once a second, and rests in between.

    Args:
        registry: Where infos and overrides are.
        info: The worker's info.
        obey: Called with the overrides in force whenever they change.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        registry: WorkerRegistry,
        info: WorkerInfo,
        obey: Obey,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._registry = registry
        self._info = info
        self._obey = obey
        self._clock = clock
        self._ticks = self._rest = 0
        self._revision = 0
        self._next_end: float | None = None
        self._told: set[str] = set()

    def tick(self) -> None:
        """Send a heartbeat, entry overrides, and look at the other workers now and then.

        Raises:
            StoreUnavailable: The store does not answer.
        """
        if self._rest > 0 and not self._over():
            self._rest -= 1
            return
        self._ticks += 1
        self._alive()  # first: it goes where a store that hangs is noticed, at no further wait
        self._rest = REST_TICKS
        if self._ticks % LOOK_TICKS == 1:
            self._look()

    def close(self) -> None:
        """Take the info down."""
        try:
            self._registry.deregister(self._info.hostname)
        except StoreUnavailable as exc:
            logger.debug("The info of this worker stays up until it is old: %s", exc)

    def _alive(self) -> None:
        known, revision = self._registry.heartbeat(self._info.hostname)
        if not known:
            self._registry.register(self._info)
        if revision != self._revision or self._over():
            overrides = self._registry.overrides()
            self._revision = revision
            self._next_end = None
            if overrides:
                left = min(o.until for o in overrides) - self._registry.now()
                self._next_end = self._clock() + left / _SECOND
            self._obey(by_queue(overrides))

    def _over(self) -> bool:
        """Whether an override ends about now; the store's clock says whether it has."""
        return self._next_end is not None and self._next_end <= self._clock()

    def _look(self) -> None:
        for other in self._registry.workers(with_tasks=False):
            if other.hostname != self._info.hostname:
                for difference in differences(self._info, other):
                    self._tell(difference)

    def _tell(self, difference: str) -> None:
        if difference not in self._told and len(self._told) < _MOST_TOLD:
            self._told.add(difference)
            logger.warning("%s; each worker applies its own", difference)
