"""Jobs in Redis: a bounded hash of states, and one of cancellation requests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.keys import spelled
from celery_dlq.backends.redis.part import RedisPart
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.store")

MOST_JOBS = 500
_CANCEL = b"cancel"


class RedisJobStore(RedisPart):
    """The `JobStore` in Redis."""

    def write(self, job_id: str, state: Mapping[str, Any]) -> bool:
        """Save a state; delete the oldest ones when there are too many."""
        text = json.dumps(state, separators=(",", ":"))
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            pipe.hset(self._keys.jobs(), job_id, text)
            pipe.hlen(self._keys.jobs())
            pipe.hget(self._keys.cancel_requests(), job_id)
            _new, known, request = pipe.execute()
            if known > MOST_JOBS:
                self._prune()
        return bool(request == _CANCEL)

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """Return one state."""
        with translated(self._url):
            text = self._client.hget(self._keys.jobs(), spelled(job_id))
        return _state(text) if text else None

    def all(self) -> list[Mapping[str, Any]]:
        """Return all states, newest first: job ids begin with the time."""
        with translated(self._url):
            found = self._client.hgetall(self._keys.jobs())
        states = (_state(text) for _job_id, text in sorted(found.items(), reverse=True))
        return [state for state in states if state is not None]

    def cancel(self, job_id: str, *, wanted: bool = True) -> None:
        """Request or withdraw the cancellation of a job."""
        with translated(self._url):
            if wanted:
                self._client.hset(self._keys.cancel_requests(), job_id, _CANCEL)
            else:
                self._client.hdel(self._keys.cancel_requests(), job_id)

    def succeeded(self, job_id: str) -> int:
        """Return the successes that workers counted."""
        with translated(self._url):
            return int(self._client.hget(self._keys.successes(), job_id) or 0)

    def acquire_run(self, job_id: str, run: int) -> bool:
        """Return True for the first process that asks."""
        with translated(self._url):
            return bool(
                self._client.hsetnx(self._keys.cancel_requests(), f"{job_id}:{run}", "taken")
            )

    def _prune(self) -> None:
        job_ids = sorted(self._client.hkeys(self._keys.jobs()))
        old = job_ids[: len(job_ids) - MOST_JOBS]
        if old:
            self._client.hdel(self._keys.jobs(), *old)
            cancel_requests = self._client.hkeys(self._keys.cancel_requests())
            gone = [
                request for request in cancel_requests if request.partition(b":")[0] in set(old)
            ]
            self._client.hdel(self._keys.successes(), *old)
            if gone:
                self._client.hdel(self._keys.cancel_requests(), *gone)


def _state(text: bytes) -> Mapping[str, Any] | None:
    try:
        state = json.loads(text)
    except ValueError as exc:
        logger.warning("Skipped the state of a job that cannot be read: %r", exc)
        return None
    return state if isinstance(state, dict) else None
