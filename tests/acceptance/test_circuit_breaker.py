"""A downstream outage: letters stop, the rest is held, probes find its end, everything runs."""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import ModuleType
from typing import Any

import intervals
import pytest
import redis
from waiting import poll
from workers import Place, Worker, run_python

BREAKER = {"deaths": 20, "window": 60}
CONF: dict[str, Any] = {"dlq_queues": {"orders": {"max_deliveries": 3, "circuit_breaker": BREAKER}}}
TASK = "poison_app.calls_downstream"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breakers probe every second."""
    intervals.change(monkeypatch, probe=1)


@pytest.fixture
def downstream(redis_url: str) -> Iterator[redis.Redis]:
    """The database whose key ``outage`` makes the task fail."""
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        yield client


def publish(redis_url: str, place: Place, first: int, number: int) -> None:
    """Publish this many messages, numbered, from a process of its own."""
    code = (
        "import sys, poison_app as p\n"
        "for n in range(int(sys.argv[1]), int(sys.argv[2])):\n"
        f"    p.app.send_task({TASK!r}, (str(n),))"
    )
    done = run_python(redis_url, "-c", code, str(first), str(first + number), **place.env)
    assert done.returncode == 0, done.stderr


def states(poison: ModuleType) -> list[str]:
    """The states of the breakers that are not closed."""
    return [one.state for one in poison.dlq.breakers()]


def held(poison: ModuleType) -> int:
    """The number of held messages."""
    return sum(one.held for one in poison.dlq.holds())


def number_of_letters(poison: ModuleType) -> int:
    """The number of letters."""
    return sum(queue.letters for queue in poison.dlq.queues())


def succeeded(downstream: redis.Redis) -> list[int]:
    """The messages that succeeded, in their order."""
    return [int(key) for key in downstream.lrange("succeeded", 0, -1)]


def args(poison: ModuleType) -> list[int]:
    """The held messages, in their order."""
    (one,) = poison.dlq.breakers()
    store = poison.dlq.assembly.backend.held
    found = store.letters(one.hold.id, newest_first=False)
    return [int(json.loads(entry.letter.args_json or "")[0]) for entry in found]


@pytest.mark.parametrize("place", ["redis", "classic"], indirect=True)
def test_an_outage_makes_few_letters_and_everything_else_runs_after_it(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    downstream: redis.Redis,
    place: Place,
) -> None:
    """Letters stop at about ``deaths``; two workers make one opening and one closing."""
    total = 400
    downstream.set("outage", 1)
    for number in range(2):
        start_worker(CONF, arguments=("-n", f"w{number}@test"), env=place.env)
    publish(redis_url, place, 0, total)
    poll(lambda: number_of_letters(poison) + held(poison) >= total, timeout_seconds=90)
    letters = number_of_letters(poison)
    assert 20 <= letters <= 20 + 40
    assert states(poison) == ["open"]
    order = args(poison)
    assert max(abs(n - place) for place, n in enumerate(order)) < total / 2

    downstream.delete("outage")
    poll(
        lambda: len(succeeded(downstream)) >= total - number_of_letters(poison), timeout_seconds=90
    )
    poll(lambda: states(poison) == [], timeout_seconds=30)
    assert held(poison) == 0
    assert len(set(succeeded(downstream))) == len(succeeded(downstream))
    assert number_of_letters(poison) <= letters + 3, "a probe that met the outage, perhaps"
    actions = Counter(str(change.action) for change in poison.dlq.changes())
    assert (actions["circuit_opened"], actions["circuit_closed"]) == (1, 1)


@pytest.mark.parametrize("place", ["redis", "quorum"], indirect=True)
def test_the_books_balance_while_workers_are_killed(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    downstream: redis.Redis,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At any time, in any state: each message succeeds or is a letter, and none is held."""
    intervals.change(  # others go on with what a killed worker had begun
        monkeypatch,
        job_silent=timedelta(seconds=4),
        claim=10.0,
        release_retry=timedelta(seconds=5),
    )
    total, conf = 200, {**CONF, "dlq_lease": 5}
    downstream.set("outage", 1)
    workers = [start_worker(conf, arguments=("-n", f"w{n}@test"), env=place.env) for n in range(2)]
    publish(redis_url, place, 0, total)
    chance = random.Random(7)  # noqa: S311 - when to kill

    def kill_until(there: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 120
        while not there() and time.monotonic() < deadline:
            time.sleep(chance.uniform(1, 4))
            workers.reverse()
            workers[0].kill()
            workers[0].start(wait=False)

    kill_until(lambda: held(poison) > total / 2)
    kill_until(lambda: number_of_letters(poison) >= 22)  # so that probes died, too
    downstream.delete("outage")
    kill_until(lambda: len(set(succeeded(downstream))) > total / 4)
    poll(lambda: states(poison) == [] and held(poison) == 0, timeout_seconds=120)

    def all_ended() -> bool:
        letters = {int(json.loads(x.args_json or "")[0]) for x in poison.dlq.letters("orders-DLQ")}
        return letters | set(succeeded(downstream)) == set(range(total))

    poll(all_ended, timeout_seconds=60)


def test_a_released_message_that_dies_of_the_same_opens_again(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    downstream: redis.Redis,
) -> None:
    """The rest stays held, also what was on its way; later all of it runs."""
    downstream.set("outage", 1)
    start_worker(CONF)
    publish(redis_url, Place("redis"), 0, 200)
    poll(lambda: number_of_letters(poison) + held(poison) == 200, timeout_seconds=60)
    downstream.delete("outage")
    poll(lambda: len(succeeded(downstream)) > 10, timeout_seconds=60)
    downstream.set("outage", 1)
    poll(lambda: states(poison) == ["open"], timeout_seconds=30)
    died = number_of_letters(poison)
    assert died < 60
    downstream.delete("outage")
    poll(lambda: states(poison) == [] and held(poison) == 0, timeout_seconds=90)
    poll(lambda: len(succeeded(downstream)) == 200 - number_of_letters(poison), timeout_seconds=30)
    actions = Counter(str(change.action) for change in poison.dlq.changes())
    assert actions["circuit_opened"] == 2


def test_a_cancelled_release_and_a_restart_of_all_workers_leave_nothing_held(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    downstream: redis.Redis,
) -> None:
    """The breaker opens, probes, and releases the rest, whoever runs by then."""
    total, conf = 200, {**CONF, "dlq_lease": 5}
    downstream.set("outage", 1)
    workers = [start_worker(conf, arguments=("-n", f"w{n}@test")) for n in range(2)]
    publish(redis_url, Place("redis"), 0, total)
    poll(lambda: number_of_letters(poison) + held(poison) == total, timeout_seconds=60)
    downstream.delete("outage")
    poll(lambda: [job.state for job in poison.dlq.jobs()] == ["running"], timeout_seconds=60)
    poison.dlq.cancel(poison.dlq.jobs()[0].id)
    for worker in workers:
        worker.kill()
        worker.start(wait=False)
    poll(lambda: states(poison) == [] and held(poison) == 0, timeout_seconds=90)
    poll(
        lambda: len(set(succeeded(downstream))) == total - number_of_letters(poison),
        timeout_seconds=30,
    )


def test_without_a_breaker_nothing_is_held(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    downstream: redis.Redis,
) -> None:
    """Each message of the outage is a letter, and nothing is counted."""
    downstream.set("outage", 1)
    start_worker()
    publish(redis_url, Place("redis"), 0, 60)
    poll(lambda: number_of_letters(poison) == 60, timeout_seconds=60)
    assert poison.dlq.holds() == []
    with redis.Redis.from_url(redis_url) as client:
        assert not list(client.scan_iter("*breaker_ends*"))


def test_a_full_breaker_probes_with_what_is_on_the_broker(
    poison: ModuleType,
    redis_url: str,
    start_worker: Callable[..., Worker],
    downstream: redis.Redis,
) -> None:
    """A probe from its queue would wait behind that; in the end all runs."""
    downstream.set("outage", 1)
    few = json.dumps({"celery_dlq.store.holds:MOST_HELD": 30})
    worker = start_worker(CONF, env={"POISON_CONSTANTS": few})
    publish(redis_url, Place("redis"), 0, 120)
    poll(lambda: "Queue orders is not consumed" in worker.output, timeout_seconds=60)
    downstream.delete("outage")
    poll(lambda: states(poison) == [] and held(poison) == 0, timeout_seconds=90)
    poll(lambda: len(succeeded(downstream)) == 120 - number_of_letters(poison), timeout_seconds=60)
    assert "is full; a message runs as a probe" in worker.output
