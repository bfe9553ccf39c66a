"""Receipts of Amazon SQS: when they are renewed, for how long, and when they are lost."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("botocore")

from botocore.exceptions import ClientError, EndpointConnectionError

from celery_dlq.transport.sqs import visibility
from celery_dlq.transport.sqs.visibility import LONGEST_SECONDS, Receipts, VisibilityKeeper

URL, OTHER = "https://sqs/1/orders", "https://sqs/1/slow"
TIMEOUT = 30


class Clock:
    """A time that tests set."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class Sqs:
    """The client of boto3, its channel and its connection, which note what is asked."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, dict[str, int]]] = []
        self.deleted: list[str] = []
        self.denies_deletions = False
        self.failing: dict[str, Exception] = {}  # by URL
        self.refusing: dict[str, str] = {}  # the code by receipt handle
        self.during: Any = None  # called in the middle of a call
        self.default_channel = SimpleNamespace(
            sqs=lambda queue: self,  # noqa: ARG005 - kombu's name
            canonical_queue_name=lambda queue: queue,
        )

    def change_message_visibility_batch(self, *, QueueUrl: str, Entries: Any) -> Any:  # noqa: N803 - AWS's names
        assert 0 < len(Entries) <= 10
        self._fail(QueueUrl)
        self.changes.append(
            (QueueUrl, {one["ReceiptHandle"]: one["VisibilityTimeout"] for one in Entries})
        )
        if self.during is not None:
            self.during()
        failed = [
            {"Id": one["Id"], "Code": self.refusing[one["ReceiptHandle"]]}
            for one in Entries
            if one["ReceiptHandle"] in self.refusing
        ]
        return {"Failed": failed} if failed else {}

    def delete_message(self, *, QueueUrl: str, ReceiptHandle: str) -> None:  # noqa: N803
        self._fail(QueueUrl)
        if self.denies_deletions:
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "DeleteMessage")
        self.deleted.append(ReceiptHandle)

    def connect(self) -> None:
        """As a connection."""

    def close(self) -> None:
        """As a connection."""

    def _fail(self, url: str) -> None:
        if url in self.failing:
            raise self.failing[url]

    def renewed(self) -> dict[str, int]:
        """All changes since the last call."""
        found = {tag: seconds for _url, change in self.changes for tag, seconds in change.items()}
        self.changes.clear()
        return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The only clock there is."""
    clock = Clock()
    monkeypatch.setattr(visibility, "seconds_since_boot", clock)
    return clock


@pytest.fixture
def receipts(clock: Clock) -> Receipts:
    """Of a worker that consumes two queues."""
    made = Receipts(clock)
    made.timeouts.update({URL: TIMEOUT, OTHER: TIMEOUT})
    return made


@pytest.fixture
def sqs() -> Sqs:
    """Amazon SQS."""
    return Sqs()


@pytest.fixture
def keeper(receipts: Receipts, sqs: Sqs) -> VisibilityKeeper:
    """The thread's object, whose rounds the tests make."""
    return VisibilityKeeper(receipts, lambda: sqs)


def receive(receipts: Receipts, clock: Clock, *tags: str, url: str = URL) -> None:
    for tag in tags:
        receipts.received(tag, "orders", url, clock.now, 0)


def test_who_takes_the_place_of_a_thread_that_stands_still_renews_the_same(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """Within a third of the visibility timeout, or what a call may take."""
    receive(receipts, clock, "a")
    keeper.errors = 3
    successor = keeper.successor()
    successor.tick()
    assert (sqs.renewed(), successor.errors) == ({"a": TIMEOUT}, 3)
    assert keeper.patience() <= TIMEOUT / 3


def test_a_receipt_is_renewed_each_third_of_its_time(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """The first one at once, so that a missing permission is known before it matters."""
    receive(receipts, clock, "a")
    keeper.tick()
    assert sqs.renewed() == {"a": TIMEOUT}
    clock.now += 9
    keeper.tick()
    assert sqs.renewed() == {}
    clock.now += 1
    keeper.tick()
    assert sqs.renewed() == {"a": TIMEOUT}
    clock.now += 25
    assert receipts.still_holds("a")
    receipts.drop_message("a")
    keeper.tick()
    assert sqs.renewed() == {}


def test_a_call_takes_ten_messages_of_one_queue_and_also_those_that_are_due_soon(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """A call costs the same with one message and with ten."""
    receive(receipts, clock, "first")
    keeper.tick()
    sqs.changes.clear()
    receive(receipts, clock, *(f"a{n}" for n in range(11)))
    receive(receipts, clock, "b", url=OTHER)
    clock.now += 6
    receive(receipts, clock, "too new")
    clock.now += 4
    keeper.tick()
    assert [(url, len(change)) for url, change in sqs.changes] == [(URL, 10), (URL, 2), (OTHER, 1)]
    assert "too new" not in sqs.renewed()


def test_after_12_hours_a_message_is_others(
    receipts: Receipts,
    keeper: VisibilityKeeper,
    sqs: Sqs,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The last renewal ends with them; then it is said, and the message starts here no more."""
    receive(receipts, clock, "a")
    begun = clock.now
    while clock.now < begun + LONGEST_SECONDS + TIMEOUT:
        keeper.tick()
        until = begun + LONGEST_SECONDS
        assert all(clock.now + seconds <= until for seconds in sqs.renewed().values())
        if clock.now < until - 2:
            assert receipts.held["a"].until > clock.now
        clock.now += 5
    assert receipts.taken == 1
    assert "1 messages were held for 12 hours" in caplog.text
    assert not receipts.still_holds("a")
    assert receipts.gave_up("a")  # so that it is not deleted
    assert not receipts.still_holds("a")
    receipts.drop_message("a")
    assert not receipts.gave_up("a")


def test_a_reply_that_lay_in_the_socket_has_used_up_its_time(
    receipts: Receipts, clock: Clock
) -> None:
    """SQS may have sent it as soon as it was asked; one that is not late was read at once."""
    clock.now += 100
    receipts.received("late", "orders", URL, clock.now - TIMEOUT - 1, 20)
    receipts.received("fresh", "orders", URL, clock.now - 19, 20)
    assert not receipts.still_holds("late")
    assert receipts.still_holds("fresh")


def test_a_process_that_stood_still_renews_nothing_and_says_so(
    receipts: Receipts,
    keeper: VisibilityKeeper,
    sqs: Sqs,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """To renew it would take it from its new owner."""
    receive(receipts, clock, "a", "b")
    keeper.tick()
    sqs.changes.clear()
    clock.now += TIMEOUT + 1
    keeper.tick()
    keeper.tick()
    assert sqs.renewed() == {}
    assert (receipts.taken, caplog.text.count("This worker stood still")) == (2, 1)
    assert not receipts.still_holds("a")


@pytest.mark.parametrize(
    "code", ["ReceiptHandleIsInvalid", "AWS.SimpleQueueService.MessageNotInflight"]
)
def test_a_receipt_that_sqs_refuses_is_lost_and_the_others_are_not(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock, code: str
) -> None:
    """It was deleted, or is another's."""
    receive(receipts, clock, "a", "b")
    sqs.refusing["a"] = code
    keeper.tick()
    clock.now += TIMEOUT - 1
    assert (receipts.still_holds("a"), receipts.still_holds("b")) == (False, True)
    assert keeper.errors == 0


def test_what_was_given_back_during_its_renewal_is_given_back_again(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """Else a stopped worker's message would be away for half an hour."""
    receive(receipts, clock, "a", "b")
    sqs.during = lambda: receipts.released("a")
    keeper.tick()
    assert sqs.changes == [(URL, {"a": TIMEOUT, "b": TIMEOUT}), (URL, {"a": 0})]


def test_a_queue_that_is_denied_keeps_no_other_queue_waiting(
    receipts: Receipts,
    keeper: VisibilityKeeper,
    sqs: Sqs,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The log names the permission, without a traceback."""
    sqs.failing[URL] = ClientError(
        {"Error": {"Code": "AccessDenied", "Message": "no"}}, "ChangeMessageVisibilityBatch"
    )
    receive(receipts, clock, "a")
    receive(receipts, clock, "b", url=OTHER)
    keeper.tick()
    assert sqs.renewed() == {"b": TIMEOUT}
    assert keeper.errors == 1
    (record,) = [one for one in caplog.records if one.levelno == logging.ERROR]
    assert "workers need sqs:ChangeMessageVisibility" in record.getMessage()
    assert not record.exc_info


def test_an_outage_ends_with_renewed_receipts(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """As long as it was shorter than the visibility timeout; deletions wait for its end."""
    receive(receipts, clock, "a", "b")
    keeper.tick()
    sqs.failing[URL] = EndpointConnectionError(endpoint_url=URL)
    receipt = receipts.receipt("b")
    assert receipt is not None
    receipts.settle_later("b", receipt, delete=True)
    receipts.drop_message("b")
    clock.now += TIMEOUT - 2
    keeper.tick()
    assert (keeper.errors, sqs.deleted) == (1, [])
    sqs.failing.clear()
    keeper.tick()
    assert receipts.still_holds("a")
    assert (sqs.renewed()["a"], sqs.deleted) == (TIMEOUT, ["b"])


def test_while_sqs_does_not_answer_a_round_asks_once(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """A hundred calls would wait for a hundred timeouts; nothing is forgotten."""
    receive(receipts, clock, *(f"a{n}" for n in range(30)))
    calls = []

    def fail(url: str) -> None:
        calls.append(url)
        raise EndpointConnectionError(endpoint_url=url)

    sqs._fail = fail  # type: ignore[method-assign]
    receipt = receipts.receipt("a0")
    assert receipt is not None
    receipts.settle_later("done", receipt, delete=True)
    keeper.tick()
    assert len(calls) == 1
    del sqs._fail  # type: ignore[method-assign]
    keeper.tick()
    assert (len(sqs.renewed()), sqs.deleted) == (31, ["done"])


def test_a_queue_that_does_not_answer_keeps_no_other_queue_waiting(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """It may be in another region; the others are asked first from then on."""
    attributes: list[str] = []
    fail = sqs._fail
    sqs._fail = lambda url: (attributes.append(url), fail(url))[1]  # type: ignore[method-assign, func-returns-value]
    sqs.failing[URL] = EndpointConnectionError(endpoint_url=URL)
    receive(receipts, clock, *(f"a{n}" for n in range(30)))
    receive(receipts, clock, "b", url=OTHER)
    receipt = receipts.receipt("b")
    assert receipt is not None
    receipts.settle_later("done", receipt, delete=True)
    keeper.tick()
    assert (sqs.renewed(), sqs.deleted) == ({"b": TIMEOUT, "done": TIMEOUT}, ["done"])
    assert attributes == [URL, OTHER, OTHER]
    clock.now += TIMEOUT / 2
    keeper.tick()
    assert sqs.renewed() == {"b": TIMEOUT}
    assert attributes[3:] == [OTHER, URL]


def test_a_deletion_is_tried_until_its_receipt_has_ended(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """12 hours after it was received: nothing is tried for ever."""
    receive(receipts, clock, "a")
    receipt = receipts.receipt("a")
    assert receipt is not None
    receipts.settle_later("a", receipt, delete=True)
    receipts.drop_message("a")
    sqs.failing[URL] = ClientError({"Error": {"Code": "Throttling"}}, "DeleteMessage")
    keeper.tick()
    assert list(receipts.to_settle()) == ["a"]
    clock.now += LONGEST_SECONDS + 1
    assert not receipts.to_settle()


def test_what_is_to_be_deleted_stays_invisible_until_it_is(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """It has been executed; a deletion may be denied for longer than the visibility timeout."""
    receive(receipts, clock, "a")
    receipt = receipts.receipt("a")
    assert receipt is not None
    receipts.settle_later("a", receipt, delete=True)
    receipts.drop_message("a")
    sqs.denies_deletions = True
    for _ in range(4):
        keeper.tick()
        assert sqs.renewed() == {"a": TIMEOUT}
        clock.now += TIMEOUT / 2
    sqs.denies_deletions = False
    keeper.tick()
    assert sqs.deleted == ["a"]
    assert not receipts.to_settle()


def test_a_message_of_a_lost_connection_that_will_not_start_goes_back(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """The pool dropped it, or it was put off; what is at work is renewed."""
    receive(receipts, clock, "runs", "dropped", "waits")
    assert receipts.begin("runs")
    assert receipts.begin("dropped")
    assert receipts.connection_closes(["runs", "dropped", "waits"]) == ["runs", "dropped"]
    assert not receipts.begin("waits")
    assert not receipts.put_off("dropped")
    keeper.tick()
    renewed = sqs.renewed()
    assert (renewed["runs"], renewed["dropped"]) == (TIMEOUT, 0)
    assert not receipts.hand_over("waits", delete=True)
    assert receipts.hand_over("runs", delete=True)


def test_giving_back_many_messages_leaves_time_to_renew(
    receipts: Receipts, keeper: VisibilityKeeper, sqs: Sqs, clock: Clock
) -> None:
    """Each takes a call; those that are held would return to their queue meanwhile."""
    many = [f"back-{number}" for number in range(200)]
    receive(receipts, clock, "held", *many)
    for tag in many:
        receipts.settle_later(tag, receipts.held.pop(tag), delete=False)

    def slow() -> None:
        clock.now += 0.5

    sqs.during = slow
    for _ in range(70):
        keeper.tick()
        assert receipts.still_holds("held")

    given_back = {tag for _url, one in sqs.changes for tag, seconds in one.items() if not seconds}
    assert given_back == set(many)
