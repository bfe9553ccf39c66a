"""The contract of every `MetricsStore`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import redis

from celery_dlq.store.keys import Keys
from celery_dlq.store.metrics import (
    DELIVERIES,
    DUPLICATES,
    MAX_TASKS,
    OTHER,
    STORE_ERRORS,
    Counts,
    Measured,
    WorkerGauges,
)
from celery_dlq.store.registrations import MOST_FIELDS
from celery_dlq.store.store import Store
from celery_dlq.store.workers import MetricsStore


@contextmanager
def redis_metrics(url: str) -> Iterator[MetricsStore]:
    """The store of one process."""
    backend = Store(url, timeout_seconds=2.0)
    yield backend.metrics
    backend.close()


@pytest.fixture
def metrics(parts: Store) -> MetricsStore:
    """Give each store in turn, empty."""
    return parts.metrics


def test_an_app_that_counted_nothing_has_no_counts(metrics: MetricsStore) -> None:
    """A scrape before the first worker is no error."""
    assert metrics.read_all() == Measured()


def test_counts_of_several_processes_add_up(metrics: MetricsStore) -> None:
    """And gauges are those of the worker's last word."""
    for waiting in (3, 0):
        counts = Counts()
        counts.count(DELIVERIES, "süß: orders", "failed", "shop.charge", by=2)
        counts.count(STORE_ERRORS, "count")
        counts.flush(
            metrics.add_counts, WorkerGauges(worker="celery@web-1", spool=7, waiting=waiting)
        )
        assert counts.empty
    measured = metrics.read_all()
    assert measured.counts == {
        (DELIVERIES.name, "süß: orders", "failed", "shop.charge"): 4,
        (STORE_ERRORS.name, "count"): 2,
    }
    assert measured.workers == (WorkerGauges(worker="celery@web-1", spool=7, waiting=0),)


def test_a_live_worker_that_reported_nothing_has_nothing_to_report(parts: Store) -> None:
    """So an idle worker writes no gauges, and is counted all the same."""
    for name in ("celery@web-1", "celery@web-2"):
        parts.workers.heartbeat(name)
    Counts().flush(parts.metrics.add_counts, WorkerGauges(worker="celery@web-2", spool=7))
    assert parts.metrics.read_all().workers == (
        WorkerGauges(worker="celery@web-1"),
        WorkerGauges(worker="celery@web-2", spool=7),
    )


def test_label_values_beyond_the_bound_become_one(redis_url: str) -> None:
    """Queue names made up at run time fill neither a worker's memory nor Redis."""
    with redis_metrics(redis_url) as metrics:
        for worker in range(3):
            counts = Counts()
            for number in range(2_500):
                counts.count(DUPLICATES, f"q{worker}-{number}")
            counts.flush(metrics.add_counts)
        found = metrics.read_all().counts
    assert sum(found.values()) == 7_500
    assert len(found) <= MOST_FIELDS + 1
    assert found[DUPLICATES.name, OTHER] > 500


def test_tasks_beyond_the_bound_are_counted_as_one(metrics: MetricsStore) -> None:
    """The queue and the outcome stay known; the first tasks keep their names in later flushes."""
    counts = Counts()
    for _ in range(2):
        for number in range(MAX_TASKS + 50):
            counts.count(DELIVERIES, "orders", "failed", f"shop.task{number}")
        counts.flush(metrics.add_counts)
    found = metrics.read_all().counts
    assert len(found) == MAX_TASKS + 1
    assert found[DELIVERIES.name, "orders", "failed", "shop.task0"] == 2
    assert found[DELIVERIES.name, "orders", "failed", OTHER] == 100


def test_what_cannot_be_written_is_written_later(redis_url: str) -> None:
    """A Redis that is away costs no count and no exception."""
    counts = Counts()
    counts.count(DUPLICATES, "orders")
    with redis_metrics("redis://127.0.0.1:1/0") as away:
        counts.flush(away.add_counts)
    assert not counts.empty
    counts.count(DUPLICATES, "orders")
    with redis_metrics(redis_url) as metrics:
        counts.flush(metrics.add_counts)
        assert metrics.read_all().counts == {(DUPLICATES.name, "orders"): 2}


def test_a_redis_that_lost_its_scripts_is_no_loss(redis_url: str) -> None:
    """The script is sent again by itself."""
    with redis_metrics(redis_url) as metrics, redis.Redis.from_url(redis_url) as client:
        for _ in range(2):
            counts = Counts()
            counts.count(DUPLICATES, "orders")
            counts.flush(metrics.add_counts)
            client.script_flush()
    with redis_metrics(redis_url) as again:
        assert sum(again.read_all().counts.values()) == 2


def test_a_worker_that_fell_silent_is_not_shown(redis_url: str) -> None:
    """Its last gauges say nothing about now; counts of another version are passed over."""
    with redis_metrics(redis_url) as metrics, redis.Redis.from_url(redis_url) as client:
        now = client.time()[0]
        client.hset(Keys().gauges(), "celery@gone", f"{now - 60}|[1,2]")
        client.hset(Keys().gauges(), "celery@live", f"{now - 3}|[1,2,3]")
        client.hset(Keys().gauges(), "celery@odd", "what?")
        client.hset(Keys().counts(), "odd", 1)
        assert metrics.read_all() == Measured(
            workers=(WorkerGauges(worker="celery@live", spool=1, waiting=2),)
        )
