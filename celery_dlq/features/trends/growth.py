"""Which queues grow, and how much more than the day before: the overview says it aloud.

A queue keeps its last hour by minutes; its causes keep a day by hours, also those whose last letter
left. Their sum is what is usual, if all causes of the day were read.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from typing import NamedTuple

from celery_dlq.store.overviews import Overviews
from celery_dlq.store.records import QueueSummary
from celery_dlq.web.http import Call, Panel
from celery_dlq.web.templating import pace

SECONDS = 0.02
"""How long causes are read for what is usual; those of one queue take a millisecond or two."""

MOST_COMPARED = 3
"""Queues, those that grow most: of a Redis that is 10 ms away, each takes 40."""

MOST_CAUSES = 100
MAX_SAID = 3
"""Queues that the overview names in a sentence."""

_GROWING, _HOURS, _EXACT_FROM = 1.5, 22, 10
_DAY = timedelta(days=1)


class Growth(NamedTuple):
    """How a queue grows, by the day before."""

    grows: bool
    text: str = ""  # ``10 times the day before``; empty if the day is not known


def growth(call: Call, subject: tuple[Sequence[QueueSummary], int]) -> Panel:
    """What the overview says of the queues that it shows, and how many of all are quiet."""
    queues, quiet = subject
    overviews, until = call.dlq.assembly.backend.letters.overviews, time.monotonic() + SECONDS
    found = dict[str, Growth]()
    for place, queue in enumerate(sorted(queues, key=lambda one: -one.last_hour)):
        in_time = place < MOST_COMPARED and time.monotonic() < until
        known = queue.per_minute and queue.letters and in_time
        usual = _usual_hour(overviews, queue.name) if known else None
        found[queue.name] = _growth_of(queue, usual)
    growing = [one for one in queues if found[one.name].grows]
    growing.sort(key=lambda one: -one.per_minute)
    said = [
        ", ".join(filter(None, (f"{one.name} is growing: {pace(one.per_minute)}", text)))
        for one in growing[:MAX_SAID]
        for text in (found[one.name].text,)
    ]
    if len(growing) > MAX_SAID:
        said.append(f"{len(growing) - MAX_SAID} more are growing")
    if quiet:
        said.append(f"{quiet:,} {'queue is' if quiet == 1 else 'queues are'} quiet")
    return "growth.html", {"said": "; ".join(said), "of": found}


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


def _usual_hour(overviews: Overviews, queue: str) -> float | None:
    """Letters of an hour, by the day before the last one; ``None`` if not all are known."""
    since = overviews.now() - _DAY
    names = overviews.ranked(queue, "newest", most=MOST_CAUSES + 1)
    groups = overviews.groups(queue, names[:MOST_CAUSES])
    gone = [group for _at, group in islice(overviews.emptied(queue, since), MOST_CAUSES + 1)]
    more = len(names) > MOST_CAUSES and all(group.last_seen_at > since for group in groups)
    if more or len(gone) > MOST_CAUSES:
        return None
    return sum(sum(group.course[:_HOURS]) for group in (*groups, *gone)) / _HOURS
