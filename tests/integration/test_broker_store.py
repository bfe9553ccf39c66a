"""Letters in real queues: what RabbitMQ makes of being read, held and left alone."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from builders import DLQ, a_letter, key_of
from celery import Celery
from kombu.connection import Connection
from rabbit import RabbitServer

from celery_dlq import DeadLetter, DeadLetters
from celery_dlq.errors import ExportError, NotSupported, SettingsError, StoreError, StoreUnavailable
from celery_dlq.store.base import ClaimState, GroupState, Stored
from celery_dlq.store.broker import BrokerStore, queue
from celery_dlq.store.broker.message import decoded
from celery_dlq.store.broker.queue import QueueDriver
from celery_dlq.store.connect import connect
from celery_dlq.store.keys import Keys
from celery_dlq.store.positions import PositionIndex

MANY = 100  # more than RabbitMQ keeps in order when they come back in one lot


@pytest.fixture(params=["quorum", "classic"])
def broker(request: pytest.FixtureRequest, rabbit: str) -> str:
    """Give the URL of RabbitMQ without the queue, which becomes a quorum one; or with a classic."""
    if request.param == "classic":
        with Connection(rabbit) as connection:
            connection.default_channel.queue_declare(DLQ, durable=True, auto_delete=False)
    return rabbit


@pytest.fixture
def rabbit(rabbit_server: RabbitServer, redis_url: str) -> str:
    """Give the URL of RabbitMQ without the queue, beside an empty Redis."""
    del redis_url
    rabbit_server.delete_queues(DLQ)
    return rabbit_server.url


@pytest.fixture
def operators(redis_url: str) -> Iterator[Callable[..., DeadLetters]]:
    """Make one process's `DeadLetters`; each call is another operator."""
    made: list[DeadLetters] = []

    def make(url: str, **conf: Any) -> DeadLetters:
        app = Celery(f"operator{len(made)}", broker=url, set_as_current=False)
        app.conf.update(dlq_store="broker", dlq_url=redis_url, **conf)
        made.append(DeadLetters(app))
        return made[-1]

    yield make
    for dead_letters in made:
        dead_letters.close()


def put(dead_letters: DeadLetters, **changes: Any) -> DeadLetter:
    """Store a letter."""
    letter = a_letter(**changes)
    dead_letters.store.dead_letter(letter, key_of(letter))
    return letter


def ids(dead_letters: DeadLetters) -> list[str]:
    """The ids of all letters, oldest first."""
    return [letter.id for letter in dead_letters.letters(DLQ)]


def raw(url: str) -> list[Any]:
    """All messages of the queue, taken out of it as another consumer would."""
    messages = []
    with Connection(url) as connection:
        channel = connection.default_channel
        while (message := channel.basic_get(DLQ, no_ack=True)) is not None:
            messages.append(message)
    return messages


def test_a_letter_is_a_message_that_anybody_can_read(
    rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """Durable, JSON, with the death in its headers; the contract of docs/reference/wire.md."""
    letter = put(operators(rabbit), body=b"\x80\xff", extra={"mood": b"\xff", "later": b"1"})
    (message,) = raw(rabbit)
    assert message.properties["content_type"] == "application/json"
    assert (message.properties["delivery_mode"], message.properties["message_id"]) == (2, letter.id)
    assert {
        name: message.headers[name]
        for name in (
            "dlq_letter",
            "dlq_reason",
            "dlq_source_queue",
            "dlq_dead_letter_queue",
            "dlq_deliveries",
        )
    } == {
        "dlq_letter": letter.id,
        "dlq_reason": "failed",
        "dlq_source_queue": "orders",
        "dlq_dead_letter_queue": DLQ,
        "dlq_deliveries": 1,
    }
    assert message.headers["dlq_position"].partition("-")[0].isdigit()
    body = message.body.encode() if isinstance(message.body, str) else message.body
    printed = json.loads(body)
    assert (printed["task_name"], printed["body"], printed["later"]) == ("shop.charge", "gP8=", "1")
    fields = {name.decode(): value for name, value in decoded(body, compressed=False).items()}
    assert DeadLetter.from_fields(fields) == letter


def test_reading_keeps_every_letter_and_the_order(
    broker: str, operators: Callable[..., DeadLetters]
) -> None:
    """On RabbitMQ 3.10 twenty readings would use up a delivery limit of 20."""
    dead_letters = operators(broker)
    letters = [put(dead_letters, retries=number).id for number in range(MANY)]
    for _ in range(22):
        dead_letters.store._seen = None  # type: ignore[attr-defined]
        assert ids(dead_letters) == letters
    dead_letters.close()
    assert [message.headers["dlq_letter"] for message in raw(broker)] == letters


def test_a_reader_that_dies_loses_nothing(
    broker: str, operators: Callable[..., DeadLetters]
) -> None:
    """The broker takes its messages back; whatever their order there, letters keep theirs."""
    dead_letters, other = operators(broker), operators(broker)
    letters = [put(dead_letters, retries=number).id for number in range(MANY)]
    store: Any = dead_letters.store
    store.claim(DLQ, letters[:1], owner="me", lease_seconds=60)
    store._held.pop(DLQ).drop()
    assert ids(other) == letters
    assert other.store.length(DLQ) == MANY


def test_of_two_operators_the_second_is_refused(
    broker: str, operators: Callable[..., DeadLetters], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes nothing meanwhile, and can go on when the first is done."""
    monkeypatch.setattr(queue, "WAIT_SECONDS", 0.3)
    one, other = operators(broker), operators(broker)
    letter = put(one)
    assert one.store.claim(DLQ, [letter.id], owner="me", lease_seconds=60) == [ClaimState.CLAIMED]
    with pytest.raises(StoreUnavailable, match="another process has been reading or changing"):
        other.store.claim(DLQ, [letter.id], owner="you", lease_seconds=60)
    one.store.done()
    assert other.store.claim(DLQ, [letter.id], owner="you", lease_seconds=60) == [ClaimState.HELD]
    other.store.done()
    assert ids(other) == [letter.id]


def test_reading_ends_while_letters_pour_in(
    rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """A flood is when people look."""
    dead_letters, worker = operators(rabbit), operators(rabbit)
    letters = [put(dead_letters, retries=number).id for number in range(20)]
    over = threading.Event()

    def flood() -> None:
        while not over.is_set():
            put(worker)

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        begun = time.monotonic()
        seen = ids(dead_letters)
        assert time.monotonic() - begun < 15
    finally:
        over.set()
        thread.join(30)
    assert seen[:20] == letters
    dead_letters.store._seen = None  # type: ignore[attr-defined]
    assert len(ids(dead_letters)) == dead_letters.store.length(DLQ)


def test_a_lost_connection_while_letters_are_held_is_said_and_mended(
    rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """Nothing is removed by halves: the next one reads again."""
    dead_letters = operators(rabbit)
    letters = [put(dead_letters, retries=number).id for number in range(3)]
    store: Any = dead_letters.store
    store.claim(DLQ, letters, owner="me", lease_seconds=60)
    store._held[DLQ]._connection.transport.close_connection(store._held[DLQ]._connection.connection)
    with pytest.raises(StoreUnavailable):
        store.remove(DLQ, letters[:1], owner="me")
    assert store.remove(DLQ, letters[:1], owner="me") == 1
    store.done()
    assert ids(dead_letters) == letters[1:]


def test_two_copies_of_a_letter_are_one(broker: str, operators: Callable[..., DeadLetters]) -> None:
    """A worker that died before it acknowledged stores again; both copies go together."""
    dead_letters = operators(broker)
    letter = put(dead_letters, task_id="t", description="first")
    put(dead_letters, task_id="t", description="second")
    other = put(dead_letters)
    assert [x.description for x in dead_letters.letters(DLQ)] == ["first", "bad order"]
    report = dead_letters.purge(DLQ, ids=frozenset({letter.id}))
    assert report.removed == 1
    assert ids(dead_letters) == [other.id]
    assert dead_letters.store.length(DLQ) == 1


def test_what_is_no_letter_is_shown_and_can_be_purged(
    broker: str, operators: Callable[..., DeadLetters]
) -> None:
    """Somebody else's message in our queue stops nothing."""
    dead_letters = operators(broker)
    letter = put(dead_letters)
    with Connection(broker) as connection:
        connection.Producer().publish({"mood": "bad"}, exchange="", routing_key=DLQ)
    found = list(dead_letters.entries(DLQ))
    assert sorted(entry.is_letter for entry in found) == [False, True]
    (foreign,) = (entry.key for entry in found if not entry.is_letter)
    assert dead_letters.entry(foreign)[1].fields == {b"body": b'{"mood": "bad"}'}
    assert dead_letters.purge(DLQ, ids=frozenset({foreign})).removed == 1
    assert ids(dead_letters) == [letter.id]
    assert dead_letters.store.length(DLQ) == 1


def test_a_queue_that_counts_deliveries_gets_letters_and_is_not_read(
    rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """Twenty readings would throw its letters away."""
    with Connection(rabbit) as connection:
        connection.default_channel.queue_declare(
            DLQ,
            durable=True,
            auto_delete=False,
            arguments={"x-queue-type": "quorum", "x-delivery-limit": 2},
        )
    dead_letters = operators(rabbit)
    put(dead_letters)
    for _ in range(4):
        with pytest.raises(StoreError, match="without a delivery limit"):
            ids(dead_letters)
    assert dead_letters.store.length(DLQ) == 1


def test_a_full_queue_is_a_store_that_is_away(
    rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """RabbitMQ refuses the letter; it waits, and its message is not acknowledged."""
    full = {"x-max-length": 0, "x-overflow": "reject-publish"}
    with Connection(rabbit) as connection:
        connection.default_channel.queue_declare(
            DLQ, durable=True, auto_delete=False, arguments=full
        )
    with pytest.raises(StoreUnavailable, match="MessageNacked"):
        put(operators(rabbit))


def test_a_deleted_queue_takes_no_letter_in_silence(
    rabbit_server: RabbitServer, rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """The broker gives it back, and the queue is made again."""
    dead_letters = operators(rabbit)
    put(dead_letters)
    rabbit_server.delete_queues(DLQ)
    letter = put(dead_letters)
    assert ids(dead_letters) == [letter.id]


@pytest.mark.parametrize("size", [100, 12_000_000])
def test_large_bodies_come_back_byte_by_byte(
    broker: str, operators: Callable[..., DeadLetters], size: int
) -> None:
    """Compressed on the way, because base64 makes them a third larger."""
    dead_letters = operators(broker)
    letter = put(dead_letters, body=bytes(range(256)) * (size // 256 + 1))
    assert dead_letters.get(letter.id, DLQ) == letter


def test_too_many_letters_are_said_and_not_exported(
    broker: str,
    redis_url: str,
    operators: Callable[..., DeadLetters],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Those that can be read can be worked on; the rest comes next time."""
    dead_letters = operators(broker)
    store: Any = dead_letters.store
    monkeypatch.setattr(
        BrokerStore, "capabilities", _with_most(store.capabilities, most_letters=60)
    )
    store._driver.most_letters = 60
    letters = [put(dead_letters, retries=number).id for number in range(MANY)]
    with caplog.at_level(logging.WARNING):
        seen = ids(dead_letters)
    assert seen == letters[: len(seen)]
    assert len(seen) == 60
    assert "more letters than are read at once" in caplog.text
    with pytest.raises(ExportError, match=r"has \d+ letters, but only 60"):
        dead_letters.export(tmp_path / "letters")
    assert dead_letters.purge(DLQ).removed == 60
    dead_letters.close()
    left = ids(dead_letters)
    assert len(left) == MANY - 60
    assert set(left) < set(letters)


def _with_most(capabilities: Any, **changes: Any) -> Any:
    from dataclasses import replace

    return replace(capabilities, **changes)


def exported(folder: Path) -> list[str]:
    """The ids of all letters in the files."""
    files = sorted(folder.glob("dlq=*/day=*/*.parquet"))
    return [text for file in files for text in pq.read_table(file).column("id").to_pylist()]


def test_an_export_has_each_letter_once_also_those_on_their_way(
    broker: str, redis_url: str, operators: Callable[..., DeadLetters], tmp_path: Path
) -> None:
    """A letter with an earlier position that arrives later is waited for, not passed over."""
    dead_letters, folder = operators(broker), tmp_path / "letters"
    first = put(dead_letters)
    slow = a_letter()
    PositionIndex(connect(redis_url, 2.0), redis_url, Keys()).place(DLQ, slow.id)
    quick = put(dead_letters)
    assert dead_letters.export(folder).letters == 1
    assert exported(folder) == [first.id]
    assert dead_letters.export(folder).letters == 0
    report = dead_letters.purge(DLQ, limit=9, ids=frozenset({quick.id}))
    assert report.removed == 1  # what is there can be worked on
    dead_letters.store.dead_letter(quick, key_of(quick))
    dead_letters.store.dead_letter(slow, key_of(slow))
    assert dead_letters.export(folder).letters == 2
    assert exported(folder) == [first.id, slow.id, quick.id]
    assert dead_letters.export(folder, then_trim=True).trimmed == 3
    assert ids(dead_letters) == []


def test_redis_may_forget_everything(
    rabbit: str, redis_url: str, operators: Callable[..., DeadLetters], tmp_path: Path
) -> None:
    """The letters are on the broker; queues with policies are looked for there."""
    dead_letters = operators(rabbit, dlq_queues={"orders": {"max_deliveries": 3}})
    letters = [put(dead_letters).id for _ in range(3)]
    connect(redis_url, 2.0).flushall()
    dead_letters.close()
    assert [(queue.name, queue.letters) for queue in dead_letters.queues()] == [(DLQ, 3)]
    assert ids(dead_letters) == letters
    assert dead_letters.export(tmp_path / "early").letters == 3
    connect(redis_url, 2.0).flushall()
    letters.append(put(dead_letters).id)
    assert ids(dead_letters) == letters
    assert dead_letters.export(tmp_path / "letters").letters == 4


def test_what_a_broker_cannot_do_is_said_in_one_line(
    broker: str, operators: Callable[..., DeadLetters]
) -> None:
    """No bin; no exchange beside; no transport that cannot be read."""
    dead_letters = operators(broker)
    letter = put(dead_letters)
    for attempt in (
        lambda: dead_letters.discard(DLQ),
        lambda: dead_letters.restore(letter.id),
        lambda: list(dead_letters.discarded(DLQ)),
    ):
        with pytest.raises(NotSupported, match="use --forever"):
            attempt()
    assert dead_letters.discard(DLQ, forever=True).removed == 1
    beside = operators(broker, dlq_queues={"orders": {"dead_letter_exchange": "deaths"}})
    with pytest.raises(SettingsError, match="no dead_letter_exchange with dlq_store = 'broker'"):
        beside.validate()


@pytest.mark.parametrize(
    ("broker_url", "said"),
    [
        ("memory://", "RabbitMQ as the broker, got memory, whose queues cannot be read"),
        ("redis://", "RabbitMQ as the broker, got redis, .*take dlq_store = 'redis'"),
        ("sentinel://", "RabbitMQ as the broker, got redis"),
    ],
)
def test_other_brokers_are_refused(redis_url: str, broker_url: str, said: str) -> None:
    """By the check for a CI and by the first command; Redis is printed of the better default."""
    app = Celery("shop", broker=broker_url, set_as_current=False)
    app.conf.update(dlq_store="broker", dlq_url=redis_url)
    for attempt in (DeadLetters(app).validate, DeadLetters(app).queues):
        with pytest.raises(SettingsError, match=said):
            attempt()


def test_a_broker_that_is_down_says_so(redis_url: str) -> None:
    """Without a password."""
    gone = partial(Connection, "amqp://me:hush@127.0.0.1:1//")
    index = PositionIndex(connect(redis_url, 2.0), redis_url, Keys())
    store = BrokerStore(QueueDriver(gone, 1.0), index)
    letter = a_letter()
    with pytest.raises(StoreUnavailable, match="the broker amqp://me:") as caught:
        store.dead_letter(letter, key_of(letter))
    assert "hush" not in str(caught.value)
    store.close()


def test_letters_that_were_removed_stay_away_when_the_connection_closes(
    rabbit_server: RabbitServer, broker: str, operators: Callable[..., DeadLetters]
) -> None:
    """A channel keeps back what is acknowledged while a quorum queue writes to a slow disk."""
    dead_letters = operators(broker)
    letters = [put(dead_letters, retries=number).id for number in range(MANY)]
    chosen = frozenset(letters[1::2])
    held = dead_letters.store._driver.hold(DLQ)  # type: ignore[attr-defined]
    rabbit_server.suspend_log(1.0)
    held.remove([entry for entry in held.snapshot.ordered() if entry.key in chosen])
    held.drop()
    assert set(ids(dead_letters)) == set(letters) - chosen


def test_a_resolved_group_of_letters_on_the_broker_regresses(
    rabbit: str, operators: Callable[..., DeadLetters]
) -> None:
    """Its state is in Redis and outlives the letters; a copy that is put again changes nothing."""
    dead_letters = operators(rabbit)
    letter = put(dead_letters, fingerprint="aa", release="1")
    dead_letters.resolve(DLQ, "aa", release="2")
    dead_letters.purge(DLQ)
    assert [group.letters for group in dead_letters.groups(DLQ, state="resolved")] == [0]
    late = a_letter(fingerprint="aa", release="1")
    assert dead_letters.store.dead_letter(late, key_of(late)) is Stored.NEW
    again = a_letter(fingerprint="aa", release="2")
    assert dead_letters.store.dead_letter(again, key_of(again)) is Stored.REGRESSED
    assert dead_letters.store.dead_letter(again, key_of(again)) is not Stored.REGRESSED
    status = dead_letters.group(DLQ, "aa").status
    assert (status.state, status.letter_id) == (GroupState.REGRESSED, again.id)
    assert status.task_name == letter.task_name
