"""Letters in Redis streams: one stream per dead-letter queue, and a hash from ids to entries."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from enum import Enum
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters.packed import letter_from
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, from_micros, to_micros
from celery_dlq.store.claims import Claims, chunks
from celery_dlq.store.keys import Keys, spelled, text_of
from celery_dlq.store.lease import Lease
from celery_dlq.store.new_letters import FACTS, NewLetters
from celery_dlq.store.overviews import Overviews, moment
from celery_dlq.store.part import of_each
from celery_dlq.store.records import (
    FIRST_POSITION,
    Choice,
    ExportFolder,
    LetterSummary,
    RawPage,
    StoredLetter,
    ordered,
)

if TYPE_CHECKING:
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.store.store import Store
    from celery_dlq.store.stream import StreamReader

logger = get_logger("celery_dlq.store")

_SUMMARIES_PER_PAGE = 50

PAGE = 200
"""Letters per page; larger pages are slower and take more memory."""

FOLDER_IN_USE = timedelta(days=30)
"""An export's folder is in use for so long after the last sign of life of an export to it."""

_REMOVED_PER_CALL = 100  # takes a few milliseconds, in which Redis serves nobody else


class Restored(Enum):
    """Result of restoring a letter from the bin."""

    NOT_THERE = 0
    RESTORED = 1
    TAKEN = 2  # the queue has another letter of this id


class Letters(NewLetters):
    """Stores, reads and removes letters."""

    def __init__(
        self, store: Store, keys: Keys | None = None, ttl_seconds: float | None = None
    ) -> None:
        super().__init__(store, keys, ttl_seconds)
        self.overviews = Overviews(store, keys)
        self.claims = Claims(store, keys, self._ttl_millis)

    @cached_property
    def _reader(self) -> StreamReader:
        from celery_dlq.store.stream import StreamReader  # noqa: PLC0415 - a claim reads none

        return StreamReader(self._client, self._store.url)

    def narrowed(self, _where: LetterFilter, _reads: set[str] | None = None) -> Letters:
        """Return what reads the letters that may match a filter: here, all are read."""
        return self

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """Return one letter by its id."""
        found = self.entry(dead_letter_queue, letter_id)
        return letter_from(found[1]) if found else None

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Return the position and raw fields of one entry, or ``None``."""
        key = self._keys.ids(dead_letter_queue)
        entry = self._client.hget(key, spelled(letter_id))
        place = text_of(entry) if entry else letter_id
        if not is_position(place):
            return None
        found = self._reader.entry_at(self._keys.letters(dead_letter_queue), place)
        return found[0] if found else None

    def named(
        self, dead_letter_queue: str, letter_ids: Iterable[str]
    ) -> Iterator[tuple[str, Mapping[bytes, bytes]]]:
        """Iterate over the position and raw fields of those of the given entries that are there."""
        for letter_id in letter_ids:
            found = self.entry(dead_letter_queue, letter_id)
            if found is not None:
                yield found

    def present(self, dead_letter_queue: str, letter_ids: Sequence[str]) -> list[str]:
        """Return those of the given ids whose letters are in a queue."""
        key, found = self._keys.ids(dead_letter_queue), []
        for some in chunks(letter_ids):
            entries = self._client.hmget(key, some)
            found += [one for one, entry in zip(some, entries, strict=True) if entry]
        return found

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Find letters whose ids begin with a prefix; reads ids only where it can."""
        found: list[tuple[str, str]] = []
        match = f"{_literal(spelled(prefix))}*"

        def ask(pipe: Any, name: str) -> None:
            pipe.hscan(self._keys.ids(name), match=match, count=1000)

        for name, ((cursor, first),) in of_each(self._client, dead_letter_queues, ask):
            more = self._client.hscan_iter(self._keys.ids(name), match=match, count=1000)
            some = (letter_id for letter_id, _entry in more) if cursor else first
            found += [(name, text_of(i)) for i in islice(some, most - len(found))]
            if len(found) == most:
                break
        return found

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """Iterate over all letters, reading bounded pages.

        Letters that arrive meanwhile are left out: the end is fixed at the first page.
        Entries that are not readable letters are skipped and logged.
        """
        for page in self.fields(dead_letter_queue, newest_first=newest_first):
            for position, fields in page:
                try:
                    letter = letter_from(fields)
                except CorruptLetter as exc:  # skip it
                    logger.warning("%s, entry %s: %s", dead_letter_queue, position, exc)
                else:
                    yield StoredLetter(position=position, letter=letter)

    def fields(
        self,
        dead_letter_queue: str,
        *,
        after: str | None = None,
        until: str | None = None,
        page_size: int = PAGE,
        newest_first: bool = False,
        choice: Choice | None = None,
    ) -> Iterator[RawPage]:
        """Iterate over raw pages, bounded in entries and bytes; includes entries of any kind.

        With a choice, Redis sends the chosen letters and fields only, oldest first.
        """
        # The end is fixed now: letters that arrive during the reading are left out.
        until = until or self.last_position(dead_letter_queue)
        if until is not None:
            stream = self._keys.letters(dead_letter_queue)
            unnoted = choice is not None or self._keys.successes_only  # a large sample has no note
            tally = "" if unnoted else self._keys.tally(dead_letter_queue)
            yield from self._reader.pages(
                stream, after, until, page_size, tally, newest_first=newest_first, choice=choice
            )

    def last_position(self, dead_letter_queue: str) -> str | None:
        """Return the position of the newest letter ever stored, or ``None``."""
        end = self._end_of_queue(dead_letter_queue)
        return text_of(end[0]) if end else None

    def stored_ever(self, dead_letter_queue: str) -> int | None:
        """Return the number of entries ever added, which Redis counts since 7.0."""
        end = self._end_of_queue(dead_letter_queue)
        return 0 if not end else int(end[1]) if end[1] != b"" else None

    def left_count(self, dead_letter_queue: str) -> int:
        """Return the number of letters that left a queue, and did not come back from its bin.

        It is 0 before Redis 7.0, which does not count what was added.
        """
        stored = self.stored_ever(dead_letter_queue) or 0
        restored = self._client.hget(self._keys.tally(dead_letter_queue), "restored")
        return max(0, stored - int(restored or 0) - self.length(dead_letter_queue))

    def oldest_letters(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """Return the entries stored first, after a position.

        At most ``most``; may be fewer, but is empty only at the end.
        """
        low = f"({after}" if after else "-"
        count = min(most, _SUMMARIES_PER_PAGE)
        page = self._reader.first_page(self._keys.letters(dead_letter_queue), low, "+", count)
        return [
            LetterSummary(
                position=entry,
                letter_id=fields.get(b"id", b"").decode("utf-8", "replace"),
                dead_lettered_at=moment(fields.get(b"dead_lettered_at", b"")),
            )
            for entry, fields in page
        ]

    def expired_letters(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Return at most ``most`` letters whose messages have expired since they were stored."""
        now = to_micros(self.now())
        ids = self._client.zrange(
            self._keys.ends(dead_letter_queue), "-inf", now, byscore=True, offset=0, num=most
        )
        entries = self._client.hmget(self._keys.ids(dead_letter_queue), ids) if ids else []
        places = [text_of(entry or b"0-0") for entry in entries]
        return [
            LetterSummary(position=place, letter_id=text_of(name))
            for name, place in zip(ids, places, strict=True)
        ]

    def export_folders(self, dead_letter_queue: str) -> list[ExportFolder]:
        """Return the folders to which a queue was exported in the last 90 days.

        The store has a copy of each folder's progress; see `celery_dlq.export.checkpoint`.
        """
        of = "successes" if self._keys.successes_only else None
        noted = self._client.hgetall(self._keys.leases(dead_letter_queue))
        found = (_export_folder(text_of(key), text_of(text), of) for key, text in noted.items())
        return [one for one in found if one is not None]

    def note_export(self, dead_letter_queue: str) -> None:
        """Say that letters of a queue are in files, before the first one is: see `Claims`."""
        self._client.hset(self._keys.tally(dead_letter_queue), "exported", 1)

    def lacking(self, dead_letter_queue: str, *, but: str = "") -> list[ExportFolder]:
        """Return the folders in use without a filter, but for one; first what lacks most letters.

        Whatever removes letters that nobody has looked at removes none after its position.
        """
        others = [
            one
            for one in self.export_folders(dead_letter_queue)
            if one.key != but and not one.filtered
        ]
        if not others:
            return []
        since, end = self.now() - FOLDER_IN_USE, self.last_position(dead_letter_queue)
        found = []
        for one in others:
            # A queue that ends before was made anew, or lost its end: the folder has none of it.
            beyond = ordered(one.position) > ordered(end or FIRST_POSITION)
            has = replace(one, position=FIRST_POSITION) if beyond else one
            if one.seen_at >= since:
                found.append(has)
        return sorted(found, key=lambda one: ordered(one.position))

    def identity(self) -> str:
        """Return a random id, made by the first call, that the store keeps for ever.

        A restarted or restored store, and a replica, have the same; an emptied one has not.
        """
        key = self._keys.identity()
        found = self._client.get(key)  # alone, it also works on a Redis that is full
        if found is None:
            self._client.set(key, uuid4().hex, nx=True)
            found = self._client.get(key)
        return text_of(found)

    def remove(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str | None = None,
        keep_seconds: float = 0.0,
        wanted: bool = False,
        operation: str = "",
    ) -> int:
        """Remove letters and their claims; return the number of letters removed.

        Of an ``operation`` it is the number that all of its calls have removed, also if a reply
        was lost or a process killed. With ``keep_seconds`` they are in the bin for so long. With
        ``owner`` only letters that it has claimed, which makes a repetition harmless. With
        ``wanted`` somebody wants them gone: a late copy of a message runs, since there is no
        letter that it could be a copy of.
        """
        args, removed = (owner or "", int(keep_seconds * 1000), int(wanted), operation), 0
        key = self._keys.operation(dead_letter_queue, operation)
        for some in chunks(list(letter_ids), _REMOVED_PER_CALL):
            reply = self._run_script("remove", *args, *some, queue=dead_letter_queue, operation=key)
            removed = int(reply) if operation else removed + int(reply)
        return removed

    def restore(self, dead_letter_queue: str, letter_id: str, *, operation: str = "") -> Restored:
        """Put a discarded letter back as the newest of its queue, in one atomic step."""
        keys, name = self._keys, spelled(letter_id)
        place = self._client.hget(keys.binned(dead_letter_queue), name)
        page = self._reader.entry_at(keys.bin(dead_letter_queue), place.decode()) if place else []
        facts = _group_facts(page[0][1]) if page else "{}"
        key = self._keys.operation(dead_letter_queue, operation)
        args = (name, facts, int(bool(operation)))
        reply = self._run_script("restore", *args, queue=dead_letter_queue, operation=key)
        return Restored(reply)

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Return those of the given queues whose bin is not empty."""
        found = of_each(
            self._client,
            dead_letter_queues,
            lambda pipe, name: pipe.exists(self._keys.binned(name)),
        )
        return [name for name, (there,) in found if there]

    def discarded(
        self,
        dead_letter_queue: str,
        *,
        after: str | None = None,
        until: str | None = None,
        newest_first: bool = True,
    ) -> Iterator[RawPage]:
        """Iterate over raw pages of the bin, between two of its positions.

        The field ``~key`` holds the id that `restore` takes, ``~job`` the operation that put the
        letter there.
        """
        key = self._keys.bin(dead_letter_queue)
        return self._reader.pages(key, after, until or "+", PAGE, newest_first=newest_first)

    def lease(self, dead_letter_queue: str, name: str, owner: str, seconds: float) -> Lease:
        """Return an owner's lease; nothing is sent yet."""
        return Lease(self._store, dead_letter_queue, name, owner, seconds)

    def close(self) -> None:
        """Close connections. Never raises."""
        if "_reader" in self.__dict__:
            self._reader.close()
        self.claims.close()
        self._connection.close()
        with suppress(Exception):
            self._client.close()

    def _end_of_queue(self, dead_letter_queue: str) -> Sequence[Any]:
        reply: Sequence[Any] = self._run_script("end_of_queue", queue=dead_letter_queue)
        return reply


def is_position(text: str) -> bool:
    """Return True if a text has the form of a stream entry's id."""
    first, dash, second = text.partition("-")
    return dash == "-" and all(part.isascii() and part.isdigit() for part in (first, second))


def _export_folder(key: str, text: str, of: str | None) -> ExportFolder | None:
    """Read what a lease says of a folder, or ``None``: it is about something else, or damaged."""
    try:
        _owner, ends, state = text.split("|", 2)
        known = json.loads(state)
        if known.get("of") != of:
            return None
        trimmed = [known.get(name) or FIRST_POSITION for name in ("trimmed", "trimming")]
        folder = ExportFolder(
            key=key,
            name=str(known["name"]),
            seen_at=from_micros(int(ends) * 1000),
            position=known["position"] or FIRST_POSITION,
            trimmed=max(trimmed, key=ordered),
            trimmed_letters=int(known.get("trimmed_letters", 0)),
            filtered=known.get("filtered") is True,
        )
        return folder if ordered(folder.position) else None
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError):
        return None


def _group_facts(fields: Mapping[bytes, bytes]) -> str:
    """Return the facts of a group, from one of its letters."""
    values = {name: fields.get(name.encode()) for name in FACTS}
    return json.dumps(
        {
            name: None if value is None else value.decode("utf-8", "replace")
            for name, value in values.items()
        }
    )


def _literal(text: str) -> str:
    """Return the Redis pattern that matches only this text."""
    return "".join(f"\\{character}" if character in "*?[]\\^" else character for character in text)
