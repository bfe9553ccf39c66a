"""Retention: trim letters past their time to live or over the maximum length of their queue.

Only retention removes letters without an operator. Each pass is bounded, letters claimed by a
redrive are skipped, and every trimming is a `Change` in the audit.

A letter's time to live begins when it is stored, by the store's clock. Workers' clocks may be
hours off; they are not used here. What an operator has it remove goes to the bin. No letter is
trimmed that an export's folder in use still lacks. Workers trim some queues at a time
(`celery_dlq.operations.retention_round`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import Any
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.events import Action, Change, Events, on_behalf_of
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import iso
from celery_dlq.operations.instructions import Audit
from celery_dlq.policies.policy import Policy
from celery_dlq.store.claims import REMOVES, ClaimState
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import LetterSummary, QueueStatus, ordered
from celery_dlq.store.workers import WorkerRegistry

logger = get_logger("celery_dlq.operations.retention")

KEPT_IN_BIN = timedelta(hours=24)
"""What an operator removed can be restored for this long."""

MAX_LETTERS_PER_PASS = 500
"""One pass over one queue trims at most this many letters for one cause."""

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
