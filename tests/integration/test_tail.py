"""``dlq tail --follow`` while Redis is away."""

from __future__ import annotations

import threading

import pytest
from builders import DLQ, a_letter, an_app, key_of
from servers import RedisServer
from waiting import poll

from celery_dlq.plugin import DeadLetters


def test_following_letters_waits_for_a_redis_that_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It says so once, and shows each letter once."""
    with RedisServer("--dbfilename", "dump.rdb") as server:
        dlq = DeadLetters(an_app(dlq_url=server.url))
        letters = [a_letter() for _ in range(4)]
        dlq.store.dead_letter(letters[0], key_of(letters[0]))
        stop = threading.Event()
        found: list[str] = []
        coming = dlq.tail(DLQ, stop=stop.is_set)
        thread = threading.Thread(target=lambda: [found.append(letter.id) for letter in coming])
        thread.start()
        try:
            dlq.store.dead_letter(letters[1], key_of(letters[1]))
            server.client().save()
            server.kill()
            poll(lambda: "does not answer" in caplog.text, timeout_seconds=20)
            server.start()
            for letter in letters[2:]:
                dlq.store.dead_letter(letter, key_of(letter))
            poll(lambda: len(found) >= 3, timeout_seconds=20)
        finally:
            stop.set()
            thread.join(20)
        dlq.close()
    assert found == [letter.id for letter in letters[1:]]
    assert caplog.text.count("does not answer") == 1
