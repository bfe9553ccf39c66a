"""The store: all parts share one client and one pipelined connection."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import url_without_secrets
from celery_dlq.store.address import Address
from celery_dlq.store.check import check_redis
from celery_dlq.store.connect import connect, is_refusal
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.instructions import CurrentInstructions
from celery_dlq.store.keys import Keys
from celery_dlq.store.new_letters import NewLetters
from celery_dlq.store.part import Part
from celery_dlq.store.pipelined import PipelinedConnection, pipelined
from celery_dlq.store.registrations import NewCounts, Registrations
from celery_dlq.store.revoked import RevokedTasks
from celery_dlq.store.worker_records import ServerMemory

if TYPE_CHECKING:
    from celery_dlq.store.giving import Instructions
    from celery_dlq.store.jobs import JobStore
    from celery_dlq.store.letters import Letters
    from celery_dlq.store.notes import GroupNotes
    from celery_dlq.store.workers import MetricsStore, WorkerRegistry

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
        self.clock = -math.inf, 0  # that of Redis, and when it was asked; see `Part.now`
        self._parts: dict[type[Part], Any] = {}
        self._knows_no_memory = False

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

    new_letters = cached_property(NewLetters)  # stored over the connection that counts

    @cached_property
    def new_held(self) -> NewLetters:
        """What stores messages that a worker holds."""
        return NewLetters(self, Keys(f"{self.keys.prefix}:held"), _HELD_TTL_SECONDS)

    @cached_property
    def letters(self) -> Letters:
        """What reads and removes letters, and stores them as `new_letters` does."""
        return self._letters()

    @cached_property
    def sampled(self) -> Letters:
        """Samples of messages that succeeded, read like letters."""
        return self._letters(Keys(self.keys.prefix, successes_only=True))

    @cached_property
    def held(self) -> Letters:
        """The held messages, in streams like letters."""
        return self._letters(Keys(f"{self.keys.prefix}:held"), _HELD_TTL_SECONDS)

    def _letters(self, keys: Keys | None = None, ttl_seconds: float | None = None) -> Letters:
        from celery_dlq.store.letters import Letters  # noqa: PLC0415 - a worker seldom reads any

        return Letters(self, keys, ttl_seconds)

    @cached_property
    def instructions(self) -> Instructions:
        """What operators require of all workers."""
        from celery_dlq.store.giving import Instructions  # noqa: PLC0415 - workers seldom give any

        return Instructions(self)

    @cached_property
    def jobs(self) -> JobStore:
        """States of jobs."""
        from celery_dlq.store.jobs import JobStore  # noqa: PLC0415 - a worker without jobs has none

        return JobStore(self)

    @cached_property
    def notes(self) -> GroupNotes:
        """What operators say of groups of letters."""
        from celery_dlq.store.notes import GroupNotes  # noqa: PLC0415 - no worker needs it

        return GroupNotes(self)

    @cached_property
    def workers(self) -> WorkerRegistry:
        """Live workers and the audit log."""
        from celery_dlq.store.workers import WorkerRegistry  # noqa: PLC0415 - no worker reads it

        return WorkerRegistry(self)

    @cached_property
    def metrics(self) -> MetricsStore:
        """The metrics of all processes."""
        from celery_dlq.store.workers import MetricsStore  # noqa: PLC0415 - as above

        return MetricsStore(self)

    registrations = cached_property(Registrations)  # what this process reports of itself
    new_counts = cached_property(NewCounts)
    current_instructions = cached_property(CurrentInstructions)  # as workers read them
    revoked = cached_property(RevokedTasks)  # tasks that operators revoked, and when

    def memory(self) -> ServerMemory | None:
        """The memory of Redis; of a cluster, that of its fullest master; ``None`` if unknown.

        Managed Redis often forbids ``CONFIG``, not ``INFO``. Where a user may not run that either,
        it is tried once.

        Source: https://redis.io/docs/latest/commands/info/
        """
        if self._knows_no_memory:
            return None
        try:
            if hasattr(self.client, "get_primaries"):  # a cluster
                nodes = self.client.get_primaries()
                found = [self.client.info("memory", target_nodes=node) for node in nodes]
            else:
                found = [self.client.info("memory")]
        except StoreUnavailable as exc:
            if not is_refusal(exc):
                raise
            self._knows_no_memory = True
            return None
        return max(map(_memory, found), key=lambda memory: memory.share or 0.0)

    def check(self, dead_letter_queues: Iterable[str] = ()) -> None:
        """Check that Redis does all that is needed; see `celery_dlq.store.check`."""
        check_redis(self, dead_letter_queues)

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


def _memory(info: Mapping[str, Any]) -> ServerMemory:
    # Buffers for replicas and the append-only file do not count towards `maxmemory`.
    return ServerMemory(
        used=int(info.get("used_memory", 0)) - int(info.get("mem_not_counted_for_evict", 0)),
        maximum=int(info.get("maxmemory", 0)),
        policy=str(info.get("maxmemory_policy", "")),
    )
