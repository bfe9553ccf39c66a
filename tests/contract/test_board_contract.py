"""What every `Board` does."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from builders import NOW

from celery_dlq.backends.memory import MemoryBoard
from celery_dlq.backends.redis.board import RedisBoard
from celery_dlq.backends.redis.connection import connect
from celery_dlq.backends.redis.keys import Keys
from celery_dlq.events import Action, Change
from celery_dlq.ports import Board, Override, WorkerCard


@pytest.fixture(params=["memory", "redis"])
def board(request: pytest.FixtureRequest) -> Iterator[Board]:
    """Give each board in turn, empty."""
    made: Board = MemoryBoard()
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        made = RedisBoard(connect(url, 2.0), url, Keys())
    yield made
    made.close()


def a_card(**changes: Any) -> WorkerCard:
    """The card of a worker."""
    values: dict[str, Any] = {
        "hostname": "celery@web-1",
        "pid": 4711,
        "version": "0.1.0",
        "started_at": NOW,
        "queues": ("orders", "mails"),
        "tasks": ("shop.charge",),
        "policies": {"orders": {"max_deliveries": 3}},
    }
    return WorkerCard(**{**values, **changes})


def an_override(**changes: Any) -> Override:
    """An override for an hour."""
    values: dict[str, Any] = {
        "queue": "orders",
        "key": "max_deliveries",
        "value": 3,
        "until": datetime.now(timezone.utc) + timedelta(hours=1),
        "actor": "ann@desk",
    }
    return Override(**{**values, **changes})


def test_a_card_is_up_until_its_worker_takes_it_down(board: Board) -> None:
    """Everything on it is read as it was written."""
    first, second = a_card(), a_card(hostname="celery@web-2", policies={})
    board.announce(second)
    board.announce(first)

    assert board.workers() == [first, second]
    assert [card.tasks for card in board.workers(with_tasks=False)] == [(), ()]
    assert board.workers(with_tasks=False)[0].policies == first.policies

    board.leave("celery@web-1")

    assert board.workers() == [second]
    assert board.alive("celery@web-1")[0] is False
    assert board.alive("celery@web-2")[0] is True


def test_the_newest_changes_come_first(board: Board) -> None:
    """What was done, by whom, to how many letters."""
    changes = [
        Change(
            at=NOW + timedelta(seconds=n), action=Action.REDRIVEN, actor="ann@desk",
            target="orders-DLQ", letters=n, detail={"filter": {"reason": "failed"}},
        )
        for n in range(3)
    ]  # fmt: skip
    for change in changes:
        board.record(change)

    assert board.changes(limit=2) == [changes[2], changes[1]]


def test_an_override_is_in_force_until_its_end(
    board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker notices by the revision; the store's clock says when the end is."""
    now = board.now()
    _, before = board.alive("celery@web-1")
    board.override(an_override(value=5))
    board.override(an_override(until=now + timedelta(hours=1)))
    board.override(an_override(key="reasons", value=["failed"], until=now + timedelta(hours=2)))
    _, after = board.alive("celery@web-1")

    assert after > before
    assert [o.value for o in board.overrides()] == [3, ["failed"]]
    with monkeypatch.context() as later:
        later.setattr(board, "now", lambda: now + timedelta(hours=1))
        assert [o.key for o in board.overrides()] == ["reasons"]
    assert [o.key for o in board.overrides()] == ["reasons"]


def test_an_override_can_be_lifted(board: Board) -> None:
    """Once."""
    board.override(an_override())

    assert board.lift("orders", "max_deliveries") is True
    assert board.lift("orders", "max_deliveries") is False
    assert board.overrides() == []
