"""The states of groups on every store: what is set, what a letter does to it, what is reported."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, key_of

from celery_dlq.errors import DLQError, NotFound
from celery_dlq.events import Action, Change, Event, Events, GroupState, acting_as
from celery_dlq.features.groups.operations import Notes
from celery_dlq.features.sentry.reports import ReportCause, Reports
from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.reading import Reading
from celery_dlq.store.notes import Note
from celery_dlq.store.records import OPEN_GROUP, GroupStatus
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import Stored

GROUP = "0123456789abcdef"
OTHER = "fedcba9876543210"


def letter_of(release: str | None = None, **changes: Any) -> DeadLetter:
    """A letter of the group."""
    return a_letter(**{"fingerprint": GROUP, "release": release, **changes})


def dies(parts: Store, release: str | None = None, **changes: Any) -> Stored:
    """Store a letter of the group."""
    letter = letter_of(release, **changes)
    return parts.letters.dead_letter(letter, key_of(letter))


def resolve(parts: Store, release: str | None = None, *releases: str) -> GroupStatus:
    """Resolve the group, which had died in some releases."""
    status = GroupStatus(
        state=GroupState.RESOLVED, at=NOW, actor="ann@desk", release=release, releases=releases
    )
    parts.notes.set_status(DLQ, GROUP, status)
    return status


def state(parts: Store) -> GroupState:
    """The state of the group."""
    return parts.notes.status(DLQ, GROUP).state


def test_a_state_is_kept_whole(parts: Store) -> None:
    """Each group and each queue has its own; a group is open until somebody says otherwise."""
    assert parts.notes.status(DLQ, GROUP) is OPEN_GROUP
    resolved = GroupStatus(
        state=GroupState.RESOLVED,
        at=NOW,
        actor="süß|ann@desk\n",
        release="2026.3|rc,1 +a",
        releases=("2026.2|b,c", "süß"),
        task_name="shop|charge",
        reason="failed",
        exception_type="shop.Broke",
        first_seen_at=NOW - timedelta(days=1),
        last_seen_at=NOW,
    )
    later = datetime.now(timezone.utc) + timedelta(hours=1)
    muted = GroupStatus(state=GroupState.MUTED, at=NOW, actor="ann", until=later)
    parts.notes.set_status(DLQ, GROUP, resolved)
    parts.notes.set_status(DLQ, OTHER, muted)
    parts.notes.set_status("mail-DLQ", GROUP, muted)
    assert parts.notes.status(DLQ, GROUP) == resolved
    assert parts.notes.statuses(DLQ, [GROUP, OTHER]) == {GROUP: resolved, OTHER: muted}
    parts.notes.set_status(DLQ, GROUP, OPEN_GROUP)
    assert parts.notes.status(DLQ, GROUP) is OPEN_GROUP
    assert parts.notes.statuses(DLQ, [GROUP, OTHER]) == {OTHER: muted}


def test_a_mute_ends_by_itself(parts: Store) -> None:
    """By the clock of the store; without an end it lasts."""
    past = datetime.now(timezone.utc) - timedelta(seconds=5)
    for until, expected in ((past, GroupState.OPEN), (None, GroupState.MUTED)):
        status = GroupStatus(state=GroupState.MUTED, at=NOW, actor="ann", until=until)
        parts.notes.set_status(DLQ, GROUP, status)
        assert state(parts) is expected
        assert (GROUP in parts.notes.states(DLQ)) is (expected is GroupState.MUTED)


def test_the_first_letter_of_a_resolved_group_makes_it_regressed(parts: Store) -> None:
    """Once, and it is known which letter it was and who had resolved the group when."""
    dies(parts)
    resolve(parts)
    assert dies(parts, fingerprint=OTHER) is Stored.NEW
    letter = letter_of("2026.4", dead_lettered_at=NOW + timedelta(seconds=1))
    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.REGRESSED
    assert parts.letters.dead_letter(letter, key_of(letter)) is Stored.ALREADY_THERE
    assert dies(parts) is Stored.NEW
    status = parts.notes.status(DLQ, GROUP)
    assert (status.state, status.at, status.actor) == (GroupState.REGRESSED, NOW, "ann@desk")
    assert (status.regressed_at, status.regressed_in) == (letter.dead_lettered_at, "2026.4")
    assert status.letter_id == letter.id
    resolve(parts)
    assert dies(parts) is Stored.REGRESSED


def test_a_state_outlives_the_letters_of_its_group(parts: Store) -> None:
    """People resolve a group and redrive it; the next letter is weeks later."""
    letter = letter_of()
    parts.letters.dead_letter(letter, key_of(letter))
    resolve(parts)
    parts.letters.remove(DLQ, [letter.id])
    assert state(parts) is GroupState.RESOLVED
    assert dies(parts) is Stored.REGRESSED


@pytest.mark.parametrize(
    ("fixed_in", "before", "died_in", "expected"),
    [
        (None, ("1", "2"), "1", Stored.REGRESSED),
        (None, ("1",), None, Stored.REGRESSED),
        ("3", ("2", "1"), "2", Stored.NEW),
        ("3", ("2", "1"), "1", Stored.NEW),
        ("3", ("2", "1"), "3", Stored.REGRESSED),
        ("3", ("2", "1"), "4", Stored.REGRESSED),
        ("3", ("2", "1"), None, Stored.REGRESSED),
        ("3", ("3", "2"), "3", Stored.REGRESSED),
        ("3", ("22", "2.2"), "2", Stored.REGRESSED),
        ("a|b,c", ("d,e|f",), "d,e|f", Stored.NEW),
        ("a|b,c", ("d,e|f",), "a|b,c", Stored.REGRESSED),
    ],
)
def test_a_worker_that_is_not_deployed_yet_is_no_regression(
    parts: Store,
    fixed_in: str | None,
    before: tuple[str, ...],
    died_in: str | None,
    expected: Stored,
) -> None:
    """If the fix has a release, letters of the releases before it end nothing."""
    resolve(parts, fixed_in, *before)
    assert dies(parts, died_in) is expected
    went_on = expected is Stored.NEW
    assert state(parts) is (GroupState.RESOLVED if went_on else GroupState.REGRESSED)


def test_many_workers_end_a_resolution_once(parts: Store) -> None:
    """One of their letters does."""
    resolve(parts)
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: dies(parts), range(20)))
    assert sorted(one.name for one in found) == ["NEW"] * 19 + ["REGRESSED"]


def test_a_regression_is_reported_whatever_was_reported_before(parts: Store) -> None:
    """Once for each resolution; asking again gives the same answer."""
    first = letter_of()
    assert parts.part(Reports).report_of(first) is not None
    parts.letters.dead_letter(first, key_of(first))
    second, third, fourth = letter_of(), letter_of(), letter_of()
    assert parts.part(Reports).report_of(second) is None
    resolve(parts)
    report = parts.part(Reports).report_of(third)
    assert report is not None
    assert (report.why, report.number) == (ReportCause.REGRESSED, 1)
    assert parts.part(Reports).report_of(third) == report
    assert parts.part(Reports).report_of(fourth) is None  # asks before the third is stored
    parts.letters.dead_letter(third, key_of(third))
    assert parts.part(Reports).report_of(letter_of()) is None
    resolve(parts, "3", "2")
    assert parts.part(Reports).report_of(letter_of("2")) is None
    later = letter_of("3")
    parts.notes.set_status(
        DLQ,
        GROUP,
        GroupStatus(state=GroupState.RESOLVED, at=NOW + timedelta(days=1), actor="ann"),
    )
    report = parts.part(Reports).report_of(later)
    assert report is not None
    assert report.why is ReportCause.REGRESSED


@pytest.mark.parametrize("quiet", [state for state in GroupState if state.is_quiet])
def test_a_quiet_group_is_not_reported(parts: Store, quiet: GroupState) -> None:
    """Its letters are stored all the same."""
    muted = GroupStatus(state=quiet, at=NOW, actor="ann")
    parts.notes.set_status(DLQ, GROUP, muted)
    assert [parts.part(Reports).report_of(letter_of()) for _ in range(12)] == [None] * 12
    assert parts.part(Reports).report_of(letter_of(fingerprint=OTHER)) is not None
    assert dies(parts) is Stored.NEW
    assert parts.letters.length(DLQ) == 1
    parts.notes.set_status(DLQ, GROUP, OPEN_GROUP)
    assert parts.part(Reports).report_of(letter_of()) is not None


def test_states_go_long_after_their_letters(redis_url: str) -> None:
    """When the next one is set; a group that has letters keeps its own."""
    backend = Store(redis_url, timeout_seconds=2.0)
    dies(backend, fingerprint="alive")
    muted = GroupStatus(state=GroupState.MUTED, at=NOW, actor="ann")
    for group in ("alive", "gone"):
        backend.notes.set_status(DLQ, group, muted)
    backend.client.zadd(backend.keys.noted(DLQ), {"alive": 0, "gone": 0})  # long ago
    backend.notes.set_status(DLQ, "new", muted)
    assert sorted(backend.notes.states(DLQ)) == ["alive", "new"]
    backend.close()


def test_an_owner_stays_whatever_the_state_becomes(redis_url: str) -> None:
    """It is no state, whatever a person is called; it goes when the rest of the group does."""
    backend = Store(redis_url, timeout_seconds=2.0)
    notes = backend.notes
    notes.set_owner(DLQ, GROUP, "resolved|süß")
    assert (notes.states(DLQ), state(backend)) == ({}, GroupState.OPEN)
    resolve(backend)
    assert dies(backend) is Stored.REGRESSED
    notes.set_status(DLQ, GROUP, OPEN_GROUP)
    assert notes.statuses(DLQ, [OTHER, GROUP]) == {GROUP: GroupStatus(owner="resolved|süß")}
    backend.client.zadd(backend.keys.noted(DLQ), {GROUP: 0})  # long ago, but it has a letter
    notes.set_owner(DLQ, OTHER, "ann")
    assert notes.status(DLQ, GROUP).owner
    backend.client.zadd(backend.keys.noted(DLQ), {OTHER: 0})
    notes.set_owner(DLQ, GROUP, "")
    assert notes.statuses(DLQ, [GROUP, OTHER]) == {}
    backend.close()


def test_a_state_of_a_later_version_counts_as_open(redis_url: str) -> None:
    """And letters of its group are stored, and reported."""
    backend = Store(redis_url, timeout_seconds=2.0)
    key = backend.keys.states(DLQ)
    for text in (
        b"odd",
        b"unheard_of|1|2|3|{}",
        b'resolved|||1|{"odd": 1}',
        b"resolved|x",
        b"\xff",
    ):
        backend.client.hset(key, GROUP, text)
        assert backend.notes.status(DLQ, GROUP) is OPEN_GROUP
        assert backend.notes.statuses(DLQ, [GROUP]) == {}
        assert dies(backend) in {Stored.NEW, Stored.REGRESSED}
    backend.client.hset(key, OTHER, b"unheard|in a day|||{}")
    assert backend.part(Reports).report_of(letter_of(fingerprint=OTHER)) is not None
    backend.close()


def operations(parts: Store) -> tuple[Notes, Reading, list[Event]]:
    """What sets states, what reads groups, and the events of the former."""
    seen: list[Event] = []
    events = Events()
    events.subscribe(seen.append)
    reading = Reading(parts.letters, notes=parts.notes)
    made: Any = SimpleNamespace(backend=parts, reading=lambda: reading, events=events)
    return Notes(made), reading, seen


def test_who_resolved_a_group_in_which_release_is_known_and_audited(parts: Store) -> None:
    """The note is one of the group's notes; the releases before are those that it died in."""
    notes, reading, seen = operations(parts)
    dies(parts, "1")
    dies(parts, "2")
    with acting_as("ann"):
        status = notes.resolve(DLQ, GROUP, release=" 3 ", note="see SHOP-17")
    assert (status.state, status.release, status.releases) == (GroupState.RESOLVED, "3", ("2", "1"))
    assert status.actor.startswith("ann via ")
    assert reading.group(DLQ, GROUP).status == status
    (change,) = parts.workers.changes(limit=5)
    assert seen == [change]
    assert (change.action, change.actor, change.target) == (Action.RESOLVED, status.actor, DLQ)
    assert change.detail == {"fingerprint": GROUP, "release": "3", "text": "see SHOP-17"}
    assert [note.text for note in notes.notes(DLQ, GROUP)] == ["see SHOP-17"]
    assert dies(parts, "2") is Stored.NEW
    assert dies(parts, "3") is Stored.REGRESSED


def test_a_group_is_found_by_its_state_also_without_letters(parts: Store) -> None:
    """Its last letters tell what it was; open groups are those that have letters."""
    notes, reading, _ = operations(parts)
    letters = [letter_of(fingerprint=name, release="1") for name in ("aa", "bb", "cc", "dd")]
    for letter in letters:
        parts.letters.dead_letter(letter, key_of(letter))
    notes.resolve(DLQ, "aa")
    notes.mute(DLQ, "bb")
    notes.resolve(DLQ, "cc")
    dies(parts, "2", fingerprint="cc")
    parts.letters.remove(DLQ, [letter.id for letter in letters])
    dies(parts, fingerprint="dd")

    def named(state: str | None) -> list[tuple[str, int, str]]:
        groups = reading.groups(DLQ, state=state, by="newest")
        return [(group.fingerprint, group.letters, group.status.state.value) for group in groups]

    assert named("resolved") == [("aa", 0, "resolved")]
    assert named("muted") == [("bb", 0, "muted")]
    assert named("regressed") == [("cc", 1, "regressed")]
    assert named("open") == [("dd", 1, "open")]
    assert named(None) == [("dd", 1, "open"), ("cc", 1, "regressed")]
    empty = reading.group(DLQ, "aa")
    assert (empty.task_name, empty.releases) == (letters[0].task_name, ("1",))
    assert (empty.first_seen_at, empty.example_id) == (letters[0].dead_lettered_at, "")
    with pytest.raises(DLQError, match="expected state to be one of open, muted, "):
        reading.groups(DLQ, state="fixed")


def test_a_cause_whose_letters_are_gone_is_still_known(parts: Store) -> None:
    """People redrive its letters first, and then say that it is mended."""
    notes, reading, _ = operations(parts)
    letters = [letter_of(release="1"), letter_of(release="2")]
    for letter in letters:
        parts.letters.dead_letter(letter, key_of(letter))
    parts.letters.remove(DLQ, [letter.id for letter in letters])
    gone = reading.group(DLQ, GROUP)
    assert (gone.letters, gone.task_name, gone.example_id) == (0, letters[0].task_name, "")
    assert gone.status is OPEN_GROUP
    assert gone.releases[0] == "2"
    assert reading.groups(DLQ) == []
    assert notes.notes(DLQ, GROUP) == []
    notes.note(DLQ, GROUP, "gateway timeout raised")
    status = notes.resolve(DLQ, GROUP, release="3")
    assert (status.task_name, status.releases[0]) == (letters[0].task_name, "2")
    assert [group.letters for group in reading.groups(DLQ, state="resolved")] == [0]
    assert notes.mute(DLQ, GROUP).state is GroupState.MUTED
    notes.reopen(DLQ, GROUP)
    assert reading.group(DLQ, GROUP).status is OPEN_GROUP
    with pytest.raises(NotFound, match="expected the fingerprint of letters"):
        notes.resolve(DLQ, "a-typo")


def test_a_note_alone_keeps_a_cause_known(parts: Store) -> None:
    """Of letters on a broker, Redis has nothing else."""
    notes, reading, _ = operations(parts)
    dies(parts, fingerprint=OTHER)
    parts.notes.add_note(DLQ, GROUP, Note(at=NOW, actor="ann", text="see SHOP-17"))
    assert (reading.group(DLQ, GROUP).letters, reading.group(DLQ, GROUP).task_name) == (0, "")
    assert notes.resolve(DLQ, GROUP).state is GroupState.RESOLVED


def test_groups_that_are_gone_are_bounded_and_forgotten(redis_url: str) -> None:
    """The newest 1,000, for 90 days; a group that comes back is one with letters again."""
    backend = Store(redis_url, timeout_seconds=2.0)
    letters = [letter_of(fingerprint=f"f{number}") for number in range(1010)]
    for letter in letters:
        backend.letters.dead_letter(letter, key_of(letter))
    backend.letters.remove(DLQ, [letter.id for letter in letters[:10]])
    backend.letters.remove(DLQ, [letter.id for letter in letters[10:]])
    key = backend.keys.gone_groups(DLQ)
    assert backend.client.xlen(key) == 1000
    assert 89 < backend.client.pttl(key) / 86_400_000 <= 90
    assert backend.letters.overviews.group(DLQ, "f9") is None
    assert backend.letters.overviews.group(DLQ, "f10") is not None
    dies(backend, fingerprint="f10")
    again = backend.letters.overviews.group(DLQ, "f10")
    assert again is not None
    assert again.letters == 1
    backend.client.delete(key)
    long_ago = int((NOW - timedelta(days=4000)).timestamp() * 1000)
    backend.client.xadd(key, {"f9": "1|2||||1|{}"}, id=f"{long_ago}-0")
    assert backend.letters.overviews.group(DLQ, "f9") is None
    backend.close()


def test_a_group_that_regressed_can_be_resolved_again_or_reopened(parts: Store) -> None:
    """The release in which it died again is one of those before the next fix."""
    notes, reading, _ = operations(parts)
    letter = letter_of("1")
    parts.letters.dead_letter(letter, key_of(letter))
    notes.resolve(DLQ, GROUP, release="2")
    again = letter_of("2")
    assert parts.letters.dead_letter(again, key_of(again)) is Stored.REGRESSED
    parts.letters.remove(DLQ, [letter.id, again.id])
    status = notes.resolve(DLQ, GROUP, release="3")
    assert status.releases == ("2", "1")
    assert notes.reopen(DLQ, GROUP, note="it is not fixed") == OPEN_GROUP
    assert [change.action for change in parts.workers.changes(limit=1)] == [Action.REOPENED]
    assert dies(parts, "3") is Stored.NEW
    assert reading.group(DLQ, GROUP).status is OPEN_GROUP


def test_the_first_digits_name_a_group(parts: Store) -> None:
    """As for a filter; those of several groups are refused with all of them."""
    notes, reading, seen = operations(parts)
    dies(parts)
    dies(parts, fingerprint=OTHER, task_id="other")
    dies(parts, fingerprint="fedd" + OTHER[4:], task_id="third")
    assert notes.resolve(DLQ, GROUP[:1]).state is GroupState.RESOLVED
    assert reading.group(DLQ, GROUP).status.state is GroupState.RESOLVED
    notes.note(DLQ, "fedc", "see SHOP-17")
    assert [note.text for note in notes.notes(DLQ, OTHER)] == ["see SHOP-17"]
    details = [event.detail["fingerprint"] for event in seen if isinstance(event, Change)]
    assert details == [GROUP, OTHER]
    with pytest.raises(NotFound, match=f"begin with 'fed': {OTHER}, fedd.*; give more digits"):
        notes.mute(DLQ, "fed")


def test_what_cannot_be_set_is_refused(parts: Store) -> None:
    """Nothing of it is in the audit."""
    notes, _, _ = operations(parts)
    dies(parts)
    now = datetime.now(timezone.utc)
    with pytest.raises(DLQError, match="expected until to be later than now"):
        notes.mute(DLQ, GROUP, until=now - timedelta(minutes=1))
    with pytest.raises(DLQError, match="expected until to have a time zone"):
        notes.mute(DLQ, GROUP, until=datetime(2100, 1, 1))  # noqa: DTZ001 - that is the mistake
    with pytest.raises(DLQError, match="expected a release of at most 200 characters, got 201"):
        notes.resolve(DLQ, GROUP, release="x" * 201)
    with pytest.raises(DLQError, match="expected a note of 1 to 2,000 characters"):
        notes.reopen(DLQ, GROUP, note="x" * 2001)
    with pytest.raises(NotFound, match="expected the fingerprint of letters in 'orders-DLQ'"):
        notes.resolve(DLQ, "0124")
    with pytest.raises(NotFound, match="expected the name of a dead-letter queue, got 'x-DLQ'"):
        notes.mute("x-DLQ", GROUP)
    assert parts.workers.changes(limit=5) == []
    assert state(parts) is GroupState.OPEN
