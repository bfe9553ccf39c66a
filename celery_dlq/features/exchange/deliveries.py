"""Publishes the letters of entries that are due: see `celery_dlq.features.exchange.publisher`."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import MutableMapping
from dataclasses import replace

from kombu.utils.functional import LRUCache

from celery_dlq.errors import BrokerUnavailable
from celery_dlq.features.exchange.connection import Exchanges, Refused
from celery_dlq.features.exchange.publisher import Outbox, OutboxEntry
from celery_dlq.letters.printable import get_logger
from celery_dlq.registry import interval
from celery_dlq.store.metrics import INTERNAL_ERRORS
from celery_dlq.store.store import Store
from celery_dlq.worker.housekeeping import Stopping

logger = get_logger("celery_dlq.features.exchange.publisher")

TRIES = 5
"""An entry that is refused so often is given up, after half an hour: the waits grow fourfold."""

_ENTRIES_PER_ROUND = 100
_MAX_REMEMBERED = 10_000


class Deliveries:
    """Publishes letters, and remembers what was warned of and which letters are missing."""

    def __init__(self, backend: Store, exchanges: Exchanges) -> None:
        self._backend = backend
        self._outbox = backend.part(Outbox)
        self._exchanges = exchanges
        self._missing: MutableMapping[OutboxEntry, float] = LRUCache(_MAX_REMEMBERED)  # type: ignore[no-untyped-call]
        self._warned: MutableMapping[str, None] = LRUCache(_MAX_REMEMBERED)  # type: ignore[no-untyped-call]

    def deliver(self, dead_letter_queue: str, stopping: Stopping) -> None:
        """Publish the letters of a queue whose entries are due."""
        while not stopping():
            until, lease = time.monotonic() + interval("outbox_round"), interval("outbox_lease")
            due = self._outbox.due_entries(
                dead_letter_queue, most=_ENTRIES_PER_ROUND, lease_seconds=lease
            )
            left, over = deque(due), []
            try:
                # Not when it is slow: what is left would soon be another worker's, too.
                while left and time.monotonic() < until:
                    entry = left.popleft()
                    if self._published(dead_letter_queue, entry):
                        over.append(entry)
            finally:
                self._outbox.remove_entries(dead_letter_queue, over)
                for entry in left:  # due at once, for any worker
                    self._outbox.add_entry(dead_letter_queue, entry)
            if not left and len(due) < _ENTRIES_PER_ROUND:
                return

    def _published(self, dead_letter_queue: str, entry: OutboxEntry) -> bool:
        """Publish an entry's letter; return True if the entry is done."""
        letter = self._backend.letters.get(dead_letter_queue, entry.letter_id)
        if letter is None:
            return self._is_lost(entry)
        try:
            if entry.task:
                routed = self._exchanges.send_to_task(letter, entry.task)
            else:
                routed = self._exchanges.publish(letter, entry.exchange, entry.routing_key)
        except Refused as exc:
            return self._refused(dead_letter_queue, entry, exc)
        except BrokerUnavailable:
            self._postpone(dead_letter_queue, entry)  # the broker may have it
            raise
        return routed or self._unroutable(dead_letter_queue, entry)

    def _refused(self, dead_letter_queue: str, entry: OutboxEntry, exc: Refused) -> bool:
        """Try an entry again later, or give it up; return True if it is done."""
        if entry.tries + 1 < TRIES:
            self._warn_once(entry.letter_id, "Letter %s is not published yet: %s", exc)
            self._postpone(dead_letter_queue, entry)
            return False
        self._backend.new_counts.add_counts({(INTERNAL_ERRORS.name, "exchange"): 1})
        logger.error(
            "Letter %s is given up for %s, after %d publications: %s. "
            "It stays in %s; subscribers that took it have copies with one message id. Make room "
            "in the queue that refuses, or unbind it; this letter is not published there again",
            entry.letter_id,
            entry,
            TRIES,
            exc,
            dead_letter_queue,
        )
        return True

    def _postpone(self, dead_letter_queue: str, entry: OutboxEntry) -> None:
        """Let an entry wait, four times as long as before; it counts how often."""
        later = replace(entry, tries=min(entry.tries + 1, TRIES - 1))
        wait_seconds = interval("outbox_lease") * 4**entry.tries
        self._outbox.add_entry(dead_letter_queue, later, after_seconds=wait_seconds)
        if later != entry:
            self._outbox.remove_entries(dead_letter_queue, [entry])

    def _unroutable(self, dead_letter_queue: str, entry: OutboxEntry) -> bool:
        """Warn that no queue got the message; return True if the entry is done."""
        self._warn_once(
            str(entry),
            "Letters for %s are lost there: %s. They are stored; this is logged once",
            "no queue is bound to it",
        )
        if not entry.exchange:  # a missing queue may be made again
            self._postpone(dead_letter_queue, entry)
        return bool(entry.exchange)  # a named one may have no subscribers

    def _warn_once(self, what: str, message: str, why: object) -> None:
        if what in self._warned:
            return
        self._warned[what] = None
        logger.warning(message, what, why)

    def _is_lost(self, entry: OutboxEntry) -> bool:
        """True if an entry's letter was removed unpublished, False if it may be stored yet."""
        now = time.monotonic()
        if now - self._missing.setdefault(entry, now) < interval("outbox_missing"):
            return False
        del self._missing[entry]
        logger.warning(
            "Letter %s was never published to %s: it was redriven or removed before",
            entry.letter_id,
            entry,
        )
        return True
