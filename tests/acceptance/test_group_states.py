"""A cause that was resolved and kills a task again: what real workers say of it, and say once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import redis
from fake_sentry import FakeSentry
from waiting import poll
from workers import Worker

from celery_dlq import DeadLetter
from celery_dlq.events import GroupState
from celery_dlq.store.records import Group

DLQ = "orders-DLQ"
SHORT_SIGHT = {"broker_transport_options": {"visibility_timeout": 1}}


@pytest.fixture
def sentry() -> Iterator[FakeSentry]:
    """A Sentry that writes down what it gets."""
    with FakeSentry() as made:
        yield made


def group_of(app: ModuleType) -> Group:
    """The only group of the queue, with or without letters."""
    found = {g.fingerprint: g for s in GroupState for g in app.dlq.groups(DLQ, state=s)}
    (group,) = found.values()
    return group


def test_a_fix_that_does_not_help_is_heard_of_once_and_a_muted_cause_never(
    observed: ModuleType, redis_url: str, tmp_path: Path, sentry: FakeSentry
) -> None:
    """An old worker that is not deployed yet is no regression; the first new one that dies is."""
    dlq = observed.dlq
    signals = tmp_path / "signals"

    def dies_in(release: str, letters: int) -> Worker:
        """Let one task die in a worker of a release; until the queue has so many letters."""
        worker = Worker(
            redis_url,
            tmp_path / f"{release}-{letters}.log",
            {"dlq_release": release},
            env={
                "OBSERVED_SENTRY": json.dumps({"dsn": sentry.dsn}),
                "OBSERVED_SIGNALS": str(signals),
            },
            app="observed_app",
        )
        with worker:
            observed.fails.delay("a")
            poll(lambda: any(q.letters >= letters for q in dlq.queues()), timeout_seconds=30)
            worker.stop()
        return worker

    def reported() -> list[dict[str, Any]]:
        return [event for event in sentry.events if "group" in event.get("tags", {})]

    dies_in("1", 1)
    assert [event["tags"]["group"] for event in reported()] == ["new"]
    dlq.resolve(DLQ, group_of(observed).fingerprint, release="2")
    dlq.purge(DLQ)

    dies_in("1", 1)
    assert group_of(observed).status.state is GroupState.RESOLVED
    assert len(reported()) == 1

    worker = dies_in("2", 2)
    status = group_of(observed).status
    assert (status.state, status.regressed_in) == (GroupState.REGRESSED, "2")
    assert worker.output.count("was resolved") == 1
    first, second = reported()
    assert (second["tags"]["group"], second["release"]) == ("regressed", "2")
    assert second["fingerprint"] == first["fingerprint"]
    dies_in("2", 3)
    assert len(reported()) == 2

    dlq.mute(DLQ, group_of(observed).fingerprint)
    dlq.purge(DLQ)
    dies_in("3", 1)
    assert len(reported()) == 2
    assert len(signals.read_text().splitlines()) == 5


def test_a_worker_killed_after_storing_leaves_one_regression(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    grown_old: Callable[[], None],
    redis_url: str,
) -> None:
    """The message comes back and finds its letter; the state was changed in the same step."""

    def settled(client: Any) -> bool:
        return not client.llen("orders") and not client.hlen("unacked")

    with redis.Redis.from_url(redis_url) as client:
        first = start_worker(SHORT_SIGHT)
        poison.to_dlq.delay("first")
        letters(count=1)
        poll(lambda: settled(client), timeout_seconds=30)
        first.stop()
        poison.dlq.resolve(DLQ, group_of(poison).fingerprint)
        poison.dlq.purge(DLQ)

        sent = poison.to_dlq.delay("again")
        second = start_worker(SHORT_SIGHT, env={"POISON_DIE_AFTER_STORING": "1"})
        second.process.wait(30)
        second.kill()
        (letter,) = letters()
        regressed = group_of(poison).status
        assert (regressed.state, regressed.letter_id) == (GroupState.REGRESSED, letter.id)
        poison.dlq.resolve(DLQ, letter.fingerprint)  # before the message comes back
        grown_old()

        start_worker(SHORT_SIGHT)
        poll(lambda: settled(client), timeout_seconds=30)
    assert [found.task_id for found in letters()] == [sent.id]
    assert group_of(poison).status.state is GroupState.RESOLVED
