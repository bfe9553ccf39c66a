"""Find and read letters; changes nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any, get_args

from celery_dlq import timing
from celery_dlq.errors import CorruptLetter, DLQError, NotFound, StoreUnavailable
from celery_dlq.events import GroupState
from celery_dlq.letters.filters import FilterFields, LetterFilter, filter_of
from celery_dlq.letters.fingerprint import DIGITS
from celery_dlq.letters.printable import get_logger, some_of
from celery_dlq.letters.record import DeadLetter, from_micros
from celery_dlq.letters.redaction import NO_REDACTION, Redaction
from celery_dlq.operations.edit import arguments
from celery_dlq.operations.paging import LetterCount, LetterPage, Search
from celery_dlq.operations.redrive.select import Progress, RawEntry, select_entries
from celery_dlq.policies.checks import check_names
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.store.letters import Letters
from celery_dlq.store.notes import GroupNotes
from celery_dlq.store.records import (
    KEPT_DAYS,
    OPEN_GROUP,
    Group,
    GroupOrder,
    GroupStatus,
    QueueSummary,
    has_text,
    in_order,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from celery_dlq.operations.job import Job

logger = get_logger("celery_dlq")

ID_LENGTH = 36
SHORTEST_PREFIX = 6
_MAX_NAMES_SHOWN = 20  # in an error text
_MOST_BUSY = 20  # queues in which a cause of another queue is looked for
_EMPTIED_SHOWN = timedelta(days=1)
_MOST_NAMED = 20_000  # fingerprints, the first, among which some are found by digits or a name
_SEARCHED_AT_ONCE = 500


def split_arguments(
    method: str, where: LetterFilter | None, given: Mapping[str, Any], taken: Iterable[str]
) -> tuple[LetterFilter, dict[str, Any]]:
    """The filter and the options of a call that takes both as keywords."""
    check_names(f"arguments of {method}()", given, [*taken, *FilterFields.__annotations__])
    known = FilterFields.__annotations__
    by_field: Any = {name: value for name, value in given.items() if name in known}
    options = {name: value for name, value in given.items() if name not in known}
    return filter_of(where, by_field), options


class Reading:
    """Finds letters; `DeadLetters` describes the arguments that its methods share."""

    def __init__(
        self, store: Letters, redaction: Redaction = NO_REDACTION, notes: GroupNotes | None = None
    ) -> None:
        self._store = store
        self.redaction = redaction
        self._notes = notes

    def queues(self, names: Sequence[str] | None = None) -> list[QueueSummary]:
        """All dead-letter queues, or some: name, number of letters, ages, letters by reason."""
        return self._store.overviews.queues(names)

    def busiest(self) -> dict[str, tuple[int, int]]:
        """Letters of each queue, and those of the last hour; the busiest of the last hour first.

        Those without letters are the last ones.
        """
        overviews = self._store.overviews
        found = overviews.counts(overviews.names()).items()
        return dict(sorted(found, key=lambda one: (not one[1][0], -one[1][1], -one[1][0], one[0])))

    def letters(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        newest_first: bool = False,
        limit: int | None = None,
        scanned: Progress | None = None,
        unread: Progress | None = None,
        **fields: Unpack[FilterFields],
    ) -> Iterator[DeadLetter]:
        """The letters of a queue, streamed, oldest first; reading changes nothing.

        Leaves out letters that arrive while you iterate, and entries that are no letters
        (`entries` returns those too). Calls ``unread(1)`` for each letter that it leaves out
        because a condition asks for its arguments, which cannot be read.
        """
        found = self.entries(
            dead_letter_queue,
            where,
            newest_first=newest_first,
            scanned=scanned,
            unread=unread,
            **fields,
        )
        return islice(_readable(found), limit)

    def entries(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        newest_first: bool = False,
        limit: int | None = None,
        scanned: Progress | None = None,
        unread: Progress | None = None,
        **fields: Unpack[FilterFields],
    ) -> Iterator[RawEntry]:
        """Like `letters`, but raw, with positions, and with entries that are no letters."""
        where = filter_of(where, fields)
        self.check_queue(dead_letter_queue)
        found = select_entries(
            self._store,
            dead_letter_queue,
            where,
            newest_first=newest_first,
            scanned=scanned,
            unread=unread,
        )
        return islice(found, limit)

    def page(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        cursor: str | None = None,
        size: int = 50,
        deadline_seconds: float = 2.0,
        **fields: Unpack[FilterFields],
    ) -> LetterPage:
        """A page of letters, newest first, and of entries that are no letters.

        Letters that arrive after the first page was read are on none of its pages, so no letter
        moves from one page to the next. A page with large letters is shorter.
        """
        where = filter_of(where, fields)
        self.check_queue(dead_letter_queue)
        return Search(self._store, dead_letter_queue, where, deadline_seconds).page(cursor, size)

    def count(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        most: int = 10_000,
        deadline_seconds: float = 2.0,
        **fields: Unpack[FilterFields],
    ) -> LetterCount:
        """The number of letters that match a filter, counted from the newest.

        Without a filter, or with nothing but a whole fingerprint, no letter is read and the
        number is exact.
        """
        where = filter_of(where, fields)
        self.check_queue(dead_letter_queue)
        return Search(self._store, dead_letter_queue, where, deadline_seconds).count(most)

    def tail(
        self,
        /,
        dead_letter_queue: str,
        where: LetterFilter | None = None,
        *,
        stop: Callable[[], bool] = lambda: False,
        **fields: Unpack[FilterFields],
    ) -> Iterator[DeadLetter]:
        """Letters as they arrive from now on, until ``stop`` returns true.

        Polls the store, and waits for one that does not answer.
        """
        where = filter_of(where, fields)
        self.check_queue(dead_letter_queue)
        after = self._store.last_position(dead_letter_queue)
        return self._follow(dead_letter_queue, where, after, stop)

    def _follow(
        self,
        dead_letter_queue: str,
        where: LetterFilter,
        after: str | None,
        stop: Callable[[], bool],
    ) -> Iterator[DeadLetter]:
        poll = timing.current.poll
        backoff = timing.Backoff(2 * poll, timing.current.max_poll)
        while not stop():
            try:
                until = self._store.last_position(dead_letter_queue)
                if until != after:
                    for entry in select_entries(
                        self._store, dead_letter_queue, where, after=after, until=until
                    ):
                        after = entry.position
                        yield from _readable(iter([entry]))
                after, pause = until, poll
                backoff.worked()
            except StoreUnavailable as exc:
                pause = backoff.failed()
                if backoff.failures == 1:
                    logger.warning("waiting, the store does not answer: %s", exc)
            time.sleep(pause)

    def get(self, letter_id: str, dead_letter_queue: str | None = None) -> DeadLetter:
        """One letter by its id."""
        return self.entry(letter_id, dead_letter_queue)[1].letter()

    def entry(
        self, letter_id: str, dead_letter_queue: str | None = None, *, whole: bool = False
    ) -> tuple[str, RawEntry]:
        """The queue of a letter, and the raw letter; also for an entry that is no letter.

        The beginning of an id is enough, unless it is said to be ``whole``: all ids are read then.
        """
        if dead_letter_queue is not None:
            self.check_queue(dead_letter_queue)
        names = [dead_letter_queue] if dead_letter_queue else self._store.names()
        holder = next(iter(self._store.overviews.holders(names, letter_id)), None)
        entry = None if holder is None else self._store.entry(holder, letter_id)
        if holder is not None and entry is not None:
            return holder, RawEntry(*entry)
        if not whole and SHORTEST_PREFIX <= len(letter_id) < ID_LENGTH:
            found = self._store.ids(names, letter_id, most=_MAX_NAMES_SHOWN)
            if len(found) == 1:
                return self.entry(found[0][1], found[0][0])
            if found:
                several = ", ".join(letter_id for _, letter_id in found)
                raise NotFound(
                    f"several letters have an id that begins with {letter_id!r}: {several}"
                )
        where = some_of(names, _MAX_NAMES_SHOWN) or "no queue"
        more = f"; give at least {SHORTEST_PREFIX} characters" * (len(letter_id) < SHORTEST_PREFIX)
        raise NotFound(
            f"expected a letter with the id {letter_id!r}, found none (searched {where}){more}"
        )

    def groups(
        self,
        dead_letter_queue: str,
        *,
        limit: int | None = None,
        by: GroupOrder = "letters",
        state: GroupState | str | None = None,
        offset: int = 0,
    ) -> list[Group]:
        """The letters of a queue by fingerprint, after the first ``offset`` of this order."""
        names = self._ranked(dead_letter_queue, by, state, offset, limit)
        return self._groups_of(dead_letter_queue, names, by, state)

    def groups_and_more(
        self, queue: str, by: GroupOrder, state: str | None, offset: int, limit: int
    ) -> tuple[list[Group], bool]:
        """Some groups, as `groups` has them, and whether there are more after them."""
        names = self._ranked(queue, by, state, offset, limit + 1)
        return self._groups_of(queue, names[:limit], by, state), len(names) > limit

    def groups_with_text(
        self, queue: str, text: str, by: GroupOrder, state: str | None, most: int, seconds: float
    ) -> tuple[list[Group], int]:
        """The first groups that have a text in what names them, and how many were searched."""
        ranked, searched, found = list[str](), 0, list[Group]()
        until, text = 0.0, text.casefold()
        for limit in (_SEARCHED_AT_ONCE, _MOST_NAMED):  # A text that many have needs few names
            if len(found) >= most or searched < len(ranked):
                break
            ranked += self._ranked(queue, by, state, len(ranked), limit - len(ranked))
            until = until or time.monotonic() + seconds
            while searched < len(ranked) and len(found) < most and time.monotonic() < until:
                some = ranked[searched : searched + _SEARCHED_AT_ONCE]
                names = self._store.overviews.with_text(queue, some, text)
                found += [x for x in self._groups_of(queue, names, by, state) if has_text(x, text)]
                searched += len(some)
        return found[:most], searched

    def _ranked(
        self, queue: str, by: GroupOrder, state: str | None, offset: int, limit: int | None
    ) -> list[str]:
        """The fingerprints of the groups in an order."""
        if by not in get_args(GroupOrder):
            raise DLQError(f"expected by to be letters or newest, got {by!r}")
        known = [one.value for one in GroupState]
        if state is not None and state not in known:
            raise DLQError(f"expected state to be one of {', '.join(known)}, got {state!r}")
        self.check_queue(queue)
        overviews, notes = self._store.overviews, self._notes
        states = {} if state is None or notes is None else notes.states(queue)
        end = None if limit is None else offset + limit
        if state is None or state == GroupState.OPEN:
            names = overviews.ranked(queue, by, most=None if end is None else end + len(states))
            return [name for name in names if name not in states][offset:end]
        wanted = [name for name, one in states.items() if one == state]
        return overviews.ranked(queue, by, most=end, of=wanted)[offset:]

    def _groups_of(
        self, queue: str, names: Sequence[str], by: GroupOrder, state: str | None
    ) -> list[Group]:
        """The groups of fingerprints, with their states."""
        overviews, notes = self._store.overviews, self._notes
        statuses = {} if notes is None else notes.statuses(queue, names)
        found = {name: _empty_group(name, status) for name, status in statuses.items()}
        found |= {one.fingerprint: one for one in overviews.groups(queue, names)}
        groups = (replace(found[n], status=statuses.get(n, OPEN_GROUP)) for n in found)
        return in_order([one for one in groups if state is None or one.status.state == state], by)

    def cause(self, fingerprint: str, dead_letter_queue: str | None = None) -> tuple[str, str]:
        """The queue and the whole fingerprint of a cause; without a queue, all are looked at."""
        if dead_letter_queue is not None:
            return dead_letter_queue, self.whole_fingerprint(dead_letter_queue, fingerprint)
        found = list[tuple[str, str]]()
        for queue in self._store.names():
            whole = self.whole_fingerprint(queue, fingerprint)
            if len(whole) == DIGITS and self._knows(queue, whole):
                found.append((queue, whole))
        if len(found) == 1:
            return found[0]
        if found:
            queues = some_of([queue for queue, _whole in found], _MAX_NAMES_SHOWN)
            raise NotFound(
                f"expected a fingerprint of one queue, got {fingerprint!r} of {queues}; name the "
                f"queue as well, as QUEUE or --queue"
            )
        raise NotFound(
            f"expected the fingerprint of a cause, got {fingerprint!r}; `dlq groups QUEUE` shows "
            f"those of a queue"
        )

    def is_elsewhere(self, dead_letter_queue: str, fingerprint: str) -> bool:
        """True if another of the busiest queues has a cause: commands then name its queue."""
        busiest = islice(self.busiest(), _MOST_BUSY)
        return any(one != dead_letter_queue and self._knows(one, fingerprint) for one in busiest)

    def _knows(self, queue: str, fingerprint: str) -> bool:
        """True if a queue has, or had, letters of a cause."""
        with suppress(NotFound):
            return bool(self.group(queue, fingerprint))
        return False

    def whole_fingerprint(self, dead_letter_queue: str, fingerprint: str) -> str:
        """The fingerprint that begins with these digits; what was given, if no known one does."""
        self.check_queue(dead_letter_queue)
        if len(fingerprint) >= DIGITS:
            return fingerprint
        queue = dead_letter_queue
        known = {*self._store.overviews.ranked(queue, "letters", most=_MOST_NAMED)}
        if self._notes is not None:
            known |= self._notes.states(queue).keys()
        found = sorted(one for one in known if one.startswith(fingerprint))
        if not found:  # its letters may be gone
            since = self._store.now() - timedelta(days=KEPT_DAYS)
            gone = {one.fingerprint for _at, one in self._store.overviews.emptied(queue, since)}
            known, found = gone, sorted(one for one in gone if one.startswith(fingerprint))
        if len(found) > 1 and fingerprint not in known:
            raise NotFound(
                f"several fingerprints in {dead_letter_queue!r} begin with {fingerprint!r}: "
                f"{some_of(found, _MAX_NAMES_SHOWN)}; give more digits"
            )
        return fingerprint if fingerprint in known or not found else found[0]

    def emptied(
        self,
        dead_letter_queue: str,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
    ) -> list[tuple[datetime, Group]]:
        """The causes whose last letter left, and when: by default those of the last day.

        A cause that has letters again is one of `groups`; it is left out.
        """
        self.check_queue(dead_letter_queue)
        since = since or self._store.now() - _EMPTIED_SHOWN
        found = self._store.overviews.emptied(dead_letter_queue, since, until, still=True)
        return [*islice(found, limit)]

    def group(self, dead_letter_queue: str, fingerprint: str) -> Group:
        """The group of one fingerprint; also one whose letters are gone, while it is known.

        It is known by a state or a note for 90 days, and by its letters for 90 days after the last
        one left.
        """
        self.check_queue(dead_letter_queue)
        status = OPEN_GROUP
        if self._notes is not None:
            status = self._notes.status(dead_letter_queue, fingerprint)
        found = self._store.overviews.group(dead_letter_queue, fingerprint)
        if found is None and self._notes is not None:
            known = status is not OPEN_GROUP or self._notes.notes(dead_letter_queue, fingerprint)
            found = _empty_group(fingerprint, status) if known else None
        if found is None:
            raise NotFound(
                f"expected the fingerprint of letters in {dead_letter_queue!r}, got "
                f"{fingerprint!r}; `dlq groups {dead_letter_queue}` shows the fingerprints"
            )
        return replace(found, status=status)

    def group_of(self, job: Job) -> Group | None:
        """The group that a job is about, with or without letters; ``None`` if it names none."""
        with suppress(NotFound):  # its letters left long ago
            digits = str(job.filter.get("fingerprint") or "")
            whole = digits and self.whole_fingerprint(job.queue, digits)
            return self.group(job.queue, whole) if whole else None
        return None

    def arguments(
        self, letter_id: str, dead_letter_queue: str | None = None
    ) -> tuple[list[Any], dict[str, Any]]:
        """Args and kwargs of a letter, as `edit` changes them.

        What ``dlq_redact`` masks is ``[redacted]``; `edit` puts the values back.
        """
        letter = self.get(letter_id, dead_letter_queue)
        found = arguments(letter.content_type, letter.body, letter.decoded("headers") or {})
        return self.redaction.arguments(found.args, found.kwargs)

    def check_queue(self, name: str) -> None:
        """Check that a dead-letter queue exists."""
        if not self._store.has_queue(name):
            names = self._store.names()
            all_of_them = some_of(names, _MAX_NAMES_SHOWN) or "none yet"
            known = did_you_mean(name, names) or f"; there are: {all_of_them}"
            raise NotFound(f"expected the name of a dead-letter queue, got {name!r}{known}")


def _empty_group(fingerprint: str, status: GroupStatus) -> Group:
    """A group that has no letters any more, as it was when its state was set."""
    return Group(
        fingerprint=fingerprint,
        letters=0,
        task_name=status.task_name,
        reason=status.reason,
        exception_type=status.exception_type,
        first_seen_at=status.first_seen_at or from_micros(0),
        last_seen_at=status.last_seen_at or from_micros(0),
        example_id="",
        releases=tuple(filter(None, (status.regressed_in, *status.releases))),
    )


def _readable(found: Iterator[RawEntry]) -> Iterator[DeadLetter]:
    for entry in found:
        with suppress(CorruptLetter):  # one bad entry must not stop the others
            yield entry.letter()
