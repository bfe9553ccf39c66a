"""Queues, their groups by cause, and what was discarded: is something burning, since when, why?"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from functools import lru_cache
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

from celery_dlq import timing
from celery_dlq.errors import NotFound
from celery_dlq.events import GroupState
from celery_dlq.letters.tracebacks import Frame
from celery_dlq.operations.in_force import NOTHING_IN_FORCE
from celery_dlq.operations.incidents import Incidents, message_of
from celery_dlq.web.http import Call, Page
from celery_dlq.web.pages import Row, confirm, frames_of, gone_page, page_of
from celery_dlq.web.status import MAX_QUEUES

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.operations.job import Job
    from celery_dlq.operations.release import HeldMessages
    from celery_dlq.store.records import Group, GroupOrder, QueueSummary

Columns = Sequence[tuple[str, Mapping[str, int]]]
"""Letters by reason for each part of a time, for bars."""

MAX_GROUPS = 100
EXAMPLES_SECONDS = 0.01
"""How long the newest letters of causes are read for a page of them; one takes 0.2 ms."""
MAX_EMPTIED = 20
MAX_MARKED, MAX_CAUSES_MARKED = 20, 20
"""Queues whose newest causes are looked at for what holds them, and how many causes of each."""
MINUTES_PER_BAR = 2
MAX_DISCARDED_SHOWN = 100
MAX_DISCARDED_SCANNED = 10_000


def overview(call: Call) -> Page:
    """Show the busiest dead-letter queues, a page of them, or those whose names have a text."""
    text, number = call.typed("q"), page_of(call)
    known = call.dlq.assembly.reading().busiest()
    names = [name for name in known if text.casefold() in name.casefold()]
    shown = names[(number - 1) * MAX_QUEUES : number * MAX_QUEUES]
    queues = {queue.name: queue for queue in call.dlq.queues(shown)}
    fleet = call.site.status.fleet()
    in_force = call.in_force() or NOTHING_IN_FORCE
    newest_tasks = call.dlq.assembly.backend.letters.overviews.newest_tasks
    tasks = newest_tasks(shown[:MAX_MARKED], MAX_CAUSES_MARKED) if in_force.held else {}
    return call.page(
        "overview.html",
        title="Dead-letter queues",
        queues=[queues[name] for name in shown if name in queues],
        known=len(known),
        found=len(names),
        most=MAX_QUEUES,
        text=text,
        number=number,
        columns=_columns_of_hour,
        jobs={name: [job for job in in_force.jobs if job.queue == name] for name in shown},
        quiet=sum(not last_hour for _letters, last_hour in known.values()),
        held={
            queue: in_force.holding(some, fleet.sources_of(queue)) for queue, some in tasks.items()
        },
        fleet=fleet,
    )


def _columns_of_hour(queue: QueueSummary) -> Columns:
    return [
        (
            f"{60 - start} to {60 - start - MINUTES_PER_BAR} minutes ago",
            {
                reason: sum(minutes[start : start + MINUTES_PER_BAR])
                for reason, minutes in queue.arrivals.items()
            },
        )
        for start in range(0, 60, MINUTES_PER_BAR)
    ]


def groups(call: Call) -> Page:
    """Show the groups of a queue."""
    queue = call.parts["queue"]
    by: GroupOrder = "letters" if call.value("by") == "letters" else "newest"
    state = call.value("state") or None
    text, number, searched = call.typed("q"), page_of(call), 0
    first, reading = (number - 1) * MAX_GROUPS, call.dlq.assembly.reading()
    if text:
        most, seconds = first + MAX_GROUPS + 1, timing.current.page / 2  # rows take time, too
        found, searched = reading.groups_with_text(queue, text, by, state, most, seconds)
        found, more = found[first : first + MAX_GROUPS], len(found) == most
    else:
        found, more = reading.groups_and_more(queue, by, state, first, MAX_GROUPS)
    if by == "newest":
        found = sorted(found, key=lambda group: (-group.last_hour, -group.letters))
    return call.page(
        "groups.html",
        title=f"{queue}: groups",
        groups=found,
        held=_held_by_task(call, queue, found),
        examples=_examples_of(call, queue, found),
        tries=_last_tries(call, queue, found),
        by=by,
        state=state or "",
        states=[one.value for one in GroupState],
        columns=columns_of_day,
        text=text,
        number=number,
        more=more,
        searched=searched,
        length=call.dlq.store.length(queue),
        emptied=[] if state or text or number > 1 else call.dlq.emptied(queue, limit=MAX_EMPTIED),
    )


def _held_by_task(
    call: Call, queue: str, groups: Sequence[Group]
) -> dict[str | None, list[HeldMessages]]:
    """What holds messages of the tasks of causes."""
    in_force, fleet = call.in_force() or NOTHING_IN_FORCE, call.site.status.fleet()
    tasks = {group.task_name for group in groups if group.task_name}
    return {task: in_force.holding({task}, fleet.sources_of(queue)) for task in tasks}


class Example(NamedTuple):
    """What the row of a cause says of its newest letter."""

    message: str
    place: Frame | None


def _examples_of(call: Call, queue: str, groups: Sequence[Group]) -> dict[str, Example]:
    """What happened to the newest letters of the first causes, as far as there is time."""
    found, incidents = dict[str, Example](), Incidents(call.dlq.assembly)
    until = time.monotonic() + EXAMPLES_SECONDS
    for group in groups:
        if time.monotonic() > until:
            break
        letter = incidents.example_of(queue, group)
        found[group.fingerprint] = Example(message_of(letter), _place_of(letter))
    return found


def _last_tries(call: Call, queue: str, groups: Sequence[Group]) -> dict[str, Job]:
    """The last job on the letters of each cause."""
    known = [job for job in call.site.status.jobs() if job.queue == queue]
    known = [job for job in known if "fingerprint" in job.filter]
    tries = [job for job in known if job.state not in ("planned", "expired")]
    names = [group.fingerprint for group in groups]  # the newest job comes last, and stays
    return {name: job for job in tries[::-1] for name in names if job.is_of_cause(queue, name)}


def group(call: Call) -> Page:
    """Show one group and its newest example."""
    queue, fingerprint = call.parts["queue"], call.parts["fingerprint"]
    found, incidents = call.dlq.group(queue, fingerprint), Incidents(call.dlq.assembly)
    example = incidents.example_of(queue, found)
    answer = incidents.of_cause(queue, found, example) if found.letters else None
    name = (found.exception_type or "").rpartition(".")[2]
    return call.page(
        "group.html",
        title=f"{queue}: {name or found.reason or fingerprint}",
        group=found,
        held=_held_by_task(call, queue, [found]).get(found.task_name, []),
        answer=answer,
        message=message_of(example),
        raised_at=_place_of(example),
        example=example,
        exceptions=frames_of(example),
    )


def _place_of(letter: DeadLetter | None) -> Frame | None:
    """Where an exception was raised: the innermost frame of the app itself."""
    frames = [frame for raised in frames_of(letter)[:1] for frame in raised.frames]
    own = [frame for frame in frames if frame.own] or frames
    return own[-1] if own else None


def columns_of_day(group: Group) -> Columns:
    """Bars of the last 24 hours of a cause."""
    now = datetime.now(timezone.utc).replace(minute=0, second=0, microsecond=0)
    pairs = zip(_hour_names(now, len(group.course)), group.course, strict=True)
    return [(name, {group.reason: letters}) for name, letters in pairs]


@lru_cache(maxsize=2)
def _hour_names(now: datetime, number: int) -> list[str]:
    """The names of the last hours: the same for all groups of a page."""
    hours = (now - timedelta(hours=before) for before in range(number - 1, -1, -1))
    return [f"{hour:%d %b %H:00} UTC" for hour in hours]


def discarded(call: Call) -> Page:
    """Show the newest discarded letters of a queue."""
    queue = call.parts["queue"]
    newest = islice(call.dlq.discarded(queue), MAX_DISCARDED_SHOWN)
    rows = [Row.of(call, entry) for entry in newest]
    return call.page("discarded.html", title=f"{queue}: discarded letters", rows=rows)


def restore(call: Call) -> Page:
    """Put a discarded letter back: first show which and where to, then do it."""
    queue, letter_id = call.parts["queue"], call.value("id")
    there = call.dlq.store.entry(queue, letter_id) is not None
    bin_ = islice(call.dlq.discarded(queue), MAX_DISCARDED_SCANNED)
    entry = next((one for one in bin_ if one.key == letter_id), None)
    if entry is None and there:  # another operator was faster
        return call.to("letter", queue=queue, letter=letter_id)
    if entry is None:
        what = f"expected a discarded letter of {queue}, got {letter_id!r}"
        return gone_page(call, NotFound(f"{what}; discarded letters are kept for 24 hours"))
    found = Row.of(call, entry)
    return confirm(
        call,
        lambda: call.dlq.restore(letter_id, queue),
        title=f"Restore a letter of {queue}?",
        button="Restore 1 letter",
        facts={
            "letter": letter_id,
            "task": found.task_name,
            "reason": found.reason,
            "what happened": found.description or "-",
            "where to": f"{queue}, as its newest letter; an export then has it once more",
        },
        back=call.link("discarded", queue=queue),
        to=call.link("letter", queue=queue, letter=letter_id),
        problem=f"{queue} has this letter again: its message died again." if there else "",
    )
