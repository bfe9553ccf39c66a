"""How much of the store's memory letters may take, and what happens to those above that."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
from builders import a_letter, an_ended_delivery

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.packing import packed
from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.worker_records import ServerMemory
from celery_dlq.writing.memory_limit import MemoryLimit, MemoryLimitReached, without_text

MAXIMUM = 100_000_000
BODY = 20_000


class Server:
    """A server whose memory fills with what is stored."""

    def __init__(self, used: int, maximum: int = MAXIMUM) -> None:
        self.used = used
        self.maximum = maximum
        self.readings = 0
        self.down = False

    def read(self) -> ServerMemory:
        self.readings += 1
        if self.down:
            raise StoreUnavailable("away")
        return ServerMemory(used=self.used, maximum=self.maximum, policy="noeviction")

    def store(self, limit: MemoryLimit) -> bool:
        """Store a letter if there is room."""
        try:
            letter = limit.fitted(large())
        except MemoryLimitReached:
            return False
        self.used += len(letter.body) + 500
        return True


def large(body: int = BODY) -> DeadLetter:
    """A letter with all that describes a death."""
    return a_letter(
        body=b"x" * body,
        headers='{"argsrepr": "(1,)"}',
        description="no price " * 100,
        exception_message="no price " * 100,
        traceback='File "shop.py"\n' * 1000,
        history=(an_ended_delivery(),),
    )


def limit_of(server: Server, share: float = 0.8) -> MemoryLimit:
    """The limit of a worker after its first tick."""
    limit = MemoryLimit(server.read, share)
    limit.tick()
    return limit


@pytest.mark.parametrize(
    ("used", "whole"), [(0, True), (79_000_000, True), (80_000_001, False), (89_900_000, False)]
)
def test_above_the_limit_a_letter_loses_its_text(used: int, *, whole: bool) -> None:
    """Only what describes the death: the message can be redriven as ever."""
    letter = large()
    kept = limit_of(Server(used)).fitted(letter)
    assert (kept == letter) is whole
    if not whole:
        assert kept == without_text(letter)


def test_halfway_to_the_maximum_letters_wait() -> None:
    """Also one for whose size there is no room any more."""
    with pytest.raises(MemoryLimitReached, match=r"uses 90% of its maxmemory"):
        limit_of(Server(90_000_001)).fitted(large())
    with pytest.raises(MemoryLimitReached):
        limit_of(Server(85_000_000)).fitted(large(6_000_000))


def test_a_letter_that_can_wait_keeps_its_text() -> None:
    """A letter on disk takes no memory."""
    with pytest.raises(MemoryLimitReached):
        limit_of(Server(85_000_000)).fitted(large(), whole=True)
    assert limit_of(Server(70_000_000)).fitted(large(), whole=True).traceback


def test_without_its_text_a_letter_has_its_whole_message() -> None:
    """And takes hardly more than that."""
    letter = large()
    cut = without_text(letter)
    restored = replace(
        cut,
        **{
            name: getattr(letter, name)
            for name in ("description", "exception_message", "traceback", "history")
        },
    )
    assert restored == letter
    assert len(cut.description) == len(cut.exception_message or "") == 200
    assert sum(map(len, packed(cut.to_fields()).values())) < BODY + 800


def test_without_a_maximum_there_is_no_limit() -> None:
    """Most development servers have none."""
    assert limit_of(Server(99, maximum=0)).fitted(large()).traceback


def test_a_limit_of_0_is_none() -> None:
    """The memory is not even read again and again."""
    server = Server(MAXIMUM)
    limit = limit_of(server, 0.0)
    limit.tick()
    assert limit.fitted(large()).traceback
    assert server.readings == 0


def test_where_the_memory_is_unknown_there_is_no_limit() -> None:
    """A user who may not run INFO has all else."""
    limit = MemoryLimit(lambda: None, 0.8)
    limit.tick()
    assert limit.fitted(large()).traceback


def test_the_memory_is_not_read_for_each_letter() -> None:
    """Nor while letters wait, until the next tick."""
    server = Server(0)
    limit = MemoryLimit(server.read, 0.8, clock=lambda: 0.0)  # however long the letters take
    limit.tick()
    stored = 0
    while server.store(limit):
        stored += 1
    assert stored > 4_000
    assert server.readings < stored / 4
    full = server.readings
    assert not any(server.store(limit) for _ in range(1000))
    assert server.readings == full
    server.used = 0
    assert not server.store(limit)
    limit.tick()
    assert server.store(limit)


@pytest.mark.parametrize("workers", [1, 10, 100])
def test_workers_hardly_overshoot_together(workers: int) -> None:
    """Each knows what it has written itself; of the others it reads in time."""
    server = Server(0)
    limits = [limit_of(server) for _ in range(workers)]
    while sum(server.store(limit) for limit in limits):
        pass
    assert 89_900_000 <= server.used < 90_000_000 + workers * 64 * 1024


def test_a_server_that_does_not_answer_is_asked_once_until_the_next_tick() -> None:
    """Storing the letter will tell that it is away; each question may cost a time-out."""
    server = Server(0)
    limit = limit_of(server)
    server.down = True
    for _ in range(1000):
        limit.fitted(large())
    assert server.readings == 2
    with pytest.raises(StoreUnavailable):
        limit.tick()


def test_warnings_come_once_when_the_memory_is_first_known(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The store may be away while the worker starts."""
    server = Server(0)
    server.down = True
    limit = MemoryLimit(server.read, 0.0, lambda memory: [f"max {memory.maximum}"])
    with pytest.raises(StoreUnavailable):
        limit.tick()
    server.down = False
    limit.tick()
    limit.tick()
    assert [record.message for record in caplog.records] == [f"max {MAXIMUM}"]


def test_the_log_says_when_letters_are_cut_wait_and_are_whole_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Worse is said at once, better once a minute: memory goes up and down around a limit."""
    now = [0.0]
    server = Server(0)
    limit = MemoryLimit(server.read, 0.8, clock=lambda: now[0])
    for used, seconds in [(85, 0), (85, 1), (95, 2), (70, 3), (95, 4), (70, 63), (70, 64)]:
        server.used, now[0] = used * 1_000_000, seconds
        limit.tick()
    said = [(record.levelno, record.message.rpartition(": ")[2]) for record in caplog.records]
    assert said == [
        (logging.WARNING, "letters are stored without their texts"),
        (logging.ERROR, "letters wait outside of it"),
        (logging.WARNING, "letters are stored whole again"),
    ]


def test_long_arguments_of_a_compressed_body_are_room_too() -> None:
    """They are no part of it: a megabyte of arguments beside ten kilobytes of message."""
    text = f'["{"x" * 500_000}"]'
    letter = replace(large(), body=b"compressed", args_json=text, kwargs_json="{}")
    cut = without_text(letter)
    assert (cut.args_json, cut.kwargs_json) == (None, "{}")
    assert limit_of(Server(89_800_000)).fitted(replace(letter, args_json=None)) is not None
    with pytest.raises(MemoryLimitReached):
        limit_of(Server(89_800_000)).fitted(letter)
