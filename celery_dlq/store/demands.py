"""Demands in Redis; also if the letters are on a broker."""

from __future__ import annotations

import json

from celery_dlq.logs import readable
from celery_dlq.store.base import MOST_DEMANDS, Demand
from celery_dlq.store.connect import translated
from celery_dlq.store.keys import spelled
from celery_dlq.store.part import RedisPart
from celery_dlq.store.scripts import DemandReply


class RedisDemands(RedisPart):
    """The `DemandStore` in Redis."""

    def add(self, demand: Demand) -> bool:
        """Add a demand."""
        text = json.dumps(demand.to_stored(), separators=(",", ":"), sort_keys=True)
        with translated(self._url):
            reply = self._scripts.demand(
                keys=[self._keys.demands(), self._keys.overrides()],
                args=[spelled(demand.task_id), text, MOST_DEMANDS],
            )
        return bool(reply == DemandReply.ADDED)

    def get(self, task_id: str) -> Demand | None:
        """Return the demand for a task."""
        with translated(self._url):
            text = self._client.hget(self._keys.demands(), spelled(task_id))
        found = None if text is None else _read(text)
        return found if found is not None and found.until > self.now() else None

    def all(self) -> list[Demand]:
        """Return the demands in force."""
        with translated(self._url):
            texts = self._client.hgetall(self._keys.demands())
        now = self.now() if texts else None
        found, ended = [], []
        for field, text in texts.items():
            demand = _read(text)
            if demand is not None and now is not None and demand.until <= now:
                ended.append(field)
            elif demand is not None:
                found.append(demand)
        if ended:
            with translated(self._url):
                self._client.hdel(self._keys.demands(), *ended)
        return sorted(found, key=lambda one: (one.at, one.task_id))

    def remove(self, task_id: str) -> bool:
        """Remove the demand for a task."""
        with translated(self._url):
            return bool(self._client.hdel(self._keys.demands(), spelled(task_id)))


def _read(text: bytes) -> Demand | None:
    return readable("a demand", lambda: Demand.from_stored(json.loads(text)))
