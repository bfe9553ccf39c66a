"""Letters on disk: bounded, and stored in the order in which they died."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import NOW, a_letter, key_of

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.record import DeadLetter
from celery_dlq.writing import spool as module
from celery_dlq.writing.spool import Spool


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """An empty spool."""
    return Spool(str(tmp_path), "x")


def add(spool: Spool, **changes: Any) -> DeadLetter:
    letter = a_letter(**changes)
    spool.write_letter(letter, key_of(letter))
    return letter


def test_letters_are_stored_in_the_order_of_their_deaths(spool: Spool) -> None:
    """Whatever their ids are."""
    late_first = [add(spool, dead_lettered_at=NOW - timedelta(seconds=n)) for n in range(20)]
    stored: list[DeadLetter] = []
    assert spool.store_waiting(lambda letter, _key: stored.append(letter)) == 20
    assert stored == late_first[::-1]
    assert len(spool) == 0


def test_a_flush_that_ends_early_goes_on_where_it_was(spool: Spool) -> None:
    """Also with letters that came in between."""
    letters = [add(spool, dead_lettered_at=NOW + timedelta(seconds=n)) for n in range(5)]
    stored: list[DeadLetter] = []

    def save(letter: DeadLetter, _key: object) -> None:
        if len(stored) == 2:
            raise StoreUnavailable("no room")
        stored.append(letter)

    assert spool.store_waiting(save) == 2
    letters.append(add(spool, dead_lettered_at=NOW + timedelta(seconds=9)))
    for _ in range(2):
        spool.store_waiting(lambda letter, _key: stored.append(letter))
    assert stored == letters


def test_two_workers_may_empty_one_spool(tmp_path: Path, spool: Spool) -> None:
    """What the other one has stored is gone."""
    for _ in range(3):
        add(spool)
    other = Spool(str(tmp_path), "x")
    stored: list[DeadLetter] = []

    def save(letter: DeadLetter, _key: object) -> None:
        if not stored:
            stored.append(letter)
            other.store_waiting(lambda letter, _key: stored.append(letter))
        else:
            stored.append(letter)

    spool.store_waiting(save)
    assert len({letter.id for letter in stored}) == 3
    assert len(spool) == 0


def test_a_spool_takes_a_bounded_number_of_letters(
    spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And more when there is room again."""
    monkeypatch.setattr(module, "MAX_FILES", 3)
    for _ in range(3):
        add(spool)
    with pytest.raises(OSError, match="3 letters wait"):
        add(spool)
    spool.store_waiting(lambda _letter, _key: None)
    add(spool)
    assert len(spool) == 1


def test_a_spool_leaves_room_on_its_disk(spool: Spool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk would stop more than this worker; nothing is left of the attempt."""
    monkeypatch.setattr(module, "FREE_SHARE", 1.0)
    with pytest.raises(OSError, match="the disk is 0% full"):
        add(spool)
    assert not list(spool.folder.iterdir())


def test_a_file_that_nobody_here_may_read_keeps_no_other_waiting(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is kept for an operator, and said once."""
    theirs, ours = add(spool), add(spool)
    read = Path.read_text

    def refused(path: Path, encoding: str) -> str:
        if theirs.id in path.name:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path, encoding)

    monkeypatch.setattr(Path, "read_text", refused)
    stored: list[DeadLetter] = []
    for _ in range(2):
        spool.store_waiting(lambda letter, _key: stored.append(letter))
    assert stored == [ours]
    assert [path.name for path in spool.folder.glob("*.broken")]
    assert caplog.text.count("Permission denied") == 1


def test_a_letter_that_an_error_of_ours_keeps_from_being_stored_stays_in_the_spool(
    spool: Spool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is the only copy of its message. It is tried again after a while; others go before."""
    odd, good = add(spool), add(spool)
    stored: list[DeadLetter] = []

    def save(letter: DeadLetter, _key: object) -> None:
        if letter.id == odd.id and not stored[1:]:
            raise TypeError("odd")
        stored.append(letter)

    for _ in range(3):
        spool.store_waiting(save)
    assert (stored, len(spool)) == ([good], 1)
    assert caplog.text.count("cannot be stored yet") == 1
    stored.append(good)  # from now on it can be stored
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.0)
    spool.store_waiting(save)
    assert (stored[2:], len(spool)) == ([odd], 0)


def test_a_folder_that_cannot_be_made_is_known_before_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that was named, and the system's own; asking leaves nothing behind."""
    assert Spool(str(tmp_path / "a" / "b"), "x").unusable() is None
    assert [*tmp_path.iterdir()] == []
    (tmp_path / "file").touch()
    assert "Not a directory" in str(Spool(str(tmp_path / "file" / "b"), "x").unusable())
    monkeypatch.setattr("tempfile.tempdir", "/proc")
    assert "/proc/celery-dlq-" in str(Spool(None, "x").unusable())
