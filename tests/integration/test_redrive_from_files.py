"""A redrive of letters that are in the files of an export, and perhaps in Redis, too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest
import redis
from builders import DLQ, NOW, a_letter, a_request, an_ended_delivery, key_of
from click.testing import CliRunner
from fork_server import TESTS, ForkedProcess, run_forked
from kombu import Queue
from rabbit import RabbitServer
from servers import RedisServer
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.cli.commands import dlq as commands
from celery_dlq.errors import DLQError, ExportError, NotFound
from celery_dlq.events import Redriven
from celery_dlq.export.destination import Destination
from celery_dlq.export.exported import ExportedLetters
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.record import REDRIVEN_FIELDS, Kind, field_kinds
from celery_dlq.operations.api import Operations
from celery_dlq.operations.edit import Edit
from celery_dlq.store.claims import Claims
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters

Make = Callable[..., DeadLetters]
dlq_keys = Keys()


@pytest.fixture(params=["one step", "claims"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Letters in the broker's database, or as if they were elsewhere."""
    if request.param == "claims":
        monkeypatch.setattr(Claims, "marker", lambda *_: None)
    return str(request.param)


def put(store: Letters, count: int = 1, **changes: Any) -> list[DeadLetter]:
    """Store letters of tasks."""
    letters = []
    for _ in range(count):
        letter = a_letter(properties='{"priority": 0}', **changes)
        headers = a_request(id=letter.task_id, root_id=letter.task_id)
        letter = replace(letter, headers=json.dumps(headers))
        store.dead_letter(letter, key_of(letter))
        letters.append(letter)
    return letters


def sent(client: redis.Redis, queue: str = "orders") -> Counter[str]:
    """The letters whose messages are in a queue of the broker, and how often."""
    messages = map(json.loads, client.lrange(queue, 0, -1))
    return Counter(message["headers"]["dlq_letter"] for message in messages)


def archived(dlq: DeadLetters, folder: Path, count: int = 3, **changes: Any) -> list[DeadLetter]:
    """Letters that are in a folder only."""
    letters = put(dlq.store, count, **changes)
    dlq.export(folder, then_trim=True)
    assert not dlq.store.length(DLQ)
    return letters


def test_letters_of_files_go_once_however_often_they_are_redriven(
    make: Make, client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """Their receipts stay; the second redrive says that they are gone."""
    dlq = make()
    letters = archived(dlq, tmp_path)
    report = dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert (report.published, report.gone, report.state) == (3, 0, "done")
    assert sent(client) == Counter(letter.id for letter in letters)
    again = dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert (again.published, again.gone, again.skipped) == (0, 3, 3)
    assert sent(client) == Counter(letter.id for letter in letters)


def test_a_letter_of_a_file_becomes_the_message_that_it_was(
    make: Make, client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """Body, headers and properties are those of a redrive from Redis, byte for byte."""
    dlq = make()
    body = json.dumps([["\u20ac", 1], {"a": None}, {}]).encode("utf-8")
    (letter,) = put(dlq.store, body=body)
    dlq.redrive(DLQ, ids={letter.id}, force=True)
    expected = json.loads(client.lpop("orders") or b"")
    dlq.store.dead_letter(letter, key_of(letter))
    dlq.export(tmp_path, then_trim=True)
    dlq.redrive(DLQ, files=str(tmp_path), force=True)
    got = json.loads(client.lpop("orders") or b"")
    for message in (expected, got):  # what names the redrive, and this publication
        for name in ("dlq_redrive", "dlq_redriven_at"):
            message["headers"].pop(name)
        message["properties"].pop("delivery_tag")
    assert got == expected


def a_whole_letter() -> DeadLetter:
    """A letter of which each field has a value, those of later versions, too."""
    letter = a_letter(redrives=2, deliveries=3, max_deliveries=3, history=[an_ended_delivery()])
    values = {
        Kind.TEXT: "a text",
        Kind.INTEGER: 7,
        Kind.BOOLEAN: True,
        Kind.TIME: letter.dead_lettered_at - timedelta(seconds=1),
        Kind.JSON: '{"a": 1}',
    }
    lacking = {
        name: values[kind]
        for name, kind in field_kinds().items()
        if getattr(letter, name) in (None, "", 0)
    }
    headers = a_request(id=letter.task_id, expires="2026-01-01T00:00:00+00:00")
    return replace(
        letter, **{**lacking, "headers": json.dumps(headers), "properties": '{"priority": 3}'}
    )


def entry_of(client: redis.Redis, key: str) -> dict[str, Any]:
    """The one entry of a broker's list, without what differs between two redrives."""
    (entry,) = map(json.loads, client.lrange(key, 0, -1))
    client.delete(key)
    for name in ("dlq_redrive", "dlq_redriven_at"):
        entry["headers"].pop(name)
    entry["headers"]["eta"] = entry["headers"]["eta"] and "later"  # of a delay
    del entry["properties"]["delivery_tag"]
    return dict(entry)


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({}, "orders\x06\x163"),
        ({"to_queue": "others", "delay": 60}, "others\x06\x163"),
        ({"keep_count": True, "force": True}, "orders\x06\x163"),
        ({"where": LetterFilter(conditions=("kwargs.a=1",))}, "orders\x06\x163"),
    ],
)
def test_the_columns_that_a_redrive_reads_make_the_message_of_the_whole_letter(
    make: Make, client: redis.Redis, tmp_path: Path, options: dict[str, Any], key: str
) -> None:
    """The other columns of a file are not read: a message must need none of them."""
    dlq, letter = make(), replace(a_whole_letter(), kwargs_json='{"a": 1}')
    dlq.store.dead_letter(letter, key_of(letter))
    options = {"force": True, **options}
    dlq.redrive(DLQ, **options)
    expected = entry_of(client, key)
    dlq.store.dead_letter(letter, key_of(letter))
    dlq.export(tmp_path, then_trim=True)
    assert dlq.dry_run(DLQ, files=str(tmp_path), keep_count=True).used_up == 1
    assert dlq.redrive(DLQ, files=str(tmp_path), **options).published == 1
    assert entry_of(client, key) == expected


def test_a_redrive_reads_few_columns_unless_somebody_is_shown_the_letters(
    make: Make, client: redis.Redis, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An observer of what is redriven gets whole letters; without one, no traceback is read."""
    dlq = make()
    for letter in (a_whole_letter(), a_whole_letter()):
        dlq.store.dead_letter(letter, key_of(letter))
    letters = [*dlq.letters(DLQ)]
    dlq.export(tmp_path, then_trim=True)
    read: list[set[bytes]] = []
    fields = ExportedLetters.fields

    def seen(*args: Any, **kwargs: Any) -> Any:
        for page in fields(*args, **kwargs):
            read.extend({*one} for _position, one in page)
            yield page

    monkeypatch.setattr(ExportedLetters, "fields", seen)
    dlq.redrive(DLQ, files=str(tmp_path), limit=1, force=True)
    assert {name.decode() for name in read[0]} == REDRIVEN_FIELDS
    shown: list[Any] = []
    dlq.events.subscribe(shown.append, lambda kind: kind is Redriven)
    dlq.redrive(DLQ, files=str(tmp_path), force=True)
    (event,) = (one for one in shown if isinstance(one, Redriven))
    assert event.letter in letters


def test_a_letter_in_redis_and_in_files_goes_once(
    make: Make, client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """Whichever is redriven first; it leaves Redis."""
    dlq = make()
    first, second = put(dlq.store, 2)
    dlq.export(tmp_path)
    from_files = dlq.redrive(DLQ, files=str(tmp_path), ids={first.id}, force=True)
    assert from_files.published == 1
    assert [letter.id for letter in dlq.letters(DLQ)] == [second.id]
    assert dlq.redrive(DLQ, force=True).published == 1
    again = dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert (again.published, again.gone) == (0, 2)
    assert sent(client) == Counter([first.id, second.id])


def test_the_same_file_in_two_folders_and_two_operators_at_once(
    make: Make, client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """Both redrive everything; each letter goes once."""
    dlq = make()
    letters = archived(dlq, tmp_path / "a", 300)
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    reports = []

    def operate(folder: str) -> None:
        own = make()
        reports.append(own.redrive(DLQ, files=str(tmp_path / folder), force=True))

    operators = [threading.Thread(target=operate, args=(name,)) for name in "ab"]
    for operator in operators:
        operator.start()
    for operator in operators:
        operator.join()
    later = dlq.redrive(DLQ, files=str(tmp_path / "b"), force=True)  # what was skipped as claimed
    assert sum(report.published for report in (*reports, later)) == len(letters)
    assert sent(client) == Counter(letter.id for letter in letters)


_OPERATOR = """
import sys
from builders import an_app
from celery_dlq import DeadLetters
from celery_dlq.store.claims import Claims
if sys.argv[3] == "claims":
    Claims.marker = lambda *_: None
dlq = DeadLetters(an_app(broker_url=sys.argv[1], dlq_url=sys.argv[1]))
dlq.redrive("orders-DLQ", files=sys.argv[2], force=True, rate=400)
"""


def test_a_killed_redrive_is_resumed_and_no_letter_goes_twice(
    make: Make, server: RedisServer, client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """By another process, which opens the files again; with claims a copy is counted."""
    dlq = make()
    letters = archived(dlq, tmp_path / "letters", 400)
    operator = ForkedProcess(
        ["-c", _OPERATOR, server.url, str(tmp_path / "letters"), way],
        cwd=TESTS,
        env=os.environ,
        log=tmp_path / "operator.log",
    )
    try:
        poll(lambda: client.llen("orders") > 60, timeout_seconds=30)
    finally:
        operator.send_signal(signal.SIGKILL)
        operator.wait()
    job = poll(
        lambda: next((j for j in dlq.jobs() if j.state == "interrupted"), None), timeout_seconds=30
    )
    report = dlq.resume(job.id)
    assert report.state == "done"
    found = sent(client)
    assert set(found) == {letter.id for letter in letters}
    copies = sum(found.values()) - len(letters)
    assert copies <= report.maybe_twice if way == "claims" else not copies
    assert report.published + report.finished >= len(letters) - (report.gone if copies else 0)


_DIES = """
import os, signal, sys
from builders import an_app
from celery_dlq import DeadLetters
from celery_dlq.operations.redrive.publisher import Publisher
from celery_dlq.store.claims import Claims
from celery_dlq.store.letters import Letters

url, folder, way, owner, name, when = sys.argv[1:]
if way == "claims":
    Claims.marker = lambda *_: None
place = {"Claims": Claims, "Letters": Letters, "Publisher": Publisher}[owner]
inner, calls = getattr(place, name), []

def dying(self, *args, **kwargs):
    calls.append(1)
    if len(calls) == 2 and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    result = inner(self, *args, **kwargs)
    if len(calls) == 2 and when == "after":
        os.kill(os.getpid(), signal.SIGKILL)
    return result

setattr(place, name, dying)
DeadLetters(an_app(broker_url=url, dlq_url=url)).redrive("orders-DLQ", files=folder, force=True)
"""
_A_BATCH = 500


@pytest.mark.parametrize(
    ("way", "owner", "name", "when", "twice"),
    [
        ("one step", "Claims", "redrive", "before", 0),
        ("one step", "Claims", "redrive", "after", 0),
        ("claims", "Claims", "claim", "before", 0),
        ("claims", "Claims", "claim", "after", 0),
        ("claims", "Publisher", "publish", "after", _A_BATCH),
        ("claims", "Claims", "mark_published", "after", 0),
        # Removed in the background: the next letters may be on their way at that moment.
        ("claims", "Letters", "remove", "before", None),
        ("claims", "Letters", "remove", "after", None),
    ],
    indirect=["way"],
)
def test_killed_at_a_step_it_is_finished_by_resuming_its_job(
    make: Make,
    server: RedisServer,
    client: redis.Redis,
    tmp_path: Path,
    way: str,
    owner: str,
    name: str,
    when: str,
    twice: int | None,
) -> None:
    """No letter is lost; only what was published and not noted goes twice, and is counted."""
    dlq = make()
    letters = archived(dlq, tmp_path, 1100)
    done = run_forked("-c", _DIES, server.url, str(tmp_path), way, owner, name, when)
    assert done.returncode == -signal.SIGKILL, done.stderr
    (job,) = dlq.jobs()
    report = dlq.resume(job.id)
    assert report.state == "done"
    found = sent(client)
    assert set(found) == {letter.id for letter in letters}
    copies = sum(found.values()) - len(letters)
    assert copies in (range(_A_BATCH + 1) if twice is None else [twice])
    assert report.maybe_twice >= copies
    assert client.hlen(dlq_keys.claims(DLQ)) == 0
    if way == "one step":
        assert dlq.job(job.id).counts["published"] == len(letters)


def test_letters_of_files_go_to_rabbitmq_once_unless_it_is_killed(
    make: Make, rabbit_server: RabbitServer, tmp_path: Path
) -> None:
    """Broker and receipts are apart: published, confirmed, then noted; bytes as they were."""
    rabbit_server.delete_queues("orders")
    dlq = make(broker_url=rabbit_server.url)
    letters = archived(dlq, tmp_path, 5)
    with dlq.app.connection_for_write() as connection:
        Queue("orders", durable=True)(connection.channel()).declare()
    report = dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert (report.published, report.failed) == (5, {})
    assert dlq.redrive(DLQ, files=str(tmp_path), force=True).gone == 5
    found = {}
    with dlq.app.connection_for_read() as connection:
        channel = connection.channel()
        while (message := channel.basic_get("orders", no_ack=True)) is not None:
            body = message.body
            found[message.headers["dlq_letter"]] = body.encode() if isinstance(body, str) else body
    assert found == {letter.id: letter.body for letter in letters}


def test_what_is_exported_while_a_job_runs_is_none_of_its_letters(
    make: Make, client: redis.Redis, tmp_path: Path
) -> None:
    """A redriven message that dies again is exported to the same folder: no endless redrive."""
    dlq = make()
    (first,) = archived(dlq, tmp_path, 1)
    run, seen = Operations(dlq.assembly).prepare(
        "redrive", DLQ, None, {"files": str(tmp_path), "force": True}
    )
    assert seen.letters == 1
    archived(dlq, tmp_path, 2)
    report = dlq.assembly.jobs().run(run)
    assert report.published == 1
    assert sent(client) == Counter([first.id])


def test_filters_days_and_statistics_choose_what_is_opened(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One day of three is one file."""
    dlq = make()
    for days in range(3):
        put(dlq.store, 2, dead_lettered_at=NOW - timedelta(days=days), task_name=f"shop.t{days}")
    dlq.export(tmp_path, then_trim=True)
    opened: list[str] = []
    source = Destination.source
    monkeypatch.setattr(
        Destination, "source", lambda self, name: opened.append(name) or source(self, name)
    )
    letters = ExportedLetters(Destination(tmp_path), dlq.store)
    since = NOW - timedelta(days=1, hours=NOW.hour, minutes=NOW.minute, seconds=NOW.second)
    where = LetterFilter(since=since, until=since + timedelta(hours=23, minutes=59))
    assert sum(map(len, letters.narrowed(where).fields(DLQ))) == 2
    assert len(opened) == 1
    files = dlq.files(tmp_path)
    assert {one.task_name for one in files.letters(DLQ, task_name="shop.t2")} == {"shop.t2"}
    assert not [*files.letters(DLQ, task_name="shop.t9")]


def test_letters_of_files_are_the_records_of_redis(make: Make, tmp_path: Path) -> None:
    """As letters, one by its id or the beginning of it, and by cause."""
    dlq = make()
    put(dlq.store, 3, task_name="shop.charge")
    put(dlq.store, 2, task_name="shop.mail", fingerprint="f" * 16)
    expected = [*dlq.letters(DLQ)]
    groups = {one.fingerprint: (one.letters, one.task_name) for one in dlq.groups(DLQ)}
    dlq.export(tmp_path, then_trim=True)
    files = dlq.files(tmp_path)
    assert files.names == [DLQ]
    assert sorted(files.letters(DLQ), key=lambda one: one.id) == sorted(
        expected, key=lambda one: one.id
    )
    some = expected[0]
    assert files.get(some.id) == some
    assert files.entry(some.id[:12])[1].key == some.id
    found = {one.fingerprint: (one.letters, one.task_name) for one in files.groups(DLQ)}
    assert found == groups
    assert files.group(DLQ, "f" * 16).letters == 2
    newest = [*files.letters(DLQ, newest_first=True)]
    assert sorted(one.id for one in newest) == sorted(one.id for one in expected)
    with pytest.raises(NotFound):
        files.get("0" * 36)
    with pytest.raises(NotFound):
        next(files.letters("other-DLQ"))
    with pytest.raises(ExportError, match="to be a folder of an export, found no letters"):
        next(dlq.files(tmp_path / "none").letters(DLQ))


def test_an_edit_a_limit_and_a_canary_work_on_files(
    make: Make, client: redis.Redis, tmp_path: Path
) -> None:
    """As they do on letters in Redis."""
    dlq = make()
    letters = archived(dlq, tmp_path, 4)
    report = dlq.edit(
        letters[0].id, Edit(assign={"kwargs.fixed": True}), files=str(tmp_path), force=True
    )
    assert report.published == 1
    assert dlq.redrive(DLQ, files=str(tmp_path), limit=2, force=True).published == 2
    tried = dlq.redrive(DLQ, files=str(tmp_path), force=True, canary=1, canary_wait=0.5)
    assert (tried.state, tried.published) == ("stopped", 1)  # nobody runs it
    assert dlq.resume(tried.redrive_id).state in ("done", "stopped")


def test_a_redacted_folder_is_refused_in_one_line(
    make: Make, client: redis.Redis, tmp_path: Path
) -> None:
    """Its bodies are not those of the messages."""
    dlq = make()
    put(dlq.store)
    dlq.export(tmp_path, redact=["kwargs.token"], redact_key=b"k" * 32)
    with pytest.raises(ExportError, match=r"whose export hid kwargs.token; redrive from Redis"):
        dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert not client.llen("orders")


def test_a_file_that_is_half_there_is_named_before_anything_is_sent(
    make: Make, client: redis.Redis, tmp_path: Path
) -> None:
    """The files are looked at first, with a filter too; the later day's is damaged."""
    dlq = make()
    for days, count in ((1, 250), (0, 2)):  # the first day is more than a batch
        died = NOW - timedelta(days=days)
        put(dlq.store, count, dead_lettered_at=died, task_name="shop.charge")
    dlq.export(tmp_path, then_trim=True)
    file = max(tmp_path.glob("dlq=*/day=*/*.parquet"))
    file.write_bytes(file.read_bytes()[:-100])
    for chosen in ({}, {"task_name": "shop.charge"}):
        with pytest.raises(ExportError, match=r"letters-.*to be a whole file of an export"):
            dlq.redrive(DLQ, files=str(tmp_path), force=True, **chosen)
        assert not client.llen("orders")


def test_files_of_this_machine_are_refused_for_a_job_that_waits(make: Make, tmp_path: Path) -> None:
    """A worker may run on another machine."""
    dlq = make()
    archived(dlq, tmp_path)
    with pytest.raises(DLQError, match="that every worker reaches"):
        dlq.plan("redrive", DLQ, files=str(tmp_path))


def command(dlq: DeadLetters, *arguments: object) -> Any:
    """``celery -A shop dlq …`` with these arguments."""
    context = SimpleNamespace(app=dlq.app, no_color=True)
    return CliRunner().invoke(commands, [*map(str, arguments)], obj=context)


def test_commands_read_and_redrive_files(make: Make, client: redis.Redis, tmp_path: Path) -> None:
    """``--from`` of list, show, groups and redrive; what does not go together says so."""
    dlq = make()
    (letter,) = archived(dlq, tmp_path, 1, task_name="shop.charge")
    shown = command(dlq, "list", DLQ, "--from", tmp_path, "--json")
    assert json.loads(shown.output)["id"] == letter.id
    one = command(dlq, "show", letter.id[:8], "--from", tmp_path, "--json")
    assert json.loads(one.output)["task_id"] == letter.task_id
    groups = command(dlq, "groups", DLQ, "--from", tmp_path, "--json")
    assert json.loads(groups.output)["letters"] == 1
    for wrong in (
        ("groups", DLQ, "--state", "open", "--from", tmp_path),
        ("list", DLQ, "--discarded", "--from", tmp_path),
    ):
        assert command(dlq, *wrong).exit_code == 2
    waits = command(dlq, "redrive", DLQ, "--all", "--from", tmp_path, "--background", "--yes")
    assert waits.exit_code == 1
    assert "that every worker reaches" in waits.output
    none = command(dlq, "list", DLQ, "--from", tmp_path / "none")
    assert none.exit_code == 1
    seen = command(dlq, "redrive", DLQ, "--all", "--from", tmp_path, "--dry-run", "--json")
    assert json.loads(seen.output)["letters"] == 1
    done = command(
        dlq, "redrive", DLQ, letter.id[:8], "--from", tmp_path, "--force", "--yes", "--json"
    )
    assert json.loads(done.output)["published"] == 1
    assert sent(client) == Counter([letter.id])
    for how in ("--dry-run", "--force"):
        gone = command(dlq, "redrive", DLQ, letter.id, "--from", tmp_path, how)
        assert gone.exit_code == 1
        assert "nothing is left; letters that match and were redriven before: 1" in gone.output
    assert sent(client) == Counter([letter.id])


def test_letters_that_went_before_are_none_of_a_limit_or_of_a_canary(
    make: Make, client: redis.Redis, tmp_path: Path, way: str
) -> None:
    """They stay in their files, and are the first there: a limit found only them, a canary too."""
    dlq = make()
    letters = archived(dlq, tmp_path, 130)
    first = dlq.redrive(DLQ, files=str(tmp_path), force=True, limit=50)
    assert (first.published, first.gone) == (50, 0)
    second = dlq.redrive(DLQ, files=str(tmp_path), force=True, limit=50)
    assert (second.published, second.gone, second.skipped) == (50, 50, 50)
    seen = dlq.dry_run(DLQ, files=str(tmp_path), limit=50)
    assert (seen.letters, [*seen.warnings]) == (
        30,
        ["letters that match and were redriven before: 100"],
    )
    tried = dlq.redrive(DLQ, files=str(tmp_path), force=True, canary=2, canary_wait=0.1)
    assert (tried.published, tried.gone, tried.canary["redriven"]) == (2, 0, 2)
    dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert sent(client) == Counter(letter.id for letter in letters)
    nothing = command(dlq, "redrive", DLQ, "--all", "--from", tmp_path, "--dry-run")
    assert nothing.exit_code == 1
    assert "nothing is left; letters that match and were redriven before: 130" in nothing.output


@pytest.mark.parametrize("column", ["headers", "properties", "body", None])
def test_a_file_without_a_part_of_the_messages_is_refused(
    make: Make, client: redis.Redis, tmp_path: Path, column: str | None
) -> None:
    """Who wrote it anew left out a column, or all: another message would go, with a receipt."""
    dlq = make()
    archived(dlq, tmp_path)
    (file,) = tmp_path.glob("dlq=*/day=*/*.parquet")
    written = pq.ParquetFile(file).read()
    pq.write_table(written.drop_columns([column] if column else written.column_names[1:]), file)
    with pytest.raises(
        ExportError, match=f"whole file of an export, got: no column {column or ''}"
    ):
        dlq.redrive(DLQ, files=str(tmp_path), force=True)
    assert not client.llen("orders")
