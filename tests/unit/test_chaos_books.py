"""The books of the chaos test find what must not be, and explain only what has evidence."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timezone
from typing import Any

import pytest
from builders import a_letter
from chaos.books import Balance, Books
from chaos.facts import Ended, Facts, Logged, Mark, Published, Spell, name_of, task_id_of
from chaos.publish import RAW, WEIGHTS, mix

from celery_dlq import Delivery, Outcome, Reason

TASK, WORKER, OTHER = "task", 100, 200
AGAIN = "again: its result could not be stored, so Celery never ended it"


def at(*times: float, worker: int = WORKER, pid: int = 101) -> list[Mark]:
    """Marks of the task at these times."""
    return [Mark(TASK, 0, pid, worker, time) for time in times]


def balance(kind: str, starts: Sequence[Mark], ends: Sequence[Mark] = (), **more: Any) -> Books:
    """The books of a run with one message, at a limit of 3 if no other is given."""
    letters = more.pop("letters", [])
    if not (ends or letters):
        letters = [a_letter(task_id=TASK, reason=Reason.MAX_DELIVERIES_EXCEEDED, deliveries=3)]
    facts = Facts(
        max_deliveries=more.pop("limit", 3),
        published={TASK: Published(kind, 1, confirmed=True)},
        starts=[*starts],
        ends=[*ends],
        letters=letters,
        slots={WORKER: "w1", OTHER: "w2"},
        **more,
    )
    return Balance(facts)()


def faults(books: Books) -> set[str]:
    """The kinds of faults that were found."""
    return {name for name, found in books.faults.items() if found}


def test_a_message_without_success_or_letter_is_lost() -> None:
    """Lost, unless it is still on the broker."""
    nothing = Facts(3, {TASK: Published("quick", 1, confirmed=True)}, [], [], [])
    assert faults(Balance(nothing)()) == {"lost"}
    nothing.left = {TASK}
    assert not faults(Balance(nothing)())


@pytest.mark.parametrize(
    ("spell", "found"),
    [
        (None, {"started too often by one worker alone"}),
        (Spell("store loses replies", "w1", 0.0, 4.0), {"started too often by one worker alone"}),
        (Spell("redis refuses", "", 0.0, 4.0), {"started too often by one worker alone"}),
        (Spell("redis hangs", "", 2.5, 4.5), set()),
    ],
)
def test_only_a_silent_store_excuses_a_start_beyond_the_limit(
    spell: Spell | None, found: set[str]
) -> None:
    """One worker started a killer four times at a limit of 3."""
    books = balance("killed", at(-3.0, 1.0, 2.0, 4.0), spells=[spell] if spell else [])
    assert faults(books) == found


@pytest.mark.parametrize(
    ("more", "cause"),
    [
        ({}, ""),
        ({"ended": [Ended(WORKER, 2.0, 3.0, cold=False, how=0)]}, ""),
        ({"ended": [Ended(WORKER, 2.0, 2.1, cold=False, how=-9)]}, "again: its worker ended"),
        ({"spells": [Spell("stop", "w1", 2.0, 12.0)]}, "again: its worker stood still"),
        ({"spells": [Spell("broker drops", "", 1.5, 2.0)]}, ""),
        (
            {"spells": [Spell("broker drops", "", 1.5, 2.0)], "broker": "classic"},
            "again: its connection was lost",
        ),
        ({"spells": [Spell("redis dies", "", 1.5, 3.0)]}, AGAIN),
        (
            {
                "spells": [Spell("redis dies", "", 1.5, 3.0)],
                "succeeded": [Logged(TASK, WORKER, 2.0)],
            },
            "",
        ),
        ({"not_settled": {WORKER: [2.1]}, "broker": "classic"}, "again: its connection was lost"),
        ({"not_settled": {WORKER: [2.1]}}, ""),
        ({"not_settled": {WORKER: [9.0]}, "broker": "classic"}, ""),
    ],
)
def test_a_second_start_of_what_can_succeed_needs_a_cause(more: dict[str, Any], cause: str) -> None:
    """It ran from 1 to 2 in one worker, and again at 14 in another."""
    starts = at(1.0) + at(14.0, worker=OTHER, pid=201)
    ends = at(2.0) + at(14.1, worker=OTHER, pid=201)
    books = balance("slow", starts, ends, **more)
    assert faults(books) == (set() if cause else {"started again without a cause"})
    assert not cause or any(name.startswith(cause) for name in books.explained)


@pytest.mark.parametrize(
    ("seconds", "found"), [(0.0, {"did not end when it was asked to"}), (12.0, set())]
)
def test_a_worker_that_does_not_end_is_a_fault_unless_servers_were_away(
    seconds: float, found: set[str]
) -> None:
    """It was asked at 10 and killed at 25."""
    hung = Ended(WORKER, 10.0, 25.0, cold=True, how=-9, hung=True)
    books = balance(
        "quick",
        at(1.0),
        at(1.0),
        ended=[hung],
        spells=[Spell("redis hangs", "", 10.0, 10.0 + seconds)] if seconds else [],
    )
    assert faults(books) == found
    green = balance("quick", at(1.0), at(1.0), ended=[hung], pool="gevent")
    assert not faults(green)  # Celery's own handler fails there
    pool = replace(hung, reading=True)
    assert not faults(balance("quick", at(1.0), at(1.0), ended=[pool]))  # Celery's own pool waits


@pytest.mark.parametrize(
    ("spell", "died_at", "found"),
    [
        (Spell("redis drops", "", 0.9, 1.1), 1.2, 0),
        (Spell("redis drops", "", 0.9, 1.1), 9.0, 1),
        (Spell("redis drops", "", 4.0, 4.1), 1.2, 1),
    ],
)
def test_a_count_that_was_lost_with_its_worker_explains_one_start(
    spell: Spell, died_at: float, found: int
) -> None:
    """A worker that lives for a second sends it again."""
    died = Ended(WORKER, died_at, died_at, cold=False, how=-9)
    starts = [*at(1.0), *at(20.0, 21.0, 22.0, worker=OTHER, pid=201)]
    books = balance("kills_worker", starts, spells=[spell], ended=[died])
    assert len(faults(books)) == found


def test_a_message_whose_task_was_retried_is_over() -> None:
    """Its retry is another message; a copy of it begins anew, as after a success."""
    starts = [*at(1.0, 2.0, 3.0, 4.0), Mark(TASK, 1, 101, WORKER, 5.0)]
    assert not faults(balance("fails", starts))
    assert faults(balance("fails", starts[:-1]))


@pytest.mark.parametrize(
    ("pool", "more", "found"),
    [
        ("prefork", {}, "its success"),
        ("prefork", {"died_at": 4.0}, "a start that still ran"),
        ("prefork", {"ended": Ended(WORKER, 6.0, 6.0, cold=False, how=-9)}, ""),
        ("prefork", {"spell": Spell("stop", "w1", 2.0, 4.0)}, ""),
        ("prefork", {"spell": Spell("stop", "w2", 2.0, 4.0)}, "its success"),
        ("prefork", {"spell": Spell("store is slow", "w1", 2.0, 4.0)}, ""),
        ("prefork", {"spell": Spell("broker is away", "w1", 2.0, 4.0)}, ""),
        (
            "prefork",
            {"spell": Spell("broker is away", "w1", 2.0, 4.0), "broker": "quorum"},
            "its success",
        ),
        ("solo", {}, "its success"),
    ],
)
def test_a_healthy_task_is_charged_for_the_death_of_its_worker_only(
    pool: str, more: dict[str, Any], found: str
) -> None:
    """It ran from 1 to 5.5 in a worker, and a letter at 8 says that this start vanished."""
    letter = the_letter_of_a_start_at(1.0, more.get("died_at", 8.0))
    books = balance(
        "long",
        at(1.0),
        at(5.5),
        letters=[letter],
        limit=1,
        pool=pool,
        broker=more.get("broker", "redis"),
        ended=[more["ended"]] if "ended" in more else [Ended(OTHER, 7.0, 7.0, cold=False, how=-9)],
        spells=[more["spell"]] if "spell" in more else [],
    )
    assert faults(books) == ({f"a healthy task was charged for {found}"} if found else set())


@pytest.mark.parametrize(("pool", "excused"), [("solo", True), ("prefork", False)])
def test_solo_acknowledges_after_the_tasks_that_follow_at_once(pool: str, excused: bool) -> None:
    """A quick task, two others in the same turn of the loop, then the connection is lost."""
    neighbour = "long"
    retried = Mark("retried", 0, 101, WORKER, 2.05)  # has no end
    after = [Mark(neighbour, 0, 101, WORKER, 2.1)], [Mark(neighbour, 0, 101, WORKER, 7.0)]
    facts = Facts(
        max_deliveries=3,
        published={
            TASK: Published("quick", 1, confirmed=True),
            neighbour: Published("long", 1, confirmed=True),
            "retried": Published("retries", 1, confirmed=True),
        },
        starts=[*at(2.0), retried, *after[0], *at(9.0, worker=OTHER, pid=201)],
        ends=[*at(2.0), *after[1], *at(9.0, worker=OTHER, pid=201)],
        letters=[],
        slots={WORKER: "w1", OTHER: "w2"},
        pool=pool,
        broker="quorum",
        spells=[Spell("broker drops", "", 6.0, 6.5)],
    )
    again = {"started again without a cause"} & faults(Balance(facts)())
    assert (not again) == excused


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({}, True),
        ({"spells": [Spell("stop", "w2", 1.0, 8.5)]}, False),
        ({"spells": [Spell("stop", "w1", 1.0, 8.5)]}, True),
        ({"not_settled": {OTHER: [9.2]}}, False),
        ({"not_settled": {OTHER: [2.0]}}, True),
        ({"spells": [Spell("broker drops", "", 6.0, 6.5)], "received": 5.0}, False),
        ({"spells": [Spell("broker drops", "", 4.0, 4.5)], "received": 5.0}, True),
    ],
)
def test_a_worker_may_have_had_a_message_before_another_one_got_it(
    more: dict[str, Any], fault: bool
) -> None:
    """RabbitMQ gave it on; it died there at 2, and starts here at 9."""
    received = more.pop("received", 9.0)
    letter = the_letter_of_a_start_at(1.0, 2.0)
    books = balance(
        "fails",
        at(1.0) + at(9.0, worker=OTHER, pid=201),
        letters=[replace(letter, reason=Reason.FAILED)],
        limit=1,
        broker="quorum",
        received=[Logged(TASK, OTHER, received)],
        **more,
    )
    assert ("executed again after its letter was stored" in faults(books)) == fault


@pytest.mark.parametrize(("attempts", "fault"), [(1, True), (2, False)])
def test_what_was_published_twice_may_be_two_letters(attempts: int, fault: bool) -> None:
    """Each attempt of the publisher is a message of its own."""
    letter = a_letter(task_id=TASK, reason=Reason.FAILED)
    facts = Facts(
        max_deliveries=3,
        published={TASK: Published("fails", attempts, confirmed=True)},
        starts=at(1.0, 2.0),
        ends=[],
        letters=[letter, replace(letter, id="another")],
    )
    assert ("two letters of one message" in faults(Balance(facts)())) == fault


@pytest.mark.parametrize("group", [False, True])
def test_a_deploy_charges_nothing_though_its_signal_reaches_the_pool(group: bool) -> None:
    """Without a signal to the pool, the worker was killed at last."""
    ended = Ended(WORKER, 2.0, 2.5, cold=False, how=0 if group else -9, asked=True, group=group)
    books = balance(
        "slow", at(1.0), letters=[the_letter_of_a_start_at(1.0, 4.0)], limit=1, ended=[ended]
    )
    shutdown = "a healthy task was charged for a shutdown of its whole process group"
    assert faults(books) == ({shutdown} if group else set())


@pytest.mark.parametrize(
    ("began", "how", "excused"), [(3, -9, True), (2, -9, True), (2, 0, False), (1, -9, False)]
)
def test_a_worker_that_is_killed_between_count_and_first_line_explains_one_delivery(
    began: int, how: int, excused: bool
) -> None:
    """Three workers had it, each ended half a second later; it began in the first of them."""
    times = (1.0, 9.0, 17.0)
    first = the_letter_of_a_start_at(1.0, 20.0)
    history = tuple(
        replace(first.history[0], number=n, started_at=datetime.fromtimestamp(t, timezone.utc))
        for n, t in enumerate(times, 1)
    )
    books = balance(
        "slow",
        at(*times[:began]),
        letters=[replace(first, deliveries=3, history=history)],
        ended=[Ended(WORKER, t + 0.5, t + 0.5, cold=False, how=how) for t in times],
    )
    name = "a bystander was dead-lettered, and had not even started each time"
    assert (name not in faults(books)) == excused


@pytest.mark.parametrize(
    ("began", "away", "excused"), [(2, True, True), (2, False, False), (1, True, False)]
)
def test_a_start_that_an_outage_hid_and_that_never_began_explains_one_delivery(
    began: int, away: bool, excused: bool
) -> None:
    """A worker took the message three times, and two starts are in the letter's history."""
    first = the_letter_of_a_start_at(1.0, 20.0)
    history = tuple(
        replace(first.history[0], number=n, started_at=datetime.fromtimestamp(t, timezone.utc))
        for n, t in enumerate((1.0, 9.0), 1)
    )
    books = balance(
        "slow",
        at(*(1.0, 9.0)[:began]),
        letters=[replace(first, deliveries=3, history=history)],
        received=[Logged(TASK, WORKER, t) for t in (0.9, 5.0, 8.9)],
        spells=[Spell("redis hangs", "", 4.5, 6.0)] if away else [],
        ended=[Ended(WORKER, t + 0.5, t + 0.5, cold=False, how=-9) for t in (1.0, 9.0)],
    )
    name = "a bystander was dead-lettered, and had not even started each time"
    assert (name not in faults(books)) == excused


@pytest.mark.parametrize(("away_until", "excused"), [(4.0, False), (6.0, True)])
def test_a_store_that_is_away_as_a_worker_ends_is_not_told_what_the_deploy_ended(
    away_until: float, excused: bool
) -> None:
    """The worker tries for three seconds."""
    ended = Ended(WORKER, 2.0, 2.5, cold=False, how=0, asked=True, group=True)
    away = [Spell("redis dies", "", 1.9, away_until)]
    letter = the_letter_of_a_start_at(1.0, 9.0)
    books = balance("slow", at(1.0), letters=[letter], limit=1, ended=[ended], spells=away)
    assert (not faults(books)) == excused


@pytest.mark.parametrize(
    ("what", "slot", "excused"),
    [
        ("broker is away", "w1", True),
        ("broker is away", "w2", False),
        ("store is slow", "w1", False),
    ],
)
def test_a_warm_shutdown_acknowledges_nothing_while_the_broker_is_away(
    what: str, slot: str, excused: bool
) -> None:
    """A task ended at 2, right before the signal; its message came back after the worker's end."""
    ended = Ended(WORKER, 2.1, 8.0, cold=False, how=0, asked=True)
    starts = at(1.0) + at(9.0, worker=OTHER, pid=201)
    books = balance(
        "quick",
        starts,
        at(2.0) + at(9.1, worker=OTHER, pid=201),
        ended=[ended],
        spells=[Spell(what, slot, 2.2, 6.0)],
        broker="redis",
    )
    assert (not faults(books)) == excused


def test_a_long_task_ends_with_its_worker_long_after_its_start() -> None:
    """It began at 1, and its worker was killed at 7; a quick one was over by then."""
    died = Ended(WORKER, 7.0, 7.0, cold=False, how=-9)
    starts = at(1.0) + at(9.0, worker=OTHER, pid=201)
    ends = at(15.0, worker=OTHER, pid=201)
    assert not faults(balance("long", starts, ends, ended=[died]))
    assert faults(balance("quick", starts, ends, ended=[died])) == {"started again without a cause"}


def test_what_a_signal_to_the_whole_group_ended_starts_again() -> None:
    """It is not charged, so at a limit of 1 there are two starts."""
    ended = Ended(WORKER, 2.0, 2.5, cold=False, how=0, asked=True, group=True)
    starts, ends = at(1.0) + at(9.0, worker=OTHER), at(10.0, worker=OTHER)
    assert not faults(balance("slow", starts, ends, limit=1, ended=[ended]))
    alone = replace(ended, group=False)
    again = "started again without a cause"
    assert faults(balance("slow", starts, ends, limit=3, ended=[alone])) == {again}


def the_letter_of_a_start_at(started_at: float, died_at: float) -> Any:
    """A letter at a limit of 1."""
    return replace(
        a_letter(task_id=TASK, reason=Reason.MAX_DELIVERIES_EXCEEDED, deliveries=1),
        dead_lettered_at=datetime.fromtimestamp(died_at, timezone.utc),
        history=(
            Delivery(
                number=1,
                started_at=datetime.fromtimestamp(started_at, timezone.utc),
                worker_hostname="w1@chaos",
                worker_pid=WORKER,
                outcome=Outcome.VANISHED,
            ),
        ),
    )


@pytest.mark.parametrize("after", ["alive", "letter", "success"])
def test_each_publication_of_a_task_id_has_an_end_of_its_own(after: str) -> None:
    """The success of the first one is none of the second one."""
    again = name_of(TASK, 2)
    assert (again, task_id_of(again), name_of(TASK, 1)) == (f"{TASK}#2", TASK, TASK)
    published = {
        TASK: Published("quick", 1, confirmed=True),
        again: Published("quick", 1, confirmed=True, after=after),
    }
    facts = Facts(1, published, at(1.0), at(1.0), [])
    assert faults(Balance(facts)()) == {f"lost, its task id used before: {after}"}
    second = [replace(mark, task_id=again) for mark in at(2.0)]
    facts.starts += second
    facts.ends += second
    assert not faults(Balance(facts)())


def test_what_is_published_uses_some_task_ids_again() -> None:
    """At once or after the end of the one before; each publication has a name of its own."""
    plan = mix(random.Random(7), 1000, WEIGHTS, 0.2)  # noqa: S311
    assert len({planned.name for planned in plan}) == 1000
    used = Counter(planned.task_id for planned in plan)
    again = [planned for planned in plan if planned.before]
    assert len(again) == 1000 - len(used)
    assert 100 < len(again) < 250
    assert {planned.at_once for planned in again} == {True, False}
    assert not any(planned.kind in RAW for planned in again)
    so_far: set[str] = set()
    for planned in plan:
        assert not planned.before or planned.before in so_far
        so_far.add(planned.name)
