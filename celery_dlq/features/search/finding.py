"""Finds queues, causes and letters in all queues, as far as a page may wait for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import NotFound
from celery_dlq.features.search.places import Places
from celery_dlq.features.search.words import Asked
from celery_dlq.letters.conditions import all_hold
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.operations.reading import ID_LENGTH
from celery_dlq.policies.policy import DLQ_SUFFIX
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.store.records import has_text

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.operations.redrive.select import RawEntry
    from celery_dlq.store.records import Group

MOST = 20
"""Queues, causes or letters that a page names of each."""

MOST_COUNTED = 1_000
"""Letters of a queue that match, before they are counted as more."""

NAMES_SECONDS = 0.01
LEAST_QUEUES = 8  # of which the newest letters are searched, whatever the time
_CAUSES_AT_ONCE, _SEARCHED_IN_TIME = 200, 2_000
_MOST_OF_TASK = 200  # queues, the busiest, in which a task is looked for
_OF_CAUSES = frozenset({"task_name", "reason", "exception_type", "release", "fingerprint"})
"""Fields of a filter that say something of causes."""


@dataclass(slots=True, kw_only=True)
class InQueue:
    """What was found in one queue."""

    queue: str
    total: int  # Its letters
    where: LetterFilter
    entries: Sequence[RawEntry] = ()
    exact: bool = True  # False if there may be more: it was not searched to its end
    scanned: int = 0
    older: str | None = None  # Cursor of the list of letters, from which the search goes on

    @property
    def letters(self) -> int:
        """How many were found."""
        return len(self.entries)


@dataclass(slots=True, kw_only=True)
class Found:
    """What was found."""

    queues: list[str] = field(default_factory=list)
    causes: list[tuple[str, Group]] = field(default_factory=list)
    by_id: list[tuple[str, RawEntry]] = field(default_factory=list)
    letters: list[InQueue] = field(default_factory=list)
    searched: int = 0  # Queues
    left: int = 0  # Queues that were not searched
    first: int = 0  # The number of the first one that was
    of_task: bool = False  # True if ``by_id`` are of a task, among the newest letters of queues
    older: int = 0  # Queues with older letters, in which the task was not looked for
    hurried: bool = False  # True if causes, or ids that begin so, may be missing: time ran out


def queues_of(asked: Asked, known: Mapping[str, Any]) -> list[str]:
    """The queues to search, the busiest first."""
    if not asked.queue:
        return [*known]
    found = [name for name in (asked.queue, f"{asked.queue}{DLQ_SUFFIX}") if name in known]
    if not found:
        hint = did_you_mean(asked.queue, [*known])
        raise NotFound(f"expected the name of a dead-letter queue, got {asked.queue!r}{hint}")
    return found[:1]


class Finder:
    """Searches the queues of an app."""

    def __init__(self, assembly: Assembly) -> None:
        self._reading = assembly.reading()
        self._places = assembly.backend.part(Places)

    def find(self, asked: Asked, first: int = 0) -> Found:
        """Search names and indexes, and then the newest letters, from one queue on."""
        known = self._reading.busiest()
        names, found = queues_of(asked, known), Found(first=first)
        until = time.monotonic() + NAMES_SECONDS
        if not first and asked.text:
            text = asked.text.casefold()
            found.queues = [one for one in names if text in one.casefold()][:MOST]
            found.by_id = [*islice(self._letters_by_id(names, text, until), MOST)]
            if not found.by_id and len(text) == ID_LENGTH and not asked.where:
                queues = [name for name in names if known[name][0]]
                found.older += len(queues[_MOST_OF_TASK:])
                some = queues[:_MOST_OF_TASK]
                found.by_id = [*islice(self._letters_of_task(found, some, asked.text), MOST)]
            if found.by_id and len(text) >= ID_LENGTH:
                return found
        if not first:
            found.causes = [*islice(self._causes(names, asked, until), MOST)]
            found.hurried = time.monotonic() >= until and len(found.causes) < MOST
        if asked.text or asked.where:
            with_letters = [name for name in names if known[name][0]]
            self._search(found, asked, with_letters[first:], known)
        return found

    def _letters_by_id(
        self, names: Sequence[str], word: str, until: float
    ) -> Iterator[tuple[str, RawEntry]]:
        for queue, letter_id in self._places.of_letter(names, word, until):
            with suppress(NotFound):
                yield self._reading.entry(letter_id, queue, whole=True)

    def _letters_of_task(
        self, found: Found, names: Sequence[str], task_id: str
    ) -> Iterator[tuple[str, RawEntry]]:
        """The letters of a task among the newest of every queue; each queue is looked at."""
        found.of_task, wanted = True, (_named(task_id),)
        for queue, more, ids in [*self._places.of_task(names, task_id)]:
            found.older += more
            for letter_id in ids:
                with suppress(NotFound):
                    entry = self._reading.entry(letter_id, queue, whole=True)[1]
                    if entry.text("task_id") == task_id or all_hold(wanted, entry.text):
                        yield queue, entry

    def _causes(
        self, names: Sequence[str], asked: Asked, until: float
    ) -> Iterator[tuple[str, Group]]:
        """The causes whose names have the text, or that the filter means."""
        wanted, given = asked.where, asked.where.to_json()
        digits = asked.text.casefold() if not given else wanted.fingerprint or ""
        seen = set[tuple[str, str]]()
        for queue, fingerprint in self._places.of_cause(names, digits, until):
            with suppress(NotFound):
                seen.add((queue, fingerprint))
                yield queue, self._reading.group(queue, fingerprint)
        if not given.keys() <= _OF_CAUSES or not (asked.text or given):
            return
        for queue in names:
            if time.monotonic() >= until:
                return
            for group in self._reading.groups(queue, by="newest", limit=_CAUSES_AT_ONCE):
                if (queue, group.fingerprint) not in seen and _is_of(group, asked):
                    yield queue, group

    def _search(
        self, found: Found, asked: Asked, names: Sequence[str], known: Mapping[str, Any]
    ) -> None:
        """Search each queue for its share of the time, by what there is to search."""
        until = time.monotonic() + timing.current.page
        filters = [asked.letters]
        if len(asked.text) == ID_LENGTH and not asked.where:
            filters.append(LetterFilter(conditions=(_named(asked.text),)))
        sizes = [min(known[queue][0], _SEARCHED_IN_TIME) for queue in names]
        for queue, size in zip(names, sizes, strict=True):
            left = until - time.monotonic()
            if left <= 0 and found.searched >= LEAST_QUEUES:
                break
            others = sizes[found.searched : found.searched + MOST]
            share = left * size / sum(others) / len(filters)
            for where in filters:
                one = self._in_queue(queue, where, max(share, 0.0), known[queue][0])
                if one.letters or not one.exact:
                    found.letters.append(one)
            found.searched += 1
        found.left = len(names) - found.searched

    def _in_queue(self, queue: str, where: LetterFilter, seconds: float, total: int) -> InQueue:
        page = self._reading.page(queue, where, size=MOST_COUNTED, deadline_seconds=seconds)
        return InQueue(
            queue=queue,
            total=total,
            where=where,
            entries=page.entries,
            exact=page.older is None,
            scanned=page.scanned,
            older=page.older,
        )


def _named(task_id: str) -> str:
    """The condition that a message is of a task."""
    return f"headers.id={json.dumps(task_id)}"


def _is_of(group: Group, asked: Asked) -> bool:
    """True if a cause has the text in its names, and is one that the filter means."""
    where, exception = asked.where, group.exception_type or ""
    return (
        has_text(group, asked.text.casefold())
        and where.task_name in (None, group.task_name)
        and (where.reason is None or str(where.reason) == group.reason)
        and where.exception_type in (None, exception, exception.rpartition(".")[2])
        and (where.release is None or where.release in group.releases)
        and group.fingerprint.startswith(where.fingerprint or "")
    )
