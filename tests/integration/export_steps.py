"""Exports killed at every step, in processes of their own; run by the tests as a script.

For each number of a step: a child exports and is killed there; readers look at what it left; a
second child is killed at another step; a third one comes to its end. Then every letter must be in
the files once. Prints how many steps there were.

With "overtaken", the first child is stopped at the step instead, as a machine that hangs. Others
go on meanwhile, more letters come, and then the first one goes on too. With "back", Redis came
back from a snapshot that is older than the last export, and more letters came.

Args: URL of Redis, destination with {} for the step, "trim", "keep", "overtaken" or "back", the
first step, and every how many steps.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import intervals
import pyarrow.parquet as pq
import pytest
import redis
from builders import DLQ, NOW, a_letter, key_of

from celery_dlq.errors import ExportError
from celery_dlq.export import checkpoint, roll
from celery_dlq.export.destination import Destination, Draft
from celery_dlq.export.exporter import ParquetExport, Rolling
from celery_dlq.store.lease import Lease
from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store

LETTERS, MORE, ROWS = 24, 7, 10
REFUSED = 3
MOST_STEPS = 400

STEPS = [
    (Destination, "open"),
    (Destination, "draft"),
    (Destination, "put_in_place"),
    (Destination, "save"),
    (Destination, "rename"),
    (Destination, "upload"),
    (Draft, "opened"),
    (Draft, "discard"),
    (os, "replace"),
    (os, "fsync"),
    (checkpoint.Checkpoint, "save"),
    (roll.DayFile, "write"),
    (roll.DayFile, "close"),
    (Letters, "remove"),
    (Lease, "request"),
    (roll, "letter_ids_in"),
]


def main(url: str, place: str, mode: str, first: str, stride: str) -> None:
    step = int(first)
    intervals.change(pytest.MonkeyPatch(), export_lease=0.4)
    while step < MOST_STEPS:
        here = place.format(step)
        if mode == "back":
            child(lambda to=here: turn_back(url, to))
        else:
            child(lambda: store_letters(url))
        if mode == "overtaken":
            if not overtaken(url, here, step):
                print(step)
                return
            step += int(stride)
            continue
        killed = child(lambda at=step, to=here: export(url, to, mode, at))
        child(lambda at=step, to=here: (look(to), export(url, to, mode, at * 7 % 23)))
        child(lambda to=here: (export(url, to, mode, None), check(url, to, mode)))
        if killed != -signal.SIGKILL:
            print(step)
            return
        step += int(stride)
    sys.exit("expected the steps to come to an end")


def overtaken(url: str, here: str, step: int) -> bool:
    """True if an export came to that step, stopped there, and was overtaken by two others."""
    pid = forked(lambda: export(url, here, "keep", step, signal.SIGSTOP))
    _pid, status = os.waitpid(pid, os.WUNTRACED)
    stopped = os.WIFSTOPPED(status)
    if stopped:
        child(lambda: elsewhere(lambda: export(url, here, "keep", None)))
        child(lambda: (store_more(url), elsewhere(lambda: export(url, here, "keep", None))))
        os.kill(pid, signal.SIGCONT)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if code not in (0, REFUSED):
            sys.exit(f"the export that was stopped at step {step} failed with {code}")
    more = MORE if stopped else 0
    child(lambda: (export(url, here, "keep", None), check(url, here, "keep", LETTERS + more)))
    return stopped


def elsewhere(work: Callable[[], object]) -> None:
    """Do it as another machine would, which does not see the locks of this one."""
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = folder
        work()


def forked(work: Callable[[], object]) -> int:
    """Begin something in a process of its own."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
        except ExportError as exc:
            print(exc, file=sys.stderr)
            os._exit(REFUSED)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def child(work: Callable[[], object]) -> int:
    """Do something in a process of its own, which may be killed but may not fail."""
    pid = forked(work)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code not in (0, -signal.SIGKILL):
        sys.exit(f"a step failed with {code}")
    return code


def a_store(url: str) -> Letters:
    return Store(url, timeout_seconds=10.0).letters


def store_letters(url: str) -> None:
    redis.Redis.from_url(url).flushall()
    put_letters(a_store(url), range(LETTERS))


def turn_back(url: str, place: str) -> None:
    """Export twice, and let Redis forget the second time; some letters it forgets, too."""
    store, client = a_store(url), redis.Redis.from_url(url)
    client.flushall()
    put_letters(store, range(8))
    export(url, place, "back", None)
    put_letters(store, range(8, 14))
    snapshot = {key: client.dump(key) for key in client.keys("*")}
    put_letters(store, range(14, 19))
    export(url, place, "back", None)
    client.flushall()
    for key, value in snapshot.items():
        client.restore(key, 0, value)
    put_letters(store, range(19, LETTERS))


def store_more(url: str) -> None:
    put_letters(a_store(url), range(LETTERS, LETTERS + MORE))


def put_letters(store: Letters, numbers: range) -> None:
    for number in numbers:
        letter = a_letter(task_id=f"t{number}", dead_lettered_at=NOW + timedelta(hours=number))
        store.dead_letter(letter, key_of(letter))


def export(url: str, place: str, mode: str, at: int | None, strike: int = signal.SIGKILL) -> None:
    store = a_store(url)
    if at is not None:
        strike_at_step(at, strike)
    trimmed = (lambda _queue, _count: None) if mode in ("trim", "back") else None
    ParquetExport(store, place, rolling=Rolling(rows=ROWS), trimmed=trimmed).run([DLQ])


def strike_at_step(number: int, strike: int) -> None:
    """Signal this process before or after one of the calls that leave something behind."""
    left = [number]

    def step() -> None:
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), strike)

    for owner, name in STEPS:
        setattr(owner, name, stepping(owner, name, step))


def stepping(owner: Any, name: str, step: Callable[[], None]) -> Any:
    real = getattr(owner, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        step()
        result = real(*args, **kwargs)
        step()
        return result

    return staticmethod(call) if isinstance(vars(owner).get(name), staticmethod) else call


def exported(place: str) -> list[str]:
    """The ids in all files that a reader sees."""
    destination = Destination(place)
    ids: list[str] = []
    for name in destination.files(""):
        if name.split("/")[0].startswith("_"):
            continue
        assert name.endswith(".parquet"), name
        with destination.source(name) as source:
            table = pq.ParquetFile(source, page_checksum_verification=True).read()
        assert table.num_rows > 0, name
        ids += table.column("id").to_pylist()
    return ids


def look(place: str) -> None:
    """A killed export leaves whole files only, and nothing twice."""
    twice = [i for i, count in Counter(exported(place)).items() if count > 1]
    assert not twice, twice


def check(url: str, place: str, mode: str, letters: int = LETTERS) -> None:
    """Every letter is in the files, once; it is out of the queue only if the export trims."""
    store = a_store(url)
    expected = sorted(a_letter(task_id=f"t{number}").id for number in range(letters))
    assert sorted(exported(place)) == expected
    left = [found.letter.id for found in store.letters(DLQ, newest_first=False)]
    assert sorted(left) == ([] if mode in ("trim", "back") else expected)
    (folder,) = store.export_folders(DLQ)
    assert folder.position == store.last_position(DLQ)
    assert not [n for n in Destination(place).files("_celery_dlq") if n.endswith(".tmp")]


if __name__ == "__main__":
    main(*sys.argv[1:])
