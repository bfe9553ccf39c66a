"""Makes the store, the registry and the counter that the settings name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from celery_dlq.backends.base import (
    DeadLetterStore,
    DeliveryCounter,
    JobStore,
    Outbox,
    Samples,
    WorkerRegistry,
)
from celery_dlq.backends.memory import (
    MemoryCounter,
    MemoryJobStore,
    MemoryMetrics,
    MemoryOutbox,
    MemoryReports,
    MemoryStore,
    MemoryWorkerRegistry,
)
from celery_dlq.backends.reports import Reports
from celery_dlq.config import Settings
from celery_dlq.metrics import MetricsStore

Connect = Callable[..., Any]
"""Makes a connection to the app's broker: ``app.connection_for_write``."""


def make_store(settings: Settings, broker_url: object, connect: Connect) -> DeadLetterStore:
    """The store; nothing is sent to it yet.

    Args:
        settings: The checked settings.
        broker_url: The app's ``broker_url``: where letters are if ``dlq_url`` is not set.
        connect: For letters that are kept on the broker.

    Raises:
        SettingsError: There is no usable URL, or the broker cannot keep letters.
    """
    if settings.store == "memory":
        return MemoryStore(MemoryCounter())
    if settings.store == "broker":
        return _broker_store(settings, broker_url, connect)
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415 - see the tests of imports
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.letters import RedisStore  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    client = connect(url, settings.store_timeout)
    return RedisStore(client, url, Keys(settings.key_prefix), settings.count_ttl)


def make_sampled(settings: Settings, broker_url: object) -> DeadLetterStore:
    """The samples of successful messages, as a store that an export reads; see `make_store`."""
    if settings.store == "memory":
        return MemoryStore(MemoryCounter())
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.letters import RedisStore  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    client = connect(url, settings.store_timeout)
    return RedisStore(client, url, Keys(settings.key_prefix, successes_only=True))


def _broker_store(settings: Settings, broker_url: object, connect: Connect) -> DeadLetterStore:
    from celery_dlq.backends.broker.queue import QueueDriver  # noqa: PLC0415 - as above
    from celery_dlq.backends.broker.store import BrokerStore  # noqa: PLC0415
    from celery_dlq.backends.redis.connect import connect as connect_redis  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.positions import PositionIndex  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    settings.check_broker(connect().transport.driver_type)
    client = connect_redis(url, settings.store_timeout)
    index = PositionIndex(client, url, Keys(settings.key_prefix), settings.count_ttl)
    driver = QueueDriver(connect, max(_BROKER_SECONDS, settings.store_timeout))
    named = (policy.dead_letter_queue_of(queue) for queue, policy in settings.queues.items())
    targets = (target for target in settings.adopt.values() if target is not None)
    expected = (name for name in (*named, *targets) if not set(name) & set("*?["))
    return BrokerStore(driver, index, expected)


def make_worker_registry(settings: Settings, broker_url: object) -> WorkerRegistry:
    """The registry; see `make_store`."""
    if settings.store == "memory":
        return MemoryWorkerRegistry()
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.workers import RedisWorkerRegistry  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    return RedisWorkerRegistry(connect(url, settings.store_timeout), url, Keys(settings.key_prefix))


def make_job_store(settings: Settings, broker_url: object) -> JobStore:
    """The job book; see `make_store`."""
    if settings.store == "memory":
        return MemoryJobStore()
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415
    from celery_dlq.backends.redis.jobs import RedisJobStore  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    return RedisJobStore(connect(url, settings.store_timeout), url, Keys(settings.key_prefix))


def make_metrics(settings: Settings, broker_url: object) -> MetricsStore:
    """Where the app's processes add up their counts; see `make_store`."""
    if settings.store == "memory":
        return MemoryMetrics()
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415
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
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415
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
    from celery_dlq.backends.redis.connect import connect  # noqa: PLC0415 - see the tests of imports
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.outbox import RedisOutbox  # noqa: PLC0415

    url = settings.redis_url(broker_url)
    return RedisOutbox(connect(url, settings.store_timeout), url, Keys(settings.key_prefix))


_BROKER_SECONDS = 10.0  # a quorum of nodes writes a large letter to its discs


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker uses of the backend; on Redis two connections in all."""

    store: DeadLetterStore
    registry: WorkerRegistry
    counter: DeliveryCounter
    samples: Samples | None = None
    metrics: MetricsStore | None = None


def make_worker_parts(
    settings: Settings, broker_url: object, connect_broker: Connect
) -> WorkerParts:
    """Store, registry and counter of a worker; see `make_store`."""
    if settings.store == "memory":
        counter = MemoryCounter()
        return WorkerParts(MemoryStore(counter), MemoryWorkerRegistry(), counter)
    from celery_dlq.backends.redis.connect import PipelinedConnection, connect  # noqa: PLC0415
    from celery_dlq.backends.redis.counter import RedisCounter  # noqa: PLC0415
    from celery_dlq.backends.redis.keys import Keys  # noqa: PLC0415
    from celery_dlq.backends.redis.letters import RedisStore  # noqa: PLC0415
    from celery_dlq.backends.redis.metrics import RedisMetrics  # noqa: PLC0415
    from celery_dlq.backends.redis.samples import RedisSamples  # noqa: PLC0415
    from celery_dlq.backends.redis.workers import RedisWorkerRegistry  # noqa: PLC0415

    url, keys = settings.redis_url(broker_url), Keys(settings.key_prefix)
    client = connect(url, settings.store_timeout)
    # No second try: a count that was lost on the way must not be taken twice.
    connection = PipelinedConnection(connect(url, settings.store_timeout, retries=0), url)
    store: DeadLetterStore = (
        _broker_store(settings, broker_url, connect_broker)
        if settings.store == "broker"
        else RedisStore(client, url, keys, settings.count_ttl, connection)
    )
    return WorkerParts(
        store,
        RedisWorkerRegistry(client, url, keys, connection),
        RedisCounter(connection, keys, settings.count_ttl),
        RedisSamples(connection, keys),
        RedisMetrics(client, url, keys, connection),
    )


def shown_place(settings: Settings, broker_url: Any) -> str:
    """Where the letters are, without the password."""
    from kombu.utils.url import maybe_sanitize_url  # noqa: PLC0415

    if settings.store == "redis":
        return str(maybe_sanitize_url(settings.redis_url(broker_url)))
    if settings.store == "broker":
        urls = broker_url if isinstance(broker_url, (list, tuple)) else str(broker_url).split(";")
        return ";".join(str(maybe_sanitize_url(str(url))) for url in urls)
    return settings.store
