"""Groups and arrivals over time, on every store."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest
from builders import DLQ, NOW, a_letter, key_of

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.operations.reading import Reading

if TYPE_CHECKING:
    from celery_dlq.store.letters import Letters

MINUTE = timedelta(minutes=1)


def stored(store: Letters, fingerprint: str = "aa", **changes: Any) -> DeadLetter:
    """A letter that is in the store now."""
    letter = a_letter(fingerprint=fingerprint, **changes)
    store.dead_letter(letter, key_of(letter))
    return letter


def newest(store: Letters, most: int | None = None) -> list[str]:
    """The fingerprints of the groups, last seen first."""
    return store.overviews.ranked(DLQ, "newest", most=most)


def test_the_rate_of_a_young_queue_is_of_its_own_time(store: Letters) -> None:
    """It has not had five minutes yet; its first minute counts as a whole one."""
    for number in range(30):
        stored(store, id=f"{number}", task_id=f"{number}")
    (orders,) = store.overviews.queues()
    assert 14 < orders.per_minute <= 30


def test_arrivals_are_counted_by_reason_and_minute(store: Letters) -> None:
    """By when letters were stored, also those that are gone; a queue without any has none."""
    first = stored(store)
    stored(store)
    stored(store, reason=Reason.REJECTED)
    stored(store, dead_letter_queue="mail-DLQ")
    store.remove(DLQ, [first.id])
    mail, orders = store.overviews.queues()
    assert set(mail.arrivals) == {"failed"}
    assert {reason: len(counts) for reason, counts in orders.arrivals.items()} == {
        "failed": 60,
        "rejected": 60,
    }
    # The minute may have turned meanwhile.
    assert sum(orders.arrivals["failed"][-2:]) == 2
    assert sum(orders.arrivals["rejected"][-2:]) == 1
    assert orders.last_hour == 3


def test_the_tasks_of_the_newest_groups_of_many_queues_are_read_at_once(store: Letters) -> None:
    """What has no task has none, and a queue without groups is left out."""
    for minute, task in enumerate(("shop.old", "shop.charge", "", "shop.ship")):
        at = NOW + minute * MINUTE
        stored(store, f"{minute}a", task_name=task, dead_lettered_at=at)
    stored(store, "bb", task_name="shop.mail", dead_letter_queue="mail-DLQ")
    found = store.overviews.newest_tasks([DLQ, "mail-DLQ", "none-DLQ"], 3)
    assert found == {DLQ: {"shop.charge", "shop.ship"}, "mail-DLQ": {"shop.mail"}}


def test_groups_can_be_ordered_by_their_newest_letter(store: Letters) -> None:
    """What began to fail after a deploy is on top, however small its group is."""
    for minute, fingerprint in enumerate(("aa", "aa", "bb", "cc", "bb")):
        stored(store, fingerprint, dead_lettered_at=NOW + minute * MINUTE)
    assert newest(store) == ["bb", "cc", "aa"]
    assert newest(store, most=2) == ["bb", "cc"]
    reading = Reading(store)
    assert reading.groups(DLQ, by="newest", limit=1) == [reading.group(DLQ, "bb")]
    with pytest.raises(DLQError, match="expected by to be letters or newest, got 'size'"):
        reading.groups(DLQ, by="size")  # type: ignore[arg-type]


def test_the_order_of_groups_follows_removals(store: Letters) -> None:
    """A group without letters is in no order, and comes back when a letter does."""
    gone = stored(store, "bb", dead_lettered_at=NOW + MINUTE)
    stored(store, "aa")
    store.remove(DLQ, [gone.id])
    assert newest(store) == ["aa"]
    stored(store, "bb", dead_lettered_at=NOW + 2 * MINUTE)
    assert newest(store) == ["bb", "aa"]


def test_a_restored_letter_is_in_the_order_of_groups(store: Letters) -> None:
    """Its group was gone with it; it did not arrive again."""
    letter = stored(store, "bb", dead_lettered_at=NOW + MINUTE)
    stored(store, "aa")
    store.claims.claim(DLQ, [letter.id], owner="me", lease_seconds=60)
    store.remove(DLQ, [letter.id], owner="me", keep_seconds=60)
    assert newest(store) == ["aa"]
    store.restore(DLQ, letter.id)
    assert newest(store) == ["bb", "aa"]


def test_one_group_is_found_by_its_fingerprint(store: Letters) -> None:
    """The page of a group reads no other groups."""
    stored(store, "aa", task_name="t.a")
    stored(store, "bb", task_name="t.b")
    stored(store, "bb", task_name="t.b")
    group = store.overviews.group(DLQ, "bb")
    assert group is not None
    assert (group.fingerprint, group.letters, group.task_name) == ("bb", 2, "t.b")
    assert store.overviews.group(DLQ, "b") is None
    assert store.overviews.group("unknown-DLQ", "bb") is None
    with pytest.raises(NotFound, match="expected the fingerprint of letters in 'orders-DLQ'"):
        Reading(store).group(DLQ, "b")


def test_a_group_knows_how_many_letters_came_when(store: Letters) -> None:
    """By when they were stored: a burst and a drizzle look different."""
    for _ in range(3):
        stored(store, "aa")
    stored(store, "bb")
    group, other = store.overviews.groups(DLQ, ["aa", "bb"])
    assert (len(group.course), sum(group.course[-2:]), group.last_hour) == (24, 3, 3)
    assert (sum(other.course), other.last_hour) == (1, 1)


def test_a_group_knows_its_releases(store: Letters) -> None:
    """The newest letter's is first; the oldest one stays, whatever came between."""

    def releases() -> tuple[str, ...]:
        return Reading(store).groups(DLQ)[0].releases

    stored(store)
    assert releases() == ()
    for release in ("1", "2", "2", "süß|,%\n", "3", "2"):
        stored(store, release=release)
    assert releases() == ("2", "3", "süß|,%\n", "1")
    for release in ("4", "5", "6"):
        stored(store, release=release)
    assert releases() == ("6", "5", "4", "2", "1")
