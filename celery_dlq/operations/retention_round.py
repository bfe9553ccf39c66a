"""The rounds in which a worker trims dead-letter queues.

What trims them is made, and its modules are loaded, when there is a queue that it may trim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_dlq.operations.retention import Retention
    from celery_dlq.policies.table import PolicyTable
    from celery_dlq.store.part import QueueNames

QUEUES_READ_PER_TICK = 20
"""A worker reads the length and the oldest times of this many queues per tick."""

QUEUES_PER_TICK = 3
"""A worker trims at most this many queues per tick."""

REST_TICKS = 19
"""After all queues, a worker with nothing to trim skips this many ticks."""


class RetentionRound:
    """Visits the dead-letter queues of an app in turn, some in a tick."""

    def __init__(
        self, make: Callable[[], Retention], store: QueueNames, table: Callable[[], PolicyTable]
    ) -> None:
        self._make = make
        self._store = store
        self._table = table
        self._names: list[str] = []
        self._more: list[str] = []
        self._pause = 0

    @cached_property
    def _retention(self) -> Retention:
        return self._make()

    def tick(self) -> None:
        """Visit the next queues; without a pause after a trimming: the queue may have more."""
        if self._pause > 0:
            self._pause -= 1
            return
        if not self._names:
            self._names = self._store.names()
        table, looked = self._table(), [*self._names[-QUEUES_READ_PER_TICK:], *self._more]
        free = [name for name in looked if not table.never_trims(name)]
        policies = {name: table.of_dead_letter_queue(name) for name in free}
        del self._names[-QUEUES_READ_PER_TICK:]
        due = self._retention.due_queues(policies) if policies else []
        self._more = due[QUEUES_PER_TICK:]
        for number, name in enumerate(due[:QUEUES_PER_TICK], 1):
            to_bin = table.trims_by_override(name)
            if self._retention.trim(name, policies[name], to_bin=to_bin):
                self._more = [*due[number:], name]
                break
        self._pause = 0 if self._more or self._names else REST_TICKS
