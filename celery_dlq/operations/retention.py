"""Retention: trim letters past their time to live or over the maximum length of their queue.

Only retention removes letters without an operator. Each pass is bounded, letters claimed by a
redrive are skipped, and every trimming is a `Change` in the audit.

A letter's time to live begins when it is stored, by the store's clock. Workers' clocks may be
hours off; they are not used here. What an operator has it remove goes to the bin. No letter is
trimmed that an export's folder in use still lacks. What nothing bounds, the server may delete by
itself: `MemoryCheck` warns of that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.config import Settings
from celery_dlq.events import Action, Change, Events, on_behalf_of
from celery_dlq.letters.printable import get_logger, some_of, url_without_secrets
from celery_dlq.letters.record import iso
from celery_dlq.operations.instructions import Audit
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.address import SCHEMES, SOCKETS
from celery_dlq.store.claims import REMOVES
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import (
    ClaimState,
    LetterSummary,
    QueueStatus,
    ServerMemory,
    ordered,
)
from celery_dlq.store.workers import WorkerRegistry

logger = get_logger("celery_dlq.operations.retention")

KEPT_IN_BIN = timedelta(hours=24)
"""What an operator removed can be restored for this long."""

MAX_LETTERS_PER_PASS = 500
"""One pass over one queue trims at most this many letters for one cause."""

QUEUES_READ_PER_TICK = 20
"""A worker reads the length and the oldest times of this many queues per tick."""

QUEUES_PER_TICK = 3
"""A worker trims at most this many queues per tick."""

REST_TICKS = 19
"""After all queues, a worker with nothing to trim skips this many ticks."""

_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_REDIS_PORT = 6379
_TRIMMABLE = (ClaimState.CLAIMED, ClaimState.RECLAIMED, ClaimState.PUBLISHED)


class Retention:
    """Trims dead-letter queues by their policies."""

    def __init__(
        self, store: Letters, registry: WorkerRegistry, events: Events, actor: str
    ) -> None:
        self._store = store
        self._audit = Audit(registry, events)
        self._actor = actor

    def trim(
        self,
        dead_letter_queue: str,
        policy: Policy | None,
        *,
        dry_run: bool = False,
        to_bin: bool = False,
    ) -> list[Change]:
        """Trim a queue in one bounded pass."""
        name, policy, at = dead_letter_queue, policy or Policy(), self._store.now()
        changes = []
        with on_behalf_of(self._actor):
            for cause, chosen in self._letters_to_trim(name, policy, at, MAX_LETTERS_PER_PASS):
                owner = f"trim {uuid4()}{REMOVES}"
                found = chosen if dry_run else self._claimed(name, chosen, owner)
                if not found:
                    continue
                detail = _audit_detail(cause, getattr(policy, cause, None), found)
                if to_bin:
                    detail["kept_until"] = iso(at + KEPT_IN_BIN)
                change: Change | None = self._audit.change(
                    Action.TRIMMED, name, detail, letters=len(found)
                )
                if not dry_run:
                    change = self._removed(name, found, owner, detail, to_bin=to_bin)
                changes += [] if change is None else [change]
        return changes

    def trim_all(
        self, dead_letter_queue: str, policy: Policy | None, *, to_bin: bool = False
    ) -> list[Change]:
        """Repeat passes until nothing is left to trim; bounded by the letters there are now."""
        most = self._store.length(dead_letter_queue) // MAX_LETTERS_PER_PASS + 1
        totals: dict[str, Change] = {}
        for _ in range(most):
            changes = self.trim(dead_letter_queue, policy, to_bin=to_bin)
            for change in changes:
                before = totals.get(change.detail["cause"])
                letters = change.letters + (before.letters if before else 0)
                totals[change.detail["cause"]] = replace(change, letters=letters)
            if not changes:
                break
        return list(totals.values())

    def due_queues(self, policies: Mapping[str, Policy | None]) -> list[str]:
        """The queues that have something to trim, judged by their length and oldest times."""
        found = self._store.overviews.statuses(list(policies))
        return [status.name for status in found if _is_due(status, policies[status.name])]

    def count_trimmable(
        self, dead_letter_queue: str, policy: Policy, at: datetime, most: int
    ) -> int:
        """How many of today's letters would be trimmed at a time; counted up to a bound."""
        every = self._letters_to_trim(dead_letter_queue, policy, at, most)
        found = {summary.letter_id for _cause, chosen in every for summary in chosen}
        return min(len(found), most)

    def _letters_to_trim(
        self, name: str, policy: Policy, at: datetime, most: int
    ) -> Iterator[tuple[str, list[LetterSummary]]]:
        """The letters of one pass by the rule that removes them; each is read after the one before.

        None that a folder of an export in use still lacks, unless that has a filter.
        """
        store, lacking = self._store, self._store.lacking(name)[:1]
        rules: dict[str, Callable[[], Iterable[LetterSummary]]] = {
            "dead_letter_ttl": lambda: self._too_old(name, policy, at, 2 * most),
            "expires": lambda: (
                () if policy.dead_letter_ttl else store.expired_letters(name, most=most)
            ),
            "dead_letter_max_length": lambda: self._too_many(name, policy),
        }
        for cause, find in rules.items():
            found = islice(find(), most)
            yield (
                cause,
                [
                    one
                    for one in found
                    if all(ordered(one.position) <= ordered(its.position) for its in lacking)
                ],
            )

    def _too_old(
        self, name: str, policy: Policy, at: datetime, scanned: int
    ) -> Iterator[LetterSummary]:
        if not policy.dead_letter_ttl:
            return
        limit = at - timedelta(seconds=policy.dead_letter_ttl)
        for summary in islice(self._oldest_letters(name), scanned):  # unreadable entries included
            if summary.dead_lettered_at is None or summary.stored_at is None:
                continue  # an entry that is no letter stays until it is discarded
            if summary.stored_at > limit:
                return  # the others were stored later
            yield summary

    def _too_many(self, name: str, policy: Policy) -> Iterator[LetterSummary]:
        if policy.dead_letter_max_length:
            over = self._store.length(name) - policy.dead_letter_max_length
            yield from islice(self._oldest_letters(name), max(0, over))

    def _oldest_letters(self, name: str) -> Iterator[LetterSummary]:
        after = None
        while page := self._store.oldest_letters(name, after=after, most=MAX_LETTERS_PER_PASS):
            yield from page
            after = page[-1].position

    def _claimed(self, name: str, chosen: list[LetterSummary], owner: str) -> list[LetterSummary]:
        """Claim letters; one that a redrive has claimed stays."""
        if not chosen:
            return []
        ids = [each.letter_id for each in chosen]
        lease = timing.current.claim
        states = self._store.claims.claim(name, ids, owner=owner, lease_seconds=lease)
        pairs = zip(chosen, states, strict=True)
        return [each for each, state in pairs if state in _TRIMMABLE]

    def _removed(
        self,
        name: str,
        found: list[LetterSummary],
        owner: str,
        detail: Mapping[str, Any],
        *,
        to_bin: bool,
    ) -> Change | None:
        """Remove letters; what the audit says of it."""
        ids = [each.letter_id for each in found]
        keep_seconds = KEPT_IN_BIN.total_seconds() if to_bin else 0.0
        entry = self._audit.counted(self._store, owner, Action.TRIMMED, name, detail)
        entry.open()
        self._store.remove(name, ids, owner=owner, keep_seconds=keep_seconds, operation=owner)
        change = entry.close()
        if change is not None:
            _log_change(change)
        return change


def _audit_detail(cause: str, limit: Any, found: list[LetterSummary]) -> dict[str, Any]:
    """What the audit says of letters that are trimmed."""
    died = [each.dead_lettered_at for each in found if each.dead_lettered_at is not None]
    oldest, newest = iso(min(died, default=None)), iso(max(died, default=None))
    return {"cause": cause, "limit": limit, "oldest_at": oldest, "newest_at": newest}


def _log_change(change: Change) -> None:
    oldest, newest = change.detail["oldest_at"], change.detail["newest_at"]
    logger.warning(
        "Trimmed %d letters from %s because of %s%s",
        change.letters,
        change.target,
        change.detail["cause"],
        f": dead-lettered {oldest} to {newest}" if oldest else "",
    )


def _is_due(status: QueueStatus, policy: Policy | None) -> bool:
    policy = policy or Policy()
    max_length, ttl = policy.dead_letter_max_length, policy.dead_letter_ttl
    if max_length and status.letters > max_length:
        return True
    if not ttl:
        return status.first_end_at is not None and status.first_end_at <= status.at
    stored_at = status.oldest_stored_at
    return stored_at is not None and stored_at <= status.at - timedelta(seconds=ttl)


class RetentionRound:
    """Visits the dead-letter queues of an app in turn, some in a tick."""

    def __init__(
        self, retention: Retention, store: Letters, table: Callable[[], PolicyTable]
    ) -> None:
        self._retention = retention
        self._store = store
        self._table = table
        self._names: list[str] = []
        self._more: list[str] = []
        self._pause = 0

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
        due = self._retention.due_queues(policies)
        self._more = due[QUEUES_PER_TICK:]
        for number, name in enumerate(due[:QUEUES_PER_TICK], 1):
            to_bin = table.trims_by_override(name)
            if self._retention.trim(name, policies[name], to_bin=to_bin):
                self._more = [*due[number:], name]
                break
        self._pause = 0 if self._more or self._names else REST_TICKS


class MemoryCheck:
    """Finds what endangers an app's letters in the memory of Redis."""

    def __init__(
        self,
        settings: Settings,
        table: PolicyTable,
        queues: Iterable[str],
        conf: Any,
        read: Callable[[], ServerMemory | None],
    ) -> None:
        self._settings = settings
        self._table = table
        self._queues = queues
        self._conf = conf
        self._read = read

    def memory(self) -> ServerMemory | None:
        """The memory of the Redis that keeps counts and letters; ``None`` if unknown."""
        return self._read()

    def warnings(self, memory: ServerMemory | None = None) -> list[str]:
        """What endangers letters or counts, a line each with what to do; empty if unknown.

        ``memory`` is what was read before, if it was.
        """
        memory = memory or self._read()
        if memory is None or not (self._table.queues or self._table.tasks):
            return []
        unbounded, found = self._table.unbounded(self._queues), memory_faults(memory)
        if unbounded and is_brokers(self._settings, self._conf):
            text = f"The letters of {some_of(unbounded)} are kept for ever in the broker's Redis"
            mend = (
                "set dead_letter_ttl or dead_letter_max_length, or give them a Redis of their own"
            )
            found = [(text, f"{mend} (dlq_url)"), *found]
        return [f"{text}: {mend}" for text, mend in found]


def is_brokers(settings: Settings, conf: Any) -> bool:
    """True if letters and the broker's messages are on one server."""
    address, _prefix = settings.store_at(conf)
    urls = conf.broker_write_url
    broker = urls.split(";") if isinstance(urls, str) else urls or ()
    servers = {server_of(url) for url in broker if str(url).partition("://")[0] in SCHEMES}
    return not servers.isdisjoint(map(server_of, address.urls))


def memory_faults(memory: ServerMemory) -> list[tuple[str, str]]:
    """What endangers letters or counts in a server's memory, each with what to do."""
    if not memory.maximum:
        text = (
            "The Redis of the letters has no maxmemory, so they may take all memory of its "
            "machine, and dlq_memory_limit does nothing"
        )
        return [(text, "set maxmemory")]
    policy = f"(maxmemory-policy is {memory.policy})"
    if memory.policy.startswith("allkeys"):
        text = f"At its maxmemory Redis may delete letters and counts of deliveries {policy}"
        return [(text, "set noeviction")]
    if memory.policy.startswith("volatile"):
        text = "At its maxmemory Redis may delete counts of deliveries, and a message is then"
        return [(f"{text} counted from 1 again {policy}", "set noeviction")]
    return []


def server_of(url: object) -> tuple[str, str]:
    """Host and port, or the path of a socket; databases of one server share its memory."""
    parts = urlsplit(url_without_secrets(str(url)))
    if parts.scheme in SOCKETS:
        return ("", parts.path)
    host = parts.hostname or "localhost"
    return ("localhost" if host in _LOOPBACK else host, str(parts.port or _REDIS_PORT))
