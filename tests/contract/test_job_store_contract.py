"""The contract of every `JobStore`."""

from __future__ import annotations

import pytest

from celery_dlq.backends.base import Backend, JobStore
from celery_dlq.backends.redis.jobs import MOST_JOBS, RedisJobStore
from celery_dlq.backends.redis.keys import Keys


@pytest.fixture
def jobs(parts: Backend) -> JobStore:
    """Give each jobs in turn, empty."""
    return parts.jobs


def test_states_are_kept_newest_first(jobs: JobStore) -> None:
    """The last state of each job counts."""
    jobs.write("20260101-1", {"id": "a", "done": 1})
    jobs.write("20260102-1", {"id": "b"})
    jobs.write("20260101-1", {"id": "a", "done": 2})
    assert jobs.all() == [{"id": "b"}, {"id": "a", "done": 2}]
    assert jobs.read("20260101-1") == {"id": "a", "done": 2}
    assert jobs.read("x") is None


def test_a_cancel_request_is_returned_by_the_next_write(jobs: JobStore) -> None:
    """Other jobs do not get it, and neither does this one once it is withdrawn."""
    jobs.write("1", {})
    jobs.cancel("1")
    assert (jobs.write("1", {}), jobs.write("2", {})) == (True, False)
    jobs.cancel("1", wanted=False)
    assert not jobs.write("1", {})


def test_one_process_takes_a_run(jobs: JobStore) -> None:
    """Two that resume one job at once would redrive its letters twice."""
    assert [jobs.acquire_run("1", 2), jobs.acquire_run("1", 2), jobs.acquire_run("1", 3)] == [
        True,
        False,
        True,
    ]


def test_the_oldest_jobs_are_forgotten(jobs: JobStore) -> None:
    """Their cancel requests are forgotten with them."""
    jobs.cancel("0000")
    jobs.acquire_run("0000", 2)
    for number in range(MOST_JOBS + 5):
        jobs.write(f"{number:04d}", {"n": number})
    assert len(jobs.all()) == MOST_JOBS
    assert jobs.read("0004") is None
    assert jobs.read("0005") is not None
    if isinstance(jobs, RedisJobStore):
        assert jobs._client.hlen(Keys().cancel_requests()) == 0
