"""Many small letters, and then large ones: what reading them takes of both processes.

A reader that asks for a number of letters guesses their size by those before.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import redis
from builders import DLQ, a_letter, key_of
from command_proxy import Command, CommandProxy
from letter_readers import READERS
from servers import RedisServer
from waiting import poll

from celery_dlq.store.letters import Letters
from celery_dlq.store.store import Store

HERE = Path(__file__).parent
MEGABYTE = 2**20
SMALL, LARGE, LARGE_BYTES = 3_000, 100, 3_000_000
FOLLOWED = 96  # 576 MB
ASKING = "xrange", "xrevrange"
MOST_OF_READER, MOST_OF_REDIS = 400, 40  # MiB


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    """A Redis with three thousand small letters, and then a hundred large ones."""
    with RedisServer() as server:
        store = Store(server.url, timeout_seconds=10.0).letters
        for number in range(SMALL + LARGE):
            size = 40 if number < SMALL else LARGE_BYTES
            text = os.urandom(size // 2).hex()
            letter = a_letter(args_json=f'["{text}"]', body=f'[["{text}"],{{}},{{}}]'.encode())
            store.dead_letter(letter, key_of(letter))
        store.close()
        yield server


@dataclass
class Watch:
    """Writes as others do and looks at Redis's memory, until it is stopped."""

    client: redis.Redis
    written: int = 0
    refused: int = 0
    above: int = 0  # most bytes of Redis's above what it had before
    stop: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        before = self.client.info("memory")["used_memory"]
        while not self.stop.is_set():
            self.above = max(self.above, self.client.info("memory")["used_memory"] - before)
            try:
                self.client.set("other", b"x" * 1000, ex=1)
                self.written += 1
            except redis.exceptions.OutOfMemoryError:
                self.refused += 1


@pytest.mark.xdist_group("large letters")  # they are stored once a process
@pytest.mark.parametrize("reader", READERS)
def test_small_letters_before_large_ones_take_no_more_memory(
    server: RedisServer, tmp_path: Path, reader: str
) -> None:
    """Of the reader and of Redis, which is near its maximum: others write on."""
    client = server.client()
    room = client.info("memory")["used_memory"] + 48 * MEGABYTE
    client.config_set("maxmemory", room)
    watch = Watch(server.client())
    thread = threading.Thread(target=watch.run)
    thread.start()
    try:
        poll(lambda: watch.written)
        found, peak = read(server, reader, tmp_path)
    finally:
        watch.stop.set()
        thread.join()
        client.config_set("maxmemory", 0)
    above = watch.above // MEGABYTE
    assert found == SMALL + LARGE
    assert peak < MOST_OF_READER
    assert above < MOST_OF_REDIS
    assert watch.written
    assert not watch.refused


def read(server: RedisServer, reader: str, folder: Path) -> tuple[int, int]:
    """The number of letters that a reader found, and the most MiB that it had in use."""
    done = subprocess.run(
        [sys.executable, HERE / "letter_readers.py", server.url, reader, str(folder)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    assert done.returncode == 0, done.stderr
    found, peak = map(int, done.stdout.split())
    return found, peak


def test_an_export_that_follows_many_queues_holds_few_letters_of_all(tmp_path: Path) -> None:
    """Each queue has less than one row group, and all together have much more."""
    with RedisServer() as server:
        store = Store(server.url, timeout_seconds=10.0).letters
        for number in range(FOLLOWED):
            text = os.urandom(LARGE_BYTES // 2).hex()
            letter = a_letter(
                dead_letter_queue=f"orders{number % 12}-DLQ",
                args_json=f'["{text}"]',
                body=f'[["{text}"],{{}},{{}}]'.encode(),
            )
            store.dead_letter(letter, key_of(letter))
        store.close()
        found, peak = read(server, "follow", tmp_path)
    assert found == FOLLOWED
    assert peak < MOST_OF_READER


def test_small_letters_behind_the_last_large_one_are_not_looked_at_one_by_one() -> None:
    """A discarded large letter that is restored is the last large one again."""
    with RedisServer() as server:
        store = Store(server.url).letters
        large = a_letter(body=b"x" * 20_000)
        for letter in (large, *(a_letter() for _ in range(1_000))):
            store.dead_letter(letter, key_of(letter))
        # 25, 125 and 200, until its pages are full.
        assert entries_looked_at(server, store, newest_first=False) < 400
        # From the newest one on, the large one is ahead of all.
        assert entries_looked_at(server, store, newest_first=True) > 900
        store.remove(DLQ, [large.id], keep_seconds=60.0)
        store.restore(DLQ, large.id)
        assert entries_looked_at(server, store, newest_first=False) > 900
        store.close()


def entries_looked_at(server: RedisServer, store: Letters, *, newest_first: bool) -> int:
    """How often Redis was asked for entries, from outside or by scripts, until all were read."""
    client = server.client()
    client.config_resetstat()
    assert sum(1 for _ in store.letters(DLQ, newest_first=newest_first)) == 1_001
    calls = client.info("commandstats")
    return sum(calls.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ASKING)


def asks_for_several(command: Command) -> bool:
    """Match the reading of more than one entry."""
    return command[0] == b"EVAL" and b"XREVRANGE" in command[1] and int(command[-2]) > 1


def asks_for_several_small_ones(command: Command) -> bool:
    """Match the reading of entries none of which is large."""
    return command[0] == b"XRANGE" and int(command[-1]) > 1


@pytest.mark.parametrize(
    ("count", "page"), [(12, asks_for_several), (800, asks_for_several_small_ones)]
)
def test_a_page_that_does_not_arrive_is_asked_for_again_by_ones(
    count: int, page: Callable[[Command], bool]
) -> None:
    """A slow connection carries one large letter within the timeout, and not five."""
    with RedisServer() as server, CommandProxy(server.port) as proxy:
        direct = Store(server.url).letters
        letters = [a_letter() for _ in range(count)]
        for letter in letters:
            direct.dead_letter(letter, key_of(letter))
        held = proxy.fault("hold", page, times=2)
        slow = Store(f"redis://127.0.0.1:{proxy.port}/0", timeout_seconds=0.5).letters
        found = [one.letter.id for one in slow.letters(DLQ, newest_first=False)]
        assert found == [letter.id for letter in letters]
        assert held.left == 0
        held.release()
        slow.close()
        direct.close()
