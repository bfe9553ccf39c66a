"""Makes the store, the board and the counter that the settings name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from celery_dlq.backends.memory import (
    MemoryBoard,
    MemoryCounter,
    MemoryJobBook,
    MemoryMetrics,
    MemoryOutbox,
    MemoryReports,
    MemoryStore,
)
from celery_dlq.config import Settings
from celery_dlq.metrics import MetricsStore
from celery_dlq.ports import Board, DeadLetterStore, DeliveryCounter, JobBook, Outbox
from celery_dlq.reports import Reports


def make_store(settings: Settings, broker_url: object) -> DeadLetterStore:
    """The store; nothing is sent to it yet.

    Args:
        settings: The checked settings.
        broker_url: The app's ``broker_url``: where letters are if ``dlq_url`` is not set.

    Raises:
        SettingsError: There is no usable URL.
    """
    if settings.store == "memory":
        return MemoryStore(MemoryCounter())
    from celery_dlq.backends.redis.connection import connect  # noqa: PLC0415 - see the tests of imports
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.store import RedisStore  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    client = connect(url, settings.store_timeout)
    return RedisStore(client, url, Keys(settings.key_prefix), settings.count_ttl)


def make_board(settings: Settings, broker_url: object) -> Board:
    """The board; see `make_store`."""
    if settings.store == "memory":
        return MemoryBoard()
    from celery_dlq.backends.redis.board import RedisBoard  # noqa: PLC0415
    from celery_dlq.backends.redis.connection import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    return RedisBoard(connect(url, settings.store_timeout), url, Keys(settings.key_prefix))


def make_job_book(settings: Settings, broker_url: object) -> JobBook:
    """The job book; see `make_store`."""
    if settings.store == "memory":
        return MemoryJobBook()
    from celery_dlq.backends.redis.connection import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.jobs import RedisJobBook  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    return RedisJobBook(connect(url, settings.store_timeout), url, Keys(settings.key_prefix))


def make_metrics(settings: Settings, broker_url: object) -> MetricsStore:
    """Where the app's processes add up their counts; see `make_store`."""
    if settings.store == "memory":
        return MemoryMetrics()
    from celery_dlq.backends.redis.connection import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.metrics import RedisMetrics  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    # No second try: counts that were lost on the way must not be added twice.
    client = connect(url, settings.store_timeout, retries=0)
    return RedisMetrics(client, url, Keys(settings.key_prefix))


def make_reports(settings: Settings, broker_url: object) -> Reports:
    """Where the app's processes agree on what is reported; see `make_store`."""
    if settings.store == "memory":
        return MemoryReports()
    from celery_dlq.backends.redis.connection import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.reports import RedisReports  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    client = connect(url, settings.store_timeout)
    tallied = settings.store == "redis"
    return RedisReports(client, url, Keys(settings.key_prefix), tallied=tallied)


def make_outbox(settings: Settings, broker_url: object) -> Outbox:
    """The outbox of dead-letter exchanges; see `make_store`."""
    if settings.store == "memory":
        return MemoryOutbox()
    from celery_dlq.backends.redis.connection import connect  # noqa: PLC0415 - see the tests of imports
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.outbox import RedisOutbox  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    return RedisOutbox(connect(url, settings.store_timeout), url, Keys(settings.key_prefix))


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker uses of the backend; on Redis two connections in all."""

    store: DeadLetterStore
    board: Board
    counter: DeliveryCounter
    metrics: MetricsStore | None = None


def make_worker_parts(settings: Settings, broker_url: object) -> WorkerParts:
    """Store, board and counter of a worker; see `make_store`."""
    if settings.store == "memory":
        counter = MemoryCounter()
        return WorkerParts(MemoryStore(counter), MemoryBoard(), counter)
    from celery_dlq.backends.redis.board import RedisBoard  # noqa: PLC0415
    from celery_dlq.backends.redis.connection import Wire, connect  # noqa: PLC0415
    from celery_dlq.backends.redis.counter import SCRIPTS, RedisCounter  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.metrics import RedisMetrics  # noqa: PLC0415
    from celery_dlq.backends.redis.store import RedisStore  # noqa: PLC0415

    url, keys = settings.redis_url(broker_url), Keys(settings.key_prefix)
    client = connect(url, settings.store_timeout)
    # No second try: a count that was lost on the way must not be taken twice.
    wire = Wire(connect(url, settings.store_timeout, retries=0), url, SCRIPTS)
    return WorkerParts(
        RedisStore(client, url, keys, settings.count_ttl, wire),
        RedisBoard(client, url, keys, wire),
        RedisCounter(wire, keys, settings.count_ttl),
        RedisMetrics(client, url, keys, wire),
    )


def shown_place(settings: Settings, broker_url: Any) -> str:
    """Where the letters are, without the password."""
    from kombu.utils.url import maybe_sanitize_url  # noqa: PLC0415

    if settings.store == "redis":
        return str(maybe_sanitize_url(settings.redis_url(broker_url)))
    return settings.store
