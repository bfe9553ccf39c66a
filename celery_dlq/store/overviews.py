"""Overviews of dead-letter queues in Redis, from counts and indexes; few letters are read."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from urllib.parse import unquote

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.printable import readable
from celery_dlq.letters.record import Reason, from_micros, to_micros
from celery_dlq.store.connect import is_cluster, is_refusal
from celery_dlq.store.keys import spelled, text_of
from celery_dlq.store.part import QueueNames, of_each
from celery_dlq.store.records import (
    KEPT_DAYS,
    Group,
    GroupOrder,
    QueueStatus,
    QueueSummary,
    by_minute,
    stored_at,
)
from celery_dlq.store.scripts import Script, script_text

_MINUTE, _SPAN = 60, 300  # seconds
_HOURS, _MINUTES = 24, 60
_SPANS_PER_HOUR = 12  # in parts/group.lua
_ENOUGH = 5  # letters that would have come, of which none did: a cause is over
_QUEUES_PER_SCRIPT, _SIZES_PER_WRITE = 100, 200
_SPELLED_AS_IS = re.compile(r"[\w.-]+", re.ASCII)  # in JSON and in a release
_SAMPLES = 50
"""Nodes of a stream that Redis weighs; the others are taken to be like them."""


class Overviews(QueueNames):
    """Reads what concerns dead-letter queues as a whole."""

    def counts(self, names: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Return the letters of each queue, and those of the last hour, in one write."""
        keys = (self._keys.letters, self._keys.arrivals)
        found = self._of_many(script_text("counts"), names, keys)
        return dict(zip(names, zip(found[::2], found[1::2], strict=True), strict=True))

    def holders(self, names: Sequence[str], letter_id: str) -> list[str]:
        """Return those of many queues that have a letter, or an entry there, in one write."""
        keys, wanted = (self._keys.ids, self._keys.letters), spelled(letter_id)
        found = self._of_many(script_text("holders"), names, keys, wanted)
        return [name for name, there in zip(names, found, strict=True) if there]

    def _of_many(
        self, script: Script, names: Sequence[str], keys: Iterable[Callable[[str], str]], *args: Any
    ) -> list[Any]:
        """Run a script that answers for many queues, each of which gives it its keys."""
        size = 1 if is_cluster(self._client) else _QUEUES_PER_SCRIPT
        self._client.script_load(script.text)
        pipe = self._client.pipeline(transaction=False)
        for start in range(0, len(names), size):
            places = [key(name) for name in names[start : start + size] for key in keys]
            pipe.execute_command("EVALSHA", script.digest, len(places), *places, *args)
        return [one for answers in pipe.execute() for one in answers]

    def queues(self, names: Sequence[str] | None = None) -> list[QueueSummary]:
        """Return dead-letter queues, by default all, with their size, age and reasons."""
        names, keys = self.names() if names is None else names, self._keys
        reasons = [f"reason:{reason.value}" for reason in Reason]
        now, status = self.now(), script_text("queue_status")
        self._client.script_load(status.text)
        found = of_each(
            self._client,
            names,
            lambda pipe, name: pipe.execute_command(
                "EVALSHA", status.digest, 2, *keys.places(status.keys, name)
            ),
            lambda pipe, name: pipe.hmget(keys.tally(name), reasons),
            lambda pipe, name: pipe.hgetall(keys.arrivals(name)),
        )
        summaries = [_summary(name, replies, now) for name, replies in found]
        sizes = self._memory_sizes(names)
        return [replace(summary, memory_bytes=sizes.get(summary.name)) for summary in summaries]

    def _memory_sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the memory of each queue's letters; nothing if the user may not ask for it."""
        keys = self._keys
        try:
            found = of_each(
                self._client,
                names,
                lambda pipe, name: pipe.memory_usage(keys.letters(name), samples=_SAMPLES),
                lambda pipe, name: pipe.memory_usage(keys.bin(name), samples=_SAMPLES),
                at_once=_SIZES_PER_WRITE,
            )
            return {name: sum(size or 0 for size in sizes) for name, sizes in found}
        except StoreUnavailable as exc:
            if is_refusal(exc):
                return {}
            raise

    def statuses(self, names: Sequence[str]) -> list[QueueStatus]:
        """Run one script per queue."""
        return [_queue_status(name, *self._written("queue_status", queue=name)) for name in names]

    def newest_tasks(self, names: Sequence[str], most: int) -> dict[str, set[str]]:
        """Return the tasks of the newest groups of each queue, in two writes."""
        keys, of, now, last = self._keys, partial(of_each, self._client), self.now(), most - 1
        found = of(names, lambda pipe, name: pipe.zrevrange(keys.newest_groups(name), 0, last))
        newest = {name: [b"group:" + one for one in some] for name, (some,) in found if some}
        found = of([*newest], lambda pipe, name: pipe.hmget(keys.tally(name), newest[name]))
        known = (
            (name, [_known_group(b"", 0, one or b"", now) for one in some])
            for name, (some,) in found
        )
        return {name: {one.task_name for one in groups} - {""} for name, groups in known}

    def with_text(self, queue: str, fingerprints: Sequence[str], text: str) -> Sequence[str]:
        """Return those of some groups in whose names a text may be; few others."""
        if _SPELLED_AS_IS.fullmatch(text) is None:
            return fingerprints
        fields = [f"group:{spelled(name)}" for name in fingerprints]
        known = zip(fingerprints, self._client.hmget(self._keys.tally(queue), fields), strict=True)
        ends = ((name, text_of(one or b"").split("|", 5)[-1]) for name, one in known)
        return [name for name, end in ends if text in f"{name}{end}".casefold()]

    def ranked(
        self,
        dead_letter_queue: str,
        by: GroupOrder,
        *,
        most: int | None = None,
        of: Sequence[str] | None = None,
    ) -> list[str]:
        """Return the fingerprints of the first groups, or some fingerprints, in an order."""
        keys, last = self._keys, -1 if most is None else most - 1
        index = (keys.groups if by == "letters" else keys.newest_groups)(dead_letter_queue)
        if of is None:
            return [text_of(name) for name in self._client.zrevrange(index, 0, last)]
        scores = self._client.zmscore(index, [*map(spelled, of)]) if of else ()
        pairs = sorted(zip(scores, of, strict=True), key=lambda pair: -(pair[0] or 0))
        return [name for _score, name in pairs][:most]

    def groups(self, dead_letter_queue: str, fingerprints: Sequence[str]) -> list[Group]:
        """Return the groups of fingerprints that are known, from the tally; no letter is read.

        Also those of the newest 1,000 groups whose last letter left,
        for `KEPT_DAYS`.
        """
        if not fingerprints:
            return []
        keys, queue, now = self._keys, dead_letter_queue, self.now()
        names = [spelled(fingerprint).encode() for fingerprint in fingerprints]
        sizes = self._client.zmscore(keys.groups(queue), names)
        texts = self._client.hmget(keys.tally(queue), [b"group:" + name for name in names])
        known = zip(names, sizes, texts, strict=True)
        found = {name: (size, text or b"") for name, size, text in known if size is not None}
        missing = {*names} - found.keys()
        if missing:
            oldest = to_micros(now - timedelta(days=KEPT_DAYS)) // 1000
            for _place, fields in self._client.xrevrange(keys.gone_groups(queue), min=oldest):
                new = (missing & fields.keys()) - found.keys()
                found |= {name: (0, fields[name]) for name in new}
        return [_known_group(name, int(size), text, now) for name, (size, text) in found.items()]

    def emptied(
        self,
        dead_letter_queue: str,
        since: datetime,
        until: datetime | None = None,
        *,
        of: str | None = None,
        still: bool = False,
    ) -> Iterator[tuple[datetime, Group]]:
        """Iterate over the groups whose last letter left in a time, and when, the last one first.

        All of them, that ``of`` one fingerprint, or those that are ``still`` empty. There may be a
        thousand: each is read when its turn comes.
        """
        keys, queue, now = self._keys, dead_letter_queue, self.now()
        least, most = (to_micros(one or now) // 1000 for one in (since, until))
        found: dict[bytes, tuple[bytes, bytes]] = {}
        for place, fields in self._client.xrevrange(keys.gone_groups(queue), most, least):
            for name, text in fields.items():
                found.setdefault(name, (place, text))
        wanted = [name for name in found if of is None or name == spelled(of).encode()]
        if wanted and still:
            sizes = self._client.zmscore(keys.groups(queue), wanted)
            wanted = [name for name, size in zip(wanted, sizes, strict=True) if not size]
        for name in wanted:
            place, text = found[name]
            yield stored_at(text_of(place)) or now, _known_group(name, 0, text, now)

    def group(self, dead_letter_queue: str, fingerprint: str) -> Group | None:
        """Return the group of a fingerprint, or ``None``; see `groups`."""
        return next(iter(self.groups(dead_letter_queue, [fingerprint])), None)


def moment(micros: bytes) -> datetime | None:
    """Return a time from microseconds since 1970, or ``None`` if the text is not a time."""
    with suppress(ValueError, OverflowError):
        return from_micros(int(micros))
    return None


def _queue_status(name: str, letters: int, oldest: bytes, *times: bytes) -> QueueStatus:
    _oldest_died, _newest_died, end, now = times
    return QueueStatus(
        name=name,
        at=from_micros(int(now)),
        letters=letters,
        oldest_stored_at=stored_at(text_of(oldest)),
        first_end_at=moment(end),
    )


def _summary(name: str, replies: Sequence[Any], now: datetime) -> QueueSummary:
    (letters, _oldest, oldest_died, newest_died, _end, _now), counts, slots = replies
    arrivals = _arrivals(slots, now)
    read = (readable(f"a count of {name}", partial(int, count or 0)) for count in counts)
    pairs = zip(Reason, read, strict=True)
    return QueueSummary(
        name=name,
        letters=letters,
        oldest_at=moment(oldest_died),
        newest_at=moment(newest_died),
        reasons=dict(sorted((reason.value, n) for reason, n in pairs if n)),
        last_hour=sum(map(sum, arrivals.values())),
        arrivals=arrivals,
        per_minute=_pace_of_queue(by_minute(arrivals), now),
    )


def _pace_of_queue(minutes: Sequence[int], now: datetime) -> float:
    since = int(now.timestamp() % _SPAN // _MINUTE) + 1  # The last one still runs
    lately = minutes[-since - _SPAN // _MINUTE :]
    first = next((place for place, letters in enumerate(lately) if letters), len(lately))
    began = now.timestamp() - (len(lately) - first - 1) * _MINUTE
    return _pace(sum(lately[:-since]), sum(lately[-since:]), began, now.timestamp())


def _pace(before: int, since: int, first: float, now: float) -> float:
    """Letters a minute, of a queue and of a cause: of the last whole five minutes, and since.

    Of the time since then alone, if none came before; of less, if the first one came later. No
    letter since is chance where few would have come.
    """
    running = now % _SPAN
    if not since and before * running >= _ENOUGH * _SPAN:
        return 0.0
    seconds = min(running + _SPAN if before else running, now - first // _MINUTE * _MINUTE)
    return (before + since) * _MINUTE / max(_MINUTE, seconds)


def _known_group(name: bytes, letters: int, text: bytes, now: datetime) -> Group:
    """Return a group; of a text that cannot be read, what is known without it."""
    read = partial(read_group, text_of(name), letters, now=now)
    what = f"what is known of the group {text_of(name)}"
    return readable(what, partial(read, text_of(text))) or read("")


def read_group(fingerprint: str, letters: int, text: str, *, now: datetime) -> Group:
    """Read the value of a group, which ``parts/group.lua`` writes."""
    parts = (*text.split("|", 6), *[""] * 7)[:7]
    first, last, example, hours, recent, releases, facts_json = parts
    facts = json.loads(facts_json or "{}")
    spans, span = _parsed_counts(recent), int(now.timestamp()) // _SPAN
    hour = span // _SPANS_PER_HOUR
    recent_spans = tuple(spans[one] for one in range(span - _SPANS_PER_HOUR + 1, span + 1))
    last_span = max(spans, default=0)  # not in the hours yet
    by_hour = _parsed_counts(hours)
    by_hour[last_span // _SPANS_PER_HOUR] += spans[last_span]
    began = from_micros(int(first or 0))
    return Group(
        fingerprint=fingerprint,
        letters=letters,
        task_name=facts.get("task_name", ""),
        reason=facts.get("reason", ""),
        exception_type=facts.get("exception_type"),
        first_seen_at=began,
        last_seen_at=from_micros(int(last or 0)),
        example_id=example,
        course=tuple(by_hour[one] for one in range(hour - _HOURS + 1, hour + 1)),
        last_hour=sum(recent_spans),
        recent=recent_spans,
        per_minute=_pace(recent_spans[-2], recent_spans[-1], began.timestamp(), now.timestamp()),
        releases=tuple(unquote(release) for release in releases.split(",") if release),
    )


def _parsed_counts(text: str) -> Counter[int]:
    """Read the counts of ``parts/group.lua``."""
    pairs = (pair.split(":") for pair in text.split(",") if pair)
    return Counter({int(span): int(letters) for span, letters in pairs})


def _arrivals(slots: Mapping[bytes, bytes], now: datetime) -> dict[str, tuple[int, ...]]:
    """Read the counts of ``parts/arrival.lua``."""
    found = {}
    for place, slot in slots.items():
        counted = readable("a count of arrivals", partial(_hour_and_count, slot))
        if counted is not None:
            found[text_of(place.partition(b":")[2]), counted[0]] = counted[1]
    last = int(now.timestamp()) // _MINUTE
    minutes = range(last - _MINUTES + 1, last + 1)
    reasons = sorted({reason for reason, minute in found if minute in minutes})
    return {
        reason: tuple(found.get((reason, minute), 0) for minute in minutes) for reason in reasons
    }


def _hour_and_count(slot: bytes) -> tuple[int, int]:
    minute, letters = slot.split(b":")
    return int(minute), int(letters)
