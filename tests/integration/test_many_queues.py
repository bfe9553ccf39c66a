"""Thousands of dead-letter queues: asking all of them is a few round trips, not one for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from builders import a_letter, key_of
from celery import Celery
from web_pages import ALL, SECRET, Pages, get

from celery_dlq import DeadLetters
from celery_dlq.errors import NotFound
from celery_dlq.features.exchange.publisher import Outbox
from celery_dlq.features.prometheus.exporter import Exporter
from celery_dlq.features.trends import growth
from celery_dlq.web.http import User

QUEUES = 350
MOST_WRITES = QUEUES // 7  # two rounds of 14, and what is asked again on a slow machine (its time)


@pytest.fixture(scope="module")
def shop(redis_server: Any) -> Iterator[DeadLetters]:
    """An app with many dead-letter queues, a letter in each."""
    redis_server.client().flushall()
    app = Celery("shop", broker=redis_server.url, set_as_current=False)
    app.conf.dlq_queues = {"*": {"dead_letter_ttl": 3600}}
    made = DeadLetters(app)
    for number in range(QUEUES):
        letter = a_letter(dead_letter_queue=f"{number:04d}-DLQ", body=b"x" * 100_000)
        made.store.dead_letter(letter, key_of(letter))
    yield made
    made.close()


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One for each write to Redis, as redis-py does it, but for those that open a connection."""
    sent: list[int] = []
    real = redis.connection.Connection.send_packed_command

    def counted(self: Any, command: Any, *args: Any, **kwargs: Any) -> Any:
        if not re.match(rb"\*\d+\r\n\$\d+\r\n(CLIENT|HELLO|SELECT)\r\n", b"".join(command)):
            sent.append(1)
        return real(self, command, *args, **kwargs)

    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", counted)
    return sent


def unknown(find: Callable[[str], object]) -> Callable[[], str]:
    """Look for a letter that is nowhere; return the error's text."""

    def look() -> str:
        with pytest.raises(NotFound) as raised:
            find("0" * 8)
        return str(raised.value)

    return look


def test_all_queues_are_asked_in_a_few_writes(shop: DeadLetters, writes: list[int]) -> None:
    """Each would wait for its answer before: a quarter of a minute for two thousand."""
    names = shop.store.names()
    letter = next(shop.letters(names[-1]))
    outbox = shop.assembly.backend.part(Outbox)
    collector = Exporter(shop.assembly)
    asked: dict[str, Callable[[], Any]] = {
        "queues": shop.queues,
        "get": lambda: shop.get(letter.id),
        "get by first digits": lambda: shop.get(letter.id[:8]),
        "get what is not there": unknown(shop.get),
        "restore": unknown(shop.restore),
        "trim": lambda: shop.trim(dry_run=True),
        "scrape": lambda: list(collector.collect()),
        "entries": lambda: outbox.holding(names),
    }
    for what, ask in asked.items():
        del writes[:]
        ask()
        assert 0 < len(writes) <= MOST_WRITES, what


def test_the_overview_of_two_thousand_queues_asks_in_a_few_writes(
    redis_server: Any, writes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Redis is 10 ms away, eighty writes were most of a second; the rest is found by name."""
    # How much it compares within its 20 ms depends on the machine: all that it ever does.
    monkeypatch.setattr(growth, "SECONDS", 60.0)
    url = f"{redis_server.url.rpartition('/')[0]}/1"  # beside the other queues
    app = Celery("bazaar", broker=url, set_as_current=False)
    app.conf.dlq_queues = {"*": {}}
    dlq = DeadLetters(app)
    for number in range(2000):
        letter = a_letter(dead_letter_queue=f"q{number:04d}-DLQ")
        dlq.store.dead_letter(letter, key_of(letter))
    letter = a_letter(dead_letter_queue="q1234-DLQ")
    dlq.store.dead_letter(letter, key_of(letter))
    web = Pages(dlq, access=lambda _: User(name="olga", permissions=ALL), secret=SECRET)

    def shown(query: str, most: int) -> list[str]:
        del writes[:]
        answer = web.handle(get("/", query=query))
        assert answer.status == 200
        assert len(writes) <= most
        return re.findall(r">(q\d+-DLQ)</a>", answer.body.decode())

    pages = [shown("", 60), shown("page=2", 36), shown("page=10", 36)]
    assert [*map(len, pages)] == [100, 100, 100]
    assert pages[0][0] == "q1234-DLQ", "the one with the most letters of the last hour is first"
    assert not {*pages[0]} & {*pages[1]}
    assert shown("q=Q012", 36) == [f"q012{digit}-DLQ" for digit in range(10)]
    assert not shown("q=nobody", 12)
    web.close()
    dlq.close()


def test_a_message_names_some_of_many_queues(shop: DeadLetters) -> None:
    """Not a screen full of names."""
    said = unknown(shop.get)()
    assert "0019-DLQ and 330 more" in said
    with pytest.raises(NotFound, match="0019-DLQ and 330 more"):
        shop.groups("nowhere")


def test_a_summary_is_right_however_many_there_are(shop: DeadLetters) -> None:
    """Each queue gets its own numbers."""
    shop.purge("0100-DLQ")
    found = shop.queues()
    assert [queue.name for queue in found] == shop.store.names()
    assert [queue.name for queue in found if not queue.letters] == ["0100-DLQ"]
    assert {tuple(queue.reasons.items()) for queue in found if queue.letters} == {(("failed", 1),)}
    assert {queue.last_hour for queue in found} == {1}
