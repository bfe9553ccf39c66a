"""Letters in Redis Streams: one stream per dead-letter queue, found by id through a hash."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from typing import Any

from celery_dlq.backends.redis.connection import Wire, translated
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.backends.redis.scripts import MOST_IDS, ClaimReply, DeadLetterReply, Scripts
from celery_dlq.errors import CorruptLetter, StoreUnavailable
from celery_dlq.ports import (
    ClaimState,
    Group,
    Heading,
    MessageKey,
    QueueSummary,
    Stored,
    StoredLetter,
)
from celery_dlq.record import DeadLetter, end_of, from_micros, to_micros

logger = logging.getLogger("celery_dlq.store")

_PAGE_OF_HEADINGS = 50

PAGE = 200
"""Letters read at a time: more is slower and takes more memory."""

_CLAIMS = {
    ClaimReply.CLAIMED: ClaimState.CLAIMED,
    ClaimReply.RECLAIMED: ClaimState.RECLAIMED,
    ClaimReply.PUBLISHED: ClaimState.PUBLISHED,
    ClaimReply.HELD: ClaimState.HELD,
    ClaimReply.GONE: ClaimState.GONE,
}

RawPage = Sequence[tuple[str, Mapping[bytes, bytes]]]


class RedisStore:
    """The `DeadLetterStore` of Redis.

    Args:
        client: A redis-py client that answers bytes.
        url: For messages; its password is never shown.
        keys: Key names.
        ttl_seconds: How long late copies of a dead-lettered message are known to be dead.
    """

    def __init__(self, client: Any, url: str, keys: Keys, ttl_seconds: float = 72 * 3600.0) -> None:
        self._client = client
        self._url = url
        self._keys = keys
        self._ttl = int(ttl_seconds * 1000)
        self._scripts = Scripts.on(client)
        self._reader = Wire(client, url)

    def check(self) -> None:
        """Ask for a sign of life."""
        with translated(self._url):
            self._client.ping()

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter; see `DeadLetterStore.dead_letter`."""
        name, keys = letter.dead_letter_queue, self._keys
        facts = {
            "task_name": letter.task_name,
            "reason": letter.reason.value,
            "exception_type": letter.exception_type,
        }
        fields = [part for pair in letter.to_fields().items() for part in pair]
        end = end_of(letter)
        with translated(self._url):
            # The name first: a letter in a queue that no list shows would be lost to people.
            self._client.sadd(keys.queues(), name)
            reply = self._scripts.dead_letter(
                keys=[
                    keys.letters(name),
                    keys.ids(name),
                    keys.tally(name),
                    keys.run(key),
                    keys.ends(name),
                ],
                args=[
                    letter.id,
                    letter.reason.value,
                    letter.fingerprint,
                    to_micros(letter.dead_lettered_at),
                    json.dumps(facts),
                    key.retries,
                    self._ttl,
                    "" if end is None else to_micros(end),
                    *fields,
                ],
            )
        return Stored.NEW if reply == DeadLetterReply.STORED else Stored.ALREADY_THERE

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """One letter by its id."""
        with translated(self._url):
            entry = self._client.hget(self._keys.ids(dead_letter_queue), letter_id)
            if entry is None:
                return None
            found = self._range(dead_letter_queue, entry.decode(), entry.decode(), 1)
        return DeadLetter.from_fields(_named(found[0][1])) if found else None

    def ids(self, dead_letter_queue: str, prefix: str, *, most: int) -> list[str]:
        """Ids that begin with a text; walks the index in steps, never the letters."""
        key, found = self._keys.ids(dead_letter_queue), []
        with translated(self._url):
            for name, _entry in self._client.hscan_iter(
                key, match=f"{_literal(prefix)}*", count=1000
            ):
                found.append(name.decode())
                if len(found) >= most:
                    break
        return found

    def letters(self, dead_letter_queue: str, *, newest_first: bool) -> Iterator[StoredLetter]:
        """Read all letters page by page; see `DeadLetterStore.letters`."""
        pages = self._pages(dead_letter_queue, None, None, PAGE, newest_first=newest_first)
        for page in pages:
            for position, fields in page:
                try:
                    letter = DeadLetter.from_fields(_named(fields))
                except CorruptLetter as exc:  # it stops nothing
                    logger.warning("%s, entry %s: %s", dead_letter_queue, position, exc)
                else:
                    yield StoredLetter(position=position, letter=letter)

    def fields(
        self, dead_letter_queue: str, *, after: str | None, until: str, page_size: int
    ) -> Iterator[RawPage]:
        """Raw pages, oldest first; see `DeadLetterStore.fields`."""
        return self._pages(dead_letter_queue, after, until, page_size, newest_first=False)

    def last_position(self, dead_letter_queue: str) -> str | None:
        """The stream's last generated id."""
        with translated(self._url):
            if not self._client.exists(self._keys.letters(dead_letter_queue)):
                return None
            info = self._client.xinfo_stream(self._keys.letters(dead_letter_queue))
        return _text(info["last-generated-id"])

    def oldest(self, dead_letter_queue: str, *, after: str | None, most: int) -> list[Heading]:
        """The oldest letters; reads whole entries, so few of them at a time."""
        low = f"({after}" if after else "-"
        with translated(self._url):
            page = self._range(dead_letter_queue, low, "+", min(most, _PAGE_OF_HEADINGS))
        return [_heading(entry, fields) for entry, fields in page]

    def ended(self, dead_letter_queue: str, now: datetime, *, most: int) -> list[Heading]:
        """Letters past the end of their message's life, from the index."""
        with translated(self._url):
            ids = self._client.zrange(
                self._keys.ends(dead_letter_queue), "-inf", to_micros(now), byscore=True,
                offset=0, num=most,
            )  # fmt: skip
            entries = self._client.hmget(self._keys.ids(dead_letter_queue), ids) if ids else []
        return [
            Heading(position=_text(entry or b"0-0"), letter_id=_text(name), dead_lettered_at=None)
            for name, entry in zip(ids, entries, strict=True)
        ]

    def length(self, dead_letter_queue: str) -> int:
        """How many letters are there."""
        with translated(self._url):
            return int(self._client.xlen(self._keys.letters(dead_letter_queue)))

    def note_exported(self, dead_letter_queue: str, position: str) -> None:
        """Note how far the queue is exported; see `DeadLetterStore.note_exported`."""
        with translated(self._url):
            self._scripts.note_exported(
                keys=[self._keys.exported(dead_letter_queue)], args=[position]
            )

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """How far the queue is exported; see `DeadLetterStore.exported_until`."""
        with translated(self._url):
            noted = self._client.get(self._keys.exported(dead_letter_queue))
        last = self.last_position(dead_letter_queue) if noted is not None else None
        if last is None or _order(last) < _order(_text(noted)):
            return None
        return _text(noted)

    def names(self) -> list[str]:
        """The names of all dead-letter queues."""
        with translated(self._url):
            return sorted(name.decode() for name in self._client.smembers(self._keys.queues()))

    def queues(self) -> list[QueueSummary]:
        """All dead-letter queues with their size, age and reasons."""
        with translated(self._url):
            return [self._summary(name) for name in self.names()]

    def groups(self, dead_letter_queue: str) -> list[Group]:
        """The groups, from the tally: no letter is read."""
        with translated(self._url):
            tally = self._client.hgetall(self._keys.tally(dead_letter_queue))
        text = {name.decode(): value.decode() for name, value in tally.items()}
        prefix = "count:"
        prints = [name[len(prefix) :] for name in text if name.startswith(prefix)]
        groups = [_group(fingerprint, text) for fingerprint in prints]
        return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))

    def claim(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str, lease_seconds: float
    ) -> list[ClaimState]:
        """Claim letters; see `DeadLetterStore.claim`."""
        keys = [self._keys.ids(dead_letter_queue), self._keys.claims(dead_letter_queue)]
        states: list[ClaimState] = []
        with translated(self._url):
            for some in _chunks(letter_ids):
                args: list[Any] = [owner, int(lease_seconds * 1000), *some]
                states += [
                    _CLAIMS[ClaimReply(reply)]
                    for reply in self._scripts.claim(keys=keys, args=args)
                ]
        return states

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Note that these are on the broker: from now on anybody may finish the removal."""
        self._on_claims(self._scripts.mark_published, dead_letter_queue, letter_ids, owner, 0)

    def release(self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str) -> None:
        """Give unused claims back."""
        self._on_claims(self._scripts.release, dead_letter_queue, letter_ids, owner)

    def remove(self, dead_letter_queue: str, letter_ids: Iterable[str]) -> int:
        """Remove letters; see `DeadLetterStore.remove`."""
        keys, name = self._keys, dead_letter_queue
        places = [
            keys.letters(name), keys.ids(name), keys.tally(name), keys.claims(name),
            keys.ends(name),
        ]  # fmt: skip
        with translated(self._url):
            return sum(
                int(self._scripts.remove(keys=places, args=some))
                for some in _chunks(list(letter_ids))
            )

    def close(self) -> None:
        """Disconnect."""
        self._reader.close()
        with suppress(Exception):
            self._client.close()

    def _on_claims(
        self,
        script: Any,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *args: object,
    ) -> None:
        with translated(self._url):
            for some in _chunks(letter_ids):
                script(keys=[self._keys.claims(dead_letter_queue)], args=[*args, *some])

    def _summary(self, name: str) -> QueueSummary:
        stream = self._keys.letters(name)
        pipe = self._client.pipeline(transaction=False)
        pipe.xlen(stream)
        pipe.xrange(stream, count=1)
        pipe.xrevrange(stream, count=1)
        pipe.hgetall(self._keys.tally(name))
        length, oldest, newest, tally = pipe.execute()
        prefix = b"reason:"
        return QueueSummary(
            name=name,
            letters=length,
            oldest_at=_time_of(oldest),
            newest_at=_time_of(newest),
            reasons={
                field[len(prefix) :].decode(): int(count)
                for field, count in sorted(tally.items())
                if field.startswith(prefix)
            },
        )

    def _pages(
        self,
        dead_letter_queue: str,
        after: str | None,
        until: str | None,
        page_size: int,
        *,
        newest_first: bool,
    ) -> Iterator[RawPage]:
        # The end is fixed now: letters that arrive while we read are left out.
        until = until or self.last_position(dead_letter_queue)
        if until is None:
            return
        low, high = (f"({after}" if after else "-"), until
        while True:
            with translated(self._url):
                page = self._range(
                    dead_letter_queue, low, high, page_size, newest_first=newest_first
                )
            if page:
                yield page
            if len(page) < page_size:
                return
            last = page[-1][0]
            low, high = (low, f"({last}") if newest_first else (f"({last}", high)

    def _range(
        self, dead_letter_queue: str, low: str, high: str, count: int, *, newest_first: bool = False
    ) -> RawPage:
        """XRANGE without redis-py's reply callback, which costs more than Redis itself."""
        stream = self._keys.letters(dead_letter_queue)
        order = ("XREVRANGE", stream, high, low) if newest_first else ("XRANGE", stream, low, high)
        reply = self._read(*order, "COUNT", count)
        return [
            (entry.decode(), dict(zip(parts[::2], parts[1::2], strict=True)))
            for entry, parts in reply
        ]

    def _read(self, *command: Any) -> Any:
        """Read on the connection of our own; once more if it turns out to be a stale one."""
        try:
            return self._reader.call(*command)
        except StoreUnavailable:
            self._reader.close()
            self._reader = Wire(self._client, self._url)
            return self._reader.call(*command)


def _group(fingerprint: str, tally: Mapping[str, str]) -> Group:
    facts = json.loads(tally.get(f"facts:{fingerprint}", "{}"))
    return Group(
        fingerprint=fingerprint,
        letters=int(tally[f"count:{fingerprint}"]),
        task_name=facts.get("task_name", ""),
        reason=facts.get("reason", ""),
        exception_type=facts.get("exception_type"),
        first_seen_at=from_micros(int(tally.get(f"first:{fingerprint}", 0))),
        last_seen_at=from_micros(int(tally.get(f"last:{fingerprint}", 0))),
        example_id=tally.get(f"example:{fingerprint}", ""),
    )


def _named(fields: Mapping[bytes, bytes]) -> dict[str, bytes]:
    return {name.decode("utf-8", "replace"): value for name, value in fields.items()}


def _heading(entry: str, fields: Mapping[bytes, bytes]) -> Heading:
    return Heading(
        position=entry,
        letter_id=fields.get(b"id", b"").decode("utf-8", "replace"),
        dead_lettered_at=_time_of([(entry.encode(), fields)]),
    )


def _time_of(entries: Sequence[tuple[bytes, Mapping[bytes, bytes]]]) -> Any:
    for _entry, fields in entries:
        with suppress(KeyError, ValueError, OverflowError):
            return from_micros(int(fields[b"dead_lettered_at"]))
    return None


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _order(position: str) -> list[int]:
    return [int(part) for part in position.split("-")]


def _literal(text: str) -> str:
    """Text as a Redis pattern that matches only itself."""
    return "".join(f"\\{character}" if character in "*?[]\\^" else character for character in text)


def _chunks(letter_ids: Sequence[str]) -> Iterator[list[str]]:
    for start in range(0, len(letter_ids), MOST_IDS):
        yield list(letter_ids[start : start + MOST_IDS])
