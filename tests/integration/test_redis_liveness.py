"""Redelivered messages and the workers they ran on: dead, alive, or not known yet.

A broker delivers a message again because its worker died, or because it believes so (a
visibility time-out). Only the first is a delivery to be charged.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import timedelta

import intervals
import pytest
from builders import DLQ, NOW, a_delivery, a_key, an_ended_delivery
from servers import RedisServer
from waiting import poll

from celery_dlq.store.connect import connect
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.worker_records import Count, CountStatus, MessageKey

KEYS = Keys()
STALE_SECONDS = 1.0
A_WHILE = 3600.0


class Workers:
    """Makes counters, each that of another worker process."""

    def __init__(self, url: str, open_ones: ExitStack) -> None:
        self._url = url
        self._open = open_ones

    def start(self, stale_seconds: float = STALE_SECONDS) -> DeliveryCounter:
        """The counter of a new worker process."""
        connection = PipelinedConnection(connect(self._url, 5.0, retries=0), self._url)
        with pytest.MonkeyPatch.context() as patch:
            intervals.change(patch, counter_stale=stale_seconds)
            counter = DeliveryCounter(connection, KEYS, 3600.0)
        self._open.callback(counter.close)
        return counter


@pytest.fixture
def workers(redis_url: str) -> Iterator[Workers]:
    """Give worker processes on the shared server."""
    with ExitStack() as open_ones:
        yield Workers(redis_url, open_ones)


class Redelivery:
    """A message that a worker holds and asks about, as the guard does: now and then."""

    def __init__(self, counter: DeliveryCounter, key: MessageKey, limit: int | None = None) -> None:
        self._counter, self._key, self._limit = counter, key, limit
        self._seen_at: float | None = None

    def ask(self) -> Count:
        """The answer of counting now."""
        waited = None if self._seen_at is None else time.monotonic() - self._seen_at
        count = self._counter.count_delivery(
            self._key, a_delivery(), self._limit, waited_seconds=waited
        )
        if count.status is CountStatus.UNCERTAIN and self._seen_at is None:
            self._seen_at = time.monotonic()
        return count

    def answer(self, *alive: DeliveryCounter) -> Count:
        """The last answer of counting, while some workers give heartbeats."""

        def certain() -> Count | None:
            for counter in alive:
                counter.heartbeat([DLQ])
                counter.flush()
            count = self.ask()
            return None if count.status is CountStatus.UNCERTAIN else count

        return poll(certain, timeout_seconds=STALE_SECONDS + 10, every_seconds=0.05)  # type: ignore[return-value]


def test_a_message_of_a_worker_that_died_this_moment_is_uncertain(workers: Workers) -> None:
    """Its last heartbeat is fresh, so nothing is counted yet, however often one asks."""
    died, other, key = workers.start(A_WHILE), workers.start(A_WHILE), a_key()
    died.count_first(key, a_delivery())
    died.flush()
    redelivery = Redelivery(other, key)
    assert [redelivery.ask() for _ in range(3)] == [Count(CountStatus.UNCERTAIN, 1)] * 3


def test_a_message_of_a_worker_that_stays_silent_is_counted(workers: Workers) -> None:
    """After the stale time the worker is dead, and this is the second delivery."""
    died, other, key = workers.start(), workers.start(), a_key()
    died.count_first(key, a_delivery())
    died.flush()
    assert Redelivery(other, key).answer(other) == Count(CountStatus.COUNTED, 2)


def test_the_limit_holds_after_a_worker_died(workers: Workers) -> None:
    """The waiting changes nothing about the bound."""
    died, other, key = workers.start(), workers.start(), a_key()
    died.count_first(key, a_delivery())
    died.flush()
    assert Redelivery(other, key, limit=1).answer() == Count(CountStatus.LIMIT_REACHED, 1)


def test_a_message_that_runs_on_a_live_worker_is_not_charged(workers: Workers) -> None:
    """A visibility time-out shorter than the task delivers a copy; nobody has died."""
    running, other, key = workers.start(A_WHILE), workers.start(A_WHILE), a_key()
    running.count_first(key, a_delivery())
    running.flush()
    redelivery = Redelivery(other, key, limit=1)
    assert redelivery.answer(running, other) == Count(CountStatus.RUNNING, 1)
    running.record_end(key, an_ended_delivery())
    assert len(running.history(key)) == 1


def test_a_message_whose_delivery_ended_is_counted_at_once(workers: Workers) -> None:
    """A live worker that gave it back is done with it."""
    first, other, key = workers.start(A_WHILE), workers.start(A_WHILE), a_key()
    first.count_first(key, a_delivery())
    first.record_end(key, an_ended_delivery())
    first.flush()
    assert Redelivery(other, key).ask() == Count(CountStatus.COUNTED, 2)


def test_an_interrupted_message_is_counted_at_once_and_not_charged(workers: Workers) -> None:
    """After a cold shutdown the next worker need not wait until the old one is stale."""
    first, other, key = workers.start(A_WHILE), workers.start(A_WHILE), a_key()
    first.count_first(key, a_delivery())
    first.record_end(key, an_ended_delivery(), charged=False)
    first.flush()
    assert Redelivery(other, key).ask() == Count(CountStatus.COUNTED, 1)


def test_a_restarted_worker_of_the_same_name_and_pid_is_another(workers: Workers) -> None:
    """In a container every process has pid 1; its heartbeats are not the dead one's."""
    died, restarted, key = workers.start(), workers.start(), a_key()
    died.count_first(key, a_delivery(worker_hostname="celery@pod", worker_pid=1))
    died.flush()
    restarted.count_first(a_key(), a_delivery(worker_hostname="celery@pod", worker_pid=1))
    assert Redelivery(restarted, key).answer(restarted) == Count(CountStatus.COUNTED, 2)


@pytest.mark.parametrize("here", [True, False])
def test_a_record_under_its_own_name_is_no_other_worker(workers: Workers, here: bool) -> None:
    """The end is not on record; the worker itself knows whether the delivery still runs."""
    worker, key = workers.start(A_WHILE), a_key()
    worker.count_first(key, a_delivery())
    worker.flush()
    again = a_delivery(started_at=NOW + timedelta(seconds=1))
    count = worker.count_delivery(key, again, None, here=here)
    assert count == Count(*((CountStatus.UNCERTAIN, 1) if here else (CountStatus.COUNTED, 2)))
    assert not count.suspect


def test_copies_of_a_running_message_are_charged_in_the_end(workers: Workers) -> None:
    """Bounded: should the note of an end be lost, a poison message still does not run forever."""
    running, other, key = workers.start(A_WHILE), workers.start(A_WHILE), a_key()
    running.count_first(key, a_delivery())
    running.flush()
    redelivery = Redelivery(other, key)
    redelivery.answer(running)
    standings = []
    for _ in range(30):
        standings.append(redelivery.answer(running).status)
        if standings[-1] is CountStatus.COUNTED:
            break
    assert CountStatus.COUNTED in standings
    assert set(standings[:-1]) == {CountStatus.RUNNING}


def test_signs_of_life_are_kept_for_live_workers_only(
    workers: Workers, redis_server: RedisServer
) -> None:
    """Pods come and go; Redis forgets those that have been silent for a day."""
    client, place = redis_server.client(), KEYS.workers(DLQ)
    client.zadd(place, {"1@gone#00000000": time.time() * 1000 - 25 * 3600 * 1000})
    worker = workers.start()
    worker.count_first(a_key(), a_delivery())
    worker.flush()
    worker.heartbeat([DLQ])
    worker.flush()
    worker.history(a_key())
    assert client.zcard(place) == 1
    assert client.pttl(place) > 0


def test_the_first_message_of_a_queue_is_counted_once_when_scripts_were_lost(
    workers: Workers, redis_server: RedisServer
) -> None:
    """The count and the first heartbeat go out together; one refusal must not double one."""
    worker, key = workers.start(), a_key(dead_letter_queue="mail-DLQ")
    worker.count_first(a_key(), a_delivery())
    worker.flush()
    redis_server.client().script_flush()
    worker.count_first(key, a_delivery())
    worker.flush()
    worker.history(key)
    assert redis_server.client().hget(KEYS.run(key), "count:0") == b"1"


def test_signs_of_life_survive_the_loss_of_scripts(
    workers: Workers, redis_server: RedisServer
) -> None:
    """A worker must not look dead because somebody emptied the script cache."""
    worker, names = workers.start(), [DLQ, "mail-DLQ"]
    worker.count_first(a_key(), a_delivery())
    worker.flush()
    redis_server.client().script_flush()
    worker.heartbeat(names)
    worker.flush()
    worker.history(a_key())
    assert all(redis_server.client().zcard(KEYS.workers(name)) == 1 for name in names)


def test_the_end_of_a_delivery_is_written_when_redis_is_back() -> None:
    """An outage at the wrong moment must not make a finished delivery look like a crash."""
    with (
        RedisServer("--appendonly", "yes", "--appendfsync", "always") as server,
        ExitStack() as open_ones,
    ):
        workers, key = Workers(server.url, open_ones), a_key()
        worker = workers.start()
        worker.count_first(key, a_delivery())
        worker.flush()
        server.kill()
        worker.record_end(key, an_ended_delivery())
        server.start()

        def written() -> bool:
            worker.flush()
            return bool(server.client().hexists(KEYS.run(key), "end:0:1"))

        poll(written, timeout_seconds=20)
        assert worker.history(key) == (an_ended_delivery(),)


def test_signs_of_life_never_raise() -> None:
    """The guard gives them once a second, whatever Redis does."""
    with RedisServer() as server, ExitStack() as open_ones:
        worker = Workers(server.url, open_ones).start()
        worker.count_first(a_key(), a_delivery())
        server.kill()
        worker.heartbeat([DLQ, "mail-DLQ"])
        worker.flush()
