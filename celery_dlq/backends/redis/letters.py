"""Letters in Redis Streams: one stream per dead-letter queue, found by id through a hash."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from hashlib import sha1
from itertools import islice
from typing import Any

import redis

from celery_dlq.backends.base import (
    Capabilities,
    ClaimState,
    ExportLease,
    Glance,
    Group,
    LetterSummary,
    MessageKey,
    QueueSummary,
    RawPage,
    RedriveOutcome,
    Restored,
    Stored,
    StoredLetter,
    ordered,
)
from celery_dlq.backends.redis.connect import Command, PipelinedConnection, translated
from celery_dlq.backends.redis.keys import Keys, spelled
from celery_dlq.backends.redis.many import of_each
from celery_dlq.backends.redis.read_ahead import ReadAhead
from celery_dlq.backends.redis.scripts import (
    MOST_IDS,
    ClaimReply,
    DeadLetterReply,
    ExportLeaseReply,
    RestoreReply,
    Scripts,
    source,
)
from celery_dlq.errors import CorruptLetter, StoreUnavailable
from celery_dlq.letters.packed import fields_of, packed
from celery_dlq.logs import get_logger
from celery_dlq.record import DeadLetter, Delivery, Reason, end_of, from_micros, to_micros

logger = get_logger("celery_dlq.store")

_PAGE_OF_SUMMARIES = 50
_MOST_NAMED = 1000
_DEAD_LETTER = source("dead_letter")
_DEAD_LETTER_DIGEST = sha1(_DEAD_LETTER.encode(), usedforsecurity=False).hexdigest()

PAGE = 200
"""Letters read at a time: more is slower and takes more memory."""

PAGE_BYTES = 8 * 1024 * 1024
"""A page that turned out larger is followed by pages of fewer letters."""

_FIRST_PAGE = 1  # nothing is known of their size yet
_WEIGHED = 64
_GROWTH = 5
_REMOVED_AT_ONCE = 100  # a few milliseconds, in which Redis answers nobody else
_HOUR = 60  # minutes
_FACTS = ("task_name", "reason", "exception_type")

CLAIMS = {
    ClaimReply.CLAIMED: ClaimState.CLAIMED,
    ClaimReply.RECLAIMED: ClaimState.RECLAIMED,
    ClaimReply.PUBLISHED: ClaimState.PUBLISHED,
    ClaimReply.HELD: ClaimState.HELD,
    ClaimReply.GONE: ClaimState.GONE,
}

_RESTORED = {
    RestoreReply.RESTORED: Restored.RESTORED,
    RestoreReply.NOT_THERE: Restored.NOT_THERE,
    RestoreReply.TAKEN: Restored.TAKEN,
}


class RedisStore:
    """The `DeadLetterStore` of Redis.

    Args:
        client: A redis-py client that answers bytes.
        url: For messages; its password is never shown.
        keys: Key names.
        ttl_seconds: How long late copies of a dead-lettered message are known to be dead.
        connection: A worker's connection for its counts. Letters are stored through it, because
            one write and one read of it cost a third of two commands of the client's.
    """

    capabilities = Capabilities()

    def __init__(
        self,
        client: Any,
        url: str,
        keys: Keys,
        ttl_seconds: float = 72 * 3600.0,
        connection: PipelinedConnection | None = None,
    ) -> None:
        self._client = client
        self._url = url
        self._keys = keys
        self._ttl = int(ttl_seconds * 1000)
        self._scripts = Scripts.on(client)
        self._reader = PipelinedConnection(client, url)
        self._connection = connection
        self._named: set[str] = set()

    def check(self) -> None:
        """Ask for a heartbeat."""
        with translated(self._url):
            self._client.ping()

    def now(self) -> datetime:
        """The clock of Redis."""
        return now(self._client, self._url)

    def dead_letter(self, letter: DeadLetter, key: MessageKey) -> Stored:
        """Store a letter; see `DeadLetterStore.dead_letter`."""
        name, keys = letter.dead_letter_queue, self._keys
        facts = {name: getattr(letter, name) for name in _FACTS}
        entry = [part for pair in packed(letter.to_fields()).items() for part in pair]
        end = end_of(letter)
        places = [
            keys.letters(name),
            keys.ids(name),
            keys.tally(name),
            keys.run(key),
            keys.groups(name),
            keys.arrivals(name),
            keys.ends(name),
        ]
        args = [
            letter.id,
            letter.reason.value,
            letter.fingerprint,
            to_micros(letter.dead_lettered_at),
            json.dumps(facts),
            key.retries,
            self._ttl,
            "" if end is None else to_micros(end),
            *entry,
        ]
        # The name first: a letter in a queue that no list shows would be lost to people.
        reply = self._write(name, places, args)
        return Stored.NEW if reply == DeadLetterReply.STORED else Stored.ALREADY_THERE

    def _write(self, name: str, places: list[str], args: list[Any]) -> Any:
        """Name the queue, then store: in one write where the first has worked before."""
        named: Command = ("SADD", self._keys.queues(), spelled(name))
        if self._connection is not None and self._connection.is_open and name in self._named:
            try:
                return self._connection.call_script(
                    _DEAD_LETTER_DIGEST, _DEAD_LETTER, places, *args, before=named
                )
            except StoreUnavailable as exc:
                # A refusal stays one, and a second wait would hold the tasks up.
                if not isinstance(exc.__cause__, redis.ConnectionError):
                    raise
        with translated(self._url):
            self._client.execute_command(*named)
            if len(self._named) < _MOST_NAMED:
                self._named.add(name)
            return self._scripts.dead_letter(keys=places, args=args)

    def get(self, dead_letter_queue: str, letter_id: str) -> DeadLetter | None:
        """One letter by its id."""
        found = self.entry(dead_letter_queue, letter_id)
        return DeadLetter.from_fields(_named(found[1])) if found else None

    def entry(
        self, dead_letter_queue: str, letter_id: str
    ) -> tuple[str, Mapping[bytes, bytes]] | None:
        """Position and raw fields of one letter; see `DeadLetterStore.entry`."""
        key = self._keys.ids(dead_letter_queue)
        with translated(self._url):
            entry = self._client.hget(key, spelled(letter_id))
            place = entry.decode() if entry else letter_id if is_position(letter_id) else None
            if place is None:
                return None
            found = self._range(self._keys.letters(dead_letter_queue), place, place, 1)
        return found[0] if found else None

    def position_at(self, moment: datetime) -> str:
        """Entry ids begin with the time of storing in milliseconds."""
        return f"{max(0, to_micros(moment) // 1000)}-0"

    def holder(self, dead_letter_queues: Sequence[str], letter_id: str) -> str | None:
        """The first whose index has the id; a position is looked up in the letters."""
        keys, wanted = self._keys, spelled(letter_id)

        def ask(pipe: Any, name: str) -> None:
            if is_position(letter_id):
                pipe.xrange(keys.letters(name), letter_id, letter_id)
            else:
                pipe.hexists(keys.ids(name), wanted)

        with translated(self._url):
            found = self._of_each(dead_letter_queues, ask)
            return next((name for name, (there,) in found if there), None)

    def ids(
        self, dead_letter_queues: Sequence[str], prefix: str, *, most: int
    ) -> list[tuple[str, str]]:
        """Ids that begin with a text; walks the indexes in steps, never the letters."""
        found: list[tuple[str, str]] = []
        match = f"{_literal(spelled(prefix))}*"

        def ask(pipe: Any, name: str) -> None:
            pipe.hscan(self._keys.ids(name), match=match, count=1000)

        with translated(self._url):
            for name, ((cursor, first),) in self._of_each(dead_letter_queues, ask):
                more = self._client.hscan_iter(self._keys.ids(name), match=match, count=1000)
                some = (letter_id for letter_id, _entry in more) if cursor else first
                found += [(name, _text(i)) for i in islice(some, most - len(found))]
                if len(found) == most:
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
        self,
        dead_letter_queue: str,
        *,
        after: str | None,
        until: str | None,
        page_size: int,
        newest_first: bool = False,
    ) -> Iterator[RawPage]:
        """Raw pages; see `DeadLetterStore.fields`."""
        return self._pages(dead_letter_queue, after, until, page_size, newest_first=newest_first)

    def last_position(self, dead_letter_queue: str) -> str | None:
        """The stream's last generated id."""
        with translated(self._url):
            if not self._client.exists(self._keys.letters(dead_letter_queue)):
                return None
            info = self._client.xinfo_stream(self._keys.letters(dead_letter_queue))
        return _text(info["last-generated-id"])

    def settled_position(self, dead_letter_queue: str) -> str | None:
        """The same: a letter is stored in one step."""
        return self.last_position(dead_letter_queue)

    def oldest(
        self, dead_letter_queue: str, *, after: str | None, most: int
    ) -> list[LetterSummary]:
        """The oldest letters; reads whole entries, so few of them at a time."""
        low = f"({after}" if after else "-"
        with translated(self._url):
            page = self._range(
                self._keys.letters(dead_letter_queue), low, "+", min(most, _PAGE_OF_SUMMARIES)
            )
        return [_letter_summary(entry, fields) for entry, fields in page]

    def ended(self, dead_letter_queue: str, *, most: int) -> list[LetterSummary]:
        """Letters past the end of their message's life, from the index."""
        now = to_micros(self.now())
        with translated(self._url):
            ids = self._client.zrange(
                self._keys.ends(dead_letter_queue), "-inf", now, byscore=True, offset=0, num=most
            )
            entries = self._client.hmget(self._keys.ids(dead_letter_queue), ids) if ids else []
        places = [_text(entry or b"0-0") for entry in entries]
        return [
            LetterSummary(
                position=place,
                letter_id=_text(name),
                dead_lettered_at=None,
                stored_at=stored_at(place),
            )
            for name, place in zip(ids, places, strict=True)
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

    def export_lease(
        self,
        dead_letter_queue: str,
        what: str,
        place: str,
        *,
        owner: str,
        lease_seconds: float,
        state: str = "",
    ) -> ExportLease:
        """Whose turn it is; see `ExportLeaseStore.turn`."""
        args: list[Any] = [what, place, owner, int(lease_seconds * 1000), state]
        with translated(self._url):
            reply, told = self._scripts.export_lease(
                keys=[self._keys.export_leases(dead_letter_queue)], args=args
            )
        return ExportLease(reply == ExportLeaseReply.ACQUIRED, _text(told))

    def exported_until(self, dead_letter_queue: str) -> str | None:
        """How far the queue is exported; see `DeadLetterStore.exported_until`."""
        with translated(self._url):
            noted = self._client.get(self._keys.exported(dead_letter_queue))
        last = self.last_position(dead_letter_queue) if noted is not None else None
        if last is None or ordered(last) < ordered(_text(noted)):
            return None
        return _text(noted)

    def names(self) -> list[str]:
        """The names of all dead-letter queues."""
        with translated(self._url):
            return sorted(_text(name) for name in self._client.smembers(self._keys.queues()))

    def queues(self) -> list[QueueSummary]:
        """All dead-letter queues with their size, age and reasons."""
        names, keys = self.names(), self._keys
        reasons = [f"reason:{reason.value}" for reason in Reason]
        minute = int(self.now().timestamp()) // 60
        with translated(self._url):
            found = self._looked_into(
                names,
                lambda pipe, name: pipe.hmget(keys.tally(name), reasons),
                lambda pipe, name: pipe.hvals(keys.arrivals(name)),
            )
            return [_summary(name, replies, minute) for name, replies in found]

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """One script a queue, many of them in one write."""
        with translated(self._url):
            found = self._looked_into(dead_letter_queues)
            return [_glance(name, *reply) for name, (reply,) in found]

    def groups(self, dead_letter_queue: str, *, most: int | None = None) -> list[Group]:
        """The groups, from the ranking and the tally: no letter is read."""
        keys, last = self._keys, -1 if most is None else most - 1
        with translated(self._url):
            ranked = self._client.zrevrange(
                keys.groups(dead_letter_queue), 0, last, withscores=True
            )
            if not ranked:
                return []
            names = [b"group:" + fingerprint for fingerprint, _count in ranked]
            told = self._client.hmget(keys.tally(dead_letter_queue), names)
        groups = [
            _group(_text(fingerprint), int(count), _text(text or b""))
            for (fingerprint, count), text in zip(ranked, told, strict=True)
        ]
        return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))

    def claim(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        lease_seconds: float,
        previous_run_prefix: str = "",
    ) -> list[ClaimState]:
        """Claim letters; see `DeadLetterStore.claim`."""
        name, keys = dead_letter_queue, self._keys
        places = [keys.claims(name), keys.ids(name), keys.letters(name)]
        states: list[ClaimState] = []
        with translated(self._url):
            for some in chunks(letter_ids):
                args: list[Any] = [owner, int(lease_seconds * 1000), previous_run_prefix, *some]
                states += [
                    CLAIMS[ClaimReply(reply)]
                    for reply in self._scripts.claim(keys=places, args=args)
                ]
        return states

    def mark_published(
        self, dead_letter_queue: str, letter_ids: Sequence[str], *, owner: str
    ) -> None:
        """Note that these are on the broker: from now on anybody may finish the removal."""
        self._on_claims(self._scripts.mark_published, dead_letter_queue, letter_ids, owner)

    def release(
        self,
        dead_letter_queue: str,
        letter_ids: Sequence[str],
        *,
        owner: str,
        doubtful: bool = False,
    ) -> None:
        """Give unused claims back."""
        script = self._scripts.release
        self._on_claims(script, dead_letter_queue, letter_ids, owner, int(doubtful))

    def remove(
        self, dead_letter_queue: str, letter_ids: Iterable[str], *, owner: str | None = None
    ) -> int:
        """Remove letters; see `DeadLetterStore.remove`."""
        return self._remove(dead_letter_queue, letter_ids, owner or "", 0)

    def discard(
        self,
        dead_letter_queue: str,
        letter_ids: Iterable[str],
        *,
        owner: str,
        keep_seconds: float,
    ) -> int:
        """Remove letters into the bin."""
        return self._remove(dead_letter_queue, letter_ids, owner, int(keep_seconds * 1000))

    def restore(self, dead_letter_queue: str, letter_id: str) -> Restored:
        """Put a letter back; see `DeadLetterStore.restore`."""
        name, keys = dead_letter_queue, self._keys
        places = [
            keys.letters(name),
            keys.ids(name),
            keys.tally(name),
            keys.groups(name),
            keys.bin(name),
            keys.binned(name),
        ]
        with translated(self._url):
            place = self._client.hget(keys.binned(name), spelled(letter_id))
            page = self._range(keys.bin(name), place.decode(), place.decode(), 1) if place else []
            facts = _facts(page[0][1]) if page else "{}"
            reply = self._scripts.restore(keys=places, args=[spelled(letter_id), facts])
        return _RESTORED[RestoreReply(reply)]

    def binned(self, dead_letter_queues: Sequence[str]) -> list[str]:
        """Those whose bin is there."""
        with translated(self._url):
            found = self._of_each(
                dead_letter_queues, lambda pipe, name: pipe.exists(self._keys.binned(name))
            )
            return [name for name, (there,) in found if there]

    def discarded(self, dead_letter_queue: str) -> Iterator[RawPage]:
        """The bin; what is left there beyond its time goes with the next discard."""
        return self._pages_of(self._keys.bin(dead_letter_queue), None, "+", PAGE, newest_first=True)

    def watch(self, keys: Sequence[MessageKey]) -> None:
        """Leave a mark where the message's deliveries will be counted."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hset(self._keys.run(key), "watched", 1)
                pipe.pexpire(self._keys.run(key), self._ttl)
            pipe.execute()

    def outcomes(self, keys: Sequence[MessageKey]) -> list[RedriveOutcome]:
        """A worker takes the mark away with the counts, or leaves a note of the death."""
        with translated(self._url):
            pipe = self._client.pipeline(transaction=False)
            for key in keys:
                pipe.hkeys(self._keys.run(key))
            return [_outcome(names) for names in pipe.execute()]

    def seed(self, key: MessageKey, deliveries: int, last: Delivery) -> None:
        """Write a count, with the end of its last delivery: it is over, it did not vanish."""
        run, place = self._keys.run(key), f"{key.retries}:{deliveries}"
        end = json.dumps(last.to_json(), separators=(",", ":"))
        start = f"{to_micros(last.started_at)}|{last.worker_pid or 0}@{last.worker_hostname}#0"
        fields = {f"count:{key.retries}": deliveries, f"start:{place}": start, f"end:{place}": end}
        with translated(self._url):
            pipe = self._client.pipeline(transaction=True)
            pipe.hset(run, mapping=fields)
            pipe.pexpire(run, self._ttl)
            pipe.execute()

    def done(self) -> None:
        """Claims are let go of one by one; nothing else is held."""

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
            for some in chunks(letter_ids):
                script(keys=[self._keys.claims(dead_letter_queue)], args=[*args, *some])

    def _remove(
        self, dead_letter_queue: str, letter_ids: Iterable[str], owner: str, keep: int
    ) -> int:
        keys, name = self._keys, dead_letter_queue
        places = [
            keys.letters(name),
            keys.ids(name),
            keys.tally(name),
            keys.claims(name),
            keys.groups(name),
            keys.bin(name),
            keys.binned(name),
            keys.ends(name),
        ]
        with translated(self._url):
            return sum(
                int(self._scripts.remove(keys=places, args=[owner, keep, *some]))
                for some in chunks(list(letter_ids), _REMOVED_AT_ONCE)
            )

    def _of_each(
        self, names: Sequence[str], *asks: Callable[[Any, str], object]
    ) -> Iterator[tuple[str, list[Any]]]:
        return of_each(self._client, names, *asks)

    def _looked_into(
        self, names: Sequence[str], *asks: Callable[[Any, str], object]
    ) -> Iterator[tuple[str, list[Any]]]:
        """A glance at each queue, and what else is asked of it."""
        keys, glance = self._keys, self._scripts.glance
        if names:  # loaded once: redis-py would ask with every pipeline whether it is
            self._client.script_load(glance.script)
        return self._of_each(
            names,
            lambda pipe, name: pipe.evalsha(glance.sha, 2, keys.letters(name), keys.ends(name)),
            *asks,
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
        stream = self._keys.letters(dead_letter_queue)
        yield from self._pages_of(stream, after, until, page_size, newest_first=newest_first)

    def _pages_of(
        self, stream: str, after: str | None, until: str, page_size: int, *, newest_first: bool
    ) -> Iterator[RawPage]:
        low, high = (f"({after}" if after else "-"), until
        count = min(_FIRST_PAGE, page_size)
        ahead = ReadAhead(self._client, self._url)
        try:
            while True:
                command = _xrange(stream, low, high, count, newest_first=newest_first)
                reply = self._answer(ahead, command)
                if len(reply) == count:
                    last = reply[-1][0].decode()
                    low, high = (low, f"({last}") if newest_first else (f"({last}", high)
                    following = _next_count(reply, page_size)
                    if page_size == following == count:  # many were wanted, so more will be
                        with suppress(StoreUnavailable):  # it is asked again when it is needed
                            ahead.ask(
                                *_xrange(stream, low, high, following, newest_first=newest_first)
                            )
                if reply:
                    yield _page(reply)
                if len(reply) < count:
                    return
                count = following
        finally:
            ahead.close()

    def _answer(self, ahead: ReadAhead, command: Sequence[Any]) -> Any:
        """What was asked for before; what was not is asked now."""
        if ahead.asked == command:
            try:
                return ahead.answer()
            except StoreUnavailable:  # the connection may have been idle for too long
                ahead.close()
        with translated(self._url):
            return self._read(*command)

    def _range(self, stream: str, low: str, high: str, count: int) -> RawPage:
        """XRANGE without redis-py's reply callback, which costs more than Redis itself."""
        return _page(self._read(*_xrange(stream, low, high, count, newest_first=False)))

    def _read(self, *command: Any) -> Any:
        """Read on the connection of our own; once more if it turns out to be a stale one."""
        try:
            return self._reader.call(*command)
        except StoreUnavailable:
            self._reader.close()
            self._reader = PipelinedConnection(self._client, self._url)
            return self._reader.call(*command)


def now(client: Any, url: str) -> datetime:
    """The present by the clock of Redis: the one that all machines share."""
    with translated(url):
        seconds, micros = client.time()
    return from_micros(seconds * 1_000_000 + micros)


def stored_at(position: str) -> datetime | None:
    """When an entry was stored: its id begins with the milliseconds of the clock of Redis."""
    with suppress(ValueError, OverflowError):
        return from_micros(ordered(position)[0] * 1000)
    return None


def is_position(text: str) -> bool:
    """Whether a text is written as the id of a stream entry."""
    first, dash, second = text.partition("-")
    return dash == "-" and all(part.isascii() and part.isdigit() for part in (first, second))


def _glance(name: str, letters: int, oldest: bytes, *times: bytes) -> Glance:
    _oldest_died, _newest_died, end, now = times
    return Glance(
        name=name,
        at=from_micros(int(now)),
        letters=letters,
        oldest_stored_at=stored_at(_text(oldest)),
        first_end_at=_moment(end),
    )


def _summary(name: str, replies: Sequence[Any], minute: int) -> QueueSummary:
    (letters, _oldest, oldest_died, newest_died, _end, _now), counts, arrivals = replies
    counted = zip((reason.value for reason in Reason), counts, strict=True)
    return QueueSummary(
        name=name,
        letters=letters,
        oldest_at=_moment(oldest_died),
        newest_at=_moment(newest_died),
        reasons={reason: int(count) for reason, count in sorted(counted, key=_first) if count},
        last_hour=last_hour(arrivals, minute),
    )


def _group(fingerprint: str, letters: int, text: str) -> Group:
    first, last, example, facts_json = (*text.split("|", 3), "", "", "", "")[:4]
    facts = json.loads(facts_json or "{}")
    return Group(
        fingerprint=fingerprint,
        letters=letters,
        task_name=facts.get("task_name", ""),
        reason=facts.get("reason", ""),
        exception_type=facts.get("exception_type"),
        first_seen_at=from_micros(int(first or 0)),
        last_seen_at=from_micros(int(last or 0)),
        example_id=example,
    )


def _outcome(names: Sequence[bytes]) -> RedriveOutcome:
    if not names:
        return RedriveOutcome.SUCCEEDED
    return (
        RedriveOutcome.DIED
        if any(name.startswith(b"dead:") for name in names)
        else RedriveOutcome.OPEN
    )


def last_hour(slots: Iterable[bytes], minute: int) -> int:
    """The letters of the sixty minutes that end with this one."""
    pairs = (slot.split(b":") for slot in slots)
    return sum(int(count) for at, count in pairs if minute - _HOUR < int(at) <= minute)


def _facts(fields: Mapping[bytes, bytes]) -> str:
    """What a group says of its letters, from one of them."""
    values = {name: fields.get(name.encode()) for name in _FACTS}
    return json.dumps(
        {
            name: None if value is None else value.decode("utf-8", "replace")
            for name, value in values.items()
        }
    )


def _xrange(stream: str, low: str, high: str, count: int, *, newest_first: bool) -> tuple[Any, ...]:
    order = ("XREVRANGE", stream, high, low) if newest_first else ("XRANGE", stream, low, high)
    return (*order, "COUNT", count)


def _page(reply: Sequence[Any]) -> RawPage:
    return [(entry.decode(), fields_of(parts)) for entry, parts in reply]


def _next_count(reply: Sequence[Any], page_size: int) -> int:
    """How many letters to read after a page, so that the next one is not too large."""
    some = reply[:: max(1, len(reply) // _WEIGHED)]  # to weigh all would cost as much as to read
    size = sum(sum(map(len, parts)) for _entry, parts in some)
    fitting = PAGE_BYTES * len(some) // (size + 1)
    return max(1, min(page_size, fitting, _GROWTH * len(reply)))


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _named(fields: Mapping[bytes, bytes]) -> dict[str, bytes]:
    return {name.decode("utf-8", "replace"): value for name, value in fields.items()}


def _letter_summary(entry: str, fields: Mapping[bytes, bytes]) -> LetterSummary:
    return LetterSummary(
        position=entry,
        letter_id=fields.get(b"id", b"").decode("utf-8", "replace"),
        dead_lettered_at=_moment(fields.get(b"dead_lettered_at", b"")),
        stored_at=stored_at(entry),
    )


def _moment(micros: bytes) -> datetime | None:
    """A time of the store; ``None`` for what is none."""
    with suppress(ValueError, OverflowError):
        return from_micros(int(micros))
    return None


def _text(value: bytes | str) -> str:
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _literal(text: str) -> str:
    """Text as a Redis pattern that matches only itself."""
    return "".join(f"\\{character}" if character in "*?[]\\^" else character for character in text)


def chunks(letter_ids: Sequence[str], size: int = MOST_IDS) -> Iterator[list[str]]:
    """Ids, as many at a time as one script takes, as they can be sent."""
    for start in range(0, len(letter_ids), size):
        yield [spelled(letter_id) for letter_id in letter_ids[start : start + size]]
