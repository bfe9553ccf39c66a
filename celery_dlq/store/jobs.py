"""Jobs in Redis: a bounded hash of states, and one of cancellation requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from celery_dlq.letters.printable import readable
from celery_dlq.letters.record import to_micros
from celery_dlq.store.keys import compact, spelled
from celery_dlq.store.part import Part

MOST_JOBS = 550
"""Number of jobs that a store keeps: 500 that were started, and 50 plans."""


def may_start_at(state: Mapping[str, Any]) -> int | None:
    """When a job that waits may start, in milliseconds since 1970; ``None`` if it does not wait."""
    if state.get("state") != "waiting":
        return None
    return int(state.get("start_at") or state.get("updated_at") or 0) // 1000


class JobStore(Part):
    """Keeps the states of jobs, and requests to cancel them."""

    def write(self, job_id: str, state: Mapping[str, Any]) -> str:
        """Save a state; return who has cancelled the job. Deletes the oldest of too many."""
        _saved, known, request = self._compare_and_save(job_id, b"", state)
        if known > MOST_JOBS:
            self._delete_oldest()
        return str(request.decode("utf-8", "replace"))

    def read(self, job_id: str) -> Mapping[str, Any] | None:
        """Return the state of a job, or ``None``."""
        text = self._client.hget(self._keys.jobs(), spelled(job_id))
        return _parsed_state(text) if text else None

    def all(self) -> list[Mapping[str, Any]]:
        """Return all states, newest first: job ids begin with the time."""
        found = self._client.hgetall(self._keys.jobs())
        states = (_parsed_state(text) for _job_id, text in sorted(found.items(), reverse=True))
        return [state for state in states if state is not None]

    def startable_ids(self) -> list[str]:
        """Return the ids of the jobs that wait and may start now, who waits longest first."""
        millis = to_micros(self.now()) // 1000
        found = self._client.zrangebyscore(self._keys.waiting_jobs(), "-inf", millis)
        return [job_id.decode() for job_id in found]

    def cancel(self, job_id: str, actor: str = "") -> None:
        """Request the cancellation of a job for an actor; without one, withdraw the request."""
        if actor:
            self._client.hset(self._keys.cancel_requests(), job_id, spelled(actor))
        else:
            self._client.hdel(self._keys.cancel_requests(), job_id)

    def succeeded(self, job_id: str) -> int:
        """Return how many messages of a redrive succeeded; only guarded queues report this."""
        return int(self._client.hget(self._keys.successes(), job_id) or 0)

    def replace(
        self, job_id: str, known: Mapping[str, Any], state: Mapping[str, Any] | None
    ) -> bool:
        """Save a state if the job still has the ``state`` and ``run`` of the known one.

        So one process of many starts, resumes or cancels a job, at one moment.
        """
        jobs, there = self._keys.jobs(), spelled(job_id)
        while True:  # a heartbeat in between changes neither state nor run
            text = self._client.hget(jobs, there)
            found = _parsed_state(text) if text else None
            if found is None or any(found.get(k) != known.get(k) for k in ("state", "run")):
                return False
            if self._compare_and_save(there, text, state)[0]:
                break
        if state is None:
            self._forget([there])
        return True

    def _compare_and_save(self, job_id: str, known: bytes, state: Mapping[str, Any] | None) -> Any:
        start = None if state is None else may_start_at(state)
        text = "" if state is None else compact(state)
        return self._run_script("save_job", job_id, known, text, "" if start is None else start)

    def _delete_oldest(self) -> None:
        job_ids = sorted(self._client.hkeys(self._keys.jobs()))
        waiting = {*self._client.zrange(self._keys.waiting_jobs(), 0, -1)}
        old = [one for one in job_ids[: len(job_ids) - MOST_JOBS] if one not in waiting]
        if old:
            self._client.hdel(self._keys.jobs(), *old)
            self._forget(old)

    def _forget(self, job_ids: Sequence[str | bytes]) -> None:
        """Delete what else is known of deleted jobs."""
        self._client.hdel(self._keys.successes(), *job_ids)
        self._client.hdel(self._keys.cancel_requests(), *job_ids)


def _parsed_state(text: bytes) -> Mapping[str, Any] | None:
    return readable("the state of a job", lambda: dict(json.loads(text)))
