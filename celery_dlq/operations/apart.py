"""What sets letters apart: values that others of their queue, and successes, have less often.

The same question as the triage's `why`, asked of the newest letters at once: few enough to be
counted here, without Spark. Both share what they compare and how they test it; see
`celery_dlq.letters.features` and `celery_dlq.letters.significance`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from celery_dlq.backends.base import Backend, DeadLetterStore
from celery_dlq.errors import DLQError
from celery_dlq.filters import LetterFilter
from celery_dlq.letters.features import (
    GIVEN,
    HOUR,
    MAX_VALUE_CHARS,
    TASK,
    WEEKDAY,
    Pair,
    pairs_of,
)
from celery_dlq.letters.printable import shortened
from celery_dlq.letters.significance import (
    ALL_LETTERS,
    MIN_OTHERS,
    SAME_TASKS,
    SUCCESSES,
    Significant,
    candidates,
    significant,
)
from celery_dlq.operations.reading import Reading
from celery_dlq.operations.selection import CLOCK_SKEW, RawEntry

MOST_FINDINGS = 10

_MOST_WEIGHED = 200  # findings, before those that say the same are put together
_SAME = 0.9  # common messages, divided by all that have either value
_MOST_ALSO = 5
_MAX_SAID_CHARS = 80
_MOST_PAIRS = 200_000  # different ones, at most 100 MB
_ENTRIES_PER_PAGE = 500
# Shares of the time: reading letters ends after the first, reading successes after the second.
_LETTERS_UNTIL, _SUCCESSES_UNTIL = 0.65, 0.75
# Shares of the messages.
_LETTERS, _OTHERS = 0.4, 0.4

# What a filter fixes would be found, and say nothing.
_FIXED = {
    "fingerprint": {TASK},
    "task_name": {TASK},
    "worker_hostname": {"host"},
    "release": {"release"},
    "since": {HOUR, WEEKDAY},
    "until": {HOUR, WEEKDAY},
}
_FILTER_FIELDS = {"host": "worker_hostname", "release": "release", TASK: "task_name"}
_PATH = re.compile(r"kwargs(\.[A-Za-z_][A-Za-z0-9_-]*)+")
_SAID = {
    "host": "ran on {}",
    "release": "ran on release {}",
    "queue": "came from the queue {}",
    "origin": "were published by {}",
    TASK: "are of the task {}",
    HOUR: "ended between {0}:00 and {0}:59 UTC",
    WEEKDAY: "ended on a {} (UTC)",
}
_OTHERS_SAID = {
    SAME_TASKS: "the other letters of the task",
    ALL_LETTERS: "the other letters of the queue",
    SUCCESSES: "the sampled successes of the task",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A value that is more frequent among the letters than chance makes it.

    A correlation, not yet a cause: a host that got all the bad orders is found as well as the
    orders.

    Attributes:
        feature: The property: ``kwargs.currency``, ``args[0].id``, ``kwargs.items[]`` (an item of a
            list), ``host``, ``release``, ``queue``, ``origin``, ``retries``, ``task``, ``hour`` or
            ``weekday`` (both in UTC).
        value: Its value as text, at most 200 characters; ``(given)``: the argument was given.
        against: With what the letters were compared: ``same tasks``, ``all letters`` or
            ``successes``.
        letters: Letters that have the value.
        of_letters: Letters that could: all, or those that have the argument.
        others: Others that have the value.
        of_others: Others that could.
        share_here: ``letters`` divided by ``of_letters``.
        share_elsewhere: ``others`` divided by ``of_others``.
        lift: The first share divided by the second; if no other has the value, as if half of one
            had.
        p_value: The probability that chance alone makes it as frequent (Fisher's exact test).
        q_value: The same after correction for all values tested (Benjamini and Hochberg).
        text: The finding as a sentence.
        condition: The value as a condition, ``kwargs.tenant=42``; ``None`` if there is none.
        where: Fields of `LetterFilter` that select the letters with the value; empty if it has no
            such field.
        also: Other values that nearly the same messages have, e.g. ``kwargs.plan = trial``.
    """

    feature: str
    value: str
    against: str
    letters: int
    of_letters: int
    others: int
    of_others: int
    share_here: float
    share_elsewhere: float
    lift: float
    p_value: float
    q_value: float
    text: str
    condition: str | None = None
    where: Mapping[str, str] = field(default_factory=dict)
    also: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Apart:
    """What sets letters of a queue apart; from `DeadLetters.apart`.

    Attributes:
        dead_letter_queue: The queue.
        letters: Letters that matched the filter.
        others: Other letters that were read.
        successes: Sampled successes of the same tasks.
        cut: True if time or room for more ran out: older letters were not read.
        findings: The most telling first, at most 10; empty if nothing stands out.
    """

    dead_letter_queue: str
    letters: int
    others: int
    successes: int
    cut: bool
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return asdict(self)


class _Message(NamedTuple):
    task: str
    pairs: frozenset[Pair]


class Comparison:
    """Finds what sets letters apart; `DeadLetters` describes the arguments that methods share.

    Args:
        backend: Keeps the letters and the sampled successes.
        reading: Knows the queues.
        monotonic: Returns seconds that only grow.
    """

    def __init__(
        self, backend: Backend, reading: Reading, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._backend = backend
        self._reading = reading
        self._monotonic = monotonic

    def apart(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        most: int = 5_000,
        deadline_seconds: float = 1.0,
        **fields: Any,
    ) -> Apart:
        """Find values that are more frequent in some letters than in others; changes nothing.

        The newest letters that match the filter, two fifths of ``most``, are compared with as many
        other letters of the queue: those of the same tasks if there are at least 20, else all. And
        with the newest sampled successes of the same tasks, one fifth (see
        ``dlq_sample_successes``). Arguments of more than 64 KiB are not looked into.

        Args:
            most: Messages to compare, at most.
            deadline_seconds: Stop reading after 3/4 of this time and compare what was read.

        Raises:
            NotFound: The queue does not exist.
            StoreUnavailable: The store does not answer.
            DLQError: An option or a field of the filter is not usable.
        """
        where = where or LetterFilter(**fields)
        if most < 1 or not deadline_seconds > 0:
            raise DLQError(
                f"expected most of 1 or more and deadline_seconds above 0, got {most} and "
                f"{deadline_seconds}"
            )
        self._reading.check_queue(dead_letter_queue)
        reader = _Reader(dead_letter_queue, where, self._monotonic)
        start = self._monotonic()
        letters, others = reader.letters(
            self._backend.letters,
            (round(most * _LETTERS), round(most * _OTHERS)),
            until=start + deadline_seconds * _LETTERS_UNTIL,
        )
        tasks = {one.task for one in letters}
        successes = reader.successes(
            self._backend.sampled,
            tasks,
            most - round(most * _LETTERS) - round(most * _OTHERS),
            until=start + deadline_seconds * _SUCCESSES_UNTIL,
        )
        found = compared(letters, others, successes)
        return Apart(
            dead_letter_queue=dead_letter_queue,
            letters=len(letters),
            others=len(others),
            successes=len(successes),
            cut=reader.cut,
            findings=_distinct(found, [*letters, *others, *successes], len(letters)),
        )


def compared(
    letters: list[_Message], others: list[_Message], successes: list[_Message]
) -> list[Significant]:
    """All values that are significant, the most telling first; the rows of the triage's `why`."""
    tasks = {one.task for one in letters}
    same = [one for one in others if one.task in tasks]
    inside = [one.pairs for one in letters]
    sides = {SAME_TASKS: same} if len(same) >= MIN_OTHERS else {ALL_LETTERS: others}
    sides[SUCCESSES] = successes
    found: list[Significant] = []
    for against, side in sides.items():
        tested, tests = candidates(
            inside, [one.pairs for one in side], same_tasks=against != ALL_LETTERS
        )
        found += significant(tested, tests, against)
    return sorted(found, key=lambda one: one.order)


class _Reader:
    """Reads messages newest first, until a time.

    Attributes:
        cut: True if it stopped for lack of time or room.
    """

    def __init__(self, queue: str, where: LetterFilter, monotonic: Callable[[], float]) -> None:
        self._queue = queue
        self._where = where
        self._monotonic = monotonic
        self._known: dict[Pair, Pair] = {}
        fixed = (_FIXED.get(name, ()) for name in where.to_json())
        self._fixed = frozenset(chain.from_iterable(fixed))
        self.cut = False

    def letters(
        self, store: DeadLetterStore, most: tuple[int, int], *, until: float
    ) -> tuple[list[_Message], list[_Message]]:
        """The newest letters that match the filter, and the newest others."""
        sides: tuple[list[_Message], list[_Message]] = ([], [])
        last = self._where.until
        before = None if last is None else store.position_at(last + CLOCK_SKEW)
        for entry in self._entries(store, before, until):
            side = not self._where.matches_fields(entry.fields)
            if entry.is_letter and len(sides[side]) < most[side]:
                sides[side].append(self._message(entry))
            if len(sides[0]) >= most[0] and (not self._where or len(sides[1]) >= most[1]):
                break
        return sides

    def successes(
        self, store: DeadLetterStore, tasks: set[str], most: int, *, until: float
    ) -> list[_Message]:
        """The newest sampled successes of some tasks."""
        found: list[_Message] = []
        for entry in self._entries(store, None, until) if tasks and most else ():
            if entry.text("task_name") in tasks:
                found.append(self._message(entry))
            if len(found) >= most:
                break
        return found

    def _entries(
        self, store: DeadLetterStore, before: str | None, until: float
    ) -> Iterator[RawEntry]:
        for page in store.fields(
            self._queue, after=None, until=before, page_size=_ENTRIES_PER_PAGE, newest_first=True
        ):
            for position, raw in page:
                if self._monotonic() >= until or len(self._known) >= _MOST_PAIRS:
                    self.cut = True
                    return
                yield RawEntry(position, raw)

    def _message(self, entry: RawEntry) -> _Message:
        pairs = (pair for pair in pairs_of(entry.text) if pair[0] not in self._fixed)
        # Equal pairs are one object.
        kept = frozenset(self._known.setdefault(pair, pair) for pair in pairs)
        return _Message(entry.text("task_name"), kept)


def _distinct(
    found: list[Significant], messages: list[_Message], letters: int
) -> tuple[Finding, ...]:
    """Put findings together that say the same: nearly the same messages have their values."""
    kept: list[tuple[Significant, set[int], list[str]]] = []
    weighed = found[:_MOST_WEIGHED]
    holders = _holders({_pair(one) for one in weighed}, messages)
    for one in weighed:
        holding = holders[_pair(one)]
        for other, held, also in kept:
            if len(holding & held) >= _SAME * len(holding | held):
                named = _named(one.counts.feature, one.counts.value)
                if _pair(one) != _pair(other) and named not in also and len(also) < _MOST_ALSO:
                    also.append(named)
                break
        else:
            kept.append((one, holding, []))
    return tuple(_finding(one, also, letters) for one, _held, also in kept[:MOST_FINDINGS])


def _holders(pairs: set[Pair], messages: list[_Message]) -> dict[Pair, set[int]]:
    """The numbers of the messages that have each pair."""
    found: dict[Pair, set[int]] = {pair: set() for pair in pairs}
    for number, message in enumerate(messages):
        for pair in message.pairs & pairs:
            found[pair].add(number)
    return found


def _pair(one: Significant) -> Pair:
    counts = one.counts
    return counts.feature, None if counts.value == GIVEN else counts.value


def _finding(one: Significant, also: list[str], letters: int) -> Finding:
    counts = one.counts
    name = _FILTER_FIELDS.get(counts.feature)
    selectable = name in LetterFilter.__slots__ and len(counts.value) < MAX_VALUE_CHARS
    return Finding(
        feature=counts.feature,
        value=counts.value,
        against=one.against,
        letters=counts.a,
        of_letters=counts.n,
        others=counts.c,
        of_others=counts.m,
        share_here=one.share_here,
        share_elsewhere=one.share_elsewhere,
        lift=one.lift,
        p_value=one.p_value,
        q_value=one.q_value,
        text=_sentence(one, letters),
        condition=_condition(counts.feature, counts.value),
        where={name: counts.value} if name is not None and selectable else {},
        also=tuple(also),
    )


def _condition(feature: str, value: str) -> str | None:
    cut = len(value) >= MAX_VALUE_CHARS
    if value == GIVEN or cut or _PATH.fullmatch(feature) is None:
        return None
    return f"{feature}={value}"


def _named(feature: str, value: str) -> str:
    return feature if value == GIVEN else f"{feature} = {shortened(value, _MAX_SAID_CHARS)}"


def _sentence(one: Significant, letters: int) -> str:
    feature, value, a, c, n, m = one.counts
    if value == GIVEN:
        said = f"have {feature}"
    elif feature.endswith("[]"):
        said = f"have {shortened(value, _MAX_SAID_CHARS)} in {feature[:-2]}"
    elif feature in _SAID:
        said = _SAID[feature].format(shortened(value, _MAX_SAID_CHARS))
    else:
        said = f"have {_named(feature, value)}"
    # The shares of an argument's values are shares of the messages that have the argument.
    start = f"Of those with {feature.removesuffix('[]')}, " if n < letters else ""
    here, there = _share(a, n), _share(c, m)
    here = here if start else here.capitalize()
    return f"{start}{here} of these letters {said}, against {there} of {_OTHERS_SAID[one.against]}."


def _share(part: int, whole: int) -> str:
    """A share in words; neither 0 % nor 100 % unless it is exact."""
    if part in {0, whole}:
        return "all" if part else "none"
    return f"{min(99, max(1, round(100 * part / whole)))} %"
