"""Adopting from real brokers: once, lossless, whoever filled the queue."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from builders import NOW
from celery import Celery
from command_proxy import CommandProxy, sends
from fork_server import run_forked
from kombu import Queue
from rabbit import RabbitServer
from servers import RedisServer
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters, Reason
from celery_dlq.config import Settings
from celery_dlq.errors import BrokerUnavailable, DLQError, NotFound, SettingsError, StoreUnavailable
from celery_dlq.events import Action, DeadLettered
from celery_dlq.features.adopt.adopter import Adopter
from celery_dlq.store.store import Store
from celery_dlq.store.worker_records import ServerMemory, WorkerInfo
from celery_dlq.worker.housekeeping import Housekeeping
from celery_dlq.writing.letter import LetterMaker

QUEUES = ("orders", "orders.dead", "orders-DLQ")


@dataclass
class Broker:
    """A RabbitMQ, the app on it, and its letters in Redis."""

    app: Celery
    dlq: DeadLetters
    queue_type: str

    def declare(self) -> None:
        """The usual set-up: what dies in ``orders`` goes to ``orders.dead``."""
        with self.app.connection_for_write() as connection:
            for queue in queues(self.queue_type):
                queue(connection.default_channel).declare()

    def kill_tasks(self, count: int = 1, **options: Any) -> list[str]:
        """Publish tasks and let RabbitMQ dead-letter them."""
        with self.app.connection_for_write() as connection:
            ids = [
                self.app.send_task(
                    "shop.charge",
                    (number,),
                    queue="orders",
                    connection=connection,
                    **{"ignore_result": True, **options},
                ).id
                for number in range(count)
            ]
            self.reject(connection, count)
        poll(lambda: self.ready("orders.dead") >= count)
        return ids

    def reject(self, connection: Any, count: int) -> None:
        """Take messages and reject them, so that they die."""
        channel = connection.default_channel
        for _ in range(count):
            message = poll(lambda: channel.basic_get("orders"))
            channel.basic_reject(message.delivery_tag, requeue=False)

    def publish(self, body: bytes, queue: str = "orders.dead", **options: Any) -> None:
        """Publish as a program that is not Celery."""
        with self.app.connection_for_write() as connection:
            connection.Producer().publish(
                body,
                exchange="",
                routing_key=queue,
                **{"content_type": "text/plain", "content_encoding": "binary", **options},
            )

    def ready(self, queue: str) -> int:
        """Number of messages that a queue would give out now."""
        with self.app.connection_for_read() as connection:
            return int(connection.default_channel.queue_declare(queue, passive=True).message_count)

    def letters(self, queue: str = "orders-DLQ") -> list[DeadLetter]:
        return list(self.dlq.letters(queue))


def queues(queue_type: str) -> list[Queue]:
    """A queue, and the one that RabbitMQ puts its dead messages into."""
    kind: dict[str, Any] = {"x-queue-type": queue_type}
    dead = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "orders.dead"}
    more = {"x-delivery-limit": 1} if queue_type == "quorum" else {}
    return [
        Queue("orders.dead", queue_arguments=kind),
        Queue("orders", queue_arguments={**kind, **dead, **more}),
    ]


@pytest.fixture(params=["classic", "quorum"])
def broker(
    request: pytest.FixtureRequest, rabbit_server: RabbitServer, redis_url: str
) -> Iterator[Broker]:
    """Give each type of queue in turn, empty."""
    rabbit_server.delete_queues(*QUEUES)
    app = Celery("adopting", broker=rabbit_server.url, set_as_current=False)
    app.conf.update(dlq_url=redis_url, task_queues=queues(request.param))
    made = Broker(app, DeadLetters(app), request.param)
    made.declare()
    yield made
    made.dlq.close()
    app.close()
    rabbit_server.delete_queues(*QUEUES)


def test_what_rabbitmq_dead_lettered_becomes_letters(broker: Broker) -> None:
    """With the task, the native history, and an entry in the audit."""
    ids = broker.kill_tasks(3)
    heard: list[Any] = []
    broker.dlq.events.subscribe(heard.append)

    report = broker.dlq.adopt("orders.dead")

    by_queue = {"orders-DLQ": 3}
    assert report.to_json() == {
        "queue": "orders.dead",
        "adopted": 3,
        "known": 0,
        "maybe_twice": 0,
        "by_queue": by_queue,
    }
    letters = broker.letters()
    assert [letter.task_id for letter in letters] == ids
    for number, letter in enumerate(letters):
        assert (letter.reason, letter.task_name) == (Reason.ADOPTED, "shop.charge")
        assert (letter.source_queue, letter.args_json) == ("orders", f"[{number}]")
        (death,) = letter.decoded("native_death")["x-death"]
        assert (death["reason"], death["queue"]) == ("rejected", "orders")
    assert broker.ready("orders.dead") == 0
    assert [event.letter for event in heard if isinstance(event, DeadLettered)] == letters
    (change,) = broker.dlq.registry.changes(limit=5)
    assert (change.action, change.target, change.letters) == (Action.ADOPTED, "orders-DLQ", 3)
    assert change.detail == {"queue": "orders.dead"}
    assert broker.dlq.adopt("orders.dead").adopted == 0


def test_a_redriven_letter_runs_without_the_brokers_history(broker: Broker) -> None:
    """RabbitMQ would take a message with x-death for one that goes in circles."""
    (task_id,) = broker.kill_tasks()
    broker.dlq.adopt("orders.dead")
    assert broker.dlq.redrive("orders-DLQ").published == 1
    with broker.app.connection_for_read() as connection:
        message = poll(lambda: connection.default_channel.basic_get("orders"))
        assert message.headers["id"] == task_id
        assert [name for name in message.headers if "death" in name] == []
        assert message.headers["dlq_redrives"] == 1
        # Dies again: a new message, a new letter.
        message.channel.basic_reject(message.delivery_tag, requeue=False)
    poll(lambda: broker.ready("orders.dead"))
    broker.dlq.adopt("orders.dead")
    (letter,) = broker.letters()
    assert (letter.task_id, letter.redrives) == (task_id, 1)


def test_each_native_reason_is_kept(broker: Broker) -> None:
    """Expired everywhere; over the delivery limit on quorum queues only."""
    expected = {"rejected"}
    broker.kill_tasks()
    if broker.queue_type == "classic":
        broker.publish(b"late", "orders", expiration=0.01)
        expected.add("expired")
    else:
        broker.publish(b"loops", "orders")
        with broker.app.connection_for_read() as connection:
            channel = connection.default_channel
            for _ in range(2):
                message = poll(lambda: channel.basic_get("orders"))
                channel.basic_reject(message.delivery_tag, requeue=True)
        expected.add("delivery_limit")
    poll(lambda: broker.ready("orders.dead") == 2)
    broker.dlq.adopt("orders.dead")
    assert {
        letter.decoded("native_death")["x-death"][0]["reason"] for letter in broker.letters()
    } == expected


def test_messages_of_other_programs_become_letters_too(broker: Broker) -> None:
    """Any bytes, malformed headers; each of several equal messages is a letter."""
    broker.publish(b"\x80\xff", headers={"x-death": "by accident"}, message_id="m-1")
    for _ in range(3):
        broker.publish(b"ping")
    broker.publish(b'{"task": 1}', content_type="application/json", content_encoding="utf-8")
    poll(lambda: broker.ready("orders.dead") == 5)
    report = broker.dlq.adopt("orders.dead", "odd-DLQ")
    assert (report.adopted, report.known) == (5, 0)
    letters = broker.letters("odd-DLQ")
    assert sorted(letter.body for letter in letters) == [
        b"ping",
        b"ping",
        b"ping",
        b'{"task": 1}',
        b"\x80\xff",
    ]
    assert len({letter.id for letter in letters}) == 5
    odd = next(letter for letter in letters if letter.task_id == "m-1")
    assert odd.decoded("native_death") == {"x-death": "by accident"}
    assert "cannot be read" in odd.description


def test_a_limit_takes_the_oldest_and_leaves_the_rest(broker: Broker) -> None:
    """In order."""
    ids = broker.kill_tasks(3)
    assert broker.dlq.adopt("orders.dead", limit=2).adopted == 2
    assert [letter.task_id for letter in broker.letters()] == ids[:2]
    assert broker.ready("orders.dead") == 1


def test_a_store_that_is_down_leaves_the_messages_in_their_queue(
    broker: Broker, rabbit_server: RabbitServer
) -> None:
    """The letter first, the acknowledgement second."""
    broker.kill_tasks()
    down = Celery("down", broker=rabbit_server.url, set_as_current=False)
    down.conf.update(dlq_url="redis://127.0.0.1:1/0")
    with pytest.raises(StoreUnavailable):
        DeadLetters(down).adopt("orders.dead")
    poll(lambda: broker.ready("orders.dead") == 1)
    assert broker.dlq.adopt("orders.dead").adopted == 1


def test_a_store_without_room_leaves_the_messages_in_their_queue(broker: Broker) -> None:
    """They are safe there, and are adopted when there is room."""
    ids = broker.kill_tasks(2)
    memory = [ServerMemory(used=95, maximum=100), ServerMemory(used=10, maximum=10**9)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Store, "memory", lambda _self: memory[0])
        with pytest.raises(StoreUnavailable, match="95% of its maxmemory"):
            broker.dlq.adopt("orders.dead")
        poll(lambda: broker.ready("orders.dead") == 2)
        memory.pop(0)
        broker.dlq.adopt("orders.dead")
    assert [letter.task_id for letter in broker.letters()] == ids


DIES = """
import os, signal, sys
from celery import Celery
from celery_dlq import DeadLetters
from celery_dlq.features.adopt import sources
from celery_dlq.store.new_letters import NewLetters
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
for kind in (sources.BrokerQueue, sources.RedisList):
    kind.remove_message = die
if sys.argv[3] == "storing":
    NewLetters.dead_letter = die
app = Celery("dies", broker=sys.argv[1])
app.conf.dlq_url = sys.argv[2]
DeadLetters(app).adopt("orders.dead", sys.argv[4] or None)
"""


def adopt_and_die(
    broker_url: str, redis_url: str, before: str = "acknowledging", target: str = ""
) -> None:
    """Adopt in a process that is killed before it stores, or before it acknowledges."""
    done = run_forked("-c", DIES, broker_url, redis_url, before, target)
    assert done.returncode == -signal.SIGKILL, done.stderr


def look(broker: Broker, queue: str = "orders.dead") -> None:
    """Read messages and put them back, as RabbitMQ's management page does."""
    with broker.app.connection_for_read() as connection:
        channel = connection.default_channel
        while channel.basic_get(queue) is not None:
            pass


def test_equal_messages_without_ids_are_letters_after_somebody_looked(broker: Broker) -> None:
    """RabbitMQ marks all of them as redelivered; two equal messages are two messages."""
    for _ in range(10):
        broker.publish(b"ping")
    poll(lambda: broker.ready("orders.dead") == 10)
    look(broker)
    poll(lambda: broker.ready("orders.dead") == 10)
    first = broker.dlq.adopt("orders.dead", "odd-DLQ", limit=6)
    assert (first.adopted, first.known, first.maybe_twice) == (6, 0, 0)

    report = broker.dlq.adopt("orders.dead", "odd-DLQ")

    # The first run may have been killed before it removed one of them.
    assert (report.adopted, report.known, report.maybe_twice) == (4, 0, 4)
    assert len(broker.letters("odd-DLQ")) == 10
    assert broker.ready("orders.dead") == 0


@pytest.mark.parametrize("before", ["storing", "acknowledging"])
def test_killed_with_an_unnamed_message_it_makes_a_letter_more_rather_than_one_less(
    broker: Broker, rabbit_server: RabbitServer, redis_url: str, before: str
) -> None:
    """Nothing tells if the message that comes back has a letter; the report says so."""
    for _ in range(3):
        broker.publish(b"ping")
    assert broker.dlq.adopt("orders.dead", "odd-DLQ", limit=1).adopted == 1
    adopt_and_die(rabbit_server.url, redis_url, before, "odd-DLQ")
    poll(lambda: broker.ready("orders.dead") == 2)

    report = broker.dlq.adopt("orders.dead", "odd-DLQ")

    assert (report.adopted, report.known, report.maybe_twice) == (2, 0, 1)
    assert len(broker.letters("odd-DLQ")) == (3 if before == "storing" else 4)
    assert broker.ready("orders.dead") == 0


def test_killed_between_storing_and_acknowledging_makes_one_letter(
    broker: Broker, rabbit_server: RabbitServer, redis_url: str
) -> None:
    """The message comes back and finds its letter."""
    broker.kill_tasks()
    adopt_and_die(rabbit_server.url, redis_url)
    (before,) = [q for q in broker.dlq.queues() if q.letters]
    poll(lambda: broker.ready("orders.dead") == 1)

    report = broker.dlq.adopt("orders.dead")

    assert (report.adopted, report.known) == (0, 1)
    assert [(q.name, q.letters) for q in broker.dlq.queues()] == [(before.name, 1)]
    assert broker.ready("orders.dead") == 0


@pytest.mark.parametrize("broker", ["classic"], indirect=True)
def test_mistakes_are_one_line(broker: Broker, redis_url: str) -> None:
    """It has what was expected and what came, and no password."""
    with pytest.raises(NotFound, match=r"no queue 'nowhere' on the broker amqp://guest:\*\*"):
        broker.dlq.adopt("nowhere")
    gone = Celery("gone", broker="amqp://guest:hush@127.0.0.1:1//", set_as_current=False)
    gone.conf.dlq_url = redis_url
    with pytest.raises(BrokerUnavailable, match="from the broker amqp") as raised:
        DeadLetters(gone).adopt("orders.dead")
    assert "hush" not in str(raised.value)
    guarded = Celery("guarded", broker=broker.app.conf.broker_url, set_as_current=False)
    guarded.conf.update(dlq_url=redis_url, dlq_queues={"orders": {"max_deliveries": 3}})
    for queue, target in (("orders", None), ("orders.dead", "orders")):
        with pytest.raises(SettingsError, match="'orders'"):
            DeadLetters(guarded).adopt(queue, target)
        guarded.conf.dlq_adopt = {queue: target}
        with pytest.raises(SettingsError, match="dlq_adopt"):
            Settings.from_conf(guarded.conf)
        del guarded.conf["dlq_adopt"]
    worker = WorkerInfo(hostname="w@1", pid=1, version="", started_at=NOW, queues=("orders.dead",))
    broker.dlq.registry.register(worker)
    with pytest.raises(SettingsError, match="which worker w@1 consumes"):
        broker.dlq.adopt("orders.dead")


@pytest.mark.parametrize("broker", ["classic"], indirect=True)
def test_a_letter_of_unknown_origin_is_not_redriven_to_nowhere(broker: Broker) -> None:
    """It stays, and the report says why."""
    broker.publish(b"ping")
    broker.dlq.adopt("orders.dead", "lost-orders")
    report = broker.dlq.redrive("lost-orders")
    assert report.published == 0
    (error,) = report.failed.values()
    assert "does not name its source queue" in error
    assert len(broker.letters("lost-orders")) == 1


@pytest.mark.parametrize("broker", ["classic"], indirect=True)
def test_following_waits_for_queues_stores_and_brokers(
    broker: Broker, rabbit_server: RabbitServer
) -> None:
    """A queue that is not there yet is no reason to end."""
    rabbit_server.delete_queues("orders.dead")
    make = LetterMaker(clock=lambda: NOW, hostname="web-1", pid=1)
    adopter = Adopter(broker.dlq.assembly, "orders.dead", None, make)
    stop, housekeeping = threading.Event(), Housekeeping()
    housekeeping.add(adopter.task)

    def follow() -> None:
        while not stop.wait(0.2):
            housekeeping.tick()
        housekeeping.close()

    thread = threading.Thread(target=follow)
    thread.start()
    try:
        broker.declare()
        broker.kill_tasks(2, expires=None)
        poll(lambda: adopter.report.adopted == 2, timeout_seconds=30)
    finally:
        stop.set()
        thread.join(30)
    assert not thread.is_alive()
    assert len(broker.letters()) == 2


# -- Redis ----------------------------------------------------------------------------


@pytest.fixture
def on_redis(redis_url: str) -> Iterator[tuple[DeadLetters, redis.Redis]]:
    """Give an app whose broker and store is Redis."""
    app = Celery("adopting", broker=redis_url, set_as_current=False)
    app.conf.broker_transport_options = {"global_keyprefix": "shop:"}
    dlq = DeadLetters(app)
    with redis.Redis.from_url(redis_url) as client:
        yield dlq, client
    dlq.close()
    app.close()


def test_a_list_of_redis_is_adopted_with_all_its_priorities(
    on_redis: tuple[DeadLetters, redis.Redis],
) -> None:
    """Messages of kombu, whoever moved them there, in the order in which they would be popped."""
    dlq, client = on_redis
    ids = [dlq.app.send_task("shop.charge", (n,), queue="orders").id for n in range(250)]
    ids.append(dlq.app.send_task("shop.charge", (9,), queue="orders", priority=9).id)
    client.rename("shop:orders", "shop:orders.dead")
    client.rename("shop:orders\x06\x169", "shop:orders.dead\x06\x169")
    report = dlq.adopt("orders.dead")
    assert (report.adopted, dict(report.by_queue)) == (251, {"orders-DLQ": 251})
    assert [letter.task_id for letter in dlq.letters("orders-DLQ")] == ids
    assert client.keys("shop:orders.dead*") == []
    dlq.redrive("orders-DLQ", limit=1)
    assert client.llen("shop:orders") == 1


def test_entries_that_kombu_cannot_read_become_letters_too(
    on_redis: tuple[DeadLetters, redis.Redis],
) -> None:
    """Kombu itself would take them off the list and lose them."""
    dlq, client = on_redis
    entries = [
        b"\xff\x00",
        b'{"hello": 1}',
        b"[]",
        b'{"properties": 1}',
        b"7",
        json.dumps({"body": "?", "properties": {"delivery_tag": "t"}}).encode(),
    ]
    for entry in entries:
        client.lpush("shop:orders.dead", entry)
    report = dlq.adopt("orders.dead", "orders-DLQ")
    letters = list(dlq.letters("orders-DLQ"))
    assert (report.adopted, len(letters)) == (len(entries), len(entries))
    assert [letter.body for letter in letters][:5] == entries[:5]
    assert {letter.source_queue for letter in letters} == {"orders"}
    assert client.llen("shop:orders.dead") == 0


def test_the_receive_count_of_sqs_shaped_messages_is_kept(
    on_redis: tuple[DeadLetters, redis.Redis],
) -> None:
    """As a bridge from SQS would put them there."""
    dlq, client = on_redis
    dlq.app.send_task("shop.charge", (1,), queue="orders")
    payload = json.loads(client.rpop("shop:orders") or b"")
    payload["properties"]["ApproximateReceiveCount"] = "5"
    client.lpush("shop:orders.dead", json.dumps(payload))
    dlq.adopt("orders.dead")
    (letter,) = dlq.letters("orders-DLQ")
    assert (letter.deliveries, letter.task_name) == (5, "shop.charge")
    assert letter.decoded("native_death") == {"ApproximateReceiveCount": "5"}


def test_equal_entries_of_a_list_are_letters_each(
    on_redis: tuple[DeadLetters, redis.Redis],
) -> None:
    """Also after an adoption that may have been killed before it removed one of them."""
    dlq, client = on_redis
    client.lpush("shop:orders.dead", *["ping"] * 5)
    assert dlq.adopt("orders.dead", "orders-DLQ", limit=2).adopted == 2
    report = dlq.adopt("orders.dead", "orders-DLQ")
    assert (report.adopted, report.known, report.maybe_twice) == (3, 0, 3)
    assert len(list(dlq.letters("orders-DLQ"))) == 5
    assert client.llen("shop:orders.dead") == 0


def test_a_late_reply_to_a_removal_removes_no_equal_entry(
    redis_server: RedisServer, redis_url: str
) -> None:
    """With ``retry_on_timeout``, redis-py would send the command again."""
    with CommandProxy(redis_server.port) as proxy, redis.Redis.from_url(redis_url) as client:
        app = Celery("adopting", broker=proxy.url, set_as_current=False)
        app.conf.dlq_url = redis_url
        app.conf.broker_transport_options = {"retry_on_timeout": True, "socket_timeout": 0.5}
        client.lpush("orders.dead", *["ping"] * 3)
        late = proxy.fault("hold", sends("LREM"))
        dlq = DeadLetters(app)
        with pytest.raises(BrokerUnavailable):
            dlq.adopt("orders.dead", "orders-DLQ")
        late.release()
        assert (dlq.store.length("orders-DLQ"), client.llen("orders.dead")) == (1, 2)
        assert dlq.adopt("orders.dead", "orders-DLQ").adopted == 2
        dlq.close()
        app.close()


def test_killed_before_it_leaves_the_list_an_entry_makes_one_letter(redis_url: str) -> None:
    """It is still in its list: nothing is taken before it is stored."""
    app = Celery("adopting", broker=redis_url, set_as_current=False)
    dlq = DeadLetters(app)
    app.send_task("shop.charge", (1,), queue="orders.dead")
    adopt_and_die(redis_url, redis_url)
    with redis.Redis.from_url(redis_url) as client:
        assert client.llen("orders.dead") == 1
    report = dlq.adopt("orders.dead")
    assert (report.adopted, report.known) == (0, 1)
    assert [queue.letters for queue in dlq.queues()] == [1]
    dlq.close()
    app.close()


def test_a_key_of_another_type_is_refused(on_redis: tuple[DeadLetters, redis.Redis]) -> None:
    """Not a list, not a queue."""
    dlq, client = on_redis
    client.set("shop:orders.dead", "x")
    with pytest.raises(DLQError, match=r"'orders\.dead' from .*WRONGTYPE"):
        dlq.adopt("orders.dead")
