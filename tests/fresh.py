"""Stores of a test's own: one embedded Redis per process, a key prefix that nobody else has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import uuid4

import intervals
import pytest
from builders import an_app

from celery_dlq.events import Events
from celery_dlq.operations.api import KINDS
from celery_dlq.operations.jobs import Jobs
from celery_dlq.plugin import utc_now
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.embedded import embedded
from celery_dlq.store.keys import Keys
from celery_dlq.store.metrics import Measuring
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.store import Store

C = TypeVar("C", bound=DeliveryCounter)


def fresh_conf() -> dict[str, Any]:
    """Settings of an app whose store is empty."""
    return {"dlq_url": embedded(), "dlq_key_prefix": f"fresh-{uuid4().hex[:8]}"}


def fresh_store(**options: Any) -> Store:
    """An empty store."""
    return Store(embedded(), prefix=f"fresh-{uuid4().hex[:8]}", **options)


def shared(dlq: Any) -> Any:
    """An app's `DeadLetters` whose worker has the store of its operators, which a test may break.

    What nobody ended is over here; how long a worker may be silent is tested elsewhere.
    """
    backend = dlq.assembly.backend
    backend.separate = lambda: _Shared(backend)
    backend.counter = strict_counter(backend.connection, backend.keys)
    return dlq


class _Shared:
    """A store whose connections are those of others: who ends does not close them."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def close(self) -> None:
        """Leave them open."""


def strict_counter(
    connection: PipelinedConnection,
    keys: Keys,
    kind: type[C] = DeliveryCounter,  # type: ignore[assignment]
) -> C:
    """A counter for which a delivery that nobody ended is over."""
    with pytest.MonkeyPatch.context() as patch:
        intervals.change(patch, counter_stale=0.0)
        return kind(connection, keys, 3600.0)


def jobs_on(backend: Store) -> Jobs:
    """Jobs of an app without policies, in a store of a test's own."""
    assembly: Any = SimpleNamespace(
        app=an_app(),
        settings=None,
        backend=backend,
        policy_table=PolicyTable,
        events=Events(),
        measuring=Measuring(lambda: backend.metrics.add_counts),
        clock=utc_now,
    )
    return Jobs(assembly, KINDS)
