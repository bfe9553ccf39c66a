"""Whose folder it is, and what an export does after Redis came back from an older snapshot."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
from builders import DLQ, a_letter, key_of
from pyarrow import fs as pafs
from servers import RedisServer
from waiting import poll

from celery_dlq.errors import ExportError
from celery_dlq.export.exporter import ParquetExport, Rolling
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.connect import connect
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store

QUIET, LATER = "a-quiet-DLQ", "z-later-DLQ"


@pytest.fixture
def other() -> Iterator[RedisServer]:
    """Give a second Redis."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def mine() -> Iterator[RedisServer]:
    """Give a Redis that may be stopped and turned back."""
    with RedisServer("--dbfilename", "dump.rdb") as server:
        yield server


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the store's Redis."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def a_store(url: str, prefix: str = "dlq") -> Letters:
    return Store(url, prefix=prefix, timeout_seconds=10.0).letters


def put(store: Letters, count: int, queue: str = DLQ) -> list[DeadLetter]:
    letters = [a_letter(dead_letter_queue=queue) for _ in range(count)]
    for letter in letters:
        store.dead_letter(letter, key_of(letter))
    return letters


def run(store: Letters, folder: Any, **options: Any) -> Any:
    return ParquetExport(store, folder, **options).run(store.names())


def trimming(_queue: str, _count: int) -> None:
    """Allow an export to remove what it wrote."""


def exported(folder: Path) -> Counter[str]:
    files = folder.glob("dlq=*/day=*/*.parquet")
    return Counter(text for file in files for text in pq.ParquetFile(file).read()["id"].to_pylist())


def once(*letters: list[DeadLetter]) -> Counter[str]:
    return Counter(letter.id for some in letters for letter in some)


def left(store: Letters, queue: str = DLQ) -> set[str]:
    return {found.letter.id for found in store.letters(queue, newest_first=False)}


def as_main_wrote(folder: Path, store: Letters, client: redis.Redis) -> None:
    """Turn a folder and its store into what they were before stores had an identity."""
    notes = folder / "_celery_dlq"
    for path in (notes / "about", *notes.glob("*.json")):
        known = json.loads(path.read_text())
        for name in ("store", "generation", "compared"):
            known.pop(name, None)
        path.write_text(json.dumps(known))
    keys = Keys()
    client.delete(keys.identity(), *map(keys.leases, store.names()))


def snapshot(server: RedisServer) -> None:
    server.client().save()


def turn_back(server: RedisServer) -> None:
    """Restart from the last snapshot, as after the loss of a machine."""
    server.kill()
    server.start()


# -- whose folder it is ---------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["dlq", "second"])
def test_a_folder_of_another_store_is_refused(
    redis_url: str, other: RedisServer, tmp_path: Path, prefix: str
) -> None:
    """Its checkpoint would pass letters over, and a trim would remove what no file holds."""
    first = a_store(redis_url)
    second = a_store(other.url if prefix == "dlq" else redis_url, prefix)
    theirs = put(second, 5)
    ours = put(first, 3)
    run(first, tmp_path)
    theirs += put(second, 1)
    with pytest.raises(ExportError, match=r"of another store.*--take-over"):
        run(second, tmp_path, trimmed=trimming)
    assert left(second) == set(once(theirs))
    assert second.export_folders(DLQ) == []
    assert exported(tmp_path) == once(ours)


def test_a_folder_is_taken_over_on_demand(
    redis_url: str, other: RedisServer, tmp_path: Path
) -> None:
    """Each letter of both stores is there once, also those that both stores have."""
    first, second = a_store(redis_url), a_store(other.url)
    both = put(first, 4)
    for letter in both:
        second.dead_letter(letter, key_of(letter))
    theirs, ours = put(second, 3), put(first, 2)
    run(first, tmp_path)
    report = run(second, tmp_path, take_over=True, trimmed=trimming)
    assert (report.letters, report.compared) == (3, [DLQ])
    assert exported(tmp_path) == once(both, theirs, ours)
    assert left(second) == set()
    with pytest.raises(ExportError, match="of another store"):
        run(first, tmp_path)
    theirs += put(second, 1)
    assert (report := run(second, tmp_path)).letters == 1
    assert report.compared == []
    assert exported(tmp_path) == once(both, theirs, ours)


def test_an_emptied_redis_is_another_store(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Its positions say nothing about the old ones."""
    store = a_store(redis_url)
    before = put(store, 3)
    run(store, tmp_path)
    client.flushall()
    after = put(store, 2)
    with pytest.raises(ExportError, match="of another store"):
        run(store, tmp_path)
    assert run(store, tmp_path, take_over=True).letters == 2
    assert exported(tmp_path) == once(before, after)


def test_a_restarted_redis_is_the_same_store(mine: RedisServer, tmp_path: Path) -> None:
    """The id is in its snapshot."""
    store = a_store(mine.url)
    letters = put(store, 3)
    run(store, tmp_path)
    snapshot(mine)
    turn_back(mine)
    letters += put(store, 1)
    assert (report := run(store, tmp_path)).letters == 1
    assert report.compared == []
    assert exported(tmp_path) == once(letters)


@pytest.mark.parametrize("since", ["same store", "another store"])
def test_a_folder_from_before_stores_had_an_id_is_adopted(
    redis_url: str, client: redis.Redis, other: RedisServer, tmp_path: Path, since: str
) -> None:
    """Letters are compared with the files."""
    first, second = a_store(redis_url), a_store(other.url)
    theirs = put(second, 5)
    ours = put(first, 3)
    run(first, tmp_path)
    as_main_wrote(tmp_path, first, client)
    if since == "same store":
        ours += put(first, 2)
        report, theirs = run(first, tmp_path), []
    else:
        report = run(second, tmp_path, trimmed=trimming)
    assert report.compared == [DLQ]
    assert exported(tmp_path) == once(ours, theirs)


def test_a_filtered_folder_from_before_stores_had_an_id_is_compared(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """With a filter, too."""
    store, where = a_store(redis_url), LetterFilter(task_name="shop.charge")
    letters = put(store, 3)
    run(store, tmp_path, where=where)
    as_main_wrote(tmp_path, store, client)
    letters += put(store, 2)
    assert run(store, tmp_path, where=where).letters == 2
    assert exported(tmp_path) == once(letters)


# -- a Redis that came back from an older snapshot ----------------------------------------


@pytest.mark.parametrize("trimmed", [None, trimming])
def test_a_redis_from_an_older_snapshot_blocks_no_queue(
    mine: RedisServer, tmp_path: Path, trimmed: Any
) -> None:
    """What was exported and came back is not exported again, and what is new is."""
    store = a_store(mine.url)
    letters = put(store, 3, QUIET) + put(store, 3, LATER)
    run(store, tmp_path, trimmed=trimmed)
    letters += (back := put(store, 2, QUIET)) + put(store, 2, LATER)
    snapshot(mine)
    letters += put(store, 4, QUIET)
    run(store, tmp_path, trimmed=trimmed)
    turn_back(mine)
    letters += put(store, 2, LATER)
    assert (report := run(store, tmp_path, trimmed=trimmed)).by_queue == {LATER: 2}
    assert report.compared == [QUIET, LATER]
    assert exported(tmp_path) == once(letters)
    letters += put(store, 1, QUIET)
    assert run(store, tmp_path, trimmed=trimmed).letters == 1
    assert exported(tmp_path) == once(letters)
    if trimmed is not None:
        assert not left(store, QUIET) & set(once(back))


def test_letters_below_the_checkpoint_are_not_passed_over(
    mine: RedisServer, tmp_path: Path
) -> None:
    """A restored Redis whose clock is behind gives them positions that were exported once."""
    store = a_store(mine.url)
    letters = put(store, 2)
    run(store, tmp_path)
    snapshot(mine)
    ahead = a_letter(dead_letter_queue=DLQ)
    fields = {name: value for name, value in ahead.to_fields().items() if value is not None}
    mine.client().xadd(Keys().letters(DLQ), fields, id="9999999999999-0")
    run(store, tmp_path)
    turn_back(mine)
    for _ in range(2):
        letters += put(store, 2)
        assert run(store, tmp_path).letters == 2
    assert exported(tmp_path) == once(letters, [ahead])


def test_a_copied_or_restored_folder_gets_what_it_lacks(redis_url: str, tmp_path: Path) -> None:
    """The store's copy of its state says that all is exported: to the other one."""
    store, folder, copy = a_store(redis_url), tmp_path / "folder", tmp_path / "copy"
    first = put(store, 5)
    run(store, folder)
    shutil.copytree(folder, copy)
    second = put(store, 5)
    run(store, folder)
    assert run(store, copy).letters == len(second)
    assert exported(copy) == exported(folder) == once(first, second)


def test_a_copy_from_before_redis_went_back_gets_what_it_lacks(
    mine: RedisServer, tmp_path: Path
) -> None:
    """The store's copy of the state is of a later generation."""
    store, folder, copy = a_store(mine.url), tmp_path / "folder", tmp_path / "copy"
    first = put(store, 5)
    run(store, folder)
    snapshot(mine)
    second = put(store, 5)
    run(store, folder)
    shutil.copytree(folder, copy)
    turn_back(mine)
    third = put(store, 7)
    run(store, folder)
    fourth = put(store, 2)
    run(store, folder)
    run(store, copy)
    assert exported(copy) == exported(folder) == once(first, second, third, fourth)


def test_a_damaged_copy_of_the_state_stops_no_export(redis_url: str, tmp_path: Path) -> None:
    """Each letter is once in the files."""
    store, client = a_store(redis_url), connect(redis_url, 10.0)
    letters = put(store, 5)
    run(store, tmp_path)
    key = Keys("dlq").leases(DLQ)
    ((place, known),) = client.hgetall(key).items()
    owner, _, state = known.split(b"|", 2)
    wrong = [b"[", b'{"position": 5}', state.replace(b'"generation": 0', b'"generation": "1"')]
    for damaged in (b"garbage", *(owner + b"|0|" + one for one in wrong)):
        client.hset(key, place, damaged)
        letters += put(store, 1)
        run(store, tmp_path)
        assert exported(tmp_path) == once(letters)


def test_a_queue_that_was_deleted_goes_on(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """Its letters are new, wherever they begin, and no other queue waits for it."""
    store = a_store(redis_url)
    letters = put(store, 2, QUIET) + put(store, 1, LATER)
    run(store, tmp_path)
    client.delete(Keys().letters(QUIET), Keys().ids(QUIET))
    letters += put(store, 1, LATER)
    assert run(store, tmp_path).by_queue == {LATER: 1}
    letters += put(store, 3, QUIET)
    assert run(store, tmp_path).by_queue == {QUIET: 3}
    assert exported(tmp_path) == once(letters)


def test_a_queue_fails_alone(redis_url: str, tmp_path: Path) -> None:
    """The error comes when the others are exported."""
    store = a_store(redis_url)
    put(store, 1, QUIET)
    run(store, tmp_path)
    (tmp_path / "_celery_dlq" / f"{QUIET}.json").write_text('{"position": 7}')
    later = put(store, 2, LATER)
    with pytest.raises(ExportError, match=rf"{QUIET}\.json is not a file of an export"):
        ParquetExport(store, tmp_path).run(store.names(), expected=lambda _count: None)
    assert set(once(later)) <= set(exported(tmp_path))


def test_a_snapshot_is_seen_on_a_file_system_that_machines_share(
    mine: RedisServer, tmp_path: Path
) -> None:
    """There the store has a copy of the checkpoint, which went back too."""
    store = a_store(mine.url)
    sub = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    letters = put(store, 3)
    run(store, "letters", filesystem=sub)
    letters += put(store, 2)
    snapshot(mine)
    letters += put(store, 2)
    run(store, "letters", filesystem=sub)
    turn_back(mine)
    letters += put(store, 2)
    assert run(store, "letters", filesystem=sub).letters == 2
    assert exported(tmp_path / "letters") == once(letters)


def test_entries_that_are_no_letters_stop_no_comparison(
    redis_url: str, client: redis.Redis, tmp_path: Path
) -> None:
    """They are reported, and what comes after them is exported."""
    store, key = a_store(redis_url), Keys().letters(DLQ)
    letters = put(store, 2)
    run(store, tmp_path)
    for odd in ({"id": b"\xff"}, {"+": "~", "-": "x"}, {"+": b"\xff", "-": ""}, {"+": "id"}):
        client.xadd(key, odd)
    client.delete(Keys().leases(DLQ))
    letters += put(store, 1)
    report = run(store, tmp_path)
    assert (report.letters, report.unreadable, report.compared) == (1, 4, [DLQ])
    assert exported(tmp_path) == once(letters)


# -- following --------------------------------------------------------------------------------


def test_following_waits_for_a_redis_that_is_away(
    mine: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It says so once, and writes each letter once when Redis is back."""
    store, exported_store, stop = a_store(mine.url), a_store(mine.url), threading.Event()
    letters = put(store, 2)
    export = ParquetExport(exported_store, tmp_path, rolling=Rolling(seconds=0.1))
    found: list[Any] = []
    thread = threading.Thread(
        target=lambda: found.append(export.follow(exported_store.names, stop))
    )
    thread.start()
    try:
        poll(lambda: exported(tmp_path) == once(letters), timeout_seconds=20)
        letters += put(store, 3)
        snapshot(mine)
        mine.kill()
        poll(lambda: "does not answer" in caplog.text, timeout_seconds=30)
        mine.start()
        letters += put(store, 1)
        poll(lambda: exported(tmp_path) == once(letters), timeout_seconds=20)
    finally:
        stop.set()
        thread.join(30)
    assert found
    assert caplog.text.count("does not answer") == 1


_FOLLOW = """
import signal, sys, threading
from celery_dlq.store.connect import connect
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store
from celery_dlq.cli.export import stop_event
from celery_dlq.export.exporter import ParquetExport
store = Store(sys.argv[1], timeout_seconds=2.0).letters
ParquetExport(store, sys.argv[2]).follow(store.names, stop_event())
"""


def test_sigterm_ends_following_while_redis_is_away(mine: RedisServer, tmp_path: Path) -> None:
    """With an error: what came meanwhile is not in the files."""
    put(a_store(mine.url), 1)
    command = [sys.executable, "-c", _FOLLOW, mine.url, str(tmp_path / "letters")]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        notes = tmp_path / "letters" / "_celery_dlq" / "about"
        poll(notes.exists, timeout_seconds=30)
        mine.kill()
        line = process.stderr.readline()
        os.kill(process.pid, signal.SIGTERM)
        assert "does not answer" in line
        assert process.wait(10) != 0
        assert "StoreUnavailable" in process.stderr.read()
