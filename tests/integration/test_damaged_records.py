"""One damaged record of the store: the pages show the rest."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter, key_of
from celery import Celery
from redis import Redis
from web_pages import ALL, Pages, get

from celery_dlq import DeadLetters
from celery_dlq.store.worker_records import WorkerInfo
from celery_dlq.web.http import User

PAGES = ("/", "/jobs", "/holds", "/policies", "/audit", f"/queues/{DLQ}", f"/queues/{DLQ}/letters")
DAMAGE = (b"\xff{", b"7", b"", b'{"id": 7, "state": "waiting"}')


@pytest.fixture
def dlq(redis_url: str) -> DeadLetters:
    """An app with one record of each kind."""
    app = Celery("damaged", broker=redis_url, set_as_current=False)
    app.conf.dlq_queues = {"orders": {"max_deliveries": 3}}
    made = DeadLetters(app)
    letter = a_letter()
    backend = made.assembly.backend
    backend.letters.dead_letter(letter, key_of(letter))
    info = WorkerInfo(
        hostname="celery@a", pid=1, version="0.1.0", started_at=NOW, queues=("orders",), tasks=()
    )
    backend.workers.register(info)
    made.note(DLQ, letter.fingerprint, "a note")
    made.mute(DLQ, letter.fingerprint)
    made.hold(queue="orders")
    made.plan("redrive", DLQ)
    made.start(made.plan("discard", DLQ).id)
    made.override_policy("orders", timedelta(hours=1), max_deliveries=4)
    return made


def damages(client: Redis[bytes]) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Each value of each key, and what damages it."""
    for key in sorted(client.scan_iter()):
        kind = client.type(key)
        if kind == b"hash":
            for name in sorted(client.hkeys(key)):
                for bad in DAMAGE:
                    said = f"{key!r} {name!r} {bad!r}"
                    yield said, lambda k=key, n=name, b=bad: client.hset(k, n, b)
        elif kind == b"string":
            for bad in DAMAGE:
                yield f"{key!r} {bad!r}", lambda k=key, b=bad: client.set(k, b, keepttl=True)
        elif kind == b"stream":
            yield f"{key!r}", lambda k=key: client.xadd(k, {"letter": b"\xff", "change": b"7"})


def test_a_damaged_record_takes_no_page_down(
    dlq: DeadLetters, redis_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever is written into any value."""
    caplog.set_level(logging.CRITICAL)
    bad = []
    with Redis.from_url(redis_url) as client:
        state = {key: client.dump(key) for key in client.scan_iter()}
        for said, damage in [*damages(client)]:
            damage()
            web = Pages(dlq, access=lambda _: User(permissions=ALL))
            for page in PAGES:
                status = web.handle(get(page)).status
                if status != 200:
                    bad.append((said, page, status))
            web.close()
            client.flushdb()
            for key, dumped in state.items():
                client.restore(key, 0, dumped)
    assert bad == [], "\n".join(map(str, bad))
