"""Makes the store, the board and the counter that the settings name."""

from __future__ import annotations

from typing import Any

from celery_dlq.backends.memory import MemoryBoard, MemoryCounter, MemoryJobBook, MemoryStore
from celery_dlq.config import Settings
from celery_dlq.ports import Board, DeadLetterStore, DeliveryCounter, JobBook


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


def make_counter(settings: Settings, broker_url: object, store: DeadLetterStore) -> DeliveryCounter:
    """The counter of a worker; see `make_store`."""
    if isinstance(store, MemoryStore):
        return store.counter
    from celery_dlq.backends.redis.connection import Wire, connect  # noqa: PLC0415
    from celery_dlq.backends.redis.counter import SCRIPTS, RedisCounter  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    # No second try: a count that was lost on the way must not be taken twice.
    wire = Wire(connect(url, settings.store_timeout, retries=0), url, SCRIPTS)
    return RedisCounter(wire, Keys(settings.key_prefix), settings.count_ttl)


def shown_place(settings: Settings, broker_url: Any) -> str:
    """Where the letters are, without the password."""
    from kombu.utils.url import maybe_sanitize_url  # noqa: PLC0415

    if settings.store == "redis":
        return str(maybe_sanitize_url(settings.redis_url(broker_url)))
    return settings.store
