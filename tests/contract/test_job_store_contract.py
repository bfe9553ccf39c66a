"""The contract of every `JobStore`."""

from __future__ import annotations

from typing import Any

import pytest

from celery_dlq.letters.record import to_micros
from celery_dlq.store.jobs import MOST_JOBS, JobStore
from celery_dlq.store.keys import Keys
from celery_dlq.store.store import Store


@pytest.fixture
def jobs(parts: Store) -> JobStore:
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
    jobs.cancel("1", "ann")
    assert (jobs.write("1", {}), jobs.write("2", {})) == ("ann", "")
    jobs.cancel("1")
    assert not jobs.write("1", {})


def test_one_process_changes_a_job(jobs: JobStore) -> None:
    """Two that resume one job at once would redrive its letters twice; a heartbeat is no change."""
    known = {"state": "waiting", "run": 1, "beat": 1}
    jobs.write("1", known)
    jobs.write("1", {**known, "beat": 2})
    running = {"state": "running", "run": 2}
    assert [jobs.replace("1", known, running), jobs.replace("1", known, running)] == [True, False]
    assert not jobs.replace("1", {**running, "run": 1}, {})
    assert jobs.read("1") == running
    assert not jobs.replace("2", running, running)
    assert jobs.read("2") is None


def test_a_job_is_deleted_with_its_cancel_request_unless_it_was_changed(jobs: JobStore) -> None:
    """A plan that was started at the same moment stays."""
    known = {"state": "planned", "run": 0}
    jobs.write("1", known)
    jobs.cancel("1", "ann")
    assert not jobs.replace("1", {"state": "waiting", "run": 0}, None)
    assert jobs.replace("1", known, None)
    assert (jobs.read("1"), jobs.all()) == (None, [])
    assert not jobs.write("1", known)


def test_jobs_that_wait_are_due_at_their_time(jobs: JobStore) -> None:
    """Who waits longest comes first; what starts, ends or is deleted is due no more."""
    now = to_micros(jobs.now())

    def waiting(since: int, start_at: int | None = None) -> dict[str, Any]:
        return {"state": "waiting", "run": 0, "updated_at": now + since, "start_at": start_at}

    jobs.write("1", waiting(-1_000_000))
    jobs.write("2", waiting(-2_000_000))
    jobs.write("3", waiting(-3_000_000, now + 3_600_000_000))
    jobs.write("4", waiting(-4_000_000, now - 500_000))
    jobs.write("5", {"state": "planned", "run": 0, "updated_at": now - 9_000_000})
    assert jobs.startable_ids() == ["2", "1", "4"]
    assert jobs.replace("2", waiting(0), {"state": "running", "run": 1})
    jobs.write("1", {"state": "cancelled", "run": 0})
    assert jobs.startable_ids() == ["4"]
    assert jobs.replace("4", waiting(0), None)
    assert jobs.startable_ids() == []
    assert jobs.replace("2", {"state": "running", "run": 1}, waiting(-1_000_000))
    assert jobs.startable_ids() == ["2"]


def test_a_job_that_waits_is_not_forgotten(jobs: JobStore) -> None:
    """Not even if many others come before its time."""
    later = to_micros(jobs.now()) + 3_600_000_000
    jobs.write("0000", {"state": "waiting", "run": 0, "start_at": later})
    for number in range(1, MOST_JOBS + 5):
        jobs.write(f"{number:04d}", {"state": "done", "run": 1})
    assert jobs.read("0000") is not None
    assert len(jobs.all()) <= MOST_JOBS + 1


def test_the_oldest_jobs_are_forgotten(jobs: JobStore, parts: Store) -> None:
    """Their cancel requests are forgotten with them."""
    jobs.cancel("0000", "ann")
    for number in range(MOST_JOBS + 5):
        jobs.write(f"{number:04d}", {"n": number})
    assert len(jobs.all()) == MOST_JOBS
    assert jobs.read("0004") is None
    assert jobs.read("0005") is not None
    assert parts.client.hlen(Keys().cancel_requests()) == 0
