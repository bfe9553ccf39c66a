"""Which queues grow, how much more than the day before, and of which causes: the overview says it.

A queue keeps its last hour by minutes; its causes keep a day by hours, also those whose last letter
left. Their sum is what is usual, if all causes of the day were read.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

from celery_dlq.errors import NotFound
from celery_dlq.letters.course import pace_text
from celery_dlq.operations.incidents import SETTLED, Incidents, message_of
from celery_dlq.store.overviews import Overviews
from celery_dlq.store.records import Group, QueueSummary
from celery_dlq.web.http import Call, Panel
from celery_dlq.web.templating import short

SECONDS = 0.02
"""How long causes are read, and then their messages, in time of this thread; in all half a second.

The causes of a queue take a millisecond. A machine that is busy with other work leaves none out.
"""

MOST_COMPARED = 3
"""Queues, those that grow most: of a Redis that is 10 ms away, each takes 40."""

MOST_CAUSES = 100
MAX_SAID = 3
"""Queues that the overview names in a sentence."""

MAX_SHOWN = 5
"""Causes that the overview shows: one click leads to what burns."""

_GROWING, _HOURS, _EXACT_FROM = 1.5, 22, 10
_DAY = timedelta(days=1)


class Growth(NamedTuple):
    """How a queue grows, by the day before."""

    grows: bool
    text: str = ""  # ``10 times the day before``; empty if the day is not known


class Cause(NamedTuple):
    """A cause that grew in the last hour."""

    queue: str
    group: Group
    message: str | None  # Of its newest letter; `None` if there was no time to read it


def growth(call: Call, subject: tuple[Sequence[QueueSummary], int]) -> Panel:
    """What the overview says of the queues that it shows, and how many of all are quiet."""
    queues, quiet = subject
    overviews, has_time = call.dlq.assembly.backend.letters.overviews, _clock()
    found, causes, unread = dict[str, Growth](), list[tuple[str, Group]](), 0
    for place, queue in enumerate(sorted(queues, key=lambda one: -one.last_hour)):
        in_time = place < MOST_COMPARED and has_time()
        groups = _newest(call, queue.name) if queue.last_hour and queue.letters and in_time else []
        causes += [(queue.name, one) for one in groups]
        unread += bool(queue.last_hour and queue.letters and not groups)
        usual = _usual_hour(overviews, queue.name, groups) if queue.per_minute and groups else None
        found[queue.name] = _growth_of(queue, usual)
    growing = [one for one in queues if found[one.name].grows]
    growing.sort(key=lambda one: -one.per_minute)
    said = [
        ", ".join(
            filter(None, (f"{short(one.name, 60)} is growing: {pace_text(one.per_minute)}", text))
        )
        for one in growing[:MAX_SAID]
        for text in (found[one.name].text,)
    ]
    if len(growing) > MAX_SAID:
        said.append(f"{len(growing) - MAX_SAID} more are growing")
    if quiet:
        said.append(f"{quiet:,} {'queue is' if quiet == 1 else 'queues are'} quiet")
    shown = [*_shown(call, causes)]
    return "growth.html", {"said": "; ".join(said), "of": found, "causes": shown, "unread": unread}


def _clock() -> Callable[[], bool]:
    own, all_ = time.thread_time() + SECONDS, time.monotonic() + 25 * SECONDS
    return lambda: time.thread_time() < own and time.monotonic() < all_


def _newest(call: Call, queue: str) -> list[Group]:
    """The newest causes of a queue, one more than are compared."""
    with suppress(NotFound):  # it was emptied just now
        return call.dlq.groups(queue, by="newest", limit=MOST_CAUSES + 1)
    return []


def _shown(call: Call, causes: Sequence[tuple[str, Group]]) -> Iterator[Cause]:
    """The causes with the most letters in the last hour; no muted one and no resolved one."""
    loud = [one for one in causes if one[1].last_hour and one[1].status.state not in SETTLED]
    incidents, has_time = Incidents(call.dlq.assembly), _clock()
    for queue, group in sorted(loud, key=lambda one: -one[1].last_hour)[:MAX_SHOWN]:
        in_time = has_time()
        example = incidents.example_of(queue, group) if in_time else None
        yield Cause(queue, group, message_of(example) if in_time else None)


def _growth_of(queue: QueueSummary, usual: float | None) -> Growth:
    """Growth beyond the day before; if that is not known, beyond the rest of the hour."""
    hourly = 60 * queue.per_minute
    if not hourly or not queue.letters:
        return Growth(grows=False)
    if usual is None:
        return Growth(grows=queue.direction == "growing")
    if not usual:
        return Growth(grows=True, text="nothing the day before")
    times = hourly / usual
    digits = 0 if times >= _EXACT_FROM else 1
    text = f"{times:,.{digits}f} times the day before" if times > _GROWING else ""
    return Growth(grows=times > _GROWING, text=text)


def _usual_hour(overviews: Overviews, queue: str, newest: Sequence[Group]) -> float | None:
    """Letters of an hour, by the day before the last one; ``None`` if not all are known."""
    since = overviews.now() - _DAY
    groups = newest[:MOST_CAUSES]
    gone = [group for _at, group in islice(overviews.emptied(queue, since), MOST_CAUSES + 1)]
    more = len(newest) > MOST_CAUSES and all(group.last_seen_at > since for group in groups)
    if more or len(gone) > MOST_CAUSES:
        return None
    return sum(sum(group.course[:_HOURS]) for group in (*groups, *gone)) / _HOURS
