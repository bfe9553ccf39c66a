"""A task id that is used again is another message: it runs, dies and is kept for itself."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
import redis
from rabbit import RabbitServer
from test_holds import held, hold_of, release
from waiting import poll
from workers import Place, Worker, diagonals, run_python

from celery_dlq import DeadLetter, Outcome, Reason
from celery_dlq.store.keys import Keys

Letters = Callable[..., list[DeadLetter]]
Ran = Callable[[str], int]
Start = Callable[..., Worker]

BROKERS = pytest.mark.parametrize("place", ["redis", "classic", "quorum"], indirect=True)

PUBLISH = """
import json, sys, poison_app as p
for name, args, options in json.loads(sys.argv[1]):
    p.app.send_task(f"poison_app.{name}", args, **options)
"""


def publish(redis_url: str, place: Place, *sent: tuple[str, list[Any], dict[str, Any]]) -> None:
    """Publish tasks: name, arguments and options of each."""
    done = run_python(redis_url, "-c", PUBLISH, json.dumps(sent), **place.env)
    assert done.returncode == 0, done.stderr


def tell_to_retry(redis_url: str) -> None:
    """Let the one task that waits for it retry."""
    with redis.Redis.from_url(f"{redis_url.rpartition('/')[0]}/2") as client:
        client.set("retry", 1)


@diagonals("prefork", "threads", "gevent", brokers=("redis", "classic", "quorum"))
@pytest.mark.parametrize("end", ["deployed", "killed"])
def test_a_message_whose_id_has_a_letter_waits_and_runs(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
    pool: str,
    end: str,
) -> None:
    """Its worker is deployed or killed while it waits: it comes back and is no late copy."""
    conf = {"dlq_lease": 5, "worker_prefetch_multiplier": 4}
    worker = start_worker(conf, env=place.env, pool=pool, arguments=("-c", "1"))
    publish(redis_url, place, ("fails", ["monday"], {"task_id": "order-7"}))
    letters()
    publish(
        redis_url,
        place,
        ("sleeps", ["busy", 2], {}),
        ("healthy", ["tuesday"], {"task_id": "order-7"}),
        ("healthy", ["at eight"], {"task_id": "order-7", "countdown": 4}),
    )
    poll(lambda: worker.output.count("order-7") >= 3 and ran("busy"))
    if end == "killed":
        worker.kill()
    else:
        worker.process.send_signal(signal.SIGTERM)
        worker.process.wait(30)
    start_worker(conf, env=place.env, pool=pool)

    poll(lambda: ran("tuesday") == ran("at eight") == 1, timeout_seconds=40)
    (letter,) = letters()
    assert (letter.task_id, letter.args_json) == ("order-7", '["monday"]')


@BROKERS
def test_each_message_that_dies_is_a_letter_of_its_own(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
) -> None:
    """Equal messages, too, if the publisher has the plugin; each has its own starts."""
    conf = {"dlq_queues": {"orders": {"max_deliveries": 2}}}
    start_worker(conf, env=place.env)
    again = ("killed", ["same"], {"task_id": "order-7"})
    publish(redis_url, place, *(("killed", [f"{n}"], {"task_id": "order-7"}) for n in range(2)))
    publish(redis_url, place, again, again, ("fails", ["last"], {"task_id": "order-7"}))

    found = letters(count=5, timeout_seconds=90)
    assert {letter.task_id for letter in found} == {"order-7"}
    assert len({letter.id for letter in found}) == 5
    assert [ran(key) for key in ("0", "1", "same", "last")] == [2, 2, 4, 1]
    dead = [one for one in found if one.reason is Reason.MAX_DELIVERIES_EXCEEDED]
    assert [letter.deliveries for letter in dead] == [2] * 4
    assert all([one.outcome for one in each.history] == [Outcome.WORKER_LOST] * 2 for each in dead)
    assert all(letter.published_at is not None for letter in found)


@BROKERS
def test_messages_with_one_id_are_held_and_released_each(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
) -> None:
    """One is a letter already; none of five is a copy of it, or of another."""
    worker = start_worker(env=place.env)
    publish(redis_url, place, ("fails", ["dead"], {"task_id": "order-7"}))
    letters()
    hold_id = hold_of(redis_url, place, "poison_app.healthy")
    poll(lambda: "holds tasks" in worker.output)
    keys = [f"waits-{n}" for n in range(5)]
    publish(redis_url, place, *(("healthy", [key], {"task_id": "order-7"}) for key in keys))
    poll(lambda: held(poison) == 5 or sum(map(ran, keys)) > 0)
    assert sum(map(ran, keys)) == 0
    release(redis_url, place, hold_id)

    poll(lambda: [ran(key) for key in keys] == [1] * 5)
    assert len(letters()) == 1


PLAIN = """
import json, sys, poison_app as p
from celery import signals
signals.before_task_publish.disconnect(dispatch_uid="celery_dlq.publication")
for name, args, options in json.loads(sys.argv[1]):
    p.app.send_task(f"poison_app.{name}", args, headers={"origin": "gen1@web"}, **options)
"""


@pytest.mark.parametrize("place", ["classic", "quorum"], indirect=True)
def test_equal_messages_of_a_plain_publisher_are_held_and_released_each(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
    place: Place,
) -> None:
    """Nothing tells them apart but that RabbitMQ delivers each for the first time."""

    def publish_plainly(*sent: tuple[str, list[Any], dict[str, Any]]) -> None:
        done = run_python(redis_url, "-c", PLAIN, json.dumps(sent), **place.env)
        assert done.returncode == 0, done.stderr

    worker = start_worker(env=place.env)
    again = ("fails", ["same"], {"task_id": "order-7"})
    publish_plainly(again)
    letters()
    hold_id = hold_of(redis_url, place, "poison_app.fails")
    poll(lambda: "holds tasks" in worker.output)
    publish_plainly(again, again)
    poll(lambda: held(poison) == 2)
    release(redis_url, place, hold_id)

    poll(lambda: ran("same") == 3, timeout_seconds=20)
    assert len(letters(count=3)) == 3


def test_a_copy_is_dropped_with_a_warning_and_runs_once_its_letter_is_purged(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    letters: Letters,
    ran: Ran,
) -> None:
    """What comes again of a dead message says which letter it is a copy of."""
    sent = poison.fails.apply_async(("twice",), task_id="order-7")
    with redis.Redis.from_url(redis_url) as broker:
        (entry,) = broker.lrange("orders", 0, -1)
        copy = json.loads(entry)
        copy["headers"]["redelivered"] = copy["properties"]["delivery_info"]["redelivered"] = True
        worker = start_worker()
        (letter,) = letters()
        broker.lpush("orders", json.dumps(copy))
        poll(lambda: "Late copy of task order-7 dropped" in worker.output)
        line = next(one for one in worker.output.splitlines() if "Late copy" in one)
        assert "WARNING" in line
        assert letter.id in line
        assert ran("twice") == 1

        poison.dlq.purge("orders-DLQ")
        broker.lpush("orders", json.dumps(copy))
        poll(lambda: ran("twice") == 2)
    assert [one.task_id for one in letters()] == [sent.id]


def test_the_copy_of_a_message_that_was_retried_does_nothing(
    poison: ModuleType, redis_url: str, start_worker: Start, ran: Ran
) -> None:
    """Its retry has succeeded: the copy is no start, and no death."""
    sent = poison.retries_when_told.apply_async(("once",), task_id="order-8")
    tell_to_retry(redis_url)
    with redis.Redis.from_url(redis_url) as broker:
        (entry,) = broker.lrange("orders", 0, -1)
        copy = json.loads(entry)
        copy["headers"]["redelivered"] = copy["properties"]["delivery_info"]["redelivered"] = True
        worker = start_worker({"dlq_queues": {"orders": {"max_deliveries": 1}}})
        assert sent.get(timeout=20) == "once"
        # The process that published the retry may report that later than another one its success.
        poll(lambda: broker.exists(Keys().late_copies("orders-DLQ")))
        broker.lpush("orders", json.dumps(copy))
        poll(lambda: "Late copy of task order-8 dropped" in worker.output)
    assert ran("once") == 2
    assert sent.state == "SUCCESS"
    assert not poison.dlq.queues()


@pytest.mark.parametrize("place", ["classic", "quorum"], indirect=True)
def test_a_message_whose_connection_is_lost_before_its_retry_dies_of_nothing(
    poison: ModuleType,
    redis_url: str,
    start_worker: Start,
    ran: Ran,
    place: Place,
    rabbit_server: RabbitServer,
) -> None:
    """RabbitMQ delivers it once more, and its retry is under way: that is a late copy."""
    conf = {"dlq_queues": {"orders": {"max_deliveries": 1}}}
    worker = start_worker(conf, env=place.env)
    publish(redis_url, place, ("retries_when_told", ["once"], {"task_id": "order-7"}))
    poll(lambda: ran("once") == 1)
    with rabbit_server.closing_connections(1, every_seconds=0.1):
        poll(lambda: "Connection to broker lost" in worker.output, timeout_seconds=40)
        tell_to_retry(redis_url)

    poll(lambda: "Late copy of task order-7 dropped" in worker.output, timeout_seconds=20)
    poll(lambda: poison.app.AsyncResult("order-7").state == "SUCCESS")
    assert ran("once") == 2
    assert not poison.dlq.queues()


@contextmanager
def stopped(worker: Worker) -> Iterator[None]:
    """Let a worker and its pool stand still."""
    os.killpg(worker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.killpg(worker.process.pid, signal.SIGCONT)


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_a_worker_that_stood_still_makes_no_letter_of_what_another_completed(
    poison: ModuleType, start_worker: Start, ran: Ran, redis_url: str, pool: str
) -> None:
    """Its message has another owner since; that one says how it ends."""
    conf = {"dlq_lease": 5, "dlq_queues": {"orders": {"max_deliveries": 3}}}
    first = start_worker(conf, pool=pool)
    sent = poison.fails_first.delay("twice", 3)
    poll(lambda: ran("twice") == 1)
    with stopped(first):
        second = start_worker(conf, pool=pool)
        poll(lambda: sent.state == "SUCCESS", timeout_seconds=30)
    poll(lambda: "makes no letter" in first.output, timeout_seconds=20)

    assert ran("twice") == 2
    assert not poison.dlq.queues()
    assert "please report" not in first.output + second.output
