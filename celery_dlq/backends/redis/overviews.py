"""Overviews of dead-letter queues in Redis, from counts and indexes; few letters are read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Any

from redis.exceptions import ResponseError

from celery_dlq.backends.base import Glance, Group, QueueSummary, stored_at
from celery_dlq.backends.redis.connect import translated
from celery_dlq.backends.redis.many import of_each
from celery_dlq.backends.redis.part import RedisPart
from celery_dlq.record import Reason, from_micros

_HOUR_MINUTES = 60
_SAMPLES = 50
"""Nodes of a stream that Redis weighs; the others are taken to be like them."""


class RedisOverviews(RedisPart):
    """Reads what concerns dead-letter queues as a whole."""

    def names(self) -> list[str]:
        """Return the names of all dead-letter queues."""
        with translated(self._url):
            return sorted(text_of(name) for name in self._client.smembers(self._keys.queues()))

    def queues(self) -> list[QueueSummary]:
        """Return all dead-letter queues with their size, age and reasons."""
        names, keys = self.names(), self._keys
        reasons = [f"reason:{reason.value}" for reason in Reason]
        minute = self._minute()
        with translated(self._url):
            found = self._looked_into(
                names,
                lambda pipe, name: pipe.hmget(keys.tally(name), reasons),
                lambda pipe, name: pipe.hvals(keys.arrivals(name)),
            )
            summaries = [_summary(name, replies, minute) for name, replies in found]
        sizes = self._sizes(names)
        return [replace(summary, memory_bytes=sizes.get(summary.name)) for summary in summaries]

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        """Return the memory of each queue's letters; nothing if the user may not ask for it."""
        keys = self._keys
        with translated(self._url):
            try:
                found = of_each(
                    self._client,
                    names,
                    lambda pipe, name: pipe.memory_usage(keys.letters(name), samples=_SAMPLES),
                    lambda pipe, name: pipe.memory_usage(keys.bin(name), samples=_SAMPLES),
                )
                return {name: sum(size or 0 for size in sizes) for name, sizes in found}
            except ResponseError:
                return {}

    def last_hours(self, dead_letter_queues: Sequence[str]) -> list[tuple[str, int]]:
        """Return the number of letters stored in the last hour, per queue."""
        minute = self._minute()
        with translated(self._url):
            found = of_each(
                self._client,
                dead_letter_queues,
                lambda pipe, name: pipe.hvals(self._keys.arrivals(name)),
            )
            return [(name, _last_hour(slots, minute)) for name, (slots,) in found]

    def glances(self, dead_letter_queues: Sequence[str]) -> list[Glance]:
        """Run one script per queue, many of them in one write."""
        with translated(self._url):
            found = self._looked_into(dead_letter_queues)
            return [_glance(name, *reply) for name, (reply,) in found]

    def groups(self, dead_letter_queue: str, *, most: int | None = None) -> list[Group]:
        """Return the groups, from the ranking and the tally; no letter is read."""
        keys, last = self._keys, -1 if most is None else most - 1
        with translated(self._url):
            ranked = self._client.zrevrange(
                keys.groups(dead_letter_queue), 0, last, withscores=True
            )
            if not ranked:
                return []
            names = [b"group:" + fingerprint for fingerprint, _count in ranked]
            texts = self._client.hmget(keys.tally(dead_letter_queue), names)
        groups = [
            _group(text_of(fingerprint), int(count), text_of(text or b""))
            for (fingerprint, count), text in zip(ranked, texts, strict=True)
        ]
        return sorted(groups, key=lambda group: (-group.letters, group.fingerprint))

    def _minute(self) -> int:
        return int(self.now().timestamp()) // 60

    def _looked_into(
        self, names: Sequence[str], *asks: Callable[[Any, str], object]
    ) -> Iterator[tuple[str, list[Any]]]:
        """Yield each queue with the reply of ``glance.lua`` and the replies to ``asks``."""
        keys, glance = self._keys, self._scripts.glance
        if names:  # loaded once: redis-py would check it with every pipeline
            self._client.script_load(glance.script)
        return of_each(
            self._client,
            names,
            lambda pipe, name: pipe.execute_command(
                "EVALSHA", glance.sha, 2, keys.letters(name), keys.ends(name)
            ),
            *asks,
        )


def moment(micros: bytes) -> datetime | None:
    """Return a time from microseconds since 1970, or ``None`` if the text is not a time."""
    with suppress(ValueError, OverflowError):
        return from_micros(int(micros))
    return None


def text_of(value: bytes | str) -> str:
    """Decode a reply, escaping what is not UTF-8."""
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value


def _glance(name: str, letters: int, oldest: bytes, *times: bytes) -> Glance:
    _oldest_died, _newest_died, end, now = times
    return Glance(
        name=name,
        at=from_micros(int(now)),
        letters=letters,
        oldest_stored_at=stored_at(text_of(oldest)),
        first_end_at=moment(end),
    )


def _summary(name: str, replies: Sequence[Any], minute: int) -> QueueSummary:
    (letters, _oldest, oldest_died, newest_died, _end, _now), counts, arrivals = replies
    pairs = zip(Reason, counts, strict=True)
    return QueueSummary(
        name=name,
        letters=letters,
        oldest_at=moment(oldest_died),
        newest_at=moment(newest_died),
        reasons=dict(sorted((reason.value, int(count)) for reason, count in pairs if count)),
        last_hour=_last_hour(arrivals, minute),
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


def _last_hour(slots: Iterable[bytes], minute: int) -> int:
    """Return the number of letters in the sixty minutes that end with this one."""
    pairs = (slot.split(b":") for slot in slots)
    return sum(int(count) for at, count in pairs if minute - _HOUR_MINUTES < int(at) <= minute)
