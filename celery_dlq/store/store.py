"""The store: all parts share one client and one pipelined connection."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar

from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.store.address import Address
from celery_dlq.store.check import check
from celery_dlq.store.connect import connect
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.instructions import Instructions
from celery_dlq.store.jobs import JobStore
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.memory import MemoryReader
from celery_dlq.store.metrics import MetricsStore
from celery_dlq.store.notes import GroupNotes
from celery_dlq.store.part import Part
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.records import ServerMemory
from celery_dlq.store.slots import pipelined
from celery_dlq.store.workers import WorkerRegistry

_HELD_TTL_SECONDS = 1.0  # a copy of a held message may run once that is released

P = TypeVar("P", bound=Part)


class Store:
    """Letters and counts in Redis; connects when the first command is sent."""

    def __init__(
        self,
        where: Address | str,
        *,
        prefix: str = "dlq",
        timeout_seconds: float = 5.0,
        count_ttl_seconds: float = 72 * 3600.0,
    ) -> None:
        self._where = where
        self.url = url_without_secrets(where) if isinstance(where, str) else str(where)
        self.keys = Keys(prefix)
        self._timeout = timeout_seconds
        self.count_ttl = count_ttl_seconds
        self._parts: dict[type[Part], Any] = {}

    @cached_property
    def client(self) -> Any:
        """The pooled, thread-safe client."""
        return connect(self._where, self._timeout, keys=self.keys)

    @cached_property
    def connection(self) -> PipelinedConnection:
        """The connection for writes that do not wait for replies."""
        # No retries: a count whose reply was lost must not be taken twice.
        client = connect(self._where, self._timeout, retries=0, keys=self.keys)
        return pipelined(client, self.url)

    def part(self, kind: type[P]) -> P:
        """Return the part of a feature, made once; see `celery_dlq.store.part`."""
        made = self._parts.get(kind)
        if made is None:
            made = self._parts[kind] = kind(self)
        return made

    @cached_property
    def counter(self) -> DeliveryCounter:
        """Counts of deliveries."""
        return DeliveryCounter(self.connection, self.keys, self.count_ttl)

    @cached_property
    def letters(self) -> Letters:
        """Dead letters; a worker stores them over the connection that writes its counts."""
        return Letters(self)

    @cached_property
    def sampled(self) -> Letters:
        """Samples of messages that succeeded, read like letters."""
        return Letters(self, Keys(self.keys.prefix, successes_only=True))

    @cached_property
    def held(self) -> Letters:
        """The held messages, in streams like letters."""
        return Letters(self, Keys(f"{self.keys.prefix}:held"), _HELD_TTL_SECONDS)

    @property
    def workers(self) -> WorkerRegistry:
        """Live workers and the audit log."""
        return self.part(WorkerRegistry)

    @property
    def jobs(self) -> JobStore:
        """States of jobs."""
        return self.part(JobStore)

    @property
    def metrics(self) -> MetricsStore:
        """Metrics of all processes."""
        return self.part(MetricsStore)

    @property
    def notes(self) -> GroupNotes:
        """Notes of operators on groups of letters."""
        return self.part(GroupNotes)

    @property
    def instructions(self) -> Instructions:
        """What operators require of all workers."""
        return self.part(Instructions)

    def memory(self) -> ServerMemory | None:
        """Return the memory of Redis."""
        return self.part(MemoryReader).read()

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Check that Redis does all that is needed; see `celery_dlq.store.check`."""
        check(self.client, self.url, self.keys, dead_letter_queues, self.connection)

    def separate(self) -> Store:
        """Return a store on the same data with its own connections."""
        return Store(
            self._where,
            prefix=self.keys.prefix,
            timeout_seconds=self._timeout,
            count_ttl_seconds=self.count_ttl,
        )

    def close(self) -> None:
        """Close the parts that were used."""
        for name in ("counter", "letters", "sampled", "held", "connection", "client"):
            if name in vars(self):
                with suppress(Exception):
                    vars(self)[name].close()
