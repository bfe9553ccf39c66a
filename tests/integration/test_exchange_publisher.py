"""Letters on their way to a dead-letter exchange: a real RabbitMQ, a real Redis."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import intervals
import pytest
import redis
from builders import a_letter, key_of
from celery import Celery
from kombu import Connection, Exchange, Queue
from rabbit import RabbitServer
from tcp_proxy import TcpProxy
from waiting import poll

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import BrokerUnavailable, SettingsError
from celery_dlq.events import DeadLettered
from celery_dlq.features.exchange.connection import Exchanges
from celery_dlq.features.exchange.deliveries import TRIES
from celery_dlq.features.exchange.publisher import (
    ExchangePublisher,
    Outbox,
    OutboxEntry,
    outbox_of,
    publisher_of,
)
from celery_dlq.worker.housekeeping import Housekeeping

HEADERS = '{"task":"shop.charge","id":"t-1","nothing":null,"deep":{"list":[1,2.5]}}'
EXCHANGES = ("deaths", "letters")


class Subscriber:
    """A service that listens to an exchange."""

    def __init__(self, connection: Any, exchange: Exchange, key: str) -> None:
        channel = connection.channel()
        self._queue = Queue("", exchange, key, exclusive=True, channel=channel)
        self._queue.declare()

    def get(self) -> Any:
        """Wait for a message."""
        message = poll(lambda: self._queue.get(no_ack=True), timeout_seconds=30)
        assert message is not None
        return message

    def is_empty(self) -> bool:
        return self._queue.get(no_ack=True) is None


@pytest.fixture
def connection(rabbit_server: RabbitServer) -> Iterator[Connection]:
    """Give a connection; the exchanges of these tests are gone before and after."""

    def clean() -> None:
        for name in EXCHANGES:
            made.channel().exchange_delete(name)

    with Connection(rabbit_server.url) as made:
        clean()
        yield made
        clean()


APPS: list[Celery] = []
PUBLISHERS: list[ExchangePublisher] = []


@pytest.fixture(autouse=True)
def closed(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Look at each call; close what the apps opened, the publisher's connections too."""
    intervals.change(monkeypatch, outbox_sweep=0.0)
    yield
    while PUBLISHERS:
        PUBLISHERS.pop().close()
    while APPS:
        DeadLetters.of(APPS.pop()).assembly.close()


def an_app(broker_url: str, redis_url: str, exchange: Any, key: str | None = None) -> Celery:
    app = Celery("shop", broker=broker_url, set_as_current=False)
    if key is not None:
        exchange = {"name": exchange} if isinstance(exchange, str) else exchange
        exchange = {**exchange, "routing_key": key}
    app.conf.update(dlq_url=redis_url, dlq_queues={"orders": {"dead_letter_exchange": exchange}})
    APPS.append(app)
    return app


def stored(dlq: DeadLetters, **changes: Any) -> DeadLetter:
    """A letter that was stored as a worker does it."""
    letter = a_letter(headers=HEADERS, **changes)
    store(dlq, letter)
    return letter


def store(dlq: DeadLetters, letter: DeadLetter) -> None:
    """Store it as a worker does: the outbox first."""
    outbox = outbox_of(dlq.assembly)
    assert outbox is not None
    outbox.before_store(letter)
    dlq.store.dead_letter(letter, key_of(letter))
    dlq.events.emit(DeadLettered(at=letter.dead_lettered_at, letter=letter))


def checked(dlq: DeadLetters) -> None:
    """Look at the broker as a starting worker does."""
    Exchanges(dlq.app, dlq.assembly.policy_table()).declare_all()


def a_publisher(dlq: DeadLetters) -> ExchangePublisher:
    PUBLISHERS.append(publisher_of(dlq.assembly))
    return PUBLISHERS[-1]


def deliver(publisher: Any) -> None:
    """Publish all that is due now, as a worker does every five seconds."""
    publisher.publish_new()


def waiting(dlq: DeadLetters) -> int:
    """Number of entries."""
    return dlq.assembly.backend.part(Outbox).waiting("orders-DLQ")


@pytest.mark.parametrize(
    ("kind", "key", "listens_to"),
    [
        ("direct", None, "orders"),
        ("direct", "dead", "dead"),
        ("topic", "dead.orders", "dead.*"),
        ("fanout", None, "whatever"),
    ],
)
def test_other_services_get_each_letter(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    kind: str,
    key: str | None,
    listens_to: str,
) -> None:
    """Body and headers as they were, the death in headers, a message id of its own."""
    app = an_app(rabbit_server.url, redis_url, {"name": "deaths", "type": kind}, key)
    dlq = DeadLetters(app)
    checked(dlq)
    subscriber = Subscriber(connection, Exchange("deaths", kind), listens_to)
    properties = '{"correlation_id":"t-1","message_id":"m-1","expiration":"1","priority":3}'
    letter = stored(
        dlq,
        body=b"\x80\xff",
        content_type="application/x-python-serialize",
        content_encoding="binary",
        properties=properties,
    )
    publisher = a_publisher(dlq)
    deliver(publisher)

    message = subscriber.get()

    assert bytes(message.body) == b"\x80\xff"
    assert message.content_type == "application/x-python-serialize"
    assert message.headers == {
        **letter.decoded("headers"),
        "dlq_letter": letter.id,
        "dlq_reason": "failed",
        "dlq_dead_lettered_at": "2026-03-04T05:06:07.891011+00:00",
        "dlq_source_queue": "orders",
        "dlq_dead_letter_queue": "orders-DLQ",
        "dlq_deliveries": 1,
        "dlq_retries": 0,
    }
    assert message.properties["correlation_id"] == "t-1"
    assert message.properties["message_id"] not in ("m-1", letter.id)
    assert message.properties["delivery_mode"] == 2
    assert "expiration" not in message.properties
    assert waiting(dlq) == 0
    deliver(publisher)
    assert subscriber.is_empty()
    publisher.close()
    dlq.close()


def test_a_letter_without_subscribers_is_stored_and_said_once(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The exchange is there, nobody listens: no error, no retry, one warning."""
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, "deaths"))
    stored(dlq)
    stored(dlq)
    publisher = a_publisher(dlq)
    deliver(publisher)
    assert caplog.text.count("no queue is bound") == 1
    assert waiting(dlq) == 0
    publisher.close()


def test_while_the_broker_is_down_letters_are_stored_and_published_later(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The letter does not wait for the broker."""
    intervals.change(monkeypatch, outbox_lease=1.0)
    subscriber = Subscriber(connection, Exchange("deaths", "fanout"), "")
    with TcpProxy(rabbit_server.port) as proxy:
        url = rabbit_server.url.replace(str(rabbit_server.port), str(proxy.port))
        dlq = DeadLetters(an_app(url, redis_url, {"name": "deaths", "type": "fanout"}))
        letter = stored(dlq)
        assert dlq.store.get("orders-DLQ", letter.id) == letter
        publisher, stop = a_publisher(dlq), threading.Event()
        with pytest.raises(BrokerUnavailable, match="the broker amqp://guest:"):
            deliver(publisher)
        assert waiting(dlq) == 1
        observer = outbox_of(dlq.assembly)
        assert observer is not None
        observer.publisher = publisher
        housekeeping = Housekeeping()
        housekeeping.add(*observer.tasks)

        def tick() -> None:
            while not stop.wait(0.2):
                housekeeping.tick()
            housekeeping.close()

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            proxy.open()
            assert subscriber.get().headers["dlq_letter"] == letter.id
            proxy.shut()  # with a connection in use
            later = stored(dlq)
            proxy.open()
            assert subscriber.get().headers["dlq_letter"] == later.id
            poll(lambda: waiting(dlq) == 0, timeout_seconds=30)
        finally:
            stop.set()
            thread.join(30)
        assert not thread.is_alive()
        dlq.close()


def test_an_entry_without_a_letter_is_kept_for_its_wait_and_then_reported(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its letter may be stored this moment; or it was redriven before it could be published."""
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, "deaths"))
    letter = stored(dlq)
    dlq.store.remove("orders-DLQ", [letter.id])
    publisher = a_publisher(dlq)
    intervals.change(monkeypatch, outbox_lease=0.0)
    deliver(publisher)
    assert waiting(dlq) == 1
    intervals.change(monkeypatch, outbox_missing=0.0)
    deliver(publisher)
    assert waiting(dlq) == 0
    assert f"Letter {letter.id} was never published" in caplog.text
    publisher.close()


def test_one_that_is_refused_holds_up_no_other(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exchange that another release named and nobody has; headers that AMQP cannot carry."""
    intervals.change(monkeypatch, outbox_lease=0.0)
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, "deaths"))
    subscriber = Subscriber(connection, Exchange("deaths"), "orders")
    gone = stored(dlq)
    outbox = dlq.assembly.backend.part(Outbox)
    for name in ("0", "zzz"):  # the first and the last in the outbox
        outbox.add_entry(
            "orders-DLQ", OutboxEntry(letter_id=gone.id, exchange=name, routing_key="x")
        )
    odd = a_letter(headers='{"big":99999999999999999999999}', id="00000000")
    store(dlq, odd)
    fine = [stored(dlq).id for _ in range(3)]
    publisher = a_publisher(dlq)
    deliver(publisher)
    heard = {subscriber.get().headers["dlq_letter"] for _ in range(4)}
    assert heard == {gone.id, *fine}
    assert waiting(dlq) == 3
    deliver(publisher)
    assert caplog.text.count("Letter 00000000 is not published") == 1
    assert caplog.text.count(f"Letter {gone.id} is not published") == 1
    assert waiting(dlq) == 3
    publisher.close()
    dlq.close()


@pytest.fixture
def full(connection: Connection) -> Iterator[Queue]:
    """Give a subscriber of ``deaths`` that refuses every message."""
    arguments = {"x-max-length": 0, "x-overflow": "reject-publish"}
    exchange = Exchange("deaths", "fanout")
    queue = Queue("full", exchange, queue_arguments=arguments, channel=connection.channel())
    queue.declare()
    yield queue
    queue.delete()


def test_a_subscriber_that_refuses_gives_the_others_few_copies(
    connection: Connection,
    full: Queue,
    rabbit_server: RabbitServer,
    redis_url: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """RabbitMQ refuses what one of the queues refuses, and the others have it; it ends."""
    intervals.change(monkeypatch, outbox_lease=0.0)
    subscriber = Subscriber(connection, Exchange("deaths", "fanout"), "")
    exchange = {"name": "deaths", "type": "fanout"}
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, exchange))
    letter = stored(dlq)
    for _ in range(2):  # the count of the first worker is known to the second
        dlq = DeadLetters(an_app(rabbit_server.url, redis_url, exchange))
        publisher = a_publisher(dlq)
        for _ in range(6):
            deliver(publisher)
    copies = [subscriber.get() for _ in range(TRIES)]
    assert len({copy.properties["message_id"] for copy in copies}) == 1
    assert subscriber.is_empty()
    assert waiting(dlq) == 0
    assert dlq.store.get("orders-DLQ", letter.id) == letter
    assert "a queue refused it: is it full?" in caplog.text
    (said,) = [one.getMessage() for one in caplog.records if "given up" in one.getMessage()]
    assert letter.id in said
    assert "exchange 'deaths' with routing key 'orders'" in said
    full.delete()
    fine = stored(dlq)
    deliver(publisher)
    assert subscriber.get().headers["dlq_letter"] == fine.id


def test_a_letter_that_is_refused_waits_longer_each_time(
    full: Queue, rabbit_server: RabbitServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And holds up no other; the next worker goes on counting."""
    intervals.change(monkeypatch, outbox_lease=10.0)
    exchange = {"name": "deaths", "type": "fanout"}
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, exchange))
    stored(dlq)
    publisher = a_publisher(dlq)
    waits = []
    with redis.Redis.from_url(redis_url) as client:
        (key,) = client.keys("*outbox*")
        for _ in range(TRIES - 1):
            deliver(publisher)
            deliver(publisher)  # it is not due
            ((entry, at),) = client.zrange(key, 0, -1, withscores=True)
            seconds, micros = client.time()
            waits.append(at / 1000 - seconds - micros / 1_000_000)
            client.zadd(key, {entry: 0})
        deliver(publisher)
        assert client.keys("*outbox*") == []
    assert waits == pytest.approx([10, 40, 160, 640], abs=5)


def test_a_slow_broker_gives_no_copies(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a worker took and cannot publish in time, it puts back; two workers publish once."""
    intervals.change(monkeypatch, outbox_lease=3.0, outbox_round=0.5)
    publish = Exchanges.publish

    def slowly(*args: Any) -> bool:
        time.sleep(0.1)
        return publish(*args)

    monkeypatch.setattr(Exchanges, "publish", slowly)
    subscriber = Subscriber(connection, Exchange("deaths", "fanout"), "")
    exchange = {"name": "deaths", "type": "fanout"}
    dlqs = [DeadLetters(an_app(rabbit_server.url, redis_url, exchange)) for _ in range(2)]
    letters = {stored(dlqs[0]).id for _ in range(40)}

    def delivers(dlq: DeadLetters) -> None:
        publisher = a_publisher(dlq)
        poll(lambda: deliver(publisher) or not waiting(dlq), timeout_seconds=60, every_seconds=0.1)

    with ThreadPoolExecutor() as pool:
        list(pool.map(delivers, dlqs))
    heard = [subscriber.get().headers["dlq_letter"] for _ in letters]
    assert (sorted(heard), subscriber.is_empty()) == (sorted(letters), True)


def refusal(rabbit_server: RabbitServer, redis_url: str, *policy: Any) -> str:
    """The error of a starting worker."""
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, *policy))
    with pytest.raises(SettingsError) as raised:
        checked(dlq)
    assert "guest:guest" not in str(raised.value)
    return str(raised.value)


def test_what_does_not_fit_the_broker_is_refused_at_the_start(
    connection: Connection, rabbit_server: RabbitServer, redis_url: str
) -> None:
    """Another type, a reserved name, a queue that is not there."""
    Exchange("deaths", "fanout", channel=connection.channel()).declare()
    text = refusal(rabbit_server, redis_url, {"name": "deaths", "type": "topic"})
    assert "the topic exchange 'deaths'" in text
    assert "inequivalent arg 'type'" in text
    assert "'amq.mine'" in refusal(rabbit_server, redis_url, "amq.mine")
    assert "'nowhere'" in refusal(rabbit_server, redis_url, "", "nowhere")


def test_a_queue_behind_the_default_exchange_is_waited_for(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was there at the start, and somebody deleted it; nobody has copies, so it never ends."""
    intervals.change(monkeypatch, outbox_lease=0.0)
    queue = Queue("alerts", channel=connection.channel())
    queue.declare()
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, "", "alerts"))
    checked(dlq)
    queue.delete()
    letter = stored(dlq)
    publisher = a_publisher(dlq)
    for _ in range(2 * TRIES):
        deliver(publisher)
    assert waiting(dlq) == 1
    queue.declare()
    deliver(publisher)
    message = poll(lambda: queue.get(no_ack=True))
    assert message is not None
    assert message.headers["dlq_letter"] == letter.id
    assert waiting(dlq) == 0
    queue.delete()
    publisher.close()


@pytest.mark.parametrize("kind", ["direct", "topic"])
def test_redis_has_exchanges_too(redis_url: str, kind: str) -> None:
    """As kombu makes them; without confirms, because Redis answers each push."""
    with Connection(redis_url) as connection:
        exchange = Exchange("deaths", kind)
        queue = Queue("alerts", exchange, "orders", channel=connection.channel())
        queue.declare()
        dlq = DeadLetters(an_app(redis_url, redis_url, {"name": "deaths", "type": kind}))
        checked(dlq)
        letter = stored(dlq)
        publisher = a_publisher(dlq)
        deliver(publisher)
        message = queue.get(no_ack=True)
        assert message is not None
        assert message.headers["dlq_letter"] == letter.id
        publisher.close()
        dlq.close()


def test_a_broker_that_blocks_publishers_is_named_and_the_next_message_is_its_own(
    connection: Connection,
    rabbit_server: RabbitServer,
    redis_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A task may wait for a copy: for a bounded time, and no late confirmation is another's."""
    intervals.change(monkeypatch, publish_reply=1.0, job_beat=0.2)
    dlq = DeadLetters(an_app(rabbit_server.url, redis_url, "deaths", "dead"))
    exchanges = Exchanges(dlq.app, dlq.assembly.policy_table())
    exchanges.declare_all()
    subscriber = Subscriber(connection, Exchange("deaths", type="direct"), "dead")
    blocked, letter = a_letter(body=b"blocked"), a_letter(body=b"next")
    assert exchanges.publish(a_letter(body=b"first"), "deaths", "dead")
    with (
        rabbit_server.blocking_publishers(),
        pytest.raises(BrokerUnavailable, match="RabbitMQ blocks publishers"),
    ):
        while True:  # a channel is told of the alarm by its first message
            exchanges.publish(blocked, "deaths", "dead")
    assert not exchanges.publish(letter, "deaths", "nobody")
    assert exchanges.publish(letter, "deaths", "dead")
    exchanges.close()
    assert exchanges.publish(letter, "deaths", "dead")  # on a new connection, at once
    exchanges.close()
    bodies: list[str] = []
    while bodies.count("next") < 2:
        bodies.append(subscriber.get().body)
    # What RabbitMQ has not read of a connection when that closes may be published or not.
    assert (bodies[0], {*bodies[1:-2]} - {"blocked"}, bodies[-2:]) == ("first", set(), ["next"] * 2)
