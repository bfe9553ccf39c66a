"""What every `JobBook` does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from celery_dlq.backends.memory import MemoryJobBook
from celery_dlq.backends.redis.connection import connect
from celery_dlq.backends.redis.jobs import MOST_JOBS, RedisJobBook
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.ports import JobBook


@pytest.fixture(params=["memory", "redis"])
def book(request: pytest.FixtureRequest) -> Iterator[JobBook]:
    """Give each book in turn, empty."""
    made: JobBook = MemoryJobBook()
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        made = RedisJobBook(connect(url, 2.0), url, Keys())
    yield made
    made.close()


def test_states_are_kept_newest_first(book: JobBook) -> None:
    """The last state of each job counts."""
    book.write("20260101-1", {"id": "a", "done": 1})
    book.write("20260102-1", {"id": "b"})
    book.write("20260101-1", {"id": "a", "done": 2})
    assert book.all() == [{"id": "b"}, {"id": "a", "done": 2}]
    assert book.read("20260101-1") == {"id": "a", "done": 2}
    assert book.read("x") is None


def test_a_wish_to_cancel_is_told_at_the_next_write(book: JobBook) -> None:
    """And not to others, and no more once it is taken back."""
    book.write("1", {})
    book.cancel("1")
    assert (book.write("1", {}), book.write("2", {})) == (True, False)
    book.cancel("1", wanted=False)
    assert not book.write("1", {})


def test_one_process_takes_a_run(book: JobBook) -> None:
    """Two that resume one job at once would redrive its letters twice."""
    assert [book.take("1", 2), book.take("1", 2), book.take("1", 3)] == [True, False, True]


def test_the_oldest_jobs_are_forgotten(book: JobBook) -> None:
    """With what was wanted of them."""
    book.cancel("0000")
    book.take("0000", 2)
    for number in range(MOST_JOBS + 5):
        book.write(f"{number:04d}", {"n": number})
    assert len(book.all()) == MOST_JOBS
    assert book.read("0004") is None
    assert book.read("0005") is not None
    if isinstance(book, RedisJobBook):
        assert book._client.hlen(Keys().wishes()) == 0
