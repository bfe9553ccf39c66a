"""What operators publish while the broker is slow, blocked, full, or its confirmations are lost."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from typing import Any

import intervals
import pytest
from builders import a_letter, an_app, key_of
from kombu import Connection, Queue
from rabbit import RabbitServer
from slow_proxy import SlowProxy
from sqs import SqsServer
from waiting import poll

from celery_dlq import DeadLetters
from celery_dlq.features.hold.operations import Holds
from celery_dlq.letters.record import Reason
from celery_dlq.operations.redrive.publisher import Publisher
from celery_dlq.store.holds import Hold

QUEUE = "orders-DLQ"


def charge() -> None:
    """Is the task of all messages here."""


@dataclass
class Place:
    """Letters in Redis, whose messages go to a queue of RabbitMQ."""

    make: Callable[..., DeadLetters]
    server: RabbitServer

    def ids(self) -> list[str]:
        """The letter of each message in the queue, in their order."""
        return [message.headers.get("dlq_letter", "") for message in self.messages()]

    def messages(self) -> list[Any]:
        """The messages in the queue, which stay there."""
        with Connection(self.server.url) as connection:
            queue = Queue("orders", no_declare=True).bind(connection.default_channel)
            return list(iter(queue.get, None))

    def ready(self) -> int:
        """The number of messages in the queue."""
        with Connection(self.server.url) as connection:
            return int(connection.default_channel.queue_declare("orders", True).message_count)


@pytest.fixture
def place(
    rabbit_server: RabbitServer, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Place]:
    """An empty queue, and what makes an app by its broker's port."""
    intervals.change(monkeypatch, hold_noticed=timedelta(0))
    rabbit_server.delete_queues("orders")
    with Connection(rabbit_server.url) as connection:
        connection.default_channel.queue_declare("orders", durable=True, auto_delete=False)
    with ExitStack() as stack:

        def make(port: int = rabbit_server.port) -> DeadLetters:
            url = rabbit_server.url.replace(str(rabbit_server.port), str(port))
            dlq = DeadLetters(an_app(broker_url=url, dlq_url=redis_url))
            dlq.app.task(name="shop.charge", shared=False)(charge)
            stack.callback(dlq.close)
            return dlq

        yield Place(make, rabbit_server)
    rabbit_server.delete_queues("orders")


@pytest.fixture
def proxied(rabbit_server: RabbitServer) -> Iterator[Callable[..., SlowProxy]]:
    """Makes a proxy before RabbitMQ."""
    with ExitStack() as stack:

        def make(**faults: Any) -> SlowProxy:
            proxy = stack.enter_context(SlowProxy(rabbit_server.port, **faults))
            proxy.open()
            return proxy

        yield make


def put(dlq: DeadLetters, count: int, hold: Hold | None = None, **changes: Any) -> list[str]:
    """Store letters, or hold messages; their ids, oldest first."""
    backend, ids = dlq.assembly.backend, []
    for number in range(count):
        values: dict[str, Any] = {
            "task_id": f"task-{number}",
            "source_queue": "orders",
            "headers": json.dumps({"id": f"task-{number}", "task": "shop.charge"}),
            "properties": "{}",
            **({"dead_letter_queue": hold.id, "reason": Reason.HELD} if hold else {}),
            **changes,
        }
        letter = a_letter(**values)
        (backend.held if hold else backend.letters).dead_letter(letter, key_of(letter))
        ids.append(letter.id)
    return ids


def in_background(call: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Call something in a thread; its result comes into the list."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(call()), daemon=True)
    thread.start()
    return thread, found


# -- slow ------------------------------------------------------------------------------


def test_a_slow_broker_makes_no_other_worker_release_the_same_messages(
    place: Place, proxied: Callable[..., SlowProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job of a release lives while each message of a batch waits for its confirmation."""
    intervals.change(monkeypatch, job_silent=timedelta(seconds=2))
    slow, other = place.make(proxied(delay=0.1).port), place.make()
    now = datetime.now(timezone.utc)
    hold = Hold(
        id="hold-1", task="shop.charge", since=now, until=now - timedelta(minutes=1), actor="a"
    )
    assert slow.assembly.backend.instructions.replace(None, hold)
    put(slow, 50, hold)
    thread, _ = in_background(lambda: Holds(slow.assembly).release_ended(lambda: False))
    poll(place.ready, timeout_seconds=30)
    states = set()
    while thread.is_alive():
        Holds(other.assembly).release_ended(lambda: False)
        states |= {job.state for job in other.jobs()}
        thread.join(0.2)
    assert states <= {"running", "done"}
    assert place.ready() == 50
    assert [job.counts["maybe_twice"] for job in other.jobs()] == [0]


def test_the_claims_of_a_slow_batch_are_renewed(
    place: Place, proxied: Callable[..., SlowProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second redrive takes no letter of one that publishes for longer than a lease."""
    intervals.change(monkeypatch, claim=1.0)
    slow, other = place.make(proxied(delay=0.1).port), place.make()
    put(slow, 40)
    thread, found = in_background(lambda: slow.redrive(QUEUE))
    poll(place.ready, timeout_seconds=30)
    while thread.is_alive():
        assert other.redrive(QUEUE).published == 0 or not thread.is_alive()
        thread.join(0.3)
    (report,) = found
    assert (report.published, report.maybe_twice, place.ready()) == (40, 0, 40)


def test_a_run_that_lost_its_claims_publishes_nothing_more(
    place: Place, proxied: Callable[..., SlowProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a pause of its machine: the letters that another operation has are left to it."""
    intervals.change(monkeypatch, claim=1.0)
    slow = place.make(proxied(delay=0.1).port)
    ids = put(slow, 30)
    store = slow.assembly.backend.letters
    thread, found = in_background(lambda: slow.redrive(QUEUE))
    poll(lambda: place.ready() >= 3, timeout_seconds=30)
    (job,) = slow.jobs()
    store.claims.claim(QUEUE, ids[20:], owner="other", lease_seconds=60, previous_run_prefix=job.id)
    thread.join(60)
    (report,) = found
    assert (report.state, report.published, report.skipped) == ("done", 20, 10)
    assert sorted(place.ids()) == sorted(ids[:20])


def test_a_run_whose_job_was_taken_over_stops_before_its_next_message(
    place: Place, proxied: Callable[..., SlowProxy], caplog: pytest.LogCaptureFixture
) -> None:
    """It says so, and the rest is the other one's."""
    slow = place.make(proxied(delay=0.1).port)
    put(slow, 60)
    thread, found = in_background(lambda: slow.redrive(QUEUE))
    poll(lambda: place.ready() >= 3, timeout_seconds=30)
    (job,), store = slow.jobs(), slow.job_store
    state = store.read(job.id)
    assert state is not None
    assert store.replace(job.id, state, {**state, "run": 2, "pid": 1})
    thread.join(60)
    (report,) = found
    assert report.state == "interrupted"
    assert 3 <= place.ready() == report.published < 30
    assert slow.job(job.id).run == 2
    assert "another process goes on with it" in caplog.text


# -- blocked -----------------------------------------------------------------------------


def test_a_blocked_connection_is_waited_for(
    place: Place, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job says what it waits for, is not taken for dead, and publishes each message once."""
    intervals.change(monkeypatch, job_silent=timedelta(seconds=3))
    dlq, other = place.make(), place.make()
    put(dlq, 20)
    with place.server.blocking_publishers():
        thread, found = in_background(lambda: dlq.redrive(QUEUE))
        poll(
            lambda: any("blocks publishers" in job.note for job in other.jobs()), timeout_seconds=9
        )
        thread.join(4)
        assert {job.state for job in other.jobs()} == {"running"}
    thread.join(30)
    (report,) = found
    assert (report.state, report.published, report.maybe_twice) == ("done", 20, 0)
    assert place.ready() == 20
    assert dlq.job(report.redrive_id).note == ""
    assert "RabbitMQ blocks publishers" in caplog.text


def test_a_connection_that_stays_blocked_ends_the_job_and_resuming_it_goes_on(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the reason; the one message that was on its way then may be there twice, as is said."""
    intervals.change(monkeypatch, confirm=2.0)
    dlq = place.make()
    put(dlq, 20)
    with place.server.blocking_publishers():
        report = dlq.redrive(QUEUE)
        assert (report.state, report.failures) == ("failed", 1)
        assert "RabbitMQ blocks publishers" in next(iter(report.failed.values()))
        assert "RabbitMQ blocks publishers" in dlq.job(report.redrive_id).note
        assert report.doubtful <= 1
    again = dlq.resume(report.redrive_id)
    assert again.state == "done"
    assert len(set(place.ids())) == 20
    assert place.ready() - 20 <= again.maybe_twice <= 1


# -- lost confirmations ------------------------------------------------------------------


@pytest.mark.parametrize("held", [False, True], ids=["redrive", "release"])
def test_a_message_whose_confirmation_was_lost_is_counted(
    place: Place, proxied: Callable[..., SlowProxy], held: bool
) -> None:
    """It is published again, the report says so, and a header shows the copies."""
    dlq = place.make(proxied(asked=b"task-2", lost=1).port)
    if held:
        hold = dlq.hold("shop.charge")
        ids = put(dlq, 5, hold)
        report = dlq.release(hold.id)
    else:
        ids = put(dlq, 5)
        report = dlq.redrive(QUEUE)
    assert (report.state, report.published, report.maybe_twice) == ("done", 5, 1)
    assert sorted(place.ids()) == sorted([*ids, ids[2]])


def test_a_message_that_is_never_confirmed_is_doubtful(
    place: Place, proxied: Callable[..., SlowProxy]
) -> None:
    """It is published once more at most, which is counted; its letter stays, the others go."""
    dlq = place.make(proxied(asked=b"task-1", lost=99).port)
    ids = put(dlq, 3)
    report = dlq.redrive(QUEUE)
    assert (report.published, report.failures, report.doubtful) == (2, 1, 1)
    assert [letter.id for letter in dlq.letters(QUEUE)] == [ids[1]]
    assert (place.ids().count(ids[1]), report.maybe_twice) == (2, 1)


@pytest.mark.parametrize("held", [False, True], ids=["redrive", "release"])
def test_every_copy_of_a_message_that_is_never_confirmed_is_counted(
    place: Place, proxied: Callable[..., SlowProxy], held: bool
) -> None:
    """Over several operations: the first copy is doubtful, each other one is counted once."""
    unlucky, lucky = place.make(proxied(asked=b"task-0", lost=99).port), place.make()
    hold = unlucky.hold("shop.charge") if held else None
    (letter_id,) = put(unlucky, 1, hold)

    def operate(dlq: DeadLetters) -> Any:
        return dlq.redrive(QUEUE) if hold is None else dlq.release(hold.id)

    reports = [operate(unlucky), operate(unlucky), operate(lucky)]

    assert [report.published for report in reports] == [0, 0, 1]
    copies = place.ids()
    assert copies == [letter_id] * 5
    assert [report.maybe_twice for report in reports] == [1, 2, 1]


def test_a_copy_is_counted_before_it_is_published(
    place: Place, proxied: Callable[..., SlowProxy], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that is killed then has told the job; who resumes it adds to that."""
    dlq, other = place.make(proxied(asked=b"task-0", lost=2).port), place.make()
    (letter_id,) = put(dlq, 1)
    put_on_the_wire, seen = Publisher.publish_once, []

    def dies(self: Publisher, *args: Any, **options: Any) -> None:
        seen.extend(job.counts.get("maybe_twice", 0) for job in other.jobs())
        put_on_the_wire(self, *args, **options)

    monkeypatch.setattr(Publisher, "publish_once", dies)
    dlq.redrive(QUEUE)
    assert seen == [0, 1]
    assert place.ids() == [letter_id] * 2


def test_an_idle_connection_that_was_closed_makes_nothing_doubtful(place: Place) -> None:
    """The broker closes it between two messages; the next one goes over a new one, once."""
    dlq = place.make()
    put(dlq, 3)

    def close(_letters: int) -> None:
        place.server.close_connections()

    report = dlq.redrive(QUEUE, rate=1, progress=close)
    assert (report.published, report.maybe_twice, place.ready()) == (3, 0, 3)


def test_a_message_of_sqs_whose_reply_was_lost_is_counted(
    sqs_server: SqsServer, redis_url: str
) -> None:
    """The client, botocore, sends nothing again by itself."""
    url = sqs_server.queue("orders")
    with SlowProxy(sqs_server.port, asked=b"AmazonSQS.SendMessage", lost=1) as proxy:
        proxy.open()
        app = an_app(
            broker_url=sqs_server.url.replace(str(sqs_server.port), str(proxy.port)),
            broker_transport_options=sqs_server.options,
            dlq_url=redis_url,
        )
        dlq = DeadLetters(app)
        dlq.app.task(name="shop.charge", shared=False)(charge)
        put(dlq, 3)
        report = dlq.redrive(QUEUE)
        dlq.close()
    assert (report.published, report.maybe_twice, report.doubtful) == (3, 1, 0)
    assert sqs_server.attributes(url)["ApproximateNumberOfMessages"] == "4"


# -- as they were ------------------------------------------------------------------------


def test_a_full_queue_is_named_as_the_reason(place: Place) -> None:
    """RabbitMQ says no more than no."""
    place.server.delete_queues("orders")
    full = {"x-max-length": 2, "x-overflow": "reject-publish"}
    with Connection(place.server.url) as connection:
        connection.default_channel.queue_declare("orders", auto_delete=False, arguments=full)
    dlq = place.make()
    put(dlq, 4)
    report = dlq.redrive(QUEUE)
    assert (report.published, report.failures, report.doubtful) == (2, 2, 0)
    for said in report.failed.values():
        assert said.endswith(
            "was not published to queue 'orders': the queue refused it: is it full?; "
            "it stays in the dead-letter queue"
        )


@pytest.mark.parametrize("priority", [None, 0, 3])
def test_a_priority_comes_through_a_redrive_as_it_was(place: Place, priority: int | None) -> None:
    """Also none."""
    dlq = place.make()
    properties = {} if priority is None else {"priority": priority}
    put(dlq, 1, properties=json.dumps(properties))
    assert dlq.redrive(QUEUE).published == 1
    (message,) = place.messages()
    assert message.properties.get("priority") == priority
