"""The base of the parts of the Redis backend."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import datetime
from functools import cached_property
from typing import Any, TypeVar

from celery_dlq.backends.redis.check import check
from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.pipelined import PipelinedConnection
from celery_dlq.backends.redis.scripts import Scripts
from celery_dlq.logs import get_logger
from celery_dlq.record import from_micros

logger = get_logger("celery_dlq.store")

_Record = TypeVar("_Record")


class RedisPart:
    """Base class with the client, the key names, the scripts and the clock.

    Args:
        client: A redis-py client that returns bytes.
        url: Shown in messages, without its password.
        keys: Key names.
        connection: The worker's connection for counts. Its circuit breaker spares what a worker
            writes the time-outs of a Redis that hangs: each would stop the tasks.
    """

    def __init__(
        self, client: Any, url: str, keys: Keys, connection: PipelinedConnection | None = None
    ) -> None:
        self._client = client
        self._url = url
        self._keys = keys
        self._connection = connection

    @cached_property
    def _scripts(self) -> Scripts:
        return Scripts.on(self._client)

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Check that Redis does all that is asked of it; see `celery_dlq.backends.redis.check`."""
        check(self._client, self._url, self._keys, dead_letter_queues, self._connection)

    def _raise_if_away(self) -> None:
        if self._connection is not None:
            self._connection.raise_if_away()

    def now(self) -> datetime:
        """Return the time of Redis, the clock that all machines share."""
        with translated(self._url):
            seconds, micros = self._client.time()
        return from_micros(seconds * 1_000_000 + micros)


def read_each(
    what: str, read: Callable[..., _Record], stored: Iterable[Iterable[Any]]
) -> list[_Record]:
    """The records that can be read; others are skipped, with a warning.

    Args:
        what: What they are, for the log.
        read: Reads one.
        stored: The arguments for each.
    """
    found = []
    for one in stored:
        try:
            found.append(read(*one))
        except (LookupError, ValueError, TypeError, AttributeError, OverflowError) as exc:
            # for example from a later version
            logger.warning("Skipped a %s that cannot be read: %r", what, exc)
    return found
