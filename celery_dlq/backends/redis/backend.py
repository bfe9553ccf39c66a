"""All parts of the Redis backend over one client and one connection for writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from typing import Any

from celery_dlq.backends.base import DeadLetterStore
from celery_dlq.backends.redis.connect import PipelinedConnection, connect
from celery_dlq.backends.redis.counter import RedisCounter
from celery_dlq.backends.redis.jobs import RedisJobStore
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.letters import RedisStore
from celery_dlq.backends.redis.metrics import RedisMetrics
from celery_dlq.backends.redis.outbox import RedisOutbox
from celery_dlq.backends.redis.reports import RedisReports
from celery_dlq.backends.redis.samples import RedisSamples
from celery_dlq.backends.redis.workers import RedisWorkerRegistry

MakeLetters = Callable[["RedisBackend"], DeadLetterStore]


class RedisBackend:
    """The `Backend` of Redis; connects when there is first something to send.

    Args:
        url: Where Redis is.
        prefix: The setting ``dlq_key_prefix``.
        timeout_seconds: Longest wait for a connection and for an answer.
        count_ttl_seconds: How long a message that is not delivered again is remembered.
        make_letters: Makes the store of letters, if they are kept elsewhere; asked once.
    """

    def __init__(
        self,
        url: str,
        *,
        prefix: str = "dlq",
        timeout_seconds: float = 5.0,
        count_ttl_seconds: float = 72 * 3600.0,
        make_letters: MakeLetters | None = None,
    ) -> None:
        self.url = url
        self.keys = Keys(prefix)
        self._timeout = timeout_seconds
        self.count_ttl = count_ttl_seconds
        self._make_letters = make_letters

    @cached_property
    def client(self) -> Any:
        """The pooled client; safe in several threads."""
        return connect(self.url, self._timeout)

    @cached_property
    def connection(self) -> PipelinedConnection:
        """The connection on which is written without waiting for replies."""
        # No second try: a count that was lost on the way must not be taken twice.
        return PipelinedConnection(connect(self.url, self._timeout, retries=0), self.url)

    @cached_property
    def counter(self) -> RedisCounter:
        """Deliveries."""
        return RedisCounter(self.connection, self.keys, self.count_ttl)

    @cached_property
    def letters(self) -> DeadLetterStore:
        """Dead letters; a worker stores them over its connection for counts."""
        if self._make_letters is not None:
            return self._make_letters(self)
        return RedisStore(self.client, self.url, self.keys, self.count_ttl, self.connection)

    @cached_property
    def workers(self) -> RedisWorkerRegistry:
        """Live workers, overrides of policies, and the audit."""
        return RedisWorkerRegistry(self.client, self.url, self.keys, self.connection)

    @cached_property
    def jobs(self) -> RedisJobStore:
        """Redrives and discards."""
        return RedisJobStore(self.client, self.url, self.keys)

    @cached_property
    def outbox(self) -> RedisOutbox:
        """What dead-letter exchanges must still get."""
        return RedisOutbox(self.client, self.url, self.keys)

    @cached_property
    def metrics(self) -> RedisMetrics:
        """Counts of all processes."""
        return RedisMetrics(self.client, self.url, self.keys, self.connection)

    @cached_property
    def samples(self) -> RedisSamples:
        """Takes samples of messages that succeeded."""
        return RedisSamples(self.connection, self.keys)

    @cached_property
    def sampled(self) -> DeadLetterStore:
        """The samples, read as letters are."""
        return RedisStore(self.client, self.url, Keys(self.keys.prefix, successes_only=True))

    @cached_property
    def reports(self) -> RedisReports:
        """Decides which letters an error tracker is told of."""
        tallied = self._make_letters is None
        return RedisReports(self.client, self.url, self.keys, tallied=tallied)

    def separate(self) -> RedisBackend:
        """The same place over connections of its own."""
        return RedisBackend(
            self.url,
            prefix=self.keys.prefix,
            timeout_seconds=self._timeout,
            count_ttl_seconds=self.count_ttl,
            make_letters=self._make_letters,
        )

    def close(self) -> None:
        """Close what was opened."""
        for name in ("counter", "letters", "sampled", "connection", "client"):
            if name in vars(self):
                with suppress(Exception):
                    vars(self)[name].close()
