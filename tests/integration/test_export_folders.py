"""Several folders of one queue: each has all letters, or the export says what it lacks."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import intervals
import pyarrow.parquet as pq
import pytest
from builders import DLQ, a_letter, an_app, exported_to, key_of
from click.testing import CliRunner
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.export import exporter, roll
from celery_dlq.export.checkpoint import Checkpoint
from celery_dlq.export.exporter import ParquetExport, Rolling
from celery_dlq.operations.retention import Retention
from celery_dlq.policies.policy import Policy
from celery_dlq.store.letters import FOLDER_IN_USE, Letters


@pytest.fixture
def shop(redis_url: str) -> Iterator[DeadLetters]:
    """An app whose letters and broker are in one Redis."""
    made = DeadLetters(an_app(broker_url=redis_url, dlq_url=None))
    yield made
    made.close()


@pytest.fixture
def store(shop: DeadLetters) -> Letters:
    """Its letters."""
    return shop.store


def put(store: Letters, count: int) -> list[str]:
    letters = [a_letter() for _ in range(count)]
    for letter in letters:
        store.dead_letter(letter, key_of(letter))
    return [letter.id for letter in letters]


def command(shop: DeadLetters, *arguments: object) -> Any:
    context = SimpleNamespace(app=shop.app, no_color=True)
    return CliRunner().invoke(commands, list(map(str, arguments)), obj=context)


def in_files(folder: Path) -> list[str]:
    tables = [pq.ParquetFile(file).read(["id"]) for file in folder.glob("dlq=*/day=*/*")]
    return sorted(name for table in tables for name in table.column("id").to_pylist())


def in_queue(store: Letters) -> list[str]:
    return sorted(found.letter.id for found in store.letters(DLQ, newest_first=False))


def trimming(_queue: str, _letters: int) -> None:
    """Stand for the audit."""


def test_a_second_folder_says_what_the_first_one_removed(shop: DeadLetters, tmp_path: Path) -> None:
    """It is not up to date: it lacks what came before it, and names who has that."""
    first, second = tmp_path / "first", tmp_path / "second"
    early = put(shop.store, 100)
    assert command(shop, "export", first, "--then-trim").exit_code == 0
    late = put(shop.store, 100)
    done = command(shop, "export", second)
    assert done.exit_code == 1
    assert "up to date" not in done.output
    assert f"100 of {DLQ}, stored until 20" in done.stderr
    assert str(first) in done.stderr
    assert (in_files(first), in_files(second)) == (sorted(early), sorted(late))
    again = command(shop, "export", second)  # it was said once, and is known
    assert (again.exit_code, "up to date" in again.output) == (0, True)


def test_a_second_folder_that_comes_when_all_is_trimmed_says_so_too(
    shop: DeadLetters, tmp_path: Path
) -> None:
    """There is nothing to export, and that is not the same as nothing to miss."""
    put(shop.store, 3)
    command(shop, "export", tmp_path / "first", "--then-trim")
    done = command(shop, "export", tmp_path / "second", "--json")
    assert done.exit_code == 1
    ((missing,),) = [json.loads(done.stdout)["missing"]]
    assert (missing["dead_letter_queue"], missing["letters"]) == (DLQ, 3)
    assert command(shop, "export", tmp_path / "second").exit_code == 0


def test_a_trimming_export_leaves_what_another_folder_lacks(
    shop: DeadLetters, tmp_path: Path
) -> None:
    """Both folders have all letters, whichever export comes first; then they are trimmed."""
    store, first, second = shop.store, tmp_path / "first", tmp_path / "second"
    ids = put(store, 4)
    for folder in (first, second):
        command(shop, "export", folder)
    ids += put(store, 3)
    done = command(shop, "export", first, "--then-trim")
    assert f"until each of these folders has them: {second}" in " ".join(done.output.split())
    assert in_queue(store) == sorted(ids[4:])
    assert command(shop, "export", second).exit_code == 0
    assert command(shop, "export", first, "--then-trim").exit_code == 0
    assert in_queue(store) == []
    assert in_files(first) == in_files(second) == sorted(ids)


def test_a_folder_that_was_empty_is_in_use(shop: DeadLetters, tmp_path: Path) -> None:
    """Its first export found no letters; those that come are kept for it."""
    store, first, second = shop.store, tmp_path / "first", tmp_path / "second"
    store.remove(DLQ, put(store, 1))
    assert command(shop, "export", second, "--queue", DLQ).exit_code == 0
    ids = put(store, 2)
    command(shop, "export", first, "--then-trim")
    assert in_queue(store) == sorted(ids)
    assert command(shop, "export", second).exit_code == 0
    assert in_files(second) == sorted(ids)


def test_a_file_of_which_another_folder_has_a_part_is_kept_whole(
    store: Letters, tmp_path: Path
) -> None:
    """Which of its letters the other folder has, only their positions would tell."""
    first, second = tmp_path / "first", tmp_path / "second"
    ids = put(store, 2)
    ParquetExport(store, second).run([DLQ])
    ids += put(store, 3)
    trimming_export = ParquetExport(store, first, trimmed=trimming, rolling=Rolling(rows=100))
    report = trimming_export.run([DLQ])
    assert (report.trimmed, list(report.kept_for)) == (0, [DLQ])
    ParquetExport(store, second).run([DLQ])
    assert trimming_export.run([DLQ]).trimmed == 5
    assert in_files(first) == in_files(second) == sorted(ids)


def test_a_look_does_not_make_retention_remove_what_an_export_lacks(
    store: Letters, shop: DeadLetters, tmp_path: Path
) -> None:
    """The nightly export has the letters of yesterday; somebody exports all of them to a folder."""
    lake, look = tmp_path / "lake", tmp_path / "look"
    ids = put(store, 3)
    ParquetExport(store, lake).run([DLQ])
    ids += put(store, 3)
    ParquetExport(store, look).run([DLQ])
    backend = shop.assembly.backend
    retention = Retention(store, backend.workers, shop.assembly.events, "celery@web-1")
    trimmed = retention.trim(DLQ, Policy(dead_letter_max_length=1))
    assert [change.letters for change in trimmed] == [3]
    assert f"letters of {DLQ} that {lake}" in command(shop, "trim", "--dry-run").output
    ParquetExport(store, lake).run([DLQ])
    assert "lacks" not in command(shop, "trim", "--dry-run").output
    assert in_files(lake) == sorted(ids)
    trimmed = retention.trim(DLQ, Policy(dead_letter_max_length=1))
    assert [change.letters for change in trimmed] == [2]


def test_a_folder_that_was_silent_says_what_was_removed_meanwhile(
    shop: DeadLetters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing is kept for it for ever."""
    store, first, second = shop.store, tmp_path / "first", tmp_path / "second"
    ids = put(store, 2)
    command(shop, "export", second)
    ids += put(store, 3)
    later = store.now() + FOLDER_IN_USE + timedelta(hours=1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "now", lambda: later)
        command(shop, "export", first, "--then-trim")
    assert in_queue(store) == []
    done = command(shop, "export", second)
    assert (done.exit_code, f"of {DLQ}" in done.stderr) == (1, True)
    assert in_files(second) == sorted(ids[:2])


def test_an_export_that_follows_keeps_its_folder_in_use(
    store: Letters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nothing may die for months, and then many at once."""
    intervals.change(monkeypatch, export_note=0.02)
    put(store, 1)
    stop, export = threading.Event(), ParquetExport(store, tmp_path)
    thread = threading.Thread(target=export.follow, args=(lambda: [DLQ], stop))
    thread.start()
    try:
        poll(lambda: store.export_folders(DLQ))
        (first,) = store.export_folders(DLQ)
        poll(lambda: store.export_folders(DLQ)[0].seen_at > first.seen_at + timedelta(seconds=0.5))
    finally:
        stop.set()
        thread.join(10)
    assert in_files(tmp_path)


def test_a_folder_that_comes_while_another_export_trims_lacks_nothing(
    store: Letters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It began before the other one said that it removes letters: it is seen then."""
    first, second = tmp_path / "first", tmp_path / "second"
    ids = put(store, 3)
    note, begun = Checkpoint.to_store_state, list[int]()

    def noted(its: Checkpoint) -> Any:
        if its.trimming and not begun:
            begun.append(ParquetExport(store, second).run([DLQ]).letters)
            ids.extend(put(store, 1))
        return note(its)

    monkeypatch.setattr(Checkpoint, "to_store_state", noted)
    report = ParquetExport(store, first, trimmed=trimming).run([DLQ])
    assert (begun, report.trimmed) == ([3], 3)
    assert ParquetExport(store, first, trimmed=trimming).run([DLQ]).trimmed == 0
    ParquetExport(store, second).run([DLQ])
    assert in_files(first) == in_files(second) == sorted(ids)


def test_a_folder_that_comes_after_an_export_said_that_it_trims_says_so(
    store: Letters, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody knows which letters it reads before they are removed."""
    first, second = tmp_path / "first", tmp_path / "second"
    put(store, 3)
    trim, reports = roll.trim_exported, list[Any]()

    def trimmed(*args: Any) -> int:
        reports.append(ParquetExport(store, second).run([DLQ]))
        return trim(*args)

    monkeypatch.setattr(exporter, "trim_exported", trimmed)
    assert ParquetExport(store, first, trimmed=trimming).run([DLQ]).trimmed == 3
    assert f"some of {DLQ}" in reports[0].missing_text()


def test_a_first_export_says_how_many_letters_left_before_it(
    shop: DeadLetters, tmp_path: Path
) -> None:
    """Redriven, discarded or trimmed ones are in no folder; Redis counts them since 7.0."""
    store = shop.store
    ids = put(store, 5)
    store.remove(DLQ, ids[:2])
    if not store.stored_ever(DLQ):
        pytest.skip("this Redis does not count what was ever stored")
    done = command(shop, "export", tmp_path)
    assert done.exit_code == 0
    assert f"2 letters left {DLQ}" in done.output
    store.remove(DLQ, ids[2:3])
    assert "left" not in command(shop, "export", tmp_path).output


def test_letters_that_another_folder_has_are_not_said_to_have_left(
    shop: DeadLetters, tmp_path: Path
) -> None:
    """Nor are those that came back from the bin: each is told of once, or not at all."""
    store = shop.store
    put(store, 12)
    if not store.stored_ever(DLQ):
        pytest.skip("this Redis does not count what was ever stored")
    command(shop, "export", tmp_path / "first", "--then-trim")
    ids = put(store, 10)
    store.remove(DLQ, ids[:3])
    store.remove(DLQ, ids[3:6], keep_seconds=60)
    for letter_id in ids[3:6]:
        store.restore(DLQ, letter_id)
    done = command(shop, "export", tmp_path / "second")
    assert done.exit_code == 1
    assert f"up to 12 of {DLQ}" in done.stderr
    assert f"Besides, at most 3 letters left {DLQ}" in done.stdout


def test_a_letter_that_came_back_did_not_leave(shop: DeadLetters, tmp_path: Path) -> None:
    """It is in the queue, and then in the folder."""
    (letter_id,) = put(shop.store, 1)
    shop.store.remove(DLQ, [letter_id], keep_seconds=60)
    shop.store.restore(DLQ, letter_id)
    assert "left" not in command(shop, "export", tmp_path).output


def test_a_folder_with_a_filter_does_not_say_what_it_cannot_know(
    shop: DeadLetters, tmp_path: Path
) -> None:
    """Which of the removed letters match, their files would tell; nobody reads those."""
    put(shop.store, 3)
    command(shop, "export", tmp_path / "first", "--then-trim")
    done = command(shop, "export", tmp_path / "task", "--task", "shop.oom")
    assert (done.exit_code, "lacks" in done.output) == (0, False)
    assert f"removed letters of {DLQ} before" in done.output
    assert "not known whether the filter" in done.output
    done = command(shop, "export", tmp_path / "since", "--since", "1h")
    assert (done.exit_code, "lacks letters" in done.stderr) == (1, True)
    assert f"some of {DLQ}" in done.stderr


def test_letters_from_before_since_are_not_missing(shop: DeadLetters, tmp_path: Path) -> None:
    """The folder was not to have them."""
    put(shop.store, 3)
    command(shop, "export", tmp_path / "first", "--then-trim")
    later = (shop.store.now() + timedelta(minutes=5)).isoformat()
    done = command(shop, "export", tmp_path / "since", "--since", later)
    assert (done.exit_code, "removed" in done.output) == (0, False)


def test_a_folder_with_a_filter_keeps_no_letters(shop: DeadLetters, tmp_path: Path) -> None:
    """Only folders that get all letters do; ``--since`` moves on, and such a folder gets all."""
    put(shop.store, 2)
    command(shop, "export", tmp_path / "task", "--task", "shop.oom")
    command(shop, "export", tmp_path / "since", "--since", "1h")
    put(shop.store, 2)
    done = command(shop, "export", tmp_path / "lake", "--then-trim")
    assert f"{tmp_path / 'since'} on " in done.output
    assert f"{tmp_path / 'task'} on " not in done.output
    command(shop, "export", tmp_path / "since", "--since", "1h")
    command(shop, "export", tmp_path / "lake", "--then-trim")
    assert in_queue(shop.store) == []


def test_a_deleted_folder_is_forgotten(shop: DeadLetters, tmp_path: Path) -> None:
    """Nothing else would end its thirty days."""
    looks = [tmp_path / f"look{number}" for number in range(7)]
    put(shop.store, 1)
    for look in looks:
        command(shop, "export", look)
    put(shop.store, 2)
    done = command(shop, "export", tmp_path / "lake", "--then-trim")
    assert "and 2 more" in done.output
    assert "`dlq export FOLDER --forget`" in done.output
    assert "--forget" in command(shop, "trim", "--dry-run").output
    for look in looks:
        shutil.rmtree(look)
        done = command(shop, "export", look, "--forget")
        assert (done.exit_code, f"No more letters of {DLQ} are kept" in done.output) == (0, True)
        assert not look.exists()
    command(shop, "export", tmp_path / "lake", "--then-trim")
    assert in_queue(shop.store) == []


def test_a_folder_is_forgotten_by_the_name_that_is_shown(shop: DeadLetters, tmp_path: Path) -> None:
    """It may be one of another machine."""
    put(shop.store, 1)
    exported_to(shop.store, "/mnt/lake on web-7", "1-1")
    done = command(shop, "export", "/mnt/lake", "--forget")
    assert (done.exit_code, "/mnt/lake on web-7" in done.stderr) == (1, True)
    assert command(shop, "export", "/mnt/lake", "--forget", "--then-trim").exit_code == 2
    assert command(shop, "export", "/mnt/lake on web-7", "--forget").exit_code == 0
    assert shop.store.lacking(DLQ) == []


def test_a_folder_that_was_forgotten_goes_on(shop: DeadLetters, tmp_path: Path) -> None:
    """Its next export writes what is new, as if it had not been forgotten."""
    ids = put(shop.store, 2)
    command(shop, "export", tmp_path)
    assert command(shop, "export", tmp_path, "--forget").exit_code == 0
    ids += put(shop.store, 1)
    done = command(shop, "export", tmp_path)
    assert ("Exported 1 letter" in done.output, "Read again" in done.output) == (True, False)
    assert in_files(tmp_path) == sorted(ids)
