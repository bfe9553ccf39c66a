"""How letters differ: values that others of their queue, and successes, have less often.

The same question as the triage's, about the newest letters at once, without Spark. Both get the
answer of `celery_dlq.letters.causes`.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_dlq.errors import DLQError
from celery_dlq.features.differences.findings import Finding, condition_of, finding
from celery_dlq.letters.causes import ComparedMessage, explain_causes
from celery_dlq.letters.comparison import TASK, FeatureValue, Masked, pairs_of
from celery_dlq.letters.course import CauseTiming, Course, timings
from celery_dlq.letters.explanation import UNEXPLAINED, Explanation, Shared
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.operations.incidents import Explained
from celery_dlq.operations.redrive.select import RawEntry
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import KEPT_DAYS, Group, ordered

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.assembly import Assembly

_MOST_PAIRS = 100_000  # different ones, at most 50 MB
_LEAST_MESSAGES = 5  # two letters, two others, one success
_ENTRIES_PER_PAGE = 500
# Shares of the time: reading letters ends after the first, reading successes after the second.
_LETTERS_UNTIL, _SUCCESSES_UNTIL = 0.6, 0.8
_SELECTED = "selected"  # the letters that are compared, as the name of their cause
_MICROS = 1e6
_HOUR = 3600
_SPAN = 300  # Seconds of a part of `Group.recent`
_MOST_GROUPS = 25  # of the queue, the newest: what else died at the time
OF_EACH_SIDE = 0.4  # of the messages
NOT_IN_TIME = "There was no time to compare its letters with others; ask again."
_MOST_AT_ONCE, AT_ONCE_SECONDS = 300, 0.02
_NEARLY_ALL, _HALF = 0.9, 0.5
MOST_COUNTED = 1_000_000  # letters; the time ends before, in most queues

_FIXED = {
    "fingerprint": {TASK},
    "task_name": {TASK},
    "worker_hostname": {"host"},
    "release": {"release"},
}
_OPERATOR = re.compile(r"\s*[=!<>~]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """How letters of a queue differ from others; from `DeadLetters.differences`.

    Attributes:
        dead_letter_queue: The queue.
        letters: Letters that matched the filter and were looked at, the newest.
        others: Other letters that were read.
        successes: Sampled successes of the same tasks.
        cut: True if not all was looked at: time or room for more ran out, or more letters match
            than are compared.
        selected: Letters that match the filter; ``None`` if so many match that they were not
            counted in time.
        unread: How many messages were compared without arguments, which cannot be read or are too
            large.
        shared: The values that all letters have and not all others: arguments, release and host.
            What fewest of the others have comes first.
        sentences: What all letters share, what they were compared with, and what that leaves open.
            That nothing stands out is said only if everything was compared.
        findings: The most telling first, at most 10.
    """

    dead_letter_queue: str
    letters: int
    others: int
    successes: int
    cut: bool
    selected: int | None = None
    unread: int = 0
    shared: tuple[Shared, ...] = ()
    sentences: tuple[str, ...] = ()
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names."""
        return asdict(self)


class _Compared(NamedTuple):
    """What was compared, and what that explains."""

    found: Explanation
    letters: int
    others: int
    successes: int
    in_time: bool  # False if the time was over before all of them were read


class Comparison:
    """Finds how letters differ; `DeadLetters` describes the arguments that methods share."""

    def __init__(self, assembly: Assembly, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._backend = assembly.backend
        self._reading = assembly.reading()
        self.masked: Masked | None = assembly.redaction.arguments
        self.monotonic = monotonic

    def differences(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        most: int = 5_000,
        deadline_seconds: float = 1.0,
        **fields: Unpack[FilterFields],
    ) -> Differences:
        """Find what some letters have and others lack, and since when they come; changes nothing.

        Looked for are values, sets of values, ranges of numbers and pairs of values of all
        arguments, three levels deep, and of release, host, queue, publisher and retries. A finding
        is more frequent in the letters by a tenth, beyond chance, and no mirror image of a single
        other cause: each counts alike.

        The newest letters that match the filter, two fifths of ``most``, are compared with the
        newest sampled successes of the same tasks, one fifth (see ``dlq_sample_successes``). With
        fewer than 50 of them, with as many other letters of the same tasks as letters and, if a
        task has fewer than 20, with those from the same queues, by host, release and task only: all
        else follows from the task. Hosts, releases and publishers are compared between messages of
        the same time. What is said of the time is of all letters; if not all were read, nothing is.
        Arguments of more than 65,536 characters of JSON are not looked into.
        """
        where = filter_of(where, fields)
        if most < _LEAST_MESSAGES or not deadline_seconds > 0:
            raise DLQError(
                f"expected most of {_LEAST_MESSAGES} or more and deadline_seconds above 0, got "
                f"{most} and {deadline_seconds}"
            )
        done = self.compared(dead_letter_queue, where, most, deadline_seconds)
        found = done.found
        return Differences(
            dead_letter_queue=dead_letter_queue,
            letters=done.letters,
            others=done.others,
            successes=done.successes,
            cut=found.cut,
            selected=found.selected,
            unread=found.unread,
            shared=found.shared,
            sentences=found.sentences,
            findings=tuple(finding(one, found.sentence_of(one)) for one in found.findings),
        )

    def compared(
        self, dead_letter_queue: str, where: LetterFilter, most: int, deadline_seconds: float
    ) -> _Compared:
        """Compare letters; see `differences`."""
        self._reading.check_queue(dead_letter_queue)
        reader = _Reader(self, dead_letter_queue, where)
        start, side = self.monotonic(), round(most * OF_EACH_SIDE)
        until = start + deadline_seconds * _LETTERS_UNTIL
        letters, others = reader.letters(self._backend.letters, side, until=until)
        tasks, until = {one.task for one in letters}, start + deadline_seconds * _SUCCESSES_UNTIL
        successes = reader.successes(self._backend.sampled, tasks, most - 2 * side, until=until)
        selected: int | None = len(letters)
        if reader.cut or len(letters) >= side:
            selected = self._selected(dead_letter_queue, where, len(letters), deadline_seconds)
        found = reader.explained(
            self._backend.letters,
            (letters, others, successes),
            cut=reader.cut or selected != len(letters),
            selected=selected,
            whole=len(others) < side,
        )
        sides = (len(letters), len(others), len(successes))
        return _Compared(found, *sides, in_time=not reader.cut)

    def _selected(self, queue: str, where: LetterFilter, least: int, seconds: float) -> int | None:
        """How many letters match; ``None`` if they cannot be counted in time."""
        seconds *= 1 - _SUCCESSES_UNTIL
        count = self._reading.count(queue, where, most=MOST_COUNTED, deadline_seconds=seconds)
        return max(count.number, least) if count.exact else None


def compared(
    letters: list[ComparedMessage],
    others: list[ComparedMessage],
    successes: list[ComparedMessage],
    *,
    cut: bool = False,
    selected: int | None = None,
    whole: bool = True,
    now: float | None = None,
) -> Explanation:
    """Explain letters by others; ``whole``: all that died were read, so that the time is known."""
    if not letters:
        sides: dict[str, int] = {}
        return Explanation(
            letters=0,
            shared=(),
            compared=sides,
            compared_letters=sides,
            tasks={},
            findings=(),
            unread=0,
            cut=cut,
            selected=selected,
        )
    messages = chain((one._replace(cause=_SELECTED) for one in letters), others, successes)
    timed = whole and not cut
    found = explain_causes(messages, {}, [_SELECTED], ends_at=now, cut=cut, timed=timed)
    return replace(found[_SELECTED], selected=selected)


def explained(assembly: Assembly, queue: str, fingerprint: str) -> Explained:
    """Say in a moment what sets the newest letters of a cause apart, and what selects them.

    The moment is time of this thread: on a busy machine the comparison is the same, and later.
    """
    where = LetterFilter(fingerprint=fingerprint)
    comparison = Comparison(assembly, time.thread_time)
    done = comparison.compared(queue, where, _MOST_AT_ONCE, AT_ONCE_SECONDS)
    found = done.found
    timing = found.timing
    if timing is not None:  # How fast it comes is said by its counts, as in lists
        found = replace(found, timing=replace(timing, rate=None))
    findings = (finding(one, found.sentence_of(one)) for one in found.findings)
    conditions = (
        one.condition
        for one in findings
        if one.condition and one.share_here >= _NEARLY_ALL and one.share_elsewhere < _HALF
    )
    rare = (condition_of(one.feature, one.value) for one in found.shared if one.portion < _HALF)
    condition = next(chain(conditions, filter(None, rare)), None)
    told = (one for one in found.sentences[:1] if one not in UNEXPLAINED)
    return Explained(
        sentence=next(told, ""),
        conditions=(condition,) if condition else (),
        over=bool(timing and timing.trend and timing.trend.kind == "over"),
        remark="" if done.in_time or condition else NOT_IN_TIME,
    )


def course_of(lives: list[Group], now: float) -> Course:
    """The course of a group by the hours of the clock; of one of this hour by its twelve parts.

    The last part is still running.
    """
    began, seen = (
        pick(moments).timestamp()
        for pick, moments in (
            (min, [one.first_seen_at for one in lives]),
            (max, [one.last_seen_at for one in lives]),
        )
    )
    parts = len(lives[0].recent)
    is_new = parts and began >= (now // _SPAN - parts + 1) * _SPAN
    width, last = (_SPAN, int(now // _SPAN)) if is_new else (_HOUR, int(now // _HOUR))
    counts = Counter[int]()
    for group in lives:
        some = group.recent if is_new else group.course
        counts.update({last - len(some) + 1 + place: one for place, one in enumerate(some) if one})
    return Course(
        letters=sum(counts.values()),
        first_at=began,
        last_at=min(now, seen) if seen // width == last else now,
        width=width,
        buckets=counts,
    )


class _Reader:
    """Reads messages newest first, until a time."""

    def __init__(self, of: Comparison, queue: str, where: LetterFilter) -> None:
        self._queue = queue
        self._where = where
        self._masked = of.masked
        self._monotonic = of.monotonic
        self._known: dict[FeatureValue, FeatureValue] = {}
        self._fixed = fixed_by(where.to_json())
        self.cut = False
        # The group that the filter names, and what it was before it began anew
        self._lives: list[Group] = []

    def _has_lost(self, letters: list[ComparedMessage]) -> bool:
        """True if letters of the group left before: then it is older than those that are here."""
        times = [one.at for one in letters if one.at is not None]
        first_seen = (one.first_seen_at.timestamp() for one in self._lives)
        return bool(times) and min(first_seen, default=inf) < min(times)

    def letters(
        self, store: Letters, most: int, *, until: float
    ) -> tuple[list[ComparedMessage], list[ComparedMessage]]:
        """The newest letters that match the filter, and the newest others."""
        sides: tuple[list[ComparedMessage], list[ComparedMessage]] = ([], [])
        here, newest = self._find_group(store)
        enough = min(most, here or most), most if self._where else 0
        for start in (None, newest):
            for entry in self._entries(store, start, until):
                side = not self._where.matches_fields(entry.fields)
                if entry.is_letter and len(sides[side]) < enough[side]:
                    sides[side].append(self._message(entry, died=True))
                if len(sides[1]) < enough[1]:
                    continue
                if len(sides[0]) >= enough[0]:
                    return sides
                if start is None and newest and ordered(entry.position) > ordered(newest):
                    break  # skip to the group
            else:
                return sides
        return sides

    def _find_group(self, store: Letters) -> tuple[int | None, str | None]:
        """The size of the group that the filter names, and the position of its newest letter.

        A rare group may be far from the newest letter of the queue. ``None``: not known.
        """
        if self._where.fingerprint is None:
            return None, None
        group = store.overviews.group(self._queue, self._where.fingerprint)
        if group is None:
            return None, None
        since = store.overviews.now() - timedelta(days=KEPT_DAYS)
        gone = store.overviews.emptied(self._queue, since, of=group.fingerprint)
        self._lives = [group, *(one for _, one in gone)]
        entry = store.entry(self._queue, group.example_id) if group.example_id else None
        return group.letters, None if entry is None else entry[0]

    def explained(
        self,
        store: Letters,
        messages: tuple[list[ComparedMessage], list[ComparedMessage], list[ComparedMessage]],
        *,
        cut: bool,
        selected: int | None,
        whole: bool,
    ) -> Explanation:
        """Explain letters; the time by their own times if all that died were read."""
        whole = whole and not self._has_lost(messages[0])
        now = store.overviews.now().timestamp()
        found = compared(*messages, cut=cut, selected=selected, whole=whole, now=now)
        return found if found.timing else replace(found, timing=self._timing_of_group(store, now))

    def _timing_of_group(self, store: Letters, now: float) -> CauseTiming | None:
        """When the group died that the filter names, by its counts of the last 24 hours.

        Letters that left are counted as well.
        """
        if not self._lives:
            return None
        own, overviews = self._lives[0], store.overviews
        name = own.fingerprint
        names = {*overviews.ranked(self._queue, "newest", most=_MOST_GROUPS)} - {name}
        courses = {name: course_of(self._lives, now)} | {
            group.fingerprint: course_of([group], now)
            for group in overviews.groups(self._queue, [*names])
            if group.task_name == own.task_name
        }
        starts_at = (now // _HOUR - len(own.course) + 1) * _HOUR
        found = timings(courses, {}, [name], starts_at=starts_at, ends_at=now)[name]
        return found if found.clauses else None

    def successes(
        self, store: Letters, tasks: set[str], most: int, *, until: float
    ) -> list[ComparedMessage]:
        """The newest sampled successes of some tasks."""
        found: list[ComparedMessage] = []
        for entry in self._entries(store, None, until) if tasks and most else ():
            if entry.text("task_name") in tasks:
                found.append(self._message(entry, died=False))
            if len(found) >= most:
                break
        return found

    def _entries(self, store: Letters, before: str | None, until: float) -> Iterator[RawEntry]:
        for page in store.fields(
            self._queue, after=None, until=before, page_size=_ENTRIES_PER_PAGE, newest_first=True
        ):
            for position, raw in page:
                if self._monotonic() >= until or len(self._known) >= _MOST_PAIRS:
                    self.cut = True
                    return
                yield RawEntry(position, raw)

    def _message(self, entry: RawEntry, *, died: bool) -> ComparedMessage:
        pairs = (pair for pair in pairs_of(entry.text, self._masked) if pair[0] not in self._fixed)
        task, at = entry.text("task_name"), entry.text("dead_lettered_at")
        return ComparedMessage(
            cause=(entry.text("fingerprint") or f"unknown {task}") if died else None,
            task=task,
            queue=entry.text("source_queue"),
            at=int(at) / _MICROS if at.isdecimal() else None,
            # Equal pairs are one object.
            pairs=frozenset(self._known.setdefault(pair, pair) for pair in pairs),
        )


def fixed_by(where: Mapping[str, Any]) -> frozenset[str]:
    """The features that a filter fixes, given as JSON: they would be found, and say nothing."""
    conditions = {_OPERATOR.split(one, maxsplit=1)[0] for one in where.get("conditions", ())}
    return frozenset(chain(conditions, *(_FIXED.get(name, ()) for name in where)))
