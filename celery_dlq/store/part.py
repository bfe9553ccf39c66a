"""The base of what is kept in Redis.

A feature's own part lies in its folder, with its keys and scripts::

    class Holds(Part):
        lua = "celery_dlq.features.hold"  # its scripts are in the folder `lua` of this package

        def all(self) -> list[Hold]:
            with translated(self._url):
                texts = self._client.hvals(self._keys.app("holds"))  # {prefix}:{app}:holds
            ...

``backend.part(Holds)`` makes it once, on the connections of the store. A key on the slot of a
dead-letter queue is ``self._keys.of(queue, "notes")``; scripts are attributes of ``_scripts``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, ClassVar

from celery_dlq.letters.record import from_micros
from celery_dlq.store.check import check
from celery_dlq.store.connect import translated
from celery_dlq.store.keys import Keys
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.scripts import Scripts

_QUEUES_PER_WRITE = 25
"""Few, so that Redis serves others in between: it may read two large letters per queue."""


class Part:
    """Base class with the client, the key names, the scripts and the clock."""

    lua: ClassVar[str] = "celery_dlq.store"
    """The package whose folder ``lua`` has the scripts."""

    def __init__(
        self, client: Any, url: str, keys: Keys, connection: PipelinedConnection | None = None
    ) -> None:
        self._client = client
        self._url = url
        self._keys = keys
        self._connection = connection

    @cached_property
    def _scripts(self) -> Scripts:
        return Scripts(self._client, self.lua)

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Check that Redis does all that is asked of it; see `celery_dlq.store.check`."""
        check(self._client, self._url, self._keys, dead_letter_queues, self._connection)

    def _raise_if_away(self) -> None:
        if self._connection is not None:
            self._connection.raise_if_away()

    def now(self) -> datetime:
        """Return the time of Redis, the clock that all machines share."""
        with translated(self._url):
            seconds, micros = self._client.time()
        return from_micros(seconds * 1_000_000 + micros)


def of_each(
    client: Any, names: Sequence[str], *asks: Callable[[Any, str], object]
) -> Iterator[tuple[str, list[Any]]]:
    """Send the same commands for many queues, in pipelines."""
    for start in range(0, len(names), _QUEUES_PER_WRITE):
        some = names[start : start + _QUEUES_PER_WRITE]
        pipe = client.pipeline(transaction=False)
        for name in some:
            for ask in asks:
                ask(pipe, name)
        replies = iter(pipe.execute())
        for name in some:
            yield name, [next(replies) for _ in asks]
