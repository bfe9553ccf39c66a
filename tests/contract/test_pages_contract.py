"""Pages and counts of letters, on every store."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any

import pytest
from builders import DLQ, NOW, a_letter, key_of

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.operations.reading import Reading

if TYPE_CHECKING:
    from celery_dlq.operations.paging import LetterPage
    from celery_dlq.store.letters import Letters


def stored(store: Letters, **changes: Any) -> str:
    """The id of a letter that is in the store now."""
    letter = a_letter(**changes)
    store.dead_letter(letter, key_of(letter))
    return letter.id


def several(store: Letters, count: int, **changes: Any) -> list[str]:
    """Ids of letters that are in the store, newest first."""
    return [stored(store, **changes) for _ in range(count)][::-1]


def ids(page: LetterPage) -> list[str]:
    """The ids on a page."""
    return [entry.key for entry in page.entries]


def walk(reading: Reading, **options: Any) -> tuple[list[list[str]], LetterPage]:
    """The ids on all pages from the newest to the oldest, and the last page."""
    page = reading.page(DLQ, **options)
    pages = [ids(page)]
    while page.older is not None:
        page = reading.page(DLQ, cursor=page.older, **options)
        pages.append(ids(page))
    return pages, page


def test_pages_go_from_the_newest_letter_to_the_oldest_and_back(store: Letters) -> None:
    """Each letter is on one page, in both directions; the first page has no newer one."""
    there, reading = several(store, 7), Reading(store)
    pages, page = walk(reading, size=3)
    assert pages == [there[:3], there[3:6], there[6:]]
    assert page.complete
    middle = reading.page(DLQ, cursor=page.newer, size=3)
    assert ids(middle) == there[3:6]
    first = reading.page(DLQ, cursor=middle.newer, size=3)
    assert (ids(first), first.newer) == (there[:3], None)
    assert ids(reading.page(DLQ, cursor=first.older, size=3)) == there[3:6]


def test_an_exactly_full_page_is_the_last(store: Letters) -> None:
    """No link leads to an empty page."""
    there = several(store, 4)
    assert walk(Reading(store), size=2)[0] == [there[:2], there[2:]]
    assert walk(Reading(store), size=4)[0] == [there]


def test_letters_that_arrive_meanwhile_move_nothing(store: Letters) -> None:
    """They are on no page, also not on the way back; a new first page has them."""
    there, reading = several(store, 5), Reading(store)
    first = reading.page(DLQ, size=2)
    assert first.arrived == 0
    new = several(store, 3)
    second = reading.page(DLQ, cursor=first.older, size=2)
    assert ids(second) == there[2:4]
    assert second.arrived in (3, None)
    back = reading.page(DLQ, cursor=second.newer, size=2)
    assert (ids(back), back.newer) == (there[:2], None)
    assert back.arrived in (3, None)
    assert ids(reading.page(DLQ, size=2)) == new[:2]


def test_removed_letters_leave_the_others_where_they_are(store: Letters) -> None:
    """Also if the page's own first and last letters are gone."""
    there, reading = several(store, 6), Reading(store)
    first = reading.page(DLQ, size=2)
    second = reading.page(DLQ, cursor=first.older, size=2)
    store.remove(DLQ, [there[1], there[2], there[3]])
    assert ids(reading.page(DLQ, cursor=second.older, size=2)) == there[4:]
    assert ids(reading.page(DLQ, cursor=first.older, size=2)) == there[4:]
    assert ids(reading.page(DLQ, cursor=second.newer, size=2)) == [there[0], there[4]]


def test_a_filter_holds_on_all_pages(store: Letters) -> None:
    """Pages are full of what matches, with newer pages too."""
    reading, wanted = Reading(store), []
    for _ in range(5):
        wanted.insert(0, stored(store, task_name="shop.refund"))
        stored(store)
    pages, page = walk(reading, task_name="shop.refund", size=2)
    assert pages == [wanted[:2], wanted[2:4], wanted[4:]]
    back = reading.page(DLQ, cursor=page.newer, task_name="shop.refund", size=2)
    assert ids(back) == wanted[2:4]


def test_chosen_letters_come_newest_first(store: Letters) -> None:
    """Whatever the order of their ids; another filter counts too."""
    there, reading = several(store, 4), Reading(store)
    chosen = frozenset(there[1:])
    assert walk(reading, ids=chosen, size=2)[0] == [there[1:3], there[3:]]
    assert ids(reading.page(DLQ, ids=chosen, task_name="shop.refund")) == []
    assert reading.count(DLQ, ids=chosen) == (3, True)


def test_a_search_ends_at_the_deadline_and_goes_on_from_there(store: Letters) -> None:
    """Each page gets on, so all are found in the end, in both directions."""
    wanted = stored(store, task_name="shop.refund")
    several(store, 30)
    newest = stored(store, task_name="shop.refund")
    reading = Reading(store)
    options: dict[str, Any] = {"task_name": "shop.refund", "deadline_seconds": 0.0}
    first = reading.page(DLQ, size=1, **options)
    assert ids(first) == [newest]
    assert first.scanned >= 1
    pages, page = walk(reading, size=5, **options)
    assert [letter_id for found in pages for letter_id in found] == [newest, wanted]
    assert not page.complete or len(pages) > 1
    found = []
    while page.newer is not None:
        page = reading.page(DLQ, cursor=page.newer, size=5, **options)
        found += ids(page)
    assert newest in found


def test_pages_are_bounded_in_bytes(store: Letters) -> None:
    """Fifty letters of 50 MB would not fit into memory."""
    body = bytes(3_000_000)
    there = several(store, 5, body=body, args_json=None, kwargs_json=None)
    pages, _ = walk(Reading(store), size=5)
    assert pages == [there[:2], there[2:4], there[4:]]


def test_an_empty_queue_has_an_empty_page(store: Letters) -> None:
    """A queue that never had a letter is unknown."""
    with pytest.raises(NotFound, match="expected the name of a dead-letter queue"):
        Reading(store).page(DLQ)
    store.remove(DLQ, [stored(store)])
    page = Reading(store).page(DLQ)
    assert (page.entries, page.newer, page.older, page.complete) == ((), None, None, True)
    assert Reading(store).count(DLQ) == (0, True)


@pytest.mark.parametrize(
    "cursor",
    ["", "o", "o1-0_1-0", "x1-0_1-0_1", "o1-0_1-0_1\n", f"o1-0_{'9' * 20}-0_1", "o١-0_1-0_"],
)
def test_a_malformed_cursor_is_refused(store: Letters, cursor: str) -> None:
    """It came by a link, which anybody can write."""
    stored(store)
    with pytest.raises(DLQError, match="expected cursor to be one that a page gave"):
        Reading(store).page(DLQ, cursor=cursor)
    with pytest.raises(DLQError, match="expected size to be 1 or more, got 0"):
        Reading(store).page(DLQ, size=0)


def test_letters_are_counted_up_to_a_limit(store: Letters) -> None:
    """The number says whether there may be more."""
    several(store, 4)
    several(store, 2, task_name="shop.refund")
    reading = Reading(store)
    assert reading.count(DLQ) == (6, True)
    assert reading.count(DLQ, task_name="shop.refund") == (2, True)
    assert reading.count(DLQ, task_name="shop.charge", most=4) == (4, True)
    assert reading.count(DLQ, task_name="shop.charge", most=3) == (3, False)
    number, exact = reading.count(DLQ, task_name="shop.refund", deadline_seconds=0.0)
    assert (number in (1, 2), exact) == (True, False)


def test_a_page_of_a_time_reads_no_older_letters(store: Letters) -> None:
    """Letters lie in the order in which they were stored."""
    now = datetime.now(timezone.utc)
    several(store, 3, dead_lettered_at=NOW)
    wanted = several(store, 2, dead_lettered_at=now)
    assert ids(Reading(store).page(DLQ, since=now - timedelta(seconds=1))) == wanted
    assert Reading(store).page(DLQ, since=now + timedelta(hours=1)).entries == ()


GROUP = "0123456789abcdef"


def test_the_letters_of_a_group_are_found_between_its_first_and_its_newest(
    store: Letters,
) -> None:
    """Of a million letters, those that came before or after are not read."""
    reading = Reading(store)
    several(store, 20, fingerprint="f" * 16)
    one = stored(store, fingerprint=GROUP)
    stored(store, fingerprint="f" * 16)
    other = stored(store, fingerprint=GROUP, task_name="shop.refund")
    several(store, 20, fingerprint="f" * 16)
    page = reading.page(DLQ, fingerprint=GROUP)
    assert (ids(page), page.older) == ([other, one], None)
    assert walk(reading, fingerprint=GROUP, size=1)[0] == [[other], [one]]
    assert ids(reading.page(DLQ, fingerprint=GROUP, task_name="shop.refund")) == [other]
    assert reading.count(DLQ, fingerprint=GROUP) == (2, True)
    assert reading.count(DLQ, fingerprint=GROUP, task_name="shop.refund") == (1, True)
    assert reading.count(DLQ, fingerprint="f") == (41, True)
    assert page.scanned == 3
    store.remove(DLQ, [other])
    assert ids(reading.page(DLQ, fingerprint=GROUP)) == [one]
    stored(store, fingerprint=GROUP)
    assert reading.count(DLQ, fingerprint=GROUP) == (2, True)


def test_a_wrong_clock_hides_no_letter_of_a_group(store: Letters) -> None:
    """The worker that saw the first death was ahead by hours."""
    ahead = datetime.now(timezone.utc) + timedelta(hours=20)
    there = several(store, 2, fingerprint=GROUP, dead_lettered_at=ahead)
    assert walk(Reading(store), fingerprint=GROUP, size=1)[0] == [there[:1], there[1:]]
