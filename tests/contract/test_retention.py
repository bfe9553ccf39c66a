"""Retention on every store: what is trimmed, what never, and which events there are."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from builders import DLQ, NOW, a_letter, exported_to, key_of
from fresh import fresh_store
from waiting import poll

from celery_dlq.events import Action, Change, Event, Events
from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.retention import MAX_LETTERS_PER_PASS, Retention
from celery_dlq.operations.retention_round import QUEUES_READ_PER_TICK, RetentionRound
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.claims import ClaimState
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import FOLDER_IN_USE, Letters
from celery_dlq.store.store import Store

HOUR = timedelta(hours=1)


class Place:
    """A store with a retention, and the events of the retention; its clock can be set ahead."""

    def __init__(self, store: Letters, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store = store
        self.real_now = store.now
        self.ahead = timedelta(0)
        monkeypatch.setattr(store, "now", lambda: self.real_now() + self.ahead)
        statuses = store.overviews.statuses
        monkeypatch.setattr(
            store.overviews,
            "statuses",
            lambda names: [replace(g, at=store.now()) for g in statuses(names)],
        )
        self.registry = fresh_store().workers
        self.events: list[Event] = []
        events = Events()
        events.subscribe(self.events.append)
        self.retention = Retention(store, self.registry, events, "celery@web-1")

    def put(self, **changes: Any) -> DeadLetter:
        """Store a letter."""
        letter = a_letter(**changes)
        self.store.dead_letter(letter, key_of(letter))
        return letter

    def ids(self) -> list[str]:
        """The letters that are left, oldest first."""
        return [s.letter.id for s in self.store.letters(DLQ, newest_first=False)]


@pytest.fixture
def place(store: Letters, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Each store in turn, with a retention."""
    return Place(store, monkeypatch)


def aged(place: Place, number: int, hours: float = 9.0) -> list[str]:
    """Store letters of these ages in hours; return their ids."""
    place.ahead = timedelta(0)
    made = [place.put().id for _ in range(number)]
    place.ahead = hours * HOUR
    return made


def test_letters_past_their_time_are_trimmed_counted_and_announced(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the millisecond: a letter of exactly that age goes."""
    place.put(dead_lettered_at=NOW - 30 * HOUR)
    place.put(dead_lettered_at=NOW - 24 * HOUR)
    second = place.store.oldest_letters(DLQ, after=None, most=9)[1].stored_at
    assert second is not None
    poll(lambda: place.real_now() > second + timedelta(milliseconds=1))
    young = place.put()
    monkeypatch.setattr(place.store, "now", lambda: second + 24 * HOUR)

    (change,) = place.retention.trim(DLQ, Policy(dead_letter_ttl=24 * 3600.0))

    assert place.ids() == [young.id]
    assert (change.action, change.actor, change.target) == (Action.TRIMMED, "celery@web-1", DLQ)
    assert change.letters == 2
    assert change.detail == {
        "cause": "dead_letter_ttl",
        "limit": 24 * 3600.0,
        "oldest_at": "2026-03-02T23:06:07.891011+00:00",
        "newest_at": "2026-03-03T05:06:07.891011+00:00",
    }
    assert place.events == [change] == place.registry.changes(limit=9)


@pytest.mark.parametrize("years", [-1, 100])
@pytest.mark.parametrize("age_seconds", [1790.0, 1810.0])
def test_the_clock_of_a_worker_decides_nothing(
    place: Place, years: float, age_seconds: float
) -> None:
    """A letter's time begins when it was stored, whatever date its worker gave it."""
    dated = place.put(dead_lettered_at=place.real_now() + years * 365 * 24 * HOUR)
    right = place.put(dead_lettered_at=place.real_now())
    place.ahead = timedelta(seconds=age_seconds)

    place.retention.trim(DLQ, Policy(dead_letter_ttl=1800.0))

    assert place.ids() == ([dated.id, right.id] if age_seconds < 1800 else [])


def test_a_letter_that_waited_in_a_spool_is_kept_its_whole_time(place: Place) -> None:
    """It could not be seen before it was stored, and may be past its message's end by then."""
    now = place.real_now()
    late = place.put(dead_lettered_at=now - 9 * HOUR, expires=now - 8 * HOUR)
    place.ahead = HOUR
    assert place.retention.trim(DLQ, Policy(dead_letter_ttl=2 * 3600.0)) == []
    assert place.retention.trim(DLQ, None) == []
    assert place.ids() == [late.id]


def test_entries_that_are_no_letters_stay_and_hold_up_no_letter(
    redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One broken entry at a queue's head must not keep all behind it forever."""
    place = Place(Store(redis_url, timeout_seconds=5).letters, monkeypatch)
    with redis.Redis.from_url(redis_url) as client:
        client.xadd(Keys().letters(DLQ), {"a": "1"}, id="1-1")
    letters = aged(place, 2, hours=26)
    (change,) = place.retention.trim(DLQ, Policy(dead_letter_ttl=24 * 3600.0))
    assert change.letters == 2
    letters += aged(place, 2)
    (change,) = place.retention.trim(DLQ, Policy(dead_letter_max_length=1))
    left = list(place.store.fields(DLQ, after=None, until=None, page_size=5))
    assert [entry.get(b"id") for page in left for _place, entry in page] == [
        None,
        letters[3].encode(),
    ]
    place.store.close()


def test_the_oldest_letters_over_the_limit_are_trimmed(place: Place) -> None:
    """The oldest go until the limit is reached."""
    letters = aged(place, 5)
    (change,) = place.retention.trim(DLQ, Policy(dead_letter_max_length=2))
    assert place.ids() == letters[3:]
    assert (change.letters, change.detail["cause"]) == (3, "dead_letter_max_length")
    assert place.retention.trim(DLQ, Policy(dead_letter_max_length=2)) == []


def test_without_a_ttl_a_letter_ends_with_its_message(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own expiry is kept; a message that died of it would be gone unseen, so it stays."""
    now = place.real_now()
    over = place.put(dead_lettered_at=now, expires=now + HOUR)
    expired = place.put(dead_lettered_at=now, expires=now - HOUR)
    later = place.put(dead_lettered_at=now, expires=now + 3 * HOUR)
    endless = place.put(dead_lettered_at=now - 2000 * HOUR)
    place.ahead = 2 * HOUR

    assert place.retention.trim(DLQ, Policy(dead_letter_ttl=9e6)) == []
    (change,) = place.retention.trim(DLQ, None)

    assert change.detail["cause"] == "expires"
    assert "None" not in caplog.text  # nobody has read when they died
    assert place.ids() == [expired.id, later.id, endless.id]
    assert over.id not in place.ids()


def test_a_letter_that_a_redrive_holds_is_left_alone(place: Place) -> None:
    """Otherwise a redrive that fails would find it gone."""
    held, free = aged(place, 2)
    assert place.store.claims.claim(DLQ, [held], owner="ann", lease_seconds=60) == [
        ClaimState.CLAIMED
    ]

    (change,) = place.retention.trim(DLQ, Policy(dead_letter_ttl=1.0))

    assert change.letters == 1
    assert place.ids() == [held]
    assert free not in place.ids()


def test_letters_are_kept_until_they_are_exported(place: Place) -> None:
    """Nothing is trimmed that a folder in use lacks, whatever another one has."""
    aged(place, 3)
    policy = Policy(dead_letter_ttl=1.0, dead_letter_max_length=1)
    first, second, third = (o.position for o in place.store.letters(DLQ, newest_first=False))
    exported_to(place.store, "lake", first)
    exported_to(place.store, "look", third)
    assert [change.letters for change in place.retention.trim(DLQ, policy, dry_run=True)] == [1, 1]

    exported_to(place.store, "lake", second)
    changes = place.retention.trim(DLQ, policy)

    assert [change.letters for change in changes] == [2]
    assert len(place.ids()) == 1


def test_a_folder_that_is_silent_keeps_no_letters(place: Place) -> None:
    """Otherwise one look would keep a queue growing for ever."""
    aged(place, 3)
    first, *_ = (o.position for o in place.store.letters(DLQ, newest_first=False))
    exported_to(place.store, "look", first)
    place.ahead = FOLDER_IN_USE + HOUR
    (change,) = place.retention.trim(DLQ, Policy(dead_letter_ttl=1.0))
    assert change.letters == 3


def test_a_dry_run_changes_nothing(place: Place) -> None:
    """It says what would be done."""
    letters = aged(place, 2)
    (change,) = place.retention.trim(DLQ, Policy(dead_letter_ttl=1.0), dry_run=True)
    assert change.letters == 2
    assert place.ids() == letters
    assert place.events == place.registry.changes(limit=9) == []
    assert (
        place.store.claims.claim(DLQ, letters, owner="ann", lease_seconds=1)
        == [ClaimState.CLAIMED] * 2
    )


def test_one_pass_is_bounded_and_all_passes_end(place: Place) -> None:
    """A worker trims some hundred at a time; the command line all that is there."""
    aged(place, MAX_LETTERS_PER_PASS + 20)
    policy = Policy(dead_letter_ttl=1.0)
    (first,) = place.retention.trim(DLQ, policy)
    assert first.letters == MAX_LETTERS_PER_PASS
    aged(place, MAX_LETTERS_PER_PASS)
    (rest,) = place.retention.trim_all(DLQ, policy)
    assert rest.letters == MAX_LETTERS_PER_PASS + 20
    assert place.ids() == []
    assert place.retention.trim_all(DLQ, policy) == []


def test_without_a_rule_nothing_is_ever_trimmed(place: Place) -> None:
    """No default limit exists."""
    aged(place, 2, hours=9e4)
    assert place.retention.trim(DLQ, Policy(max_deliveries=3)) == []
    assert len(place.ids()) == 2


def test_nothing_is_trimmed_that_cannot_be_audited(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The record first, the removal second."""
    aged(place, 1)

    def refuse(_operation: str, change: Change, _before: int) -> None:
        raise OSError(f"no room for {change.target}")

    monkeypatch.setattr(place.registry, "begin_change", refuse)
    silent = Retention(place.store, place.registry, Events(), "x")
    with pytest.raises(OSError, match="no room"):
        silent.trim(DLQ, Policy(dead_letter_ttl=1.0))
    assert len(place.ids()) == 1


def test_a_worker_looks_after_one_queue_after_the_other(place: Place) -> None:
    """Each by the policy that rules it."""
    place.put(dead_letter_queue="a-DLQ")
    place.put(dead_letter_queue="b-DLQ")
    place.ahead = 9 * HOUR
    table = PolicyTable({"a": Policy(dead_letter_ttl=1.0), "b": Policy(dead_letter_ttl=9e6)})
    retention_round = RetentionRound(lambda: place.retention, place.store, lambda: table)
    for _ in range(2):
        retention_round.tick()
    assert [place.store.length(name) for name in ("a-DLQ", "b-DLQ")] == [0, 1]


def test_a_worker_gets_round_many_queues(place: Place) -> None:
    """One tick reads the status of some and looks into few; what is over goes in the end."""
    names = [f"{number:03d}-DLQ" for number in range(2 * QUEUES_READ_PER_TICK)]
    for name in names:
        place.put(dead_letter_queue=name)
        place.put(dead_letter_queue=name)
    table = PolicyTable({"*": Policy(dead_letter_max_length=1)})
    retention_round = RetentionRound(lambda: place.retention, place.store, lambda: table)
    for _ in names:  # one after the other, with no rest as long as there is more
        retention_round.tick()
    assert [place.store.length(name) for name in names] == [1] * len(names)
    looked = []
    place.store.oldest_letters = lambda name, **_: looked.append(name)  # type: ignore[method-assign,assignment,func-returns-value]
    for _ in range(9):
        retention_round.tick()
    assert looked == []
