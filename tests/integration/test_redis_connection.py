"""Redis with faults: killed, emptied, hanging, full, read-only, behind a password."""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from builders import DLQ, NOW, a_delivery, a_key, a_letter, an_ended_delivery, key_of
from servers import RedisServer
from waiting import poll

from celery_dlq.errors import SettingsError, StoreUnavailable
from celery_dlq.letters.record import Delivery, Outcome
from celery_dlq.operations.reading import Reading
from celery_dlq.store.claims import ClaimState
from celery_dlq.store.connect import connect
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.keys import Keys
from celery_dlq.store.letters import Letters
from celery_dlq.store.pipelined import OutageBackoff, PipelinedConnection
from celery_dlq.store.store import Store
from celery_dlq.store.stream import ReadAhead
from celery_dlq.store.without_switch import writev
from celery_dlq.store.worker_records import CountStatus, MessageKey

KEYS = Keys()
TIMEOUT_SECONDS = 0.5
SECRET = "s3cret-word"


class Parts:
    """Wires, counters and stores on one URL, closed at the end of a test."""

    def __init__(self, url: str, *, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        self.url = url
        self._timeout = timeout_seconds
        self._open = ExitStack()

    def connection(self, *, keep_gil: bool = False, **options: Any) -> PipelinedConnection:
        """A wire that knows the counter's scripts."""
        client = connect(self.url, self._timeout, retries=0)
        connection = PipelinedConnection(client, self.url, **options)
        if keep_gil:
            connection.writev = writev
        self._open.callback(connection.close)
        return connection

    def counter(self, connection: PipelinedConnection | None = None) -> DeliveryCounter:
        """A counter as a worker has it."""
        counter = DeliveryCounter(connection or self.connection(), KEYS, 3600.0)
        self._open.callback(counter.close)
        return counter

    def store(self) -> Letters:
        """A store as a worker has it."""
        made = Store(self.url, timeout_seconds=self._timeout)
        self._open.callback(made.close)
        self.check = made.check
        return made.letters

    def close(self) -> None:
        """Close everything, last made first."""
        self._open.close()


@pytest.fixture
def parts(redis_url: str) -> Iterator[Parts]:
    """Give parts on the shared server, for tests that do not break it."""
    made = Parts(redis_url, timeout_seconds=5.0)
    yield made
    made.close()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """Give a server of one's own, for tests that break it."""
    with RedisServer() as started:
        yield started


@pytest.fixture
def own(server: RedisServer) -> Iterator[Parts]:
    """Give parts on one's own server."""
    made = Parts(server.url)
    yield made
    made.close()


def unavailable(call: Callable[[], object]) -> str:
    """The text with which a call says that the store is not available."""
    with pytest.raises(StoreUnavailable) as raised:
        call()
    return str(raised.value)


def counted(counter: DeliveryCounter, key: MessageKey) -> int:
    """Count a delivery that ends at once, and wait for its number."""
    count = counter.count_delivery(key, a_delivery(), None)
    assert count.status is CountStatus.COUNTED
    counter.record_end(key, an_ended_delivery(number=count.number))
    return count.number


def a_later() -> Delivery:
    """A start that is none of the others."""
    return a_delivery(started_at=NOW + timedelta(seconds=time.monotonic()))


def count_of(server: RedisServer, key: MessageKey) -> int:
    """The count of a message as Redis has it."""
    with redis.Redis.from_url(server.url) as client:  # some tests ask two thousand times
        return int(client.hget(KEYS.run(key), f"count:{key.retries}") or 0)


def rested(connection: PipelinedConnection) -> None:
    """Wait until the wire tries again after a failure."""
    poll(lambda: not connection.breaker.is_open, timeout_seconds=20)


# -- Redis goes and comes back ---------------------------------------------------------


def test_counting_goes_on_when_redis_comes_back_empty(own: Parts, server: RedisServer) -> None:
    """Nothing has to be restarted; a start that was written and not confirmed is written again."""
    connection = own.connection()
    counter, key = own.counter(connection), a_key()
    counter.count_first(key, a_delivery())
    counter.flush()
    server.kill()
    written = counter.count_first(key, a_delivery())
    counter.flush()
    assert connection.errors > 0
    server.start()
    rested(connection)
    assert counted(counter, key) == 1 + written
    errors = connection.errors
    counter.count_first(key, a_delivery())
    counter.record_end(key, an_ended_delivery(number=2))
    counter.flush()
    assert count_of(server, key) == 2 + written
    assert connection.errors == errors


def cut(server: RedisServer) -> None:
    """Close the connections of this plugin, as an operator or a proxy does; Redis runs on."""
    client = server.client()
    for connection in client.client_list():
        if connection["name"] == "celery_dlq":
            client.client_kill_filter(_id=connection["id"])


@pytest.mark.parametrize("keep_gil", [False, True])
def test_a_connection_that_was_closed_costs_no_count(
    own: Parts, server: RedisServer, keep_gil: bool
) -> None:
    """Neither a start that is only written nor one that is waited for; none counts twice."""
    connection = own.connection(keep_gil=keep_gil)
    counter, keys = own.counter(connection), [a_key() for _ in range(6)]
    for key in keys:
        assert counter.count_first(key, a_delivery())
        cut(server)
    counter.flush()
    assert [count_of(server, key) for key in keys] == [1] * len(keys)
    for key in keys:
        cut(server)
        counter.record_end(key, an_ended_delivery())
        cut(server)
        assert counter.count_delivery(key, a_later(), 1).status is CountStatus.LIMIT_REACHED
    assert [counter.history(key)[0].outcome for key in keys] == [Outcome.FAILED] * len(keys)
    assert [count_of(server, key) for key in keys] == [1] * len(keys)
    assert connection.errors == 0


def test_starts_go_out_with_the_next_command_that_is_awaited(
    own: Parts, server: RedisServer
) -> None:
    """Or at the end: Redis reads its socket once for a letter and the start that its end allows."""
    connection = own.connection()
    counter, keys = own.counter(connection), [a_key() for _ in range(3)]
    assert counter.count_first(keys[0], a_delivery())
    connection.gather()
    assert counter.count_first(keys[1], a_delivery())
    assert count_of(server, keys[1]) == 0
    connection.send_and_wait("PING")
    assert count_of(server, keys[1]) == 1
    assert counter.count_first(keys[2], a_delivery())
    connection.send_gathered()
    poll(lambda: count_of(server, keys[2]) == 1)
    assert counter.count_first(keys[0], a_delivery())
    poll(lambda: count_of(server, keys[0]) == 2)


@pytest.mark.parametrize("by", ["Redis", "this process"])
def test_starts_that_wait_for_another_command_survive_a_closed_connection(
    own: Parts, server: RedisServer, by: str
) -> None:
    """Each counts once, whether it was on its way or not."""
    connection = own.connection()
    counter, keys = own.counter(connection), [a_key() for _ in range(3)]
    assert counter.count_first(keys[0], a_delivery())
    connection.gather()
    assert counter.count_first(keys[1], a_delivery())
    cut(server) if by == "Redis" else connection.disconnect()
    assert counter.count_first(keys[2], a_delivery())
    cut(server) if by == "Redis" else connection.disconnect()
    connection.send_gathered()
    counter.flush()
    assert [count_of(server, key) for key in keys] == [1, 1, 1]
    assert connection.errors == 0


@pytest.mark.parametrize("first", [True, False])
def test_a_count_that_is_sent_again_is_one(own: Parts, server: RedisServer, first: bool) -> None:
    """The first may have arrived before its connection broke."""
    counter, key = own.counter(), a_key()
    if first:
        counter.count_first(key, a_delivery())
        last = list(counter.connection.unconfirmed)[-1:]
        counter.connection.disconnect()
        assert last == [counter.connection.unconfirmed[-1]]
        counter.flush()
    else:
        replies, connection = counter.connection.replies, counter.connection
        connection.send_and_wait("PING")

        def unheard(number: int) -> Any:
            connection.replies = replies  # type: ignore[method-assign]
            replies(number)
            raise redis.ConnectionError("closed before the reply")

        connection.replies = unheard  # type: ignore[method-assign]
        count = counter.count_delivery(key, a_delivery(), None)
        assert (count.status, count.number) == (CountStatus.COUNTED, 1)
    assert count_of(server, key) == 1


def test_an_awaited_count_says_that_redis_is_gone_and_works_again_later(
    own: Parts, server: RedisServer
) -> None:
    """The guard lets the message run meanwhile."""
    connection = own.connection()
    counter, key = own.counter(connection), a_key()
    counter.count_delivery(key, a_delivery(), None)
    server.kill()
    text = unavailable(lambda: counter.count_delivery(key, a_delivery(), None))
    assert f"127.0.0.1:{server.port}" in text
    server.start()
    rested(connection)
    assert counted(counter, key) == 1


@pytest.mark.parametrize("call", ["count", "history"])
def test_awaited_calls_without_any_redis_say_so(own: Parts, server: RedisServer, call: str) -> None:
    """A worker may start before its Redis."""
    server.kill()
    counter, key = own.counter(), a_key()
    calls: dict[str, Callable[[], object]] = {
        "count": lambda: counter.count_delivery(key, a_delivery(), 3),
        "history": lambda: counter.history(key),
    }
    assert "check that Redis runs there" in unavailable(calls[call])


def test_unawaited_calls_without_any_redis_never_raise(own: Parts, server: RedisServer) -> None:
    """A healthy task must not feel that its count is lost."""
    server.kill()
    connection = own.connection()
    counter, key = own.counter(connection), a_key()
    assert counter.count_first(key, a_delivery()) is False
    counter.record_end(key, an_ended_delivery())
    counter.succeeded(key, a_delivery())
    counter.flush()
    counter.close()
    assert connection.errors >= 2


def test_a_worker_that_ends_tells_its_successes_to_a_redis_that_comes_back() -> None:
    """A failover in a deploy would leave their counts, as of messages that vanished."""
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        own, keys = Parts(server.url), [a_key() for _ in range(3)]
        counter = own.counter()
        for key in keys:
            assert counter.count_first(key, a_delivery())
        counter.flush()
        server.kill()
        poll(lambda: not counter.connection.send_unanswered([("PING",)]))  # it is known to be away
        for key in keys:
            counter.succeeded(key, a_delivery())
        comes_back = threading.Timer(1.5, server.start)
        comes_back.start()
        counter.close()
        comes_back.join()
        assert [count_of(server, key) for key in keys] == [0, 0, 0]
        own.close()


def test_a_store_works_again_when_redis_comes_back_empty(own: Parts, server: RedisServer) -> None:
    """Its scripts were lost with the old server."""
    store = own.store()
    store.dead_letter(letter := a_letter(), key_of(letter))
    server.kill()
    assert "check that Redis runs there" in unavailable(own.check)
    unavailable(lambda: store.dead_letter(letter, key_of(letter)))
    unavailable(lambda: store.remove(DLQ, [letter.id]))
    unavailable(lambda: list(store.letters(DLQ, newest_first=False)))
    server.start()

    def answers() -> bool:
        with suppress(StoreUnavailable):
            own.check()
            return True
        return False

    assert poll(answers)  # the circuit breaker asks again after a moment
    store.dead_letter(letter, key_of(letter))
    assert poll(lambda: readable(store, letter.id))
    assert store.remove(DLQ, [letter.id]) == 1


def test_notes_that_nobody_needs_go_faster_than_they_come(
    parts: Parts, redis_server: RedisServer
) -> None:
    """Each tenth letter removes a hundred, and none that may still be needed."""
    store, client, notes = parts.store(), redis_server.client(), KEYS.late_copies(DLQ)
    client.zadd(notes, {f"old-{number}": 1 for number in range(250)})
    letters = [a_letter(id=f"letter-{number}") for number in range(21)]
    for letter in letters:
        store.dead_letter(letter, key_of(letter))
    assert {*client.zrange(notes, 0, -1)} == {letter.id.encode() for letter in letters}
    assert client.pttl(notes) > 0
    client.delete(notes)  # as when the last one is used up
    for number in range(30, 35):
        letter = a_letter(id=f"letter-{number}")
        store.dead_letter(letter, key_of(letter))
        assert client.pttl(notes) > 0


def readable(store: Letters, letter_id: str) -> bool:
    """True if a letter can be read now; reading rests a moment after a failure."""
    try:
        return store.get(DLQ, letter_id) is not None
    except StoreUnavailable:
        return False


def test_letters_survive_a_kill_of_a_redis_that_keeps_a_log() -> None:
    """With ``appendfsync always`` an answered storing is on disk."""
    with RedisServer("--appendonly", "yes", "--appendfsync", "always") as server:
        parts = Parts(server.url)
        store, letter = parts.store(), a_letter()
        store.dead_letter(letter, key_of(letter))
        server.kill()
        server.start()
        assert store.get(DLQ, letter.id) == letter
        parts.close()


def test_counts_survive_the_loss_of_scripts(parts: Parts, redis_server: RedisServer) -> None:
    """``SCRIPT FLUSH`` on a live server loses no count: what was refused is sent whole."""
    connection = parts.connection()
    counter, keys = parts.counter(connection), [a_key() for _ in range(200)]
    for number, key in enumerate(keys):
        if number % 50 == 10:
            redis_server.client().script_flush()
        counter.count_first(key, a_delivery())
        counter.record_end(key, an_ended_delivery())
    counter.flush()
    assert all(counter.history(key)[0].ended_at for key in keys)
    assert [count_of(redis_server, key) for key in keys] == [1] * len(keys)
    redis_server.client().script_flush()
    assert counted(counter, keys[0]) == 2
    assert connection.errors == 0


def test_a_store_survives_the_loss_of_scripts(parts: Parts, redis_server: RedisServer) -> None:
    """Every script of the store is sent whole when Redis does not know it."""
    store, letter = parts.store(), a_letter()
    for step in (
        lambda: store.dead_letter(letter, key_of(letter)),
        lambda: store.claims.claim(DLQ, [letter.id], owner="me", lease_seconds=9),
        lambda: store.claims.mark_published(DLQ, [letter.id], owner="me"),
        lambda: store.claims.release(DLQ, [letter.id], owner="me"),
        lambda: store.remove(DLQ, [letter.id]),
    ):
        redis_server.client().script_flush()
        step()
    assert store.get(DLQ, letter.id) is None


# -- Redis hangs -----------------------------------------------------------------------


def test_a_hanging_redis_costs_one_time_out_and_then_nothing(
    own: Parts, server: RedisServer
) -> None:
    """The first call waits its time; the breaker spares the next ones."""
    counter, key = own.counter(own.connection(breaker=OutageBackoff(pause_seconds=600.0))), a_key()
    counter.count_delivery(key, a_delivery(), None)
    server.pause()
    began = time.monotonic()
    unavailable(lambda: counter.count_delivery(key, a_delivery(), None))
    waited = time.monotonic() - began
    assert TIMEOUT_SECONDS * 0.9 <= waited < TIMEOUT_SECONDS * 4
    began = time.monotonic()
    for _ in range(100):
        unavailable(lambda: counter.count_delivery(key, a_delivery(), None))
        counter.count_first(key, a_delivery())
    assert time.monotonic() - began < TIMEOUT_SECONDS


def refuse(server: RedisServer) -> None:
    server.client().replicaof("127.0.0.1", 1)


def accept(server: RedisServer) -> None:
    server.client().replicaof("NO", "ONE")


def test_what_was_refused_for_a_moment_is_written_afterwards(
    own: Parts, server: RedisServer
) -> None:
    """A failover: neither a start nor an end nor a count that was taken back is missed."""
    connection = own.connection()
    counter, started, ended, back = own.counter(connection), a_key(), a_key(), a_key()
    counter.count_first(ended, a_delivery())
    counter.count_first(back, a_delivery())
    counter.flush()
    refuse(server)
    assert counter.count_first(started, a_delivery())
    counter.record_end(ended, an_ended_delivery())
    counter.record_end(back, an_ended_delivery(), charged=False)
    counter.flush()
    assert connection.errors > 0
    accept(server)
    counter.flush()
    assert [count_of(server, key) for key in (started, ended, back)] == [1, 1, 0]
    assert counter.history(ended) == (an_ended_delivery(),)
    assert not [*connection.unconfirmed, *connection.kept]


def test_what_is_taken_back_in_a_moment_without_writes_is_taken_back(
    own: Parts, server: RedisServer
) -> None:
    """No probe saw that Redis refused: each of these is confirmed by itself."""
    counter, key = own.counter(), a_key()
    counter.count_first(key, a_delivery())
    counter.flush()
    refuse(server)
    counter.record_end(key, an_ended_delivery(), charged=False)
    accept(server)
    counter.flush()
    assert count_of(server, key) == 0


def test_what_was_taken_back_in_a_moment_without_writes_stays_so_when_the_worker_ends(
    own: Parts, server: RedisServer
) -> None:
    """Its last start was sent once more, after what took it back: charged, and nobody runs it."""
    counter, key = own.counter(own.connection()), a_key()
    counter.count_first(a_key(), a_delivery())
    counter.flush()
    refuse(server)
    counter.count_first(key, a_delivery())
    counter.record_end(key, replace(an_ended_delivery(), outcome=Outcome.SHUTDOWN), charged=False)
    refused = counter.connection.errors
    closing = threading.Thread(target=counter.close)
    closing.start()
    poll(lambda: counter.connection.errors > refused + 1)  # it tries again, until it is told
    accept(server)
    closing.join(10)
    assert count_of(server, key) == 0


def test_a_key_of_another_kind_holds_up_no_other_end(own: Parts, server: RedisServer) -> None:
    """What would be refused for ever is not sent for ever."""
    counter, key, other = own.counter(), a_key(), a_key()
    server.client().set(KEYS.run(key), "not ours")
    for one in (key, other):
        counter.count_first(one, a_delivery())
        counter.record_end(one, an_ended_delivery())
    counter.flush()
    assert counter.history(other) == (an_ended_delivery(),)
    assert not counter.connection.kept


def test_counting_goes_on_when_redis_wakes_up(own: Parts, server: RedisServer) -> None:
    """Answers that come too late are not taken for those of later questions."""
    connection = own.connection()
    counter, key, other = own.counter(connection), a_key(), a_key()
    for _ in range(5):
        counted(counter, key)
    server.pause()
    unavailable(lambda: counter.history(key))
    server.resume()
    rested(connection)
    assert counter.history(other) == ()
    assert counted(counter, other) == 1
    assert len(counter.history(key)) == 5


@pytest.mark.parametrize("keep_gil", [False, True])
def test_a_hanging_redis_does_not_hold_up_unawaited_counts(
    own: Parts, server: RedisServer, keep_gil: bool
) -> None:
    """Healthy tasks wait at most once, whatever the number of starts."""
    breaker = OutageBackoff(pause_seconds=600.0)
    counter = own.counter(own.connection(keep_gil=keep_gil, breaker=breaker))
    counter.count_delivery(a_key(), a_delivery(), None)
    server.pause()
    began = time.monotonic()
    for _ in range(300):
        counter.count_first(a_key(), a_delivery())
    assert time.monotonic() - began < TIMEOUT_SECONDS * 4


@pytest.mark.parametrize("call", ["check", "dead_letter", "get", "queues"])
def test_a_store_that_hangs_says_so_in_time(own: Parts, server: RedisServer, call: str) -> None:
    """Each question may be sent twice, so two time-outs are the most."""
    store, letter = own.store(), a_letter()
    own.check()
    server.pause()
    calls: dict[str, Callable[[], object]] = {
        "check": own.check,
        "dead_letter": lambda: store.dead_letter(letter, key_of(letter)),
        "get": lambda: store.get(DLQ, letter.id),
        "queues": store.overviews.queues,
    }
    began = time.monotonic()
    unavailable(calls[call])
    assert time.monotonic() - began < TIMEOUT_SECONDS * 6


def test_an_interrupted_call_does_not_mix_up_answers(own: Parts, server: RedisServer) -> None:
    """Ctrl-C, or a time limit's signal, may strike while a reply is on its way."""
    counter, one, other = own.counter(), a_key(), a_key()
    for _ in range(3):
        counted(counter, one)

    class InterruptedHereError(BaseException):
        """The exception that the signal raises."""

    def interrupt(*_: object) -> None:
        raise InterruptedHereError

    before = signal.signal(signal.SIGALRM, interrupt)
    server.pause()
    try:
        signal.setitimer(signal.ITIMER_REAL, TIMEOUT_SECONDS / 4)
        with pytest.raises(InterruptedHereError):
            counter.history(one)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        server.resume()
    assert counter.history(other) == ()
    assert len(counter.history(one)) == 3


# -- the breaker -----------------------------------------------------------------------


def test_the_rest_after_a_failure_doubles_up_to_a_bound_and_ends_with_success() -> None:
    """A long outage costs a worker one try every quarter of a minute."""
    now = [100.0]
    breaker = OutageBackoff(pause_seconds=1.0, most_pause_seconds=4.0, clock=lambda: now[0])
    assert not breaker.is_open
    for rest in (1.0, 2.0, 4.0, 4.0):
        breaker.failed(OSError("down"))
        assert breaker.is_open
        now[0] += rest - 0.001
        assert breaker.is_open
        now[0] += 0.001
        assert not breaker.is_open
    breaker.worked()
    breaker.failed(OSError("down"))
    now[0] += 1.0
    assert not breaker.is_open


def test_an_open_breaker_tells_why(own: Parts, server: RedisServer) -> None:
    """The later errors name the first one's cause."""
    server.kill()
    connection = own.connection()
    first = unavailable(lambda: connection.send_and_wait("PING"))
    assert "refused" in first
    assert unavailable(lambda: connection.send_and_wait("PING")) == first


# -- many counts -----------------------------------------------------------------------


def test_unawaited_counts_are_confirmed_now_and_then_and_end_with_right_counts(
    parts: Parts, redis_server: RedisServer
) -> None:
    """Ten thousand starts fill neither the socket nor the memory, and none is lost."""
    connection = parts.connection()
    counter, keys = parts.counter(connection), [a_key() for _ in range(100)]
    most = 0
    for number in range(10_000):
        key = keys[number % 100]
        counter.count_first(key, a_delivery())
        counter.record_end(key, an_ended_delivery(number=number // 100 + 1))
        most = max(most, len(connection.unconfirmed))
    assert most <= 1024
    counter.flush()
    counter.history(keys[0])
    assert [count_of(redis_server, key) for key in keys] == [100] * 100
    assert connection.errors == 0


def test_clean_ups_ride_along_with_starts(parts: Parts, redis_server: RedisServer) -> None:
    """Healthy work costs one write a task and leaves little behind before a flush."""
    counter = parts.counter()
    for _ in range(1000):
        key = a_key()
        counter.count_first(key, a_delivery())
        counter.succeeded(key, a_delivery(), first=True)
    counter.history(a_key())
    assert redis_server.client().dbsize() <= 64
    counter.flush()
    counter.history(a_key())
    assert redis_server.client().keys() == [KEYS.workers(DLQ).encode()]


@pytest.mark.parametrize("keep_gil", [False, True])
def test_counts_of_many_threads_are_exact(
    parts: Parts, redis_server: RedisServer, keep_gil: bool
) -> None:
    """A pool of threads shares one wire; awaited and unawaited writes are mixed."""
    connection = parts.connection(keep_gil=keep_gil)
    counter, failures = parts.counter(connection), []
    keys = [[a_key() for _ in range(250)] for _ in range(8)]

    def count(mine: list[MessageKey]) -> None:
        often = a_key()
        try:
            for number, key in enumerate(mine):
                counter.count_first(key, a_delivery())
                counter.record_end(key, an_ended_delivery())
                assert counted(counter, key) == 2
                assert counted(counter, often) == number + 1
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=count, args=(mine,)) for mine in keys]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []
    counter.flush()
    assert [count_of(redis_server, key) for mine in keys for key in mine] == [2] * 2000
    assert connection.errors == 0


def test_a_start_in_a_pool_of_threads_lets_no_other_thread_go_first(parts: Parts) -> None:
    """It would find the connection's lock taken, and each of both would wake the other up."""
    connection = parts.connection(keep_gil=True)
    connection.send_unanswered([("PING",)])
    turns, over = [0], threading.Event()

    def take_turns() -> None:
        while not over.is_set():
            turns[0] += 1
            time.sleep(0)

    other, interval = threading.Thread(target=take_turns), sys.getswitchinterval()
    other.start()
    sys.setswitchinterval(60)  # then only who lets go of Python's lock by itself loses it
    try:
        time.sleep(0)
        before = turns[0]
        sent = [connection.send_unanswered([("PING",)]) for _ in range(200)]
        after = turns[0]
    finally:
        sys.setswitchinterval(interval)
        over.set()
        other.join()
    assert all(sent)
    assert after == before


def test_that_redis_takes_no_writes_is_seen_with_the_next_flush(
    own: Parts, server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """A start has no reply; once a second something is written that has one."""
    connection = own.connection()
    counter, keys = own.counter(connection), [a_key() for _ in range(5)]
    server.client().config_set("min-replicas-to-write", 1)
    with caplog.at_level(logging.ERROR, "celery_dlq.store"):
        for key in keys:
            counter.count_first(key, a_delivery())
            counter.flush()
    assert connection.errors == 5
    assert len(caplog.records) == 1, "expected one line in ten seconds"
    assert "Deliveries are not counted now" in caplog.text
    assert "NOREPLICAS" in caplog.text
    server.client().config_set("min-replicas-to-write", 0)
    counter.count_first(keys[0], a_delivery())
    counter.flush()
    assert (count_of(server, keys[0]), connection.errors) == (1, 5)


@pytest.mark.parametrize("keep_gil", [False, True])
def test_what_was_written_arrives_though_its_process_dies_at_once(
    own: Parts, server: RedisServer, keep_gil: bool
) -> None:
    """Redis lets go of a client to which it cannot write; so it has nothing to write to it."""
    keys = [a_key() for _ in range(28)]
    (used, says_used), (stopped, says_stopped) = os.pipe(), os.pipe()
    process = os.fork()
    if process == 0:
        counter = own.counter(own.connection(keep_gil=keep_gil))
        for key in (a_key(), a_key()):  # a connection that has been used
            counter.count_first(key, a_delivery())
            counter.record_end(key, an_ended_delivery())
        counter.heartbeat([DLQ])
        counter.flush()
        os.write(says_used, b".")
        os.read(stopped, 1)
        for key in keys:
            counter.count_first(key, a_delivery())
            counter.record_end(
                key, an_ended_delivery(outcome=Outcome.RETRIED)
            )  # nobody waits for it
        os.kill(os.getpid(), signal.SIGKILL)
    os.read(used, 1)
    poll(lambda: server.client().exists(KEYS.workers(DLQ)))
    server.pause()
    os.write(says_stopped, b".")
    os.waitpid(process, 0)
    server.resume()
    poll(lambda: [count_of(server, key) for key in keys] == [1] * len(keys))


def test_a_refusal_says_so_and_the_connection_goes_on(parts: Parts) -> None:
    """The letter is not stored, but Redis answers: the next command need not wait."""
    connection = parts.connection()
    assert "NO-SUCH-COMMAND" in unavailable(lambda: connection.send_and_wait("NO-SUCH-COMMAND"))
    assert connection.send_and_wait("PING") == b"PONG"


# -- Redis refuses -----------------------------------------------------------------------


def agreed(server: RedisServer) -> int:
    """The number of letters, after checking that stream, ids and tally agree."""
    client = server.client()
    letters = client.xlen(KEYS.letters(DLQ))
    tally = client.hgetall(KEYS.tally(DLQ))
    assert client.hlen(KEYS.ids(DLQ)) == letters
    reasons = [int(n) for name, n in tally.items() if name.startswith(b"reason:")]
    groups = client.zrange(KEYS.groups(DLQ), 0, -1, withscores=True)
    assert sum(reasons) == sum(count for _, count in groups) == letters
    assert {name for name in tally if name.startswith(b"group:")} == {
        b"group:" + fingerprint for fingerprint, _ in groups
    }
    return int(letters)


def fill(server: RedisServer) -> None:
    """Let the server refuse every write that takes memory, until `empty`."""
    client = server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", "1")


def empty(server: RedisServer) -> None:
    """Let the server write again."""
    server.client().config_set("maxmemory", "0")


def test_a_full_redis_refuses_a_letter_as_a_whole(own: Parts, server: RedisServer) -> None:
    """The message is not acknowledged then, and nothing is half written."""
    store, first, second = own.store(), a_letter(), a_letter()
    store.dead_letter(first, key_of(first))
    fill(server)
    text = unavailable(lambda: store.dead_letter(second, key_of(second)))
    assert "memory" in text
    assert agreed(server) == 1
    assert store.get(DLQ, second.id) is None
    empty(server)
    store.dead_letter(second, key_of(second))
    assert agreed(server) == 2


def test_a_redis_that_fills_up_on_the_way_holds_whole_letters(
    own: Parts, server: RedisServer
) -> None:
    """Whenever the memory ends, each letter is there with index and tally, or not at all."""
    store, client = own.store(), server.client()
    client.config_set("maxmemory-policy", "noeviction")
    client.config_set("maxmemory", str(client.info("memory")["used_memory"] + 3_000_000))
    stored = 0
    with pytest.raises(StoreUnavailable):
        for _ in range(10_000):
            letter = a_letter(body=b"x" * 20_000)
            store.dead_letter(letter, key_of(letter))
            stored += 1
    assert stored > 0
    assert agreed(server) == stored


def test_a_full_redis_still_lets_letters_be_read_and_removed(
    own: Parts, server: RedisServer
) -> None:
    """That is how an operator makes room."""
    store = own.store()
    for _ in range(3):
        letter = a_letter()
        store.dead_letter(letter, key_of(letter))
    fill(server)
    assert len(list(store.letters(DLQ, newest_first=False))) == 3
    assert store.remove(DLQ, [letter.id]) == 1
    assert agreed(server) == 2


def test_a_full_redis_still_counts(own: Parts, server: RedisServer) -> None:
    """Starts, ends and heartbeats are small; without them a poison message would run on."""
    connection = own.connection()
    counter, key, fresh = own.counter(connection), a_key(), a_key()
    assert counted(counter, key) == 1
    fill(server)
    assert counted(counter, key) == 2
    counter.count_first(fresh, a_delivery())
    counter.record_end(fresh, an_ended_delivery())
    counter.heartbeat([DLQ])
    counter.flush()
    assert connection.errors == 0
    assert counter.history(fresh) == (an_ended_delivery(),)
    assert server.client().zcard(KEYS.workers(DLQ)) == 1


def test_letters_can_be_claimed_and_purged_on_a_full_redis(own: Parts, server: RedisServer) -> None:
    """An operator makes room exactly then."""
    store, letter = own.store(), a_letter()
    store.dead_letter(letter, key_of(letter))
    fill(server)
    assert store.claims.claim(DLQ, [letter.id], owner="me", lease_seconds=9) == [ClaimState.CLAIMED]
    assert store.remove(DLQ, [letter.id], owner="me") == 1
    empty(server)
    assert agreed(server) == 0


def test_a_redis_without_its_replicas_refuses_as_an_outage(own: Parts, server: RedisServer) -> None:
    """``min-replicas-to-write`` is how careful people guard against split brains."""
    store, first, second, counter = own.store(), a_letter(), a_letter(), own.counter()
    store.dead_letter(first, key_of(first))
    server.client().config_set("min-replicas-to-write", 1)
    unavailable(lambda: store.dead_letter(second, key_of(second)))
    unavailable(lambda: store.claims.claim(DLQ, [first.id], owner="me", lease_seconds=9))
    unavailable(lambda: store.remove(DLQ, [first.id]))
    unavailable(lambda: counter.count_delivery(a_key(), a_delivery(), 3))
    server.client().config_set("min-replicas-to-write", 0)
    store.dead_letter(second, key_of(second))
    assert agreed(server) == 2


@pytest.fixture
def replica(server: RedisServer) -> Iterator[RedisServer]:
    """Give a read-only copy of one's own server."""
    with RedisServer("--replicaof", "127.0.0.1", str(server.port)) as started:
        client = started.client()
        poll(lambda: client.info("replication")["master_link_status"] == "up", timeout_seconds=30)
        yield started


def test_a_read_only_replica_refuses_as_an_outage(
    server: RedisServer, replica: RedisServer
) -> None:
    """A failover may leave ``dlq_url`` on the wrong node; nothing is lost for it."""
    primary, parts = Parts(server.url), Parts(replica.url)
    first, second, key = a_letter(), a_letter(), a_key()
    primary.store().dead_letter(first, key_of(first))
    store, connection = parts.store(), parts.connection()
    counter = parts.counter(connection)
    assert poll(lambda: store.get(DLQ, first.id)) == first
    for call in (
        lambda: store.dead_letter(second, key_of(second)),
        lambda: store.claims.claim(DLQ, [first.id], owner="me", lease_seconds=9),
        lambda: store.remove(DLQ, [first.id]),
        lambda: counter.count_delivery(key, a_delivery(), 3),
    ):
        assert "read only" in unavailable(call)
    counter.count_first(key, a_delivery())
    counter.flush()
    assert connection.errors > 0
    assert agreed(server) == 1
    parts.close()
    primary.close()


def test_letters_can_be_read_from_a_replica(server: RedisServer, replica: RedisServer) -> None:
    """An operator may look without loading the primary."""
    parts = [Parts(server.url), Parts(replica.url)]
    letter = a_letter()
    parts[0].store().dead_letter(letter, key_of(letter))
    reading = parts[1].store()
    assert poll(lambda: reading.get(DLQ, letter.id)) == letter
    assert [group.letters for group in Reading(reading).groups(DLQ)] == [1]
    for made in parts:
        made.close()


# -- passwords -----------------------------------------------------------------------------


@pytest.fixture
def guarded_server() -> Iterator[RedisServer]:
    """Give a server that wants a password."""
    with RedisServer(password=SECRET) as started:
        yield started


def test_the_right_password_is_used(guarded_server: RedisServer) -> None:
    """Both kinds of connection say it."""
    parts = Parts(guarded_server.url)
    letter, key = a_letter(), a_key()
    parts.store().dead_letter(letter, key_of(letter))
    assert counted(parts.counter(), key) == 1
    parts.close()


@pytest.mark.parametrize("said", ["", f":wrong-{SECRET}@", f"somebody:wrong-{SECRET}@"])
def test_a_wrong_password_is_an_outage_that_never_shows_it(
    guarded_server: RedisServer, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither an error nor the log may publish a password, not even a wrong one."""
    parts = Parts(f"redis://{said}127.0.0.1:{guarded_server.port}/0")
    store, letter, key = parts.store(), a_letter(), a_key()
    connection = parts.connection()
    counter = parts.counter(connection)
    with caplog.at_level(logging.DEBUG):
        with pytest.raises(SettingsError, match="to accept the user and password") as wrong:
            parts.check()
        texts = [
            str(wrong.value),
            unavailable(lambda: store.dead_letter(letter, key_of(letter))),
            unavailable(lambda: list(store.letters(DLQ, newest_first=False))),
            unavailable(lambda: counter.count_delivery(key, a_delivery(), None)),
        ]
        counter.count_first(key, a_delivery())
        counter.flush()
    assert connection.errors > 0
    assert SECRET not in caplog.text
    for text in texts:
        assert SECRET not in text
        assert "\n" not in text


def test_a_password_does_not_show_when_the_server_is_away(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """An outage is logged with the place, not with the secret."""
    port = server.port
    server.kill()
    parts = Parts(f"redis://user:{SECRET}@127.0.0.1:{port}/0")
    counter, _store = parts.counter(), parts.store()
    with caplog.at_level(logging.DEBUG):
        texts = [
            unavailable(parts.check),
            unavailable(lambda: counter.count_delivery(a_key(), a_delivery(), None)),
        ]
        counter.count_first(a_key(), a_delivery())
    assert "Deliveries are not counted now" in caplog.text
    for text in (caplog.text, *texts):
        assert f"127.0.0.1:{port}" in text
        assert SECRET not in text
    parts.close()


@pytest.mark.parametrize(
    "url",
    [
        f"redis://:{SECRET}@127.0.0.1:no-port/0",
        f"redis://:{SECRET}@127.0.0.1:99999/0",
        f"redis://:{SECRET}@127.0.0.1/0?socket_timeout=soon",
    ],
)
def test_an_unusable_url_is_refused_without_its_password(url: str) -> None:
    """A typing mistake is a settings error of one line."""
    with pytest.raises(SettingsError, match="expected dlq_url to be a usable Redis URL") as raised:
        connect(url, 1.0)
    assert SECRET not in str(raised.value)
    assert "\n" not in str(raised.value)


# -- odd servers -----------------------------------------------------------------------------


def test_something_that_is_no_redis_is_an_outage() -> None:
    """A port may belong to another program that answers in another language."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        stop = threading.Event()

        def answer() -> None:
            listening.settimeout(0.05)
            while not stop.is_set():
                try:
                    connection, _ = listening.accept()
                except TimeoutError:
                    continue
                with connection:
                    connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        parts = Parts(f"redis://127.0.0.1:{port}/0")
        try:
            counter = parts.counter()
            unavailable(lambda: counter.count_delivery(a_key(), a_delivery(), None))
            counter.count_first(a_key(), a_delivery())
            with pytest.raises(SettingsError, match="to be a Redis, got InvalidResponse"):
                Store(parts.url).check()
        finally:
            parts.close()
            stop.set()
            thread.join(10)


def test_an_entry_that_is_no_letter_stops_no_reader(
    parts: Parts, redis_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    """Somebody else's entry in the stream is passed over and named in the log."""
    store, letters = parts.store(), [a_letter() for _ in range(2)]
    store.dead_letter(letters[0], key_of(letters[0]))
    client = redis_server.client()
    client.xadd(KEYS.letters(DLQ), {"hello": "world"})
    client.xadd(KEYS.letters(DLQ), {**letters[0].to_fields(), "history": "[null]"})  # type: ignore[dict-item]
    store.dead_letter(letters[1], key_of(letters[1]))
    with caplog.at_level(logging.WARNING, "celery_dlq.store"):
        found = [stored.letter for stored in store.letters(DLQ, newest_first=False)]
    assert found == letters
    assert len(caplog.records) == 2
    assert DLQ in caplog.text


def test_connections_of_ones_own_do_not_use_up_the_pool(parts: Parts) -> None:
    """A process that lives long reconnects and reads ahead more often than a pool has places."""
    client = connect(parts.url, 5.0)
    client.connection_pool.max_connections = 2
    for _ in range(5):
        ahead = ReadAhead(client, parts.url)
        ahead.send_ahead("EXISTS", "nothing")
        assert ahead.wait_for_reply() == 0
        ahead.close()
        connection = PipelinedConnection(client, parts.url)
        assert connection.send_and_wait("EXISTS", "nothing") == 0
        connection.close()
    assert client.ping()
