"""The contract of every `DeliveryCounter`.

A message is delivered again after its delivery has ended, or because its worker died. What
a counter with several workers makes of the second case is in
``tests/integration/test_redis_liveness.py``; here each delivery ends before the next begins.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from itertools import count
from typing import Any

import pytest
from builders import DLQ, NOW, a_delivery, a_key, an_ended_delivery
from fresh import strict_counter
from servers import RedisServer

from celery_dlq.letters.record import Delivery, Outcome
from celery_dlq.store.connect import connect
from celery_dlq.store.counter import HISTORY_LIMIT, DeliveryCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.pipelined import PipelinedConnection
from celery_dlq.store.worker_records import Count, CountStatus, MessageKey

TTL_SECONDS = 3600
_SECONDS = count()


def a_start(**changes: Any) -> Delivery:
    """A delivery that begins after all earlier ones."""
    return a_delivery(**{"started_at": NOW + timedelta(seconds=next(_SECONDS)), **changes})


def delivered(counter: DeliveryCounter, key: MessageKey, limit: int | None = None) -> Count:
    """Count one delivery, and end it if it could begin."""
    start = a_start(retries=key.retries)
    answer = counter.count_delivery(key, start, limit)
    if answer.status is CountStatus.COUNTED:
        counter.record_end(key, an_end(start, answer.number))
    return answer


def two_messages() -> tuple[MessageKey, MessageKey]:
    """Two messages with one task id."""
    first = a_key(publication="a")
    return first, replace(first, publication="b")


def an_end(start: Delivery, number: int, **changes: Any) -> Delivery:
    """The end of a delivery that was counted."""
    values = {"number": number, "retries": start.retries, "started_at": start.started_at}
    return an_ended_delivery(**{**values, **changes})


def number(counter: DeliveryCounter, key: MessageKey) -> int:
    """Number of deliveries of a message, read without counting."""
    return max((d.number for d in counter.history(key) if d.retries == key.retries), default=0)


def starts(counter: DeliveryCounter, key: MessageKey) -> list[tuple[int, int]]:
    """Retries and number of all recorded deliveries of a task."""
    return [(delivery.retries, delivery.number) for delivery in counter.history(key)]


def test_a_message_whose_letter_is_elsewhere_is_dead_here(counter: DeliveryCounter) -> None:
    """Its counts go; a copy that comes late is recognised, a retry of it is not meant."""
    key, other = a_key(), a_key()
    delivered(counter, key)
    counter.record_death(key)
    assert counter.is_dead(key)
    assert not counter.is_dead(other)
    assert counter.history(key) == ()
    assert counter.count_delivery(key, a_start(), None, unless_late=True).status is CountStatus.DEAD
    assert counter.count_delivery(key, a_start(), None) == Count(CountStatus.COUNTED, 1)
    assert not counter.is_dead(key)


# -- counting --------------------------------------------------------------------------


def test_deliveries_are_numbered_from_one(counter: DeliveryCounter) -> None:
    """Each start of one message gets the next number."""
    key = a_key()
    assert [delivered(counter, key) for _ in range(3)] == [
        Count(CountStatus.COUNTED, 1),
        Count(CountStatus.COUNTED, 2),
        Count(CountStatus.COUNTED, 3),
    ]


def test_a_delivery_that_nobody_ended_was_one(counter: DeliveryCounter) -> None:
    """A worker that died leaves a start without an end; the next start counts on."""
    key = a_key()
    numbers = [counter.count_delivery(key, a_start(), None).number for _ in range(3)]
    assert numbers == [1, 2, 3]


def test_a_message_that_was_never_counted_has_no_history(counter: DeliveryCounter) -> None:
    """Asking counts nothing."""
    key = a_key()
    assert counter.history(key) == ()
    assert delivered(counter, key).number == 1


def test_an_unawaited_count_is_seen_by_the_next_awaited_one(counter: DeliveryCounter) -> None:
    """A redelivered message waits for its number; the first start counts in it."""
    key, start = a_key(), a_start()
    counter.count_first(key, start)
    counter.record_end(key, an_end(start, 1))
    assert delivered(counter, key) == Count(CountStatus.COUNTED, 2)


def test_an_unawaited_count_is_seen_without_a_flush(counter: DeliveryCounter) -> None:
    """The mark is on its way when the call returns."""
    key = a_key()
    counter.count_first(key, a_start())
    assert starts(counter, key) == [(0, 1)]


def test_at_the_limit_nothing_is_counted(counter: DeliveryCounter) -> None:
    """A message at its limit may be offered again and again without changing its count."""
    key = a_key()
    answers = [delivered(counter, key, 2) for _ in range(5)]
    assert answers[:2] == [Count(CountStatus.COUNTED, 1), Count(CountStatus.COUNTED, 2)]
    assert answers[2:] == [Count(CountStatus.LIMIT_REACHED, 2)] * 3
    assert starts(counter, key) == [(0, 1), (0, 2)]


def test_the_limit_holds_for_deliveries_that_nobody_ended(counter: DeliveryCounter) -> None:
    """A message that kills every worker is not started once more."""
    key = a_key()
    standings = [counter.count_delivery(key, a_start(), 2).status for _ in range(4)]
    assert standings == [CountStatus.COUNTED] * 2 + [CountStatus.LIMIT_REACHED] * 2


def test_a_higher_limit_counts_on(counter: DeliveryCounter) -> None:
    """An operator may raise a limit; the count is kept."""
    key = a_key()
    delivered(counter, key, 1)
    assert delivered(counter, key, 1).status is CountStatus.LIMIT_REACHED
    assert delivered(counter, key, 2) == Count(CountStatus.COUNTED, 2)


def test_a_message_above_a_lowered_limit_is_refused(counter: DeliveryCounter) -> None:
    """An operator may lower a limit below what was counted."""
    key = a_key()
    for _ in range(3):
        delivered(counter, key)
    assert delivered(counter, key, 2) == Count(CountStatus.LIMIT_REACHED, 3)


def test_deliveries_that_the_worker_knows_of_count(counter: DeliveryCounter) -> None:
    """A failover may have lost some; those that are on record are not counted twice."""
    key = a_key()
    delivered(counter, key)
    start = a_start()
    assert counter.count_delivery(key, start, 9, known=4) == Count(CountStatus.COUNTED, 5)
    counter.record_end(key, an_end(start, 5))
    assert counter.count_delivery(key, a_start(), 9, known=5).number == 6


def test_what_the_worker_knows_uses_up_the_limit(counter: DeliveryCounter) -> None:
    """A poison message does not get more deliveries from an outage."""
    key = a_key()
    assert counter.count_delivery(key, a_start(), 3, known=3).status is CountStatus.LIMIT_REACHED
    assert counter.count_delivery(key, a_start(), 3).status is CountStatus.LIMIT_REACHED


def test_an_end_whose_start_was_not_recorded_counts_it(counter: DeliveryCounter) -> None:
    """The store refused the start, and the worker could not know; said twice, it is one."""
    key, start = a_key(), a_start()
    for _ in range(2):
        counter.record_end(key, an_end(start, 1))
    assert counter.history(key) == (an_end(start, 1),)
    assert delivered(counter, key) == Count(CountStatus.COUNTED, 2)


@pytest.mark.parametrize("outcome", [Outcome.RETRIED, Outcome.REQUEUED])
def test_an_end_of_what_is_over_records_nothing(counter: DeliveryCounter, outcome: Outcome) -> None:
    """The retry has succeeded and its counts are deleted, or a copy became a letter."""
    key, start = a_key(), a_start()
    if outcome is Outcome.REQUEUED:
        counter.record_death(key)
    counter.record_end(key, an_end(start, 1, outcome=outcome))
    assert counter.history(key) == ()


def test_an_unawaited_count_says_that_it_is_on_its_way(counter: DeliveryCounter) -> None:
    """The guard remembers a start that could not be written."""
    assert counter.count_first(a_key(), a_start()) is True


@pytest.mark.parametrize(
    "other",
    [
        {"task_id": "u"},
        {"nesting": 1},
        {"retries": 1},
        {"redrives": 1},
        {"dead_letter_queue": "mail-DLQ"},
    ],
)
def test_other_messages_are_counted_apart(counter: DeliveryCounter, other: dict[str, Any]) -> None:
    """Task, retry, redrive and dead-letter queue make different messages."""
    key, neighbour = a_key(task_id="t"), a_key(**{"task_id": "t", **other})
    assert [delivered(counter, key).number for _ in range(2)] == [1, 2]
    assert delivered(counter, neighbour).number == 1
    assert delivered(counter, key).number == 3


@pytest.mark.parametrize("task_id", ["", "süß", "a b\x00\n", "{x}:run:0", "x" * 10_000, "\ud800"])
def test_any_task_id_is_counted(counter: DeliveryCounter, task_id: str) -> None:
    """Ids come over the wire and may be any text."""
    key, start = a_key(task_id=task_id), a_start()
    counter.count_first(key, start)
    counter.record_end(key, an_end(start, 1))
    assert delivered(counter, key).number == 2
    counter.succeeded(key, start)
    counter.flush()
    assert counter.history(key) == ()


# -- ends ------------------------------------------------------------------------------


def test_an_end_replaces_its_start(counter: DeliveryCounter) -> None:
    """One delivery is one entry of the history."""
    key, start = a_key(), a_start()
    counter.count_delivery(key, start, None)
    end = an_end(start, 1, exception_message="süß\ud800 \x00")
    counter.record_end(key, end)
    assert counter.history(key) == (end,)


def test_an_interrupted_delivery_is_recorded_and_not_charged(counter: DeliveryCounter) -> None:
    """A graceful shutdown is not charged: its number is given out again."""
    key = a_key()
    delivered(counter, key)
    start = a_start()
    assert counter.count_delivery(key, start, None).number == 2
    interrupted = an_end(start, 2, outcome=Outcome.SHUTDOWN)
    counter.record_end(key, interrupted, charged=False)
    assert interrupted in counter.history(key)
    assert delivered(counter, key) == Count(CountStatus.COUNTED, 2)
    assert interrupted in counter.history(key)
    assert starts(counter, key) == [(0, 1), (0, 2), (0, 2)]


def test_any_number_of_interruptions_charges_nothing(counter: DeliveryCounter) -> None:
    """A message may be given back by a hundred deployments and still has its deliveries."""
    key = a_key()
    for _ in range(100):
        start = a_start()
        assert counter.count_delivery(key, start, 1) == Count(CountStatus.COUNTED, 1)
        counter.record_end(key, an_end(start, 1, outcome=Outcome.SHUTDOWN), charged=False)
    assert delivered(counter, key, 1).status is CountStatus.COUNTED
    assert delivered(counter, key, 1).status is CountStatus.LIMIT_REACHED


def test_an_interruption_that_is_reported_twice_is_one(counter: DeliveryCounter) -> None:
    """A note whose answer was lost is sent again; the count must not fall below the truth."""
    key, start = a_key(), a_start()
    delivered(counter, key)
    counter.count_delivery(key, start, None)
    for _ in range(2):
        counter.record_end(key, an_end(start, 2, outcome=Outcome.SHUTDOWN), charged=False)
    assert delivered(counter, key).number == 2


def test_what_was_not_counted_is_not_taken_back(counter: DeliveryCounter) -> None:
    """It was never counted, or another delivery has its number: that one is not touched."""
    key, start, stranger = a_key(), a_start(), a_start()
    counter.count_delivery(key, start, 1)
    counter.record_end(key, an_end(stranger, 1, outcome=Outcome.SHUTDOWN), charged=False)
    counter.flush()
    assert counter.history(key) == (start,)
    assert counter.count_delivery(key, a_start(), 1).status is CountStatus.LIMIT_REACHED


def test_a_start_that_never_happened_is_taken_back_without_a_trace(
    counter: DeliveryCounter,
) -> None:
    """A pool dropped the job before a process took it."""
    key, start = a_key(), a_start()
    counter.count_first(key, start)
    counter.record_end(key, start, charged=False)
    counter.flush()
    assert counter.history(key) == ()
    assert delivered(counter, key, 1) == Count(CountStatus.COUNTED, 1)


def test_a_number_that_is_free_goes_to_the_last_delivery(counter: DeliveryCounter) -> None:
    """Two copies were counted, and the first one never started: the other one's end finds it."""
    key, gone, stays = a_key(), a_start(), a_start()
    counter.count_first(key, gone)
    counter.count_first(key, stays)
    counter.record_end(key, gone, charged=False)
    counter.record_end(key, an_end(stays, 2))
    counter.flush()
    assert counter.history(key) == (an_end(stays, 1),)
    assert delivered(counter, key).number == 2


def test_an_interruption_after_forgetting_changes_nothing(counter: DeliveryCounter) -> None:
    """A late note does not make a count of less than nothing."""
    key, start = a_key(), a_start()
    counter.count_delivery(key, start, None)
    counter.succeeded(key, start)
    counter.flush()
    counter.record_end(key, an_end(start, 1, outcome=Outcome.SHUTDOWN), charged=False)
    assert counter.history(key) == ()
    assert delivered(counter, key).number == 1


# -- history ---------------------------------------------------------------------------


def test_a_start_is_remembered_with_its_worker(counter: DeliveryCounter) -> None:
    """If no process is left to report an end, the start still has time and place."""
    key = a_key(retries=2)
    start = a_start(worker_hostname="celery@süß|1@x", worker_pid=99, retries=2)
    counter.count_delivery(key, start, None)
    assert counter.history(key) == (start,)


def test_a_start_without_a_process_id_has_none(counter: DeliveryCounter) -> None:
    """A worker may not know it."""
    key = a_key()
    counter.count_delivery(key, a_start(worker_pid=None), None)
    assert counter.history(key)[0].worker_pid is None


def test_the_number_of_a_delivery_is_the_counters(counter: DeliveryCounter) -> None:
    """The counter gives the number; the caller's is ignored."""
    key = a_key()
    counter.count_delivery(key, a_start(number=77), None)
    assert starts(counter, key) == [(0, 1)]


def test_history_goes_over_retries_oldest_first(counter: DeliveryCounter) -> None:
    """A letter shows all deliveries of its task, not only those of the last message."""
    first, second = a_key(task_id="t"), a_key(task_id="t", retries=1)
    delivered(counter, first)
    delivered(counter, first)
    counter.count_delivery(second, a_start(retries=1), None)
    assert starts(counter, second) == [(0, 1), (0, 2), (1, 1)]
    times = [delivery.started_at for delivery in counter.history(second)]
    assert times == sorted(times)
    outcomes = [delivery.outcome for delivery in counter.history(second)]
    assert outcomes == [Outcome.FAILED, Outcome.FAILED, None]


def test_history_orders_two_digit_numbers_as_numbers(counter: DeliveryCounter) -> None:
    """The tenth delivery comes after the ninth."""
    key = a_key()
    for _ in range(12):
        delivered(counter, key)
    assert starts(counter, key) == [(0, number) for number in range(1, 13)]


def test_deliveries_of_one_moment_are_in_the_order_of_their_numbers(
    counter: DeliveryCounter,
) -> None:
    """A clock may stop, or be set back to the same time."""
    first, second = a_key(task_id="t"), a_key(task_id="t", retries=1)
    for key in (second, first):
        for _ in range(12):
            counter.count_delivery(key, a_delivery(started_at=NOW, retries=key.retries), None)
    assert starts(counter, second) == [(r, n) for r in (0, 1) for n in range(1, 13)]


def test_history_of_a_redrive_begins_anew(counter: DeliveryCounter) -> None:
    """Its first letter has what it did before it was redriven."""
    delivered(counter, a_key(task_id="t"))
    redriven = a_key(task_id="t", redrives=1)
    start = a_start()
    counter.count_delivery(redriven, start, None)
    assert counter.history(redriven) == (start,)


# -- success ---------------------------------------------------------------------------


def test_a_message_that_succeeded_is_forgotten_after_a_flush(counter: DeliveryCounter) -> None:
    """The clean-up may be put off, but not forever; it covers all retries of the task."""
    first, second = a_key(task_id="t"), a_key(task_id="t", retries=1)
    retried = a_start()
    counter.count_delivery(first, retried, None)
    counter.record_end(first, an_end(retried, 1, outcome=Outcome.RETRIED))
    start = a_start(retries=1)
    counter.count_delivery(second, start, None)
    counter.succeeded(second, start)
    counter.flush()
    assert counter.history(first) == counter.history(second) == ()


def test_many_messages_that_succeeded_are_forgotten_after_one_flush(
    counter: DeliveryCounter,
) -> None:
    """One flush sends everything that was put off."""
    keys = [a_key() for _ in range(500)]
    for key in keys:
        counter.count_first(key, start := a_start())
        counter.succeeded(key, start, first=True)
    counter.flush()
    assert all(counter.history(key) == () for key in keys)


def test_success_forgets_no_other_message(counter: DeliveryCounter) -> None:
    """A redrive of the same task goes on counting."""
    key, redriven = a_key(task_id="t"), a_key(task_id="t", redrives=1)
    delivered(counter, key)
    delivered(counter, redriven)
    counter.succeeded(key, a_start())
    counter.flush()
    assert number(counter, redriven) == 1


def test_a_message_is_counted_apart_from_others_with_its_task_id(counter: DeliveryCounter) -> None:
    """Somebody gave one id to two messages: neither is charged for the other's starts."""
    first, second = two_messages()
    for _ in range(2):
        delivered(counter, first)
    assert delivered(counter, second, 1) == Count(CountStatus.COUNTED, 1)
    assert delivered(counter, first, 3) == Count(CountStatus.COUNTED, 3)
    assert starts(counter, second) == [(0, 1)]
    assert starts(counter, first) == [(0, 1), (0, 2), (0, 3)]


def test_success_leaves_other_messages_with_the_task_id_their_counts(
    counter: DeliveryCounter,
) -> None:
    """Also one whose worker died a while ago, and that waits to be delivered again."""
    first, second = two_messages()
    delivered(counter, first)
    start = a_start()
    counter.count_first(second, start)
    counter.succeeded(second, start, first=True)
    counter.flush()
    assert (number(counter, first), number(counter, second)) == (1, 0)
    again = a_start()
    counter.count_delivery(first, again, None)
    counter.succeeded(first, again)
    counter.flush()
    assert counter.connection.send_and_wait("KEYS", "*:run:*") == []


def test_what_is_done_here_is_told_before_a_count(counter: DeliveryCounter) -> None:
    """A copy that comes before the next flush is no second start: the first one succeeded."""
    key, start = a_key(), a_start()
    counter.count_first(key, start)
    counter.succeeded(key, start, first=True)
    assert counter.count_delivery(key, a_start(), 1) == Count(CountStatus.COUNTED, 1)


def test_who_shares_a_task_id_is_known_also_after_the_other_succeeded(
    counter: DeliveryCounter,
) -> None:
    """Celery finds results by the id: one of them may be the other message's."""
    first, second = two_messages()
    start = a_start()
    counter.count_first(first, start)
    assert not counter.shares_id(first)
    delivered(counter, second)
    assert counter.shares_id(first)
    assert counter.shares_id(second)
    counter.succeeded(first, start, first=True)
    counter.flush()
    assert counter.shares_id(second)


def test_the_retries_of_a_task_do_not_share_its_id(counter: DeliveryCounter) -> None:
    """They are one after the other."""
    key = a_key(publication="a")
    retry, start = replace(key, retries=1, publication="b"), a_start()
    counter.count_first(key, start)
    counter.record_end(key, an_end(start, 1, outcome=Outcome.RETRIED))
    counter.count_first(retry, a_start(retries=1))
    assert not counter.shares_id(retry)


def test_a_death_is_the_death_of_one_message(counter: DeliveryCounter) -> None:
    """Another one with its task id is no late copy of it, and keeps its counts."""
    first, second = two_messages()
    delivered(counter, second)
    counter.record_death(first)
    assert (
        counter.count_delivery(first, a_start(), None, unless_late=True).status is CountStatus.DEAD
    )
    assert counter.count_delivery(second, a_start(), None, unless_late=True).number == 2


def test_the_copy_of_a_message_that_was_retried_is_late(counter: DeliveryCounter) -> None:
    """Also when its retry has succeeded; another message with its task id is not meant."""
    key, other = two_messages()
    start, retry = a_start(), a_key(task_id=key.task_id, retries=1, publication="c")
    counter.count_first(key, start)
    counter.record_end(key, an_end(start, 1, outcome=Outcome.RETRIED))
    for _ in range(2):
        copy = counter.count_delivery(key, a_start(), 1, unless_late=True)
        assert copy.status is CountStatus.RETRIED
        counter.count_first(retry, again := a_start(retries=1))
        counter.succeeded(retry, again, first=True)
        counter.flush()
    assert counter.count_delivery(other, a_start(), 1, unless_late=True).number == 1


def test_the_messages_of_one_task_id_are_bounded(counter: DeliveryCounter) -> None:
    """Some vanish and never come back: the oldest go. Their id may be in use for years."""
    keys = [a_key(task_id="nightly", publication=f"{n:08x}") for n in range(3 * HISTORY_LIMIT)]
    for key in keys:
        counter.count_first(key, a_start())
    counter.flush()
    found = [number(counter, key) for key in keys]
    assert found == [0] * HISTORY_LIMIT + [1] * 2 * HISTORY_LIMIT


def test_an_end_after_forgetting_does_not_bring_a_message_back(counter: DeliveryCounter) -> None:
    """A late report must not leave a history that nobody cleans up."""
    key, start = a_key(), a_start()
    counter.count_delivery(key, start, None)
    counter.succeeded(key, start)
    counter.flush()
    counter.record_end(key, an_end(start, 1, outcome=Outcome.RETRIED))
    counter.flush()
    assert counter.history(key) == ()


def test_a_forgotten_message_is_counted_anew(counter: DeliveryCounter) -> None:
    """A task id may be used again."""
    key = a_key()
    delivered(counter, key, 1)
    counter.succeeded(key, a_start())
    counter.flush()
    assert delivered(counter, key, 1) == Count(CountStatus.COUNTED, 1)


def test_counts_that_are_forgotten_begin_anew(counter: DeliveryCounter) -> None:
    """So also with counts that Redis evicts: the message may start more often than its limit."""
    key, other = a_key(), a_key()
    for _ in range(2):
        delivered(counter, key, 2)
        delivered(counter, other, 2)
    assert delivered(counter, key, 2).status is CountStatus.LIMIT_REACHED
    counter.record_death(key)
    assert delivered(counter, key, 2) == Count(CountStatus.COUNTED, 1)
    assert number(counter, other) == 2


def test_success_leaves_another_message_under_the_same_id_its_count(
    counter: DeliveryCounter,
) -> None:
    """Somebody gave one id twice; the clean-up of the first comes while the second runs."""
    key, first, second = a_key(), a_start(), a_start()
    counter.count_first(key, first)
    counter.count_first(key, second)
    counter.succeeded(key, first, first=True)
    counter.flush()
    assert starts(counter, key) == [(0, 1)]
    assert counter.history(key)[0].started_at == second.started_at
    counter.record_end(key, an_end(second, 2))
    assert counter.history(key)[0].outcome is Outcome.FAILED
    assert delivered(counter, key, 2) == Count(CountStatus.COUNTED, 2)
    assert delivered(counter, key, 2).status is CountStatus.LIMIT_REACHED


def test_success_of_the_second_leaves_the_first_that_still_runs(counter: DeliveryCounter) -> None:
    """The other way round: a first delivery has no earlier ones."""
    key, running, done = a_key(), a_start(), a_start()
    counter.count_first(key, running)
    counter.count_first(key, done)
    counter.succeeded(key, done, first=True)
    counter.flush()
    assert [d.started_at for d in counter.history(key)] == [running.started_at]


def test_success_forgets_the_deliveries_before_it(counter: DeliveryCounter) -> None:
    """Also one that nobody ended, because its worker was killed."""
    key, last = a_key(), a_start()
    counter.count_first(key, a_start())
    counter.count_delivery(key, last, None)
    counter.succeeded(key, last)
    counter.flush()
    assert counter.history(key) == ()
    assert delivered(counter, key, 1) == Count(CountStatus.COUNTED, 1)


def test_signs_of_life_change_no_count(counter: DeliveryCounter) -> None:
    """They may come at any time, for queues of any name, also before the first count."""
    counter.heartbeat([])
    counter.heartbeat([DLQ, "süß-DLQ"])
    key = a_key()
    delivered(counter, key)
    counter.heartbeat([DLQ])
    assert delivered(counter, key).number == 2


def test_flushing_and_closing_may_be_repeated(counter: DeliveryCounter) -> None:
    """Both never raise."""
    counter.flush()
    counter.close()
    counter.flush()
    counter.close()


# -- Redis alone -----------------------------------------------------------------------


@pytest.fixture
def redis_counter(redis_url: str) -> Iterator[DeliveryCounter]:
    """Give the counter of Redis alone, for what only Redis does."""
    connection = PipelinedConnection(connect(redis_url, 2.0, retries=0), redis_url)
    counter = strict_counter(connection, Keys())
    yield counter
    counter.close()


def runs(server: RedisServer) -> list[str]:
    """The keys of all messages that Redis remembers."""
    return [key.decode() for key in server.client().scan_iter("*:run:*")]


def test_redis_forgets_a_message_some_time_after_its_last_start_or_end(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """The time to live slides with each start and each end, and with a refused start."""
    client, key, start = redis_server.client(), a_key(), a_start()
    run = Keys().run(key)
    for step in (
        lambda: redis_counter.count_first(key, start),
        lambda: redis_counter.record_end(key, an_end(start, 1)),
        lambda: delivered(redis_counter, key),
        lambda: delivered(redis_counter, key, 1),
        lambda: redis_counter.record_end(key, an_end(start, 2), charged=False),
    ):
        client.pexpire(run, 10_000)
        step()
        redis_counter.flush()
        assert (TTL_SECONDS - 60) * 1000 < client.pttl(run) <= TTL_SECONDS * 1000


def test_redis_keeps_a_bounded_number_of_deliveries_of_a_message(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """A message that is delivered forever does not fill Redis; the count goes on."""
    key = a_key()
    for _ in range(HISTORY_LIMIT + 30):
        delivered(redis_counter, key)
    assert starts(redis_counter, key) == [(0, n) for n in range(31, HISTORY_LIMIT + 31)]
    assert redis_server.client().hlen(Keys().run(key)) <= 2 * HISTORY_LIMIT + 1


def test_redis_keeps_a_bounded_number_of_retries_of_a_task(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """A task that retries forever does not fill Redis."""
    for retries in range(HISTORY_LIMIT + 30):
        key = a_key(task_id="t", retries=retries)
        for _ in range(2):
            delivered(redis_counter, key)
    found = starts(redis_counter, key)
    kept = range(found[0][0], HISTORY_LIMIT + 30)
    assert found == [(r, n) for r in kept for n in (1, 2)]
    assert redis_server.client().hlen(Keys().run(key)) <= 4 * HISTORY_LIMIT + 5


def test_redis_keeps_a_bounded_number_of_interruptions(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """A message that is given back forever does not fill Redis."""
    key = a_key()
    for _ in range(100):
        start = a_start()
        redis_counter.count_delivery(key, start, None)
        redis_counter.record_end(key, an_end(start, 1, outcome=Outcome.SHUTDOWN), charged=False)
    redis_counter.flush()
    assert redis_server.client().hlen(Keys().run(key)) < HISTORY_LIMIT


def test_redis_keeps_nothing_of_messages_that_succeeded(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """Healthy work leaves no trace but the heartbeat of its worker."""
    for _ in range(100):
        key = a_key()
        redis_counter.count_first(key, start := a_start())
        redis_counter.succeeded(key, start, first=True)
    redis_counter.flush()
    redis_counter.history(a_key())
    assert redis_server.client().keys() == [Keys().workers(DLQ).encode()]


def test_redis_sends_what_was_put_off_when_it_is_closed(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """A worker's last clean-ups are not lost at its end."""
    key = a_key()
    redis_counter.count_first(key, start := a_start())
    redis_counter.succeeded(key, start, first=True)
    redis_counter.close()
    assert runs(redis_server) == []


@pytest.mark.parametrize("release", ["2026.3+ü#1|a:b", "\udc80", None])
def test_a_start_whose_worker_vanished_keeps_its_release(
    counter: DeliveryCounter, release: str | None
) -> None:
    """The letter is written by another worker, perhaps of another release."""
    key = a_key()
    counter.count_first(key, a_start(release=release, worker_hostname="celery@web#1"))
    counter.flush()
    (found,) = counter.history(key)
    written = release and release.encode("utf-8", "backslashreplace").decode()
    assert found.release in (release, written)
    assert found.worker_hostname == "celery@web#1"


def test_a_retry_that_is_done_leaves_another_message_its_counts_for_as_long_as_before(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """One of fewer retries may be another message that runs for an hour."""
    first, second = two_messages()
    retry, start = replace(second, retries=1), a_start(retries=1)
    redis_counter.count_delivery(first, a_start(), None)
    redis_counter.count_delivery(retry, start, None)
    redis_counter.succeeded(retry, start)
    redis_counter.flush()
    assert number(redis_counter, first) == 1
    assert redis_server.client().pttl(Keys().run(first)) > 600_000


def test_a_full_redis_forgets_what_is_done_beside_another_message(
    redis_counter: DeliveryCounter, redis_server: RedisServer
) -> None:
    """It refuses to note that they shared an id only before the first thing was deleted."""
    first, second = two_messages()
    start, server = a_start(), redis_server.client()
    neighbour = replace(first, task_id="neighbour")
    for key in (first, second, neighbour):
        redis_counter.count_delivery(key, start, None)
    server.config_set("maxmemory", "1mb")
    try:
        for key in (first, neighbour):
            redis_counter.succeeded(key, start, first=True)
        redis_counter.flush()
        assert redis_counter.history(first) == ()
    finally:
        server.config_set("maxmemory", 0)
    assert redis_server.client().exists(Keys().run(neighbour)) == 0
