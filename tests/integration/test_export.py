"""The export of letters: what is in the folder, for whom it reads, and what is refused."""

from __future__ import annotations

import json
import os
import resource
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
import redis
from builders import DLQ, NOW, a_letter, an_app, key_of
from fork_server import run_forked
from fresh import fresh_conf, fresh_store
from pyarrow import fs as pafs
from servers import RedisServer
from waiting import poll

from celery_dlq.errors import ExportError, NotFound
from celery_dlq.export import table
from celery_dlq.export.destination import Destination
from celery_dlq.export.exporter import ParquetExport, Rolling
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import DeadLetter
from celery_dlq.letters.redaction import Redaction
from celery_dlq.plugin import DeadLetters
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store

KEY = b"k" * 32


@pytest.fixture
def store(redis_url: str) -> Iterator[Letters]:
    """Give an empty store on Redis."""
    made = Store(redis_url, timeout_seconds=10.0).letters
    yield made
    made.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A client of the store's Redis."""
    with redis.Redis.from_url(redis_url) as client:
        yield client


def put(store: Any, count: int = 1, **changes: Any) -> list[DeadLetter]:
    """Letters that are in the store."""
    letters = [a_letter(**changes) for _ in range(count)]
    for letter in letters:
        store.dead_letter(letter, key_of(letter))
    return letters


def run(store: Any, folder: Any, **options: Any) -> Any:
    return ParquetExport(store, folder, **options).run(store.names())


def files(folder: Path) -> list[Path]:
    return sorted(folder.glob("dlq=*/day=*/*"))


def rows(folder: Path) -> list[dict[str, Any]]:
    tables = [pq.ParquetFile(file).read() for file in files(folder)]
    return pa.concat_tables(tables).to_pylist() if tables else []


def positions(store: Any) -> list[str]:
    """Up to where each folder has a queue, as the store knows it."""
    return [folder.position for folder in store.export_folders(DLQ)]


def ids(folder: Path) -> list[str]:
    return sorted(row["id"] for row in rows(folder))


def sorted_ids(letters: list[DeadLetter]) -> list[str]:
    return sorted(letter.id for letter in letters)


# -- what is in the folder -------------------------------------------------------------


def test_every_letter_is_there_once_over_several_exports(store: Any, tmp_path: Path) -> None:
    """Only what is new is written; the store knows how far the queue came."""
    letters = put(store, 7)
    assert run(store, tmp_path, rolling=Rolling(rows=3)).letters == 7
    assert positions(store) == [store.last_position(DLQ)]
    assert run(store, tmp_path).letters == 0
    letters += put(store, 2) + put(store, 3, dead_letter_queue="mail-DLQ")
    report = run(store, tmp_path)
    assert (report.letters, report.by_queue) == (5, {DLQ: 2, "mail-DLQ": 3})
    assert ids(tmp_path) == sorted_ids(letters)


def test_odd_letters_become_faithful_rows(store: Any, tmp_path: Path) -> None:
    """NUL bytes, 10 MB, days before 1970 and at the end of the calendar."""
    odd = [
        *put(store, description="nul \x00 and \ud800 lone", body=b"\x00\xff"),
        *put(store, body=b"x" * 10_000_000),
        *put(store, dead_lettered_at=datetime(1969, 12, 31, 23, 59, 59, 999999, timezone.utc)),
        *put(store, dead_lettered_at=datetime(1, 1, 1, tzinfo=timezone.utc)),
        *put(store, dead_lettered_at=datetime(9999, 12, 31, tzinfo=timezone.utc)),
    ]
    run(store, tmp_path)
    found = {row["id"]: row for row in rows(tmp_path)}
    assert [found[letter.id]["dead_lettered_at"] for letter in odd] == [
        letter.dead_lettered_at for letter in odd
    ]
    assert [found[letter.id]["body"] for letter in odd] == [letter.body for letter in odd]
    assert found[odd[0].id]["description"] == "nul \x00 and \\ud800 lone"
    assert {file.parent.name for file in files(tmp_path)} == {
        "day=1969-12-31",
        "day=0001-01-01",
        "day=9999-12-31",
        "day=2026-03-04",
    }


@pytest.mark.parametrize("where", [None, LetterFilter(reason="failed")])
def test_entries_that_are_no_letters_are_reported_and_stop_nothing(
    store: Any, client: redis.Redis, tmp_path: Path, where: LetterFilter | None
) -> None:
    """They are counted, named, left out of the files and left in the queue."""
    letters = put(store, 2, traceback="Traceback\n" * 20)
    key, add = Keys().letters(DLQ), client.xadd
    odd = {"reason": b"\xff", "deliveries": "many", "dead_lettered_at": "yesterday", "new": "x"}
    places = [add(key, odd), add(key, {"a\x00b": "1", "c": "2"}), add(key, {"+": "~", "-": "x"})]
    ((_place, broken),) = client.xrange(key, count=1)
    places.append(add(key, {**broken, b"-": broken[b"-"][:-9]}))
    letters += put(store, 1)
    report = run(store, tmp_path, where=where, trimmed=lambda *_what: None)
    assert (report.letters, report.unreadable, report.trimmed) == (3, 4, 3)
    assert report.unreadable_at == [f"{DLQ} {place.decode()}" for place in places]
    assert ids(tmp_path) == sorted_ids(letters)
    assert [place for place, _fields in client.xrange(key)] == places
    assert run(store, tmp_path, where=where).unreadable == 0  # the checkpoint is behind them


def test_letters_with_odd_numbers_and_times_become_faithful_rows(
    store: Any, client: redis.Redis, tmp_path: Path
) -> None:
    """A letter of a foreign writer: what is no number is null."""
    fields = {**a_letter().to_fields(), "deliveries": b"many", "dead_lettered_at": b"%d" % 2**70}
    client.sadd(Keys().queues(), DLQ)
    client.xadd(Keys().letters(DLQ), fields)
    run(store, tmp_path)
    (row,) = rows(tmp_path)
    assert (row["deliveries"], row["dead_lettered_at"], row["task_name"]) == (
        None,
        None,
        "shop.charge",
    )
    assert (tmp_path / f"dlq={DLQ}" / "day=__HIVE_DEFAULT_PARTITION__").is_dir()


@pytest.mark.parametrize("name", ["007", "2026-01-31", "epoch", "a/b c%=:", "süß", "x" * 400])
def test_queues_of_any_name_have_a_folder_of_text(store: Any, tmp_path: Path, name: str) -> None:
    """Readers that guess types take no queue for a number or a day."""
    import duckdb

    put(store, dead_letter_queue=name)
    run(store, tmp_path)
    found = duckdb.sql(f"select * from read_parquet('{tmp_path}/**/*.parquet')").df()  # noqa: S608 - our own folder
    assert found["dead_letter_queue"].tolist() == [name]
    assert isinstance(found["dlq"].tolist()[0], str)
    assert ds.dataset(tmp_path, partitioning="hive").to_table().num_rows == 1


# -- for whom it reads ---------------------------------------------------------------------


def test_duckdb_pandas_polars_and_arrow_read_versions_together(store: Any, tmp_path: Path) -> None:
    """A folder that version 1 began and a later one with one more field went on with."""
    import duckdb
    import pandas as pd
    import polars as pl

    old = put(store, 3)
    run(store, tmp_path)
    newer = table.table([{k.encode(): v for k, v in a_letter().to_fields().items()}])
    newer = newer.append_column("mood", pa.array(["grim"], pa.string()))
    folder = tmp_path / f"dlq={DLQ}" / "day=2027-01-01"
    folder.mkdir()
    pq.write_table(newer, folder / "letters-9-9-10-0.parquet")
    everything = f"{tmp_path}/**/*.parquet"
    read = f"read_parquet('{everything}', union_by_name=true, hive_partitioning=true)"
    counts = duckdb.sql(f"select count(*), count(mood), count(distinct id) from {read}")  # noqa: S608
    assert counts.fetchall() == [(4, 1, 4)]
    frame = pl.scan_parquet(
        everything, missing_columns="insert", extra_columns="ignore", hive_partitioning=True
    ).collect()
    assert (frame.height, frame["id"].n_unique(), frame["dlq"].unique().to_list()) == (4, 4, [DLQ])
    assert len(pd.read_parquet(tmp_path)) == 4
    assert str(pd.read_parquet(tmp_path)["dead_lettered_at"].dt.tz) == "UTC"
    merged = pa.unify_schemas([table.schema(), newer.schema])
    rows = ds.dataset(tmp_path, schema=merged, partitioning="hive").to_table()
    assert (rows.num_rows, rows.column("mood").null_count) == (4, 3)
    assert set(sorted_ids(old)) < set(rows.column("id").to_pylist())


# -- which letters -----------------------------------------------------------------------


def test_a_filter_is_kept_with_the_folder(store: Any, tmp_path: Path) -> None:
    """Another filter would leave letters out that nobody misses: it is refused, with the reason."""
    put(store, task_name="t.a")
    wanted = put(store, task_name="t.b")
    assert run(store, tmp_path, where=LetterFilter(task_name="t.b")).letters == 1
    assert ids(tmp_path) == sorted_ids(wanted)
    for other in (LetterFilter(), LetterFilter(task_name="t.a")):
        with pytest.raises(ExportError, match=r'expected the filter.*"t\.b".*new folder'):
            run(store, tmp_path, where=other)


def test_conditions_are_kept_with_the_folder_in_any_order(store: Any, tmp_path: Path) -> None:
    """The same conditions choose the same letters; others are refused."""
    put(store, kwargs_json='{"tenant": 1}')
    wanted = put(store, kwargs_json='{"tenant": 42}', release="2026.3", deliveries=3)
    few, fewer = "kwargs.tenant=42", "args[0]<7"
    where = LetterFilter(conditions=(few, fewer), release="2026.3", min_deliveries=3)
    assert run(store, tmp_path, where=where).letters == 1
    assert run(store, tmp_path, where=replace(where, conditions=[fewer, few])).letters == 0
    assert ids(tmp_path) == sorted_ids(wanted)
    for other in (replace(where, conditions=(few,)), replace(where, min_deliveries=2)):
        with pytest.raises(
            ExportError, match=r"expected the filter.*kwargs\.tenant=42.*new folder"
        ):
            run(store, tmp_path, where=other)


def test_since_moves_on_and_never_back(store: Any, tmp_path: Path) -> None:
    """Letters before it were left out for good."""
    put(store, dead_lettered_at=NOW)
    run(store, tmp_path, where=LetterFilter(since=NOW + timedelta(hours=1)))
    wanted = put(store, dead_lettered_at=NOW + timedelta(hours=3))
    run(store, tmp_path, where=LetterFilter(since=NOW + timedelta(hours=2)))
    assert ids(tmp_path) == sorted_ids(wanted)
    for earlier in (LetterFilter(since=NOW), LetterFilter()):
        with pytest.raises(ExportError, match="older letters were left out"):
            run(store, tmp_path, where=earlier)


def test_a_letter_from_the_future_makes_no_other_wait(store: Any, tmp_path: Path) -> None:
    """It was stored before ``until``, so it had died by then."""
    for letter in (a_letter(dead_lettered_at=NOW.replace(year=2126)), a_letter()):
        store.dead_letter(letter, key_of(letter))
    until = store.now() + timedelta(seconds=1)
    report = run(store, tmp_path, where=LetterFilter(until=until))
    assert (report.letters, report.waiting) == (2, [])


def test_until_ends_a_run_and_a_later_one_goes_on(store: Any, tmp_path: Path) -> None:
    """A nightly export of yesterday loses nothing at midnight."""
    letters = [put(store, dead_lettered_at=NOW + timedelta(days=day))[0] for day in range(3)]
    report = run(store, tmp_path, where=LetterFilter(until=NOW + timedelta(days=1)))
    assert (report.letters, report.waiting) == (1, [DLQ])
    assert run(store, tmp_path, where=LetterFilter(until=NOW + timedelta(days=2))).letters == 1
    assert run(store, tmp_path).letters == 1
    assert ids(tmp_path) == sorted_ids(letters)
    assert positions(store) == [store.last_position(DLQ)]


def test_redacted_files_hold_tokens_only(store: Any, tmp_path: Path) -> None:
    """Not one byte of the value is in any file, and the folder keeps to its key."""
    kwargs = json.dumps({"card": "4111111111111111"})
    put(
        store,
        3,
        kwargs_json=kwargs,
        body=f"[[], {kwargs}, {{}}]".encode(),
        kwargsrepr=kwargs,
        description="bad 4111111111111111",
    )
    run(store, tmp_path, redaction=Redaction.with_key(["kwargs.card"], KEY))
    found = rows(tmp_path)
    assert "4111111111111111" not in repr(found)
    assert len({json.loads(row["kwargs_json"])["card"] for row in found}) == 1
    assert not [f for f in tmp_path.rglob("*") if f.is_file() and KEY in f.read_bytes()]
    for other in (None, Redaction.with_key(["kwargs.card"], b"o" * 32)):
        with pytest.raises(ExportError, match="expected the redaction"):
            run(store, tmp_path, redaction=other)


# -- trimming and following ----------------------------------------------------------------


def test_trimming_removes_what_the_files_hold(store: Any, tmp_path: Path) -> None:
    """Also what an earlier export wrote; a letter whose file went away stays."""
    letters = put(store, 2, dead_lettered_at=NOW)
    kept = put(store, 1, dead_lettered_at=NOW + timedelta(days=2))
    run(store, tmp_path)
    files(tmp_path)[-1].unlink()
    trimmed: list[tuple[str, int]] = []
    report = run(store, tmp_path, trimmed=lambda *what: trimmed.append(what))
    assert (report.trimmed, trimmed) == (2, [(DLQ, 2)])
    left = [found.letter.id for found in store.letters(DLQ, newest_first=False)]
    assert (left, ids(tmp_path)) == (sorted_ids(kept), sorted_ids(letters))


def test_trimming_refuses_a_file_that_does_not_read(store: Any, tmp_path: Path) -> None:
    """A checksum that differs keeps the letters."""
    put(store, 5)
    run(store, tmp_path)
    (file,) = files(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 0xFF
    file.write_bytes(content)
    with pytest.raises(ExportError, match="its letters stay in their queue"):
        run(store, tmp_path, trimmed=lambda *_what: None)
    assert len(list(store.letters(DLQ, newest_first=False))) == 5


def test_one_queue_is_named_as_several_are(tmp_path: Path) -> None:
    """A name is no list of letters."""
    dlq = DeadLetters(an_app(**fresh_conf()))
    put(dlq.store, 2)
    assert dlq.export(tmp_path / "one", DLQ).letters == 2
    assert dlq.export(tmp_path / "several", [DLQ]).letters == 2
    with pytest.raises(NotFound, match="no-such-DLQ"):
        dlq.export(tmp_path / "none", "no-such-DLQ")


def test_trimming_is_in_the_audit(tmp_path: Path) -> None:
    """The audit has who, what, how many, and where the letters are now."""
    dlq = DeadLetters(an_app(**fresh_conf()))
    put(dlq.store, 2)
    seen: list[Any] = []
    dlq.events.subscribe(seen.append)
    assert dlq.export(tmp_path, then_trim=True).trimmed == 2
    (change,) = dlq.registry.changes(limit=5)
    assert (change.action.value, change.target, change.letters) == ("trimmed", DLQ, 2)
    assert change.detail == {"exported_to": str(tmp_path)}
    assert seen == [change]


def test_following_writes_what_comes_and_ends_in_order(store: Any, tmp_path: Path) -> None:
    """Files appear by rows or by age; what was read when it is stopped is written too."""
    stop, letters = threading.Event(), put(store, 2)
    export = ParquetExport(store, tmp_path, rolling=Rolling(rows=2, seconds=0.1))
    thread = threading.Thread(target=export.follow, args=(store.names, stop))
    thread.start()
    try:
        poll(lambda: ids(tmp_path) == sorted_ids(letters), timeout_seconds=60)
        letters += put(store, 1) + put(store, 1, dead_letter_queue="late-DLQ")
        poll(lambda: ids(tmp_path) == sorted_ids(letters), timeout_seconds=60)
    finally:
        stop.set()
        thread.join(30)
    assert ids(tmp_path) == sorted_ids(letters)


# -- what is refused -------------------------------------------------------------------------


def test_a_folder_of_something_else_is_left_alone(store: Any, tmp_path: Path) -> None:
    """A wrong path must not fill a home directory; a stray file in ours is named."""
    put(store)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"notes\.txt"):
        run(store, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    run(store, tmp_path / "new")
    (tmp_path / "new" / "README.txt").write_text("stray")
    assert run(store, tmp_path / "new").foreign == ["README.txt"]


@pytest.mark.parametrize("place", ["/proc/letters", "{tmp}/file", "nowhere://x/y"])
def test_a_place_that_cannot_be_written_is_a_clear_error(tmp_path: Path, place: str) -> None:
    """One line that names the place."""
    (tmp_path / "file").write_text("a file")
    store = fresh_store().letters
    put(store)
    with pytest.raises(ExportError, match=r"expected .* to be"):
        run(store, place.format(tmp=tmp_path))


def test_a_broken_checkpoint_is_named(store: Any, tmp_path: Path) -> None:
    """Going on from nowhere would write letters twice."""
    put(store)
    run(store, tmp_path)
    (tmp_path / "_celery_dlq" / f"{DLQ}.json").write_text('{"position": 7}')
    with pytest.raises(ExportError, match="is not a file of an export"):
        run(store, tmp_path)


_FULL = """
import resource, sys
from celery_dlq.store.connect import connect
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store
from celery_dlq.export.exporter import ParquetExport
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))
store = Store(sys.argv[1], timeout_seconds=10.0).letters
try:
    ParquetExport(store, sys.argv[2]).run(store.names())
except Exception as exc:
    print(type(exc).__name__, exc)
"""


def test_a_disk_that_is_full_in_the_middle_leaves_nothing_half(
    store: Any, redis_url: str, tmp_path: Path
) -> None:
    """A real limit of the kernel; with room again, the next export has all of it."""
    letters = put(store, 3) + [
        letter for _ in range(20) for letter in put(store, body=os.urandom(50_000))
    ]
    done = run_forked("-c", _FULL, redis_url, str(tmp_path))
    assert done.stdout.startswith("ExportError expected "), done.stdout + done.stderr
    assert files(tmp_path) == []
    assert list((tmp_path / "_celery_dlq" / "drafts").iterdir()) == []
    run(store, tmp_path)
    assert ids(tmp_path) == sorted_ids(letters)


# -- other file systems ------------------------------------------------------------------------


def test_urls_and_file_systems_of_arrow_and_fsspec(store: Any, tmp_path: Path) -> None:
    """The same protocol wherever files can be put."""
    letters = put(store, 3)
    (tmp_path / "sub").mkdir()
    sub = pafs.SubTreeFileSystem(str(tmp_path / "sub"), pafs.LocalFileSystem())
    run(store, "letters", filesystem=sub)
    assert ids(tmp_path / "sub" / "letters") == sorted_ids(letters)
    run(store, f"file://{tmp_path}/url")
    assert ids(tmp_path / "url") == sorted_ids(letters)
    for _ in range(2):
        report = run(store, "memory://bucket/letters", trimmed=lambda *_what: None)
    assert (report.letters, report.destination) == (0, "memory://bucket/letters")
    assert list(store.letters(DLQ, newest_first=False)) == []


def test_one_export_at_a_time(store: Any, tmp_path: Path) -> None:
    """Two at once could write a letter twice."""
    put(store)

    def second(_count: int) -> None:
        with pytest.raises(ExportError, match="another export"):
            run(store, tmp_path)

    export = ParquetExport(store, tmp_path)
    assert export.run([DLQ], progress=second).letters == 1


def test_an_export_of_another_machine_leaves_drafts_that_may_be_written_now(
    tmp_path: Path,
) -> None:
    """It removes those of a killed export before it knows if it may write there at all."""
    sub = pafs.SubTreeFileSystem(str(tmp_path), pafs.LocalFileSystem())
    here, there = Destination("letters", sub), Destination("letters", sub)
    here.open()
    killed, draft = here.draft(), here.draft()
    for one in (killed, draft):
        with one.opened() as sink:
            sink.write(b"rows")
    os.utime(tmp_path / killed.path, (0, 0))
    there.open()
    assert here.put_in_place(draft, "dlq=orders-DLQ/file") == 4
    assert not (tmp_path / killed.path).exists()


def test_a_first_export_says_how_many_letters_it_will_read(store: Any, tmp_path: Path) -> None:
    """The bar on a terminal needs it; later Redis would have to count."""
    put(store, 5)
    put(store, 2, dead_letter_queue="mail-DLQ")
    expected: list[int] = []
    pages: list[int] = []
    export = ParquetExport(store, tmp_path)
    export.run(store.names(), progress=pages.append, expected=expected.append)
    put(store, 3)
    export.run(store.names(), expected=expected.append)
    assert (expected, sum(pages)) == ([7], 7)


def test_memory_stays_bounded_with_a_large_redis(tmp_path: Path) -> None:
    """Letters of a hundred kilobytes are read in smaller pages."""
    with RedisServer() as server:
        store = Store(server.url, timeout_seconds=10.0).letters
        put(store, 600, body=os.urandom(100_000))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        report = run(store, tmp_path)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        store.close()
    assert report.letters == 600
    assert grown < 350 * 1024
