"""What `celery_dlq.transport.sqs.channel` overrides and calls of kombu's SQS transport is there."""

from __future__ import annotations

import inspect
import json
from base64 import b64encode
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("boto3")

from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    ReadTimeoutError,
)
from kombu.transport import SQS, virtual

from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY
from celery_dlq.transport.sqs.aws import (
    broker_errors,
    fate_of_send,
    only_once,
    queue_exists,
    redrive_policies,
    renamed,
    url_of,
)
from celery_dlq.transport.sqs.channel import ReceiptChannel, SqsEntry, SqsMessage, receiving
from celery_dlq.transport.sqs.visibility import Receipts
from celery_dlq.writing.capture import Message

CHANNEL = SQS.Channel
URL = "https://sqs/1/orders"


def parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("owner", "method", "expected"),
    [
        (CHANNEL, "_message_to_python", ["self", "message", "queue_name", "q_url"]),
        (CHANNEL, "_on_messages_ready", ["self", "queue", "qname", "messages"]),
        (CHANNEL, "_get_async", ["self", "queue", "count", "callback"]),
        (CHANNEL, "basic_ack", ["self", "delivery_tag", "multiple"]),
        (CHANNEL, "canonical_queue_name", ["self", "queue_name"]),
        (CHANNEL, "entity_name", ["self", "name", "table"]),
        (CHANNEL, "sqs", ["self", "queue"]),
        (SQS.QoS, "append", ["self", "message", "delivery_tag"]),
        (SQS.QoS, "ack", ["self", "delivery_tag"]),
        (SQS.QoS, "reject", ["self", "delivery_tag", "requeue"]),
        (SQS.QoS, "restore_unacked", ["self"]),
    ],
)
def test_kombus_sqs_transport_has_what_ours_overrides_and_calls(
    owner: type, method: str, expected: list[str]
) -> None:
    """An override of a method that is gone, or is called differently, would do nothing."""
    assert parameters(getattr(owner, method)) == expected


def test_all_that_is_received_and_given_back_goes_through_the_overrides() -> None:
    """Received with and without an event loop; given back at once and at the end."""
    for name in ("_on_messages_ready", "_messages_to_python"):
        assert "self._message_to_python(" in inspect.getsource(getattr(CHANNEL, name))
    for name in ("_get", "_get_bulk"):
        assert "self._messages_to_python(" in inspect.getsource(getattr(CHANNEL, name))
    assert "self._get_async(queue" in inspect.getsource(CHANNEL._get_bulk_async)
    consume = inspect.getsource(virtual.Channel.basic_consume)
    assert "self.qos.append(message, message.delivery_tag)" in consume
    assert "self.Message(raw_message, channel=self)" in consume
    assert "self.restore_unacked()" in inspect.getsource(virtual.QoS.restore_unacked_once)
    assert "self.qos.reject(" in inspect.getsource(virtual.Channel.basic_reject)
    assert CHANNEL.queue_name_prefix is not None
    assert SQS.Transport.Channel is CHANNEL
    assert receiving().Channel.__mro__[1:3] == (ReceiptChannel, CHANNEL)  # type: ignore[attr-defined]


def test_a_queue_that_is_consumed_without_acknowledgements_is_left_to_kombu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Kombu deletes its messages at once: they have no receipt."""
    monkeypatch.setattr(CHANNEL, "__init__", lambda *_: None)
    monkeypatch.setattr(CHANNEL, "basic_consume", lambda *_: None)
    monkeypatch.setattr(CHANNEL, "_message_to_python", lambda *_: "kombu's")
    channel = ReceiptChannel()
    channel.dlq_default_timeout = 0
    message = {"Body": "{}", "ReceiptHandle": "r"}
    for no_ack in (True, False):
        channel.basic_consume("orders", no_ack, None, "tag")
        found = channel._message_to_python(message, "orders", "url")
        assert (found == "kombu's") is no_ack


@pytest.mark.parametrize("encode", [bytes, b64encode])
def test_an_envelope_is_read_with_base64_and_without(
    monkeypatch: pytest.MonkeyPatch, encode: Any
) -> None:
    """Kombu's option `sqs_base64_encoding` may be off; a word is no envelope, whatever its form."""
    monkeypatch.setattr(CHANNEL, "__init__", lambda *_: None)
    channel = ReceiptChannel()
    for text, readable in ((envelope(), True), ("abcd", False), ("order 7", False)):
        body = encode(text.encode()).decode()
        found = channel._message_to_python({"Body": body, "ReceiptHandle": "r"}, "orders", URL)
        assert (found.error is None) is readable
        assert found.raw == body.encode()


def test_a_deletion_reads_what_an_entry_keeps() -> None:
    """The receipt and the URL, in the delivery information."""
    source = inspect.getsource(CHANNEL.basic_ack)
    assert "message['sqs_queue']" in source
    assert "sqs_message['ReceiptHandle']" in source


class _Channel:
    def decode_body(self, body: str, encoding: str | None = None) -> Any:
        return body.encode()

    def encode_body(self, body: bytes, encoding: str | None = None) -> Any:
        return body.decode(), encoding


def entry(text: str, **more: Any) -> SqsMessage:
    message = {"MessageId": "sqs-1", "ReceiptHandle": "receipt-1", "Body": "as it was sent", **more}
    return SqsMessage(SqsEntry(message, text.encode(), "orders", URL), channel=_Channel())


def envelope(**properties: Any) -> str:
    info = {"exchange": "", "routing_key": "orders"}
    return json.dumps(
        {
            "body": "[[], {}, {}]",
            "headers": {"task": "shop.charge"},
            "properties": {"delivery_info": info, "delivery_tag": "of kombu", **properties},
        }
    )


def test_a_message_is_acknowledged_by_its_receipt_and_known_by_its_id() -> None:
    """Another receipt of it makes the same letter."""
    for message in (entry(envelope()), entry("foreign"), entry(envelope(), ReceiptHandle="2")):
        assert message.delivery_info["sqs_message"]["ReceiptHandle"] == message.delivery_tag
        assert message.delivery_info["sqs_queue"] == URL
        assert message.delivery_info["routing_key"] == "orders"
        assert Message.of(message, {}).task_id == "sqs-1"
        assert "redelivered" not in message.delivery_info
    again = entry(envelope(), Attributes={"ApproximateReceiveCount": "2"})
    assert again.delivery_info["redelivered"] is True


def test_a_message_that_is_none_of_kombu_keeps_its_body_as_it_was_sent() -> None:
    """Before Base64 was taken off."""
    message = entry("something else")
    assert message.body == b"as it was sent"
    assert message.content_type == CONTENT_TYPE_OF_ENTRY
    assert message.errors


def test_a_message_keeps_its_group_whoever_published_it() -> None:
    """Kombu writes it into the envelope, others do not."""
    outside = {"MessageGroupId": "customer-7"}
    for message in (
        entry(envelope(), Attributes=outside),
        entry(envelope(MessageGroupId="customer-7")),
        entry("foreign", Attributes=outside),
    ):
        assert message.properties["MessageGroupId"] == "customer-7"


def test_a_redrive_to_a_fifo_queue_has_the_name_of_its_letter() -> None:
    """SQS would drop it in silence for five minutes after the first publish."""
    first = {"MessageGroupId": "customer-7", "MessageDeduplicationId": "first"}
    assert renamed("orders", first, "letter-1") == first
    again = renamed("orders.fifo", first, "letter-1")
    assert again == {"MessageGroupId": "customer-7", "MessageDeduplicationId": "letter-1"}


def test_what_aws_refuses_is_an_error_of_the_broker() -> None:
    """Kombu lists the errors of the connection only."""
    connection = SimpleNamespace(transport=SQS.Transport)
    names = {kind.__name__ for kind in broker_errors(connection)}
    assert {"ClientError", "BotoCoreError", "UndefinedQueueException"} <= names


def test_a_redrive_policy_is_read_as_celery_names_its_queues() -> None:
    """Without the prefix; a queue of which SQS tells nothing is left out."""

    def attributes(*, QueueUrl: str, AttributeNames: list[str]) -> Any:  # noqa: N803 - AWS's names
        assert AttributeNames == ["RedrivePolicy"]
        if QueueUrl == "sqs/secret":
            raise ClientError({"Error": {"Code": "AccessDenied"}}, "GetQueueAttributes")
        policy = {"deadLetterTargetArn": "arn:aws:sqs:eu:1:shop-dead", "maxReceiveCount": 5}
        return {"Attributes": {"RedrivePolicy": json.dumps(policy)}} if QueueUrl[-1] == "s" else {}

    def listed(*, QueueNamePrefix: str) -> Any:  # noqa: N803
        return {"QueueUrls": [f"sqs/{QueueNamePrefix}-2", f"sqs/{QueueNamePrefix}"]}

    channel = SimpleNamespace(
        connection=SimpleNamespace(client=SimpleNamespace(transport=SQS.Transport)),
        sqs=lambda queue=None: SimpleNamespace(  # noqa: ARG005
            get_queue_attributes=attributes, list_queues=listed
        ),
        canonical_queue_name=str,
        queue_name_prefix="shop-",
        predefined_queues={},
    )
    found = redrive_policies(channel, ["orders", "secret", "mail"])
    assert found == {"orders": (5, "dead")}


def test_a_queue_is_found_by_its_whole_name_and_asked_for_once() -> None:
    """Also one that is too new for the list; one of others, or none, is no queue of this app."""
    asked: list[str] = []

    def list_queues(*, QueueNamePrefix: str) -> Any:  # noqa: N803 - AWS's names
        asked.append(QueueNamePrefix)
        return {"QueueUrls": ["sqs/orders-2", "sqs/orders"]} if QueueNamePrefix[0] == "o" else {}

    def get_queue_url(*, QueueName: str) -> Any:  # noqa: N803
        if QueueName != "new":
            raise ClientError({"Error": {"Code": "NonExistentQueue"}}, "GetQueueUrl")
        return {"QueueUrl": "sqs/new"}

    client = SimpleNamespace(list_queues=list_queues, get_queue_url=get_queue_url)
    channel = SimpleNamespace(canonical_queue_name=str, predefined_queues={}, sqs=lambda: client)
    assert [url_of(channel, name) for name in ("orders", "new", "orders")] == [
        *("sqs/orders", "sqs/new", "sqs/orders"),
    ]
    assert asked == ["orders", "new"]
    assert not queue_exists(channel, "gone")
    channel.predefined_queues = {"mails": {"url": "sqs/mails"}}
    assert url_of(channel, "mails") == "sqs/mails"
    assert not queue_exists(channel, "gone")


def receiving_channel(receipts: Receipts) -> Any:
    """A channel that was opened."""
    receipts.timeouts[URL] = 30
    transport: Any = receiving(receipts, 30)
    channel = transport.Channel.__new__(transport.Channel)
    client = SimpleNamespace(transport_options={})
    channel.__dict__.update(closed=True, connection=SimpleNamespace(client=client))
    channel.dlq_deleting, channel.dlq_delivered = {}, set()
    channel.canonical_queue_name = str
    channel._qos = channel.QoS(channel)
    return channel


@pytest.mark.parametrize("refused", [False, True])
def test_a_channel_that_closes_gives_back_what_it_delivered_but_for_tasks_at_work(
    refused: bool,
) -> None:
    """Of another channel's messages it gives none back; what AWS refuses returns later."""
    receipts, published = Receipts(), []
    channel, other = receiving_channel(receipts), receiving_channel(receipts)

    def put(queue: str, message: Any) -> None:
        if refused:
            raise ClientError({"Error": {"Code": "Throttling"}}, "SendMessage")
        published.append((queue, message["headers"]))

    channel._put, channel._lookup = put, lambda *_: ["orders"]
    delivered = [entry(envelope(), ReceiptHandle=name) for name in ("acked", "works", "waits")]
    for message in delivered:
        channel._qos.append(message, message.delivery_tag)
    foreign = entry(envelope(), ReceiptHandle="of another")
    other._qos.append(foreign, foreign.delivery_tag)
    channel._qos.ack("acked")
    assert receipts.begin("works")

    assert channel._qos.restore_unacked() == []

    assert published == ([] if refused else [("orders", {"task": "shop.charge"})])
    assert (receipts.is_own("works"), receipts.is_own("waits")) == (True, False)
    assert receipts.still_holds("of another")
    assert receipts.begin("of another")
    assert receipts.hand_over("works", delete=True)
    assert [*receipts.to_settle()] == ["works"]


@pytest.mark.parametrize(
    "refusal",
    ["Throttling", "InternalError", "ServiceUnavailable", "RequestThrottled", "AccessDenied"],
)
def test_a_deletion_that_sqs_refuses_for_now_is_made_later(refusal: str) -> None:
    """The task has ended: left to kombu, its message would come back and run again."""
    receipts = Receipts()
    channel = receiving_channel(receipts)
    refused = ClientError({"Error": {"Code": refusal, "Message": "later"}}, "DeleteMessage")

    def refuse(**_: Any) -> None:
        raise refused

    channel.sqs = lambda queue=None: SimpleNamespace(delete_message=refuse)  # noqa: ARG005
    message = entry(envelope())
    channel._qos.append(message, message.delivery_tag)

    channel.basic_ack(message.delivery_tag)

    assert list(receipts.to_settle()) == ["receipt-1"]
    assert receipts.to_settle()["receipt-1"][1]
    assert receipts.receipt("receipt-1") is None


def test_an_operators_client_sends_nothing_again_by_itself() -> None:
    """The waits that the app has set stay; kombu hands them all to botocore."""
    options = {"client-config": {"read_timeout": 3, "retries": {"max_attempts": 9}}}
    config = only_once(options)["client-config"]
    assert (config["read_timeout"], config["retries"]) == (3, {"total_max_attempts": 1})
    assert "'client-config'" in inspect.getsource(SQS.Channel)


@pytest.mark.parametrize(
    ("error", "fate_of_it"),
    [
        (ConnectionClosedError(endpoint_url="x"), (True, True)),
        (ReadTimeoutError(endpoint_url="x"), (True, True)),
        (EndpointConnectionError(endpoint_url="x"), (True, False)),
        (ConnectTimeoutError(endpoint_url="x"), (True, False)),
        (ClientError({"ResponseMetadata": {"HTTPStatusCode": 503}}, "SendMessage"), (True, True)),
        (ClientError({"Error": {"Code": "RequestThrottled"}}, "SendMessage"), (True, False)),
        (ClientError({"Error": {"Code": "AccessDenied"}}, "SendMessage"), (False, False)),
        (ValueError("cannot be encoded"), (False, False)),
    ],
)
def test_an_error_says_whether_sqs_may_have_the_message(
    error: Exception, fate_of_it: tuple[bool, bool]
) -> None:
    """And whether to send it again."""
    assert fate_of_send(error) == fate_of_it
