"""The release of a letter is that of the delivery that killed it, whoever writes the letter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from test_brokers import publish
from workers import Place, Worker

from celery_dlq import DeadLetter

SHORT_SIGHT = {"broker_transport_options": {"visibility_timeout": 1}}


@pytest.mark.parametrize("place", ["redis", "quorum"], indirect=True)
@pytest.mark.parametrize("task", ["kills_worker", "killed"])
def test_a_worker_of_the_fix_writes_the_letter_of_the_release_that_killed(
    task: str,
    place: Place,
    redis_url: str,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
    grown_old: Callable[[], None],
    poison: Any,
) -> None:
    """A rolling deploy: the last allowed delivery ran on the bad release, the fix finds it dead."""
    limit = {"dlq_queues": {"orders": {"max_deliveries": 1}}}
    conf = {**limit, **(SHORT_SIGHT if place.name == "redis" else {})}
    env = {**place.env, "POISON_MESSAGES": "1"}
    publish(redis_url, place, [task])
    bad = start_worker({**conf, "dlq_release": "shop#bad, 1 ü"}, env=env, wait=False)
    assert bad.lives_until(lambda: ran(task) > 0, timeout_seconds=30) or ran(task)
    if task == "kills_worker":
        bad.process.wait(30)
        bad.kill()
        grown_old()
        start_worker({**conf, "dlq_release": "fixed"}, env=env, wait=False)

    (letter,) = letters()

    assert letter.release == "shop#bad, 1 ü"
    assert [d.release for d in letter.history] == ["shop#bad, 1 ü"]
    assert list(poison.dlq.letters("orders-DLQ", release="shop#bad, 1 ü")) == [letter]
    (group,) = poison.dlq.groups("orders-DLQ")
    assert "fixed" not in group.releases


def test_a_death_of_the_old_release_that_the_fix_writes_down_is_no_regression(
    poison: Any,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    grown_old: Callable[[], None],
) -> None:
    """Resolved with the release of the fix: what the bad release had killed says nothing of it."""
    conf = {**SHORT_SIGHT, "dlq_queues": {"orders": {"max_deliveries": 1}}}
    for done in range(2):
        poison.kills_worker.delay("a")
        bad = start_worker({**conf, "dlq_release": "bad"}, wait=False)
        bad.process.wait(30)
        bad.kill()
        grown_old()
        fixed = start_worker({**conf, "dlq_release": "fixed"}, wait=False)
        (letter, *_) = letters(count=1)
        fixed.stop()
        if not done:
            poison.dlq.resolve("orders-DLQ", letter.fingerprint, release="fixed")
            poison.dlq.purge("orders-DLQ")

    (group,) = poison.dlq.groups("orders-DLQ", state="resolved")
    assert group.letters == 1
