"""The contract of every `Letters`."""

from __future__ import annotations

from datetime import datetime, timedelta
from itertools import islice
from typing import TYPE_CHECKING, Any

import pytest
from builders import DLQ, NOW, a_delivery, a_key, a_letter, an_ended_delivery, exported_to, key_of
from waiting import poll

from celery_dlq.letters.record import DeadLetter, Outcome, Reason
from celery_dlq.store.claims import REMOVES, ClaimState
from celery_dlq.store.letters import PAGE, Letters, Restored
from celery_dlq.store.records import (
    FIRST_POSITION,
    Group,
    QueueEntry,
    QueueSummary,
    RedriveOutcome,
    in_order,
    position_at,
)
from celery_dlq.store.scripts import MOST_IDS
from celery_dlq.store.worker_records import Count, CountStatus, Stored

if TYPE_CHECKING:
    from conftest import Store

SEVERAL_PAGES = 2 * PAGE + 50
MINUTE = timedelta(minutes=1)


def stored(store: Letters, **changes: Any) -> DeadLetter:
    """A letter that is in the store."""
    letter = a_letter(**changes)
    assert store.dead_letter(letter, key_of(letter)) is Stored.NEW
    return letter


def many(store: Letters, count: int) -> list[DeadLetter]:
    """Letters that are in the store, oldest first."""
    return [
        stored(store, dead_lettered_at=NOW + timedelta(seconds=number), retries=number)
        for number in range(count)
    ]


def groups(store: Letters, queue: str = DLQ, most: int | None = None) -> list[Group]:
    """The groups of a queue, largest first."""
    names = store.overviews.ranked(queue, "letters", most=most)
    return in_order(store.overviews.groups(queue, names), "letters")


def ids(store: Letters, queue: str = DLQ, *, newest_first: bool = False) -> list[str]:
    """The ids of all letters of a queue."""
    return [found.letter.id for found in store.letters(queue, newest_first=newest_first)]


def claim(
    store: Letters, *letter_ids: str, owner: str = "me", lease_seconds: float = 60.0
) -> list[ClaimState]:
    """Claim letters of the usual queue."""
    return store.claims.claim(DLQ, letter_ids, owner=owner, lease_seconds=lease_seconds)


# -- storing -----------------------------------------------------------------------


def test_a_store_that_works_answers(parts: Store) -> None:
    """A starting worker asks before it takes messages."""
    parts.check()


def test_a_stored_letter_comes_back_whole(store: Letters) -> None:
    """Every field survives, unknown ones too."""
    letter = stored(
        store,
        body=bytes(range(256)),
        description="süß \x00 \N{PILE OF POO}",
        history=(an_ended_delivery(), a_delivery(number=2)),
        published_at=NOW - MINUTE,
        retries=3,
        traceback=None,
        headers='{"retries":3}',
        extra={"mood": b"\xff\x00"},
    )
    assert store.get(DLQ, letter.id) == letter
    assert [found.letter for found in store.letters(DLQ, newest_first=False)] == [letter]


def test_storing_twice_is_storing_once(store: Letters) -> None:
    """A worker killed between storing and acknowledging stores again: the first letter stays."""
    letter = stored(store, description="first")
    again = a_letter(task_id=letter.task_id, description="second")
    assert again.id == letter.id
    said = store.dead_letter(again, key_of(again))
    assert said is Stored.ALREADY_THERE
    assert [found.letter for found in store.letters(DLQ, newest_first=False)] == [letter]
    assert store.overviews.queues()[0].reasons == {"failed": 1}
    assert groups(store)[0].letters == 1


def test_a_removed_letter_can_be_stored_again(store: Letters) -> None:
    """Idempotence is about letters that are there."""
    letter = stored(store)
    store.remove(DLQ, [letter.id])
    assert store.dead_letter(letter, key_of(letter)) is Stored.NEW
    assert ids(store) == [letter.id]


@pytest.mark.parametrize("twice", [False, True])
def test_storing_a_letter_forgets_the_counts_of_its_task(backend: Store, *, twice: bool) -> None:
    """The history is in the letter now; also a second storing cleans up."""
    letter = a_letter(retries=1)
    key = key_of(letter)
    if twice:
        backend.store.dead_letter(letter, key)
    retried = a_key(task_id=letter.task_id)
    backend.counter.count_delivery(retried, a_delivery(), None)
    backend.counter.record_end(retried, an_ended_delivery(number=1, outcome=Outcome.RETRIED))
    backend.counter.count_delivery(key, a_delivery(), None)
    backend.store.dead_letter(letter, key)
    assert backend.counter.history(key) == ()
    assert backend.counter.count_delivery(key, a_delivery(), None).number == 1


def test_an_end_after_the_letter_does_not_bring_the_counts_back(backend: Store) -> None:
    """A late report of a dead message leaves nothing behind."""
    letter = a_letter()
    key = key_of(letter)
    backend.counter.count_delivery(key, a_delivery(), None)
    backend.store.dead_letter(letter, key)
    backend.counter.record_end(key, an_ended_delivery())
    backend.counter.flush()
    assert backend.counter.history(key) == ()


def test_storing_a_letter_keeps_the_counts_of_others(backend: Store) -> None:
    """Only the message that died is forgotten."""
    other = a_key()
    backend.counter.count_delivery(other, a_delivery(), None)
    stored(backend.store)
    assert backend.counter.count_delivery(other, a_delivery(), None).number == 2


@pytest.mark.parametrize("task_id", ["", "süß", "a\x00b", "\ud800"])
def test_any_task_id_makes_a_letter(store: Letters, task_id: str) -> None:
    """Ids come over the wire and may be any text; the letter is stored all the same."""
    letter = stored(store, task_id=task_id)
    found = store.get(DLQ, letter.id)
    assert found is not None
    assert found.body == letter.body


# -- reading -----------------------------------------------------------------------


def test_an_unknown_queue_is_empty(store: Letters) -> None:
    """Reading what does not exist gives nothing and makes nothing."""
    assert ids(store, "nowhere") == []
    assert store.get("nowhere", "x") is None
    assert store.ids(["nowhere"], "", most=5) == []
    assert groups(store, "nowhere") == []
    assert store.last_position("nowhere") is None
    assert list(store.fields("nowhere", after=None, until="9-9", page_size=5)) == []
    assert store.claims.claim("nowhere", ["x"], owner="me", lease_seconds=1) == [ClaimState.GONE]
    assert store.remove("nowhere", ["x"]) == 0
    assert store.names() == []
    assert store.overviews.queues() == []


def test_an_unknown_letter_is_none(store: Letters) -> None:
    """``None`` is the answer, not an error."""
    stored(store)
    assert store.get(DLQ, "x") is None


def test_letters_are_found_by_the_beginning_of_their_id(store: Letters) -> None:
    """People type the first digits; characters of patterns mean themselves."""
    for letter_id in ("abc-1", "abc-2", "abd-1", "a*c-1", "[ab]-1"):
        stored(store, id=letter_id)
    assert sorted(store.ids([DLQ], "abc", most=5)) == [(DLQ, "abc-1"), (DLQ, "abc-2")]
    assert len(store.ids([DLQ], "ab", most=2)) == 2
    assert store.ids([DLQ], "a*", most=5) == [(DLQ, "a*c-1")]
    assert store.ids([DLQ], "[ab]", most=5) == [(DLQ, "[ab]-1")]
    assert store.ids([DLQ], "x", most=5) == []
    stored(store, id="abc-3", dead_letter_queue="mail-DLQ")
    everywhere = store.ids([DLQ, "mail-DLQ"], "abc", most=5)
    assert min(everywhere) == ("mail-DLQ", "abc-3")
    assert len(everywhere) == 3


def test_the_queue_of_a_letter_is_found(store: Letters) -> None:
    """Among those that are named; by its id or its position."""
    letter = stored(store, dead_letter_queue="mail-DLQ")
    stored(store)
    ((position, _fields),) = next(store.fields("mail-DLQ", after=None, until=None, page_size=5))
    holders = store.overviews.holders
    assert holders([DLQ, "nowhere", "mail-DLQ"], letter.id) == ["mail-DLQ"]
    assert "mail-DLQ" in holders([DLQ, "mail-DLQ"], position)  # two may have one position
    assert holders([DLQ], letter.id) == holders([], letter.id) == []


def test_the_status_of_a_queue_is_what_retention_needs(store: Letters) -> None:
    """It has the number, the oldest, and when the first message expires."""
    before = store.now()
    end = before.replace(microsecond=0) + 60 * MINUTE
    stored(store, dead_lettered_at=before - 60 * MINUTE, expires=end + MINUTE)
    stored(store, dead_lettered_at=before, expires=end)
    status, nothing = store.overviews.statuses([DLQ, "nowhere"])
    assert (status.name, status.letters, status.first_end_at) == (DLQ, 2, end)
    assert status.oldest_stored_at is not None
    assert abs(status.oldest_stored_at - before) < MINUTE
    assert (nothing.letters, nothing.oldest_stored_at, nothing.first_end_at) == (0, None, None)


def test_queues_with_discarded_letters_are_known(store: Letters) -> None:
    """A letter is looked for in these bins only."""
    letter = stored(store)
    stored(store, dead_letter_queue="mail-DLQ")
    claim(store, letter.id)
    store.remove(DLQ, [letter.id], owner="me", keep_seconds=60)
    assert store.binned([DLQ, "mail-DLQ", "nowhere"]) == [DLQ]


def test_letters_come_in_both_orders_over_several_pages(store: Letters) -> None:
    """No letter is uncounted or shown twice where two pages meet."""
    expected = [letter.id for letter in many(store, SEVERAL_PAGES)]
    assert ids(store) == expected
    assert ids(store, newest_first=True) == expected[::-1]


def test_exactly_full_pages_end(store: Letters) -> None:
    """The page after the last is empty."""
    expected = [letter.id for letter in many(store, 2 * PAGE)]
    assert ids(store) == expected
    assert ids(store, newest_first=True) == expected[::-1]


def test_positions_increase_strictly(store: Letters) -> None:
    """An exporter can say up to where it read."""
    many(store, 15)
    found = [letter.position for letter in store.letters(DLQ, newest_first=False)]
    backwards = [letter.position for letter in store.letters(DLQ, newest_first=True)]
    assert len(set(found)) == 15
    assert backwards == found[::-1]
    assert store.last_position(DLQ) == found[-1]


@pytest.mark.parametrize("newest_first", [False, True])
def test_letters_that_arrive_while_reading_are_left_out(
    store: Letters, *, newest_first: bool
) -> None:
    """A redrive that puts letters back would never end otherwise."""
    expected = {letter.id for letter in many(store, SEVERAL_PAGES)}
    reading = store.letters(DLQ, newest_first=newest_first)
    seen = [found.letter.id for found in islice(reading, 1)]
    late = stored(store)
    seen += [found.letter.id for found in reading]
    assert len(seen) == SEVERAL_PAGES
    assert set(seen) == expected
    assert late.id in ids(store)


@pytest.mark.parametrize("newest_first", [False, True])
def test_letters_may_be_removed_while_reading(store: Letters, *, newest_first: bool) -> None:
    """A redrive removes what it reads; no later letter is skipped for that."""
    expected = {letter.id for letter in many(store, SEVERAL_PAGES)}
    seen = set()
    for found in store.letters(DLQ, newest_first=newest_first):
        seen.add(found.letter.id)
        store.remove(DLQ, [found.letter.id])
    assert seen == expected
    assert ids(store) == []


def test_raw_pages_hold_the_storage_form(store: Letters) -> None:
    """The exporter gets every field's bytes with the position, oldest first."""
    letters = many(store, 7)
    end = store.last_position(DLQ)
    assert end is not None
    pages = list(store.fields(DLQ, after=None, until=end, page_size=3))
    assert max(len(page) for page in pages) == 3
    entries = [entry for page in pages for entry in page]
    assert [{name.decode(): value for name, value in fields.items()} for _, fields in entries] == [
        letter.to_fields() for letter in letters
    ]
    assert [position for position, _ in entries] == [
        found.position for found in store.letters(DLQ, newest_first=False)
    ]


def test_raw_pages_go_on_after_a_position_and_end_at_another(store: Letters) -> None:
    """A second export reads what is new; ``after`` is left out, ``until`` is taken."""
    many(store, 10)
    places = [found.position for found in store.letters(DLQ, newest_first=False)]
    pages = store.fields(DLQ, after=places[2], until=places[6], page_size=2)
    assert [position for page in pages for position, _ in page] == places[3:7]
    assert list(store.fields(DLQ, after=places[-1], until=places[-1], page_size=2)) == []


def test_the_last_position_stays_when_letters_go(store: Letters) -> None:
    """A queue that was emptied is not one that was deleted and made again."""
    many(store, 3)
    end = store.last_position(DLQ)
    store.remove(DLQ, ids(store))
    assert ids(store) == []
    assert store.last_position(DLQ) == end


def test_a_position_of_one_queue_is_not_moved_by_another(store: Letters) -> None:
    """Exports of queues do not depend on each other."""
    stored(store)
    end = store.last_position(DLQ)
    stored(store, dead_letter_queue="mail-DLQ")
    assert store.last_position(DLQ) == end


def test_each_folder_of_an_export_lacks_letters_of_its_own(store: Letters) -> None:
    """Whatever removes letters asks for the folder that lacks most of them."""
    many(store, 12)
    places = [found.position for found in store.letters(DLQ, newest_first=False)]
    assert store.lacking(DLQ) == []
    exported_to(store, "a", places[2])
    exported_to(store, "b", places[5], trimmed=places[4], trimmed_letters=5)
    found = {one.key: one for one in store.export_folders(DLQ)}
    assert {key: one.position for key, one in found.items()} == {"a": places[2], "b": places[5]}
    assert (found["b"].trimmed, found["b"].trimmed_letters) == (places[4], 5)
    assert lacking(store) == ("a", places[2])
    assert lacking(store, but="a") == ("b", places[5])
    exported_to(store, "c", None)  # it has begun
    assert lacking(store) == ("c", FIRST_POSITION)
    stored(store, dead_letter_queue="mail-DLQ")
    assert store.lacking("mail-DLQ") == []


def test_a_folder_is_in_use_until_thirty_days_after_its_last_export(
    store: Letters, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What somebody looked at once does not keep letters for ever."""
    many(store, 2)
    first, _last = [found.position for found in store.letters(DLQ, newest_first=False)]
    exported_to(store, "look", first)
    now = store.now()
    for days, kept in ((29, ("look", first)), (31, None)):
        monkeypatch.setattr(store, "now", lambda days=days: now + timedelta(days=days))
        assert lacking(store) == kept
    assert [one.key for one in store.export_folders(DLQ)] == ["look"]


def test_a_folder_with_a_filter_keeps_no_letters(store: Letters) -> None:
    """Most of them it can never have."""
    many(store, 2)
    first, last = [found.position for found in store.letters(DLQ, newest_first=False)]
    exported_to(store, "some", first, filtered=True)
    assert store.lacking(DLQ) == []
    exported_to(store, "all", last)
    assert [one.key for one in store.lacking(DLQ)] == ["all"]


def test_a_folder_that_is_forgotten_keeps_letters_from_its_next_export_on(store: Letters) -> None:
    """Its state stays: the next export goes on where the last one ended."""
    many(store, 2)
    first, _last = [found.position for found in store.letters(DLQ, newest_first=False)]
    exported_to(store, "look", first)
    for key, known in (("look", True), ("other", False)):
        assert store.lease(DLQ, key, "", 0).request("forget").acquired is known
    assert store.lacking(DLQ) == []
    assert [(one.key, one.position) for one in store.export_folders(DLQ)] == [("look", first)]
    exported_to(store, "look", first)
    assert lacking(store) == ("look", first)


def test_a_folder_whose_position_is_beyond_the_end_lacks_all(store: Letters) -> None:
    """The queue was made again, or lost its end: its letters are not taken for exported."""
    many(store, 2)
    exported_to(store, "a", "99999999999999999999-0")
    assert lacking(store) == ("a", FIRST_POSITION)
    exported_to(store, "a", "9-9", dead_letter_queue="nowhere-DLQ")
    assert lacking(store, "nowhere-DLQ") == ("a", FIRST_POSITION)


def test_leases_that_are_no_folders_of_letters_are_passed_over(
    store: Letters,
) -> None:
    """Of other rights, of samples of successes, or damaged."""
    many(store, 2)
    exported_to(store, "samples", "1-1", of="successes")
    lease = store.lease(DLQ, "looks", "me", 60)
    lease.acquire()
    for state in ("", "[", "[]", "7", '{"name": "a"}', '{"name": "a", "position": "x"}'):
        lease.save_state(state)
        assert store.export_folders(DLQ) == []


def lacking(store: Letters, queue: str = DLQ, *, but: str = "") -> tuple[str, str] | None:
    found = store.lacking(queue, but=but)
    return (found[0].key, found[0].position) if found else None


# -- overviews -----------------------------------------------------------------------


def test_queues_are_listed_by_name_with_numbers_ages_and_reasons(store: Letters) -> None:
    """The first look of an operator."""
    stored(store, dead_lettered_at=NOW, reason=Reason.FAILED)
    stored(store, dead_lettered_at=NOW + MINUTE, reason=Reason.REJECTED)
    stored(store, dead_lettered_at=NOW + 2 * MINUTE, reason=Reason.FAILED)
    stored(store, dead_letter_queue="mail-DLQ", dead_lettered_at=NOW)
    assert store.names() == ["mail-DLQ", DLQ]
    assert [(q.name, q.letters) for q in store.overviews.queues()] == [("mail-DLQ", 1), (DLQ, 3)]
    assert store.overviews.queues() == [
        QueueSummary(
            name="mail-DLQ", letters=1, oldest_at=NOW, newest_at=NOW, reasons={"failed": 1}
        ),
        QueueSummary(
            name=DLQ,
            letters=3,
            oldest_at=NOW,
            newest_at=NOW + 2 * MINUTE,
            reasons={"failed": 2, "rejected": 1},
        ),
    ]


def test_an_emptied_queue_is_still_listed(store: Letters) -> None:
    """It had letters, and it may get some again."""
    letter = stored(store)
    store.remove(DLQ, [letter.id])
    assert store.names() == [DLQ]
    assert store.overviews.queues() == [QueueSummary(name=DLQ, letters=0)]


def test_groups_are_the_letters_of_one_fingerprint_largest_first(store: Letters) -> None:
    """A thousand letters are few causes."""
    stored(store, fingerprint="aa", dead_lettered_at=NOW, task_name="t.a")
    for minute in (1, 2):
        last = stored(
            store,
            fingerprint="bb",
            dead_lettered_at=NOW + minute * MINUTE,
            task_name="t.b",
            reason=Reason.TIME_LIMIT_EXCEEDED,
            exception_type=None,
        )
    one, other = groups(store)
    assert one == Group(
        fingerprint="bb",
        letters=2,
        task_name="t.b",
        reason="time_limit_exceeded",
        exception_type=None,
        first_seen_at=NOW + MINUTE,
        last_seen_at=NOW + 2 * MINUTE,
        example_id=last.id,
    )
    assert (other.fingerprint, other.letters, other.exception_type) == ("aa", 1, "ValueError")


def test_groups_of_one_size_are_in_the_order_of_their_fingerprints(store: Letters) -> None:
    """Two calls show the same list."""
    for fingerprint in ("cc", "aa", "bb"):
        stored(store, fingerprint=fingerprint)
    assert [group.fingerprint for group in groups(store)] == ["aa", "bb", "cc"]


def test_groups_and_reasons_follow_removals(store: Letters) -> None:
    """A group or reason without letters disappears, the others keep their numbers."""
    first = stored(store, fingerprint="aa", reason=Reason.FAILED)
    second = stored(store, fingerprint="aa", reason=Reason.FAILED)
    third = stored(store, fingerprint="bb", reason=Reason.REJECTED)
    store.remove(DLQ, [first.id, third.id])
    assert [(group.fingerprint, group.letters) for group in groups(store)] == [("aa", 1)]
    assert store.overviews.queues()[0].reasons == {"failed": 1}
    store.remove(DLQ, [second.id])
    assert groups(store) == []
    assert store.overviews.queues()[0].reasons == {}


def test_a_group_that_comes_back_begins_anew(store: Letters) -> None:
    """After the last letter of a cause is gone, its times are forgotten too."""
    letter = stored(store, fingerprint="aa", dead_lettered_at=NOW)
    store.remove(DLQ, [letter.id])
    stored(store, fingerprint="aa", dead_lettered_at=NOW + MINUTE)
    assert [group.first_seen_at for group in groups(store)] == [NOW + MINUTE]


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_the_example_of_a_group_is_never_a_removed_letter(store: Letters, gone: int) -> None:
    """An operator opens the example; no example is better than one that is not there."""
    letters = many(store, 3)
    store.remove(DLQ, [letters[gone].id])
    assert groups(store)[0].example_id in {*ids(store), ""}


def test_two_dead_letter_queues_are_separate(store: Letters) -> None:
    """Letters, groups, claims and removals of one do not touch the other."""
    here = stored(store, task_id="t")
    there = stored(store, task_id="t", dead_letter_queue="mail-DLQ")
    assert store.get("mail-DLQ", here.id) is None
    assert store.claims.claim("mail-DLQ", [here.id], owner="me", lease_seconds=9) == [
        ClaimState.GONE
    ]
    assert claim(store, here.id) == [ClaimState.CLAIMED]
    assert store.remove("mail-DLQ", [here.id]) == 0
    assert store.remove(DLQ, [here.id]) == 1
    assert ids(store, "mail-DLQ") == [there.id]
    assert [group.letters for group in groups(store, "mail-DLQ")] == [1]
    assert groups(store) == []


# -- removing ------------------------------------------------------------------------


def test_removing_says_how_many_were_there(store: Letters) -> None:
    """Unknown and repeated ids do not count."""
    one, other = stored(store), stored(store)
    assert store.remove(DLQ, [one.id, "x", one.id]) == 1
    assert ids(store) == [other.id]
    assert [group.letters for group in groups(store)] == [1]
    assert store.remove(DLQ, [one.id]) == 0
    assert store.remove(DLQ, []) == 0


def test_any_number_of_letters_is_removed_at_once(store: Letters) -> None:
    """Callers need not know how many ids one step takes, and may give an iterator."""
    letters = many(store, MOST_IDS + 20)
    assert store.remove(DLQ, (letter.id for letter in letters[:-1])) == MOST_IDS + 19
    assert ids(store) == [letters[-1].id]


# -- claims --------------------------------------------------------------------------


def test_a_free_letter_is_claimed(store: Letters) -> None:
    """Each id has its answer, in order; what is not there is gone."""
    one, other = stored(store), stored(store)
    assert claim(store, one.id, "x", other.id) == [
        ClaimState.CLAIMED,
        ClaimState.GONE,
        ClaimState.CLAIMED,
    ]
    assert claim(store) == []


def test_a_claimed_letter_is_held_for_everybody_else(store: Letters) -> None:
    """Two operators never redrive one letter; asking does not prolong or steal."""
    letter = stored(store)
    claim(store, letter.id)
    for _ in range(2):
        assert claim(store, letter.id, owner="you") == [ClaimState.HELD]


def test_a_claim_does_not_hide_the_letter(store: Letters) -> None:
    """It is still read, counted and removable."""
    letter = stored(store)
    claim(store, letter.id)
    assert ids(store) == [letter.id]
    assert store.remove(DLQ, [letter.id]) == 1


def test_an_expired_claim_is_reclaimed(store: Letters) -> None:
    """A redrive that died is noticed: its letters may have been published."""
    letter = stored(store)
    claim(store, letter.id, lease_seconds=0.05)
    states: list[ClaimState] = []

    def taken_over() -> bool:
        states.extend(claim(store, letter.id, owner="you"))
        return states[-1] is not ClaimState.HELD

    poll(taken_over)
    assert states[-1] is ClaimState.RECLAIMED
    assert claim(store, letter.id, owner="me") == [ClaimState.HELD]


def test_a_published_letter_is_only_to_be_removed(store: Letters) -> None:
    """Once the broker confirmed it, anybody may finish, at once, and nobody publishes again."""
    letter = stored(store)
    claim(store, letter.id)
    store.claims.mark_published(DLQ, [letter.id], owner="me")
    assert claim(store, letter.id, owner="you") == [ClaimState.PUBLISHED]


def test_a_published_letter_stays_published(store: Letters) -> None:
    """The second redrive may die too; the third still knows."""
    letter = stored(store)
    claim(store, letter.id)
    store.claims.mark_published(DLQ, [letter.id], owner="me")
    claim(store, letter.id, owner="you")
    assert claim(store, letter.id, owner="her") == [ClaimState.HELD]
    assert claim(store, letter.id, owner="you") == [ClaimState.PUBLISHED]


def test_a_released_letter_is_free_again(store: Letters) -> None:
    """A redrive that stops gives back what it did not use."""
    one, other = stored(store), stored(store)
    claim(store, one.id, other.id)
    store.claims.release(DLQ, [one.id], owner="me")
    assert claim(store, one.id, other.id, owner="you") == [ClaimState.CLAIMED, ClaimState.HELD]


def test_nobody_releases_the_claim_of_another(store: Letters) -> None:
    """A redrive whose lease ran out must not free what another took over."""
    letter = stored(store)
    claim(store, letter.id)
    store.claims.release(DLQ, [letter.id, "x"], owner="you")
    store.claims.release(DLQ, [letter.id], owner="m")
    assert claim(store, letter.id, owner="you") == [ClaimState.HELD]


def test_releasing_does_not_forget_that_a_letter_was_published(store: Letters) -> None:
    """The note of the broker's confirmation is worth more than a claim."""
    letter = stored(store)
    claim(store, letter.id)
    store.claims.mark_published(DLQ, [letter.id], owner="me")
    store.claims.release(DLQ, [letter.id], owner="me")
    assert claim(store, letter.id, owner="you") == [ClaimState.PUBLISHED]


def test_a_removed_letter_leaves_no_claim(store: Letters) -> None:
    """The same message may die again after its redrive; its letter is free then."""
    letter = stored(store)
    claim(store, letter.id)
    store.claims.mark_published(DLQ, [letter.id], owner="me")
    store.remove(DLQ, [letter.id])
    assert claim(store, letter.id, owner="you") == [ClaimState.GONE]
    store.dead_letter(letter, key_of(letter))
    assert claim(store, letter.id, owner="you") == [ClaimState.CLAIMED]


def test_owners_of_any_text_are_distinct(store: Letters) -> None:
    """An owner's name holds host names; characters of patterns mean themselves."""
    letter = stored(store)
    owner = "id|x|99@höst:1.%a*[b"
    assert claim(store, letter.id, owner=owner) == [ClaimState.CLAIMED]
    assert claim(store, letter.id, owner="id") == [ClaimState.HELD]
    store.claims.release(DLQ, [letter.id], owner="id")
    assert claim(store, letter.id, owner="id|x") == [ClaimState.HELD]
    store.claims.release(DLQ, [letter.id], owner=owner)
    assert claim(store, letter.id, owner="id") == [ClaimState.CLAIMED]


def test_any_number_of_letters_is_claimed_noted_and_released_at_once(
    store: Letters,
) -> None:
    """Callers need not know how many ids one step takes."""
    some = [letter.id for letter in many(store, MOST_IDS + 20)]
    assert claim(store, *some) == [ClaimState.CLAIMED] * len(some)
    store.claims.mark_published(DLQ, some[:-10], owner="me")
    store.claims.release(DLQ, some, owner="me")
    states = claim(store, *some, owner="you")
    assert states == [ClaimState.PUBLISHED] * (len(some) - 10) + [ClaimState.CLAIMED] * 10


def test_a_claim_asked_for_twice_is_answered_as_the_first_time(store: Letters) -> None:
    """A client asks again after a time-out, and must not take itself for a dead one."""
    letter, doubtful = stored(store), stored(store)
    store.claims.claim(DLQ, [doubtful.id], owner="dead", lease_seconds=0)
    for _ in range(2):
        assert claim(store, letter.id, doubtful.id) == [ClaimState.CLAIMED, ClaimState.RECLAIMED]


def test_a_resumed_job_takes_over_the_claims_of_its_earlier_runs(store: Letters) -> None:
    """At once: it knows that they died. Others still wait."""
    one, other = stored(store), stored(store)
    claim(store, one.id, other.id, owner="job-1:1@x")
    store.claims.mark_published(DLQ, [other.id], owner="job-1:1@x")
    assert claim(store, one.id, owner="job-2:1@x") == [ClaimState.HELD]
    assert store.claims.claim(
        DLQ, [one.id, other.id], owner="job-1:2@x", lease_seconds=60, previous_run_prefix="job-1:"
    ) == [ClaimState.RECLAIMED, ClaimState.PUBLISHED]


def test_letters_that_a_killed_removal_claimed_were_not_published(store: Letters) -> None:
    """A doubt of an earlier redrive stays, whoever had them in between."""
    one, other = stored(store), stored(store)
    store.claims.claim(DLQ, [other.id], owner="redrive", lease_seconds=0)
    store.claims.claim(DLQ, [one.id, other.id], owner=f"discard{REMOVES}", lease_seconds=0)
    assert claim(store, one.id, other.id) == [ClaimState.CLAIMED, ClaimState.RECLAIMED]


def test_only_the_owner_notes_and_removes(store: Letters) -> None:
    """A late repetition must neither touch a letter that came back nor one of somebody else."""
    letter = stored(store)
    claim(store, letter.id, owner="you")
    store.claims.mark_published(DLQ, [letter.id, "gone"], owner="me")
    assert store.remove(DLQ, [letter.id], owner="me") == 0
    assert ids(store) == [letter.id]
    assert store.remove(DLQ, [letter.id], owner="you") == 1
    store.dead_letter(letter, key_of(letter))
    store.claims.mark_published(DLQ, [letter.id], owner="you")
    assert store.remove(DLQ, [letter.id], owner="you") == 0
    assert claim(store, letter.id, owner="her") == [ClaimState.CLAIMED]


def test_a_doubtful_claim_given_back_is_reclaimed_at_once(store: Letters) -> None:
    """The broker may have the message: the next owner hears of it, and need not wait."""
    letter = stored(store)
    claim(store, letter.id)
    store.claims.release(DLQ, [letter.id], owner="me", doubtful=True)
    assert claim(store, letter.id, owner="you") == [ClaimState.RECLAIMED]
    store.claims.release(DLQ, [letter.id], owner="you")
    assert claim(store, letter.id, owner="her") == [ClaimState.RECLAIMED]


# -- the bin -------------------------------------------------------------------------


def test_a_store_redrives_only_where_it_can_lie_in_a_brokers_database(
    store: Letters,
) -> None:
    """It says so by a marker, and what it did for a job is counted."""
    letter = stored(store)
    entry = store.entry(DLQ, letter.id)
    assert entry is not None
    reason, fingerprint = letter.reason.value.encode(), letter.fingerprint.encode()
    made = QueueEntry(letter.id, entry[0], reason, fingerprint, b"{orders}", "message")
    call = store.claims.redrive(DLQ, [made], job_id="job", owner="me", database=0)
    if store.claims.marker(0) is None:
        assert call is None or call.wait_for_states() is None
        assert not any(store.claims.redriven(DLQ, "job").values())
        assert ids(store) == [letter.id]
    else:
        assert call is not None
        call.send()
        assert call.wait_for_states() == [ClaimState.CLAIMED]
        assert store.claims.redriven(DLQ, "job")[ClaimState.CLAIMED] == 1
        assert ids(store) == []


def discard(store: Letters, *letter_ids: str, keep_seconds: float = 60.0) -> int:
    """Claim and discard letters of the usual queue."""
    claim(store, *letter_ids)
    return store.remove(DLQ, letter_ids, owner="me", keep_seconds=keep_seconds)


def in_bin(store: Letters) -> list[bytes]:
    """The ids in the bin, newest first."""
    return [fields[b"id"] for page in store.discarded(DLQ) for _, fields in page]


def test_a_discarded_letter_lies_in_the_bin_and_comes_back_whole(store: Letters) -> None:
    """With its group and reason; as the newest of its queue."""
    letters = many(store, 3)
    before = store.overviews.queues(), groups(store)
    assert discard(store, letters[0].id) == 1
    assert ids(store) == [letters[1].id, letters[2].id]
    assert groups(store)[0].letters == 2
    assert in_bin(store) == [letters[0].id.encode()]
    assert store.restore(DLQ, letters[0].id) is Restored.RESTORED
    assert ids(store) == [letters[1].id, letters[2].id, letters[0].id]
    assert store.get(DLQ, letters[0].id) == letters[0]
    assert (store.overviews.queues()[0].reasons, groups(store)[0].letters) == (
        before[0][0].reasons,
        before[1][0].letters,
    )
    assert in_bin(store) == []
    assert store.restore(DLQ, letters[0].id) is Restored.NOT_THERE


def test_a_group_that_comes_back_says_what_it_is(store: Letters) -> None:
    """Its only letter was discarded, and the group with it."""
    letter = stored(store, traceback="Traceback" * 50, exception_type="shop.Down")
    (before,) = groups(store)
    discard(store, letter.id)
    assert groups(store) == []
    store.restore(DLQ, letter.id)
    assert groups(store) == [before]


def test_only_the_owner_discards(store: Letters) -> None:
    """A letter that another operator redrives stays; a repetition finds nothing."""
    letter = stored(store)
    claim(store, letter.id, owner="you")
    assert store.remove(DLQ, [letter.id], owner="me", keep_seconds=60) == 0
    assert store.remove(DLQ, [letter.id], owner="you", keep_seconds=60) == 1
    assert store.remove(DLQ, [letter.id], owner="you", keep_seconds=60) == 0
    assert in_bin(store) == [letter.id.encode()]


def test_a_letter_that_came_back_is_not_overwritten(store: Letters) -> None:
    """The same message died again meanwhile: the bin keeps the older letter."""
    letter = stored(store)
    discard(store, letter.id)
    store.dead_letter(letter, key_of(letter))
    assert store.restore(DLQ, letter.id) is Restored.TAKEN
    assert ids(store) == [letter.id]


def test_the_bin_forgets(store: Letters) -> None:
    """After its time nothing can be restored."""
    letter = stored(store)
    discard(store, letter.id, keep_seconds=0.05)
    assert poll(lambda: in_bin(store) == [])
    assert store.restore(DLQ, letter.id) is Restored.NOT_THERE


# -- what operations ask ---------------------------------------------------------------


def test_the_letters_of_the_last_hour_are_counted(store: Letters) -> None:
    """By when they were stored, whenever they died; also those that are gone."""
    letters = many(store, 3)
    store.remove(DLQ, [letters[0].id])
    assert store.overviews.queues()[0].last_hour == 3


def test_groups_can_be_few(store: Letters) -> None:
    """A queue may have as many causes as letters; the first page is the largest ones."""
    for number, fingerprint in enumerate(("aa", "bb", "bb", "cc", "cc", "cc")):
        stored(store, fingerprint=fingerprint, retries=number)
    assert [group.fingerprint for group in groups(store, most=2)] == ["cc", "bb"]


def test_a_letter_is_found_raw_by_its_id_or_position(store: Letters) -> None:
    """Operations decode nothing that they do not need."""
    letter = stored(store)
    entry = store.entry(DLQ, letter.id)
    assert entry is not None
    assert entry[1] == {name.encode(): value for name, value in letter.to_fields().items()}
    assert store.entry(DLQ, entry[0]) == entry
    assert store.entry(DLQ, "0-1") is None
    assert store.entry("nowhere", letter.id) is None


def test_no_letter_lies_before_the_position_of_its_death(store: Letters) -> None:
    """A search by time need not begin at the first letter."""
    letter = stored(store)
    after = position_at(NOW)
    pages = list(store.fields(DLQ, after=after, until=None, page_size=5))
    assert [fields[b"id"] for page in pages for _, fields in page] == [letter.id.encode()]


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_pages_are_bounded_in_bytes_too(store: Letters, size: int) -> None:
    """Letters of megabytes do not come by the hundreds."""
    for number in range(12):
        stored(store, retries=number, body=b"x" * size)
    pages = list(store.fields(DLQ, after=None, until=None, page_size=200))
    assert sum(map(len, pages)) == 12
    assert [fields[b"body"] for page in pages for _, fields in page] == [b"x" * size] * 12


def test_the_outcome_of_a_watched_message_is_known(backend: Store) -> None:
    """It waits, it runs, it succeeded, or it has a letter again."""
    store, keys = backend.store, [a_key(redrives=1), a_key(redrives=1), a_key(redrives=1)]
    store.claims.watch_messages(keys)
    assert store.claims.outcomes(keys) == [RedriveOutcome.OPEN] * 3
    for key in keys:
        backend.counter.count_delivery(key, a_delivery(), None)
    backend.counter.succeeded(keys[0], a_delivery())
    backend.counter.flush()
    letter = a_letter(task_id=keys[1].task_id, redrives=1)
    store.dead_letter(letter, key_of(letter))
    assert store.claims.outcomes(keys) == [
        RedriveOutcome.SUCCEEDED,
        RedriveOutcome.DIED,
        RedriveOutcome.OPEN,
    ]


@pytest.mark.parametrize("places", ["beside", "elsewhere"])
def test_a_watched_message_that_died_has_died_however_often_it_is_told(
    backend: Store, places: str
) -> None:
    """A worker that got no answer tells it again; the canary must not take that for a success."""
    key = a_key(redrives=1)
    letter = a_letter(task_id=key.task_id, redrives=1)
    backend.store.claims.watch_messages([key])
    backend.counter.count_delivery(key, a_delivery(), None)
    for _ in range(2):
        if places == "beside":
            backend.store.dead_letter(letter, key_of(letter))
        else:
            backend.counter.record_death(key)
            backend.counter.flush()
        assert backend.store.claims.outcomes([key]) == [RedriveOutcome.DIED]


def test_deliveries_of_an_earlier_life_can_count(backend: Store) -> None:
    """A redrive with its counts kept goes on where the message died."""
    key = a_key(redrives=1)
    backend.store.claims.seed_count(key, 2, an_ended_delivery(number=7))
    assert [delivery.number for delivery in backend.counter.history(key)] == [2]
    assert backend.counter.count_delivery(key, a_delivery(), 3) == Count(CountStatus.COUNTED, 3)
    assert backend.counter.count_delivery(key, a_delivery(), 3).status is CountStatus.LIMIT_REACHED


def test_closing_may_be_repeated(store: Letters) -> None:
    """It never raises."""
    store.close()
    store.close()


def test_builders_make_letters_of_different_messages() -> None:
    """The tests above rest on it: each letter is another one, at an aware time."""
    one, other = a_letter(), a_letter()
    assert one.id != other.id
    assert isinstance(one.dead_lettered_at, datetime)
