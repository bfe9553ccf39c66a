"""Amazon SQS for operators: its errors, its queues, and bodies that are no message of kombu.

Source: https://github.com/celery/kombu/blob/main/kombu/transport/SQS/__init__.py
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from http import HTTPStatus
from importlib import import_module  # only users of SQS have boto3
from typing import Any

from kombu.exceptions import KombuError

_CONNECT_SECONDS = 4.0
_REPLY_SECONDS = 10.0


def broker_errors(connection: Any) -> tuple[type[Exception], ...]:
    """The errors of a broker's client; kombu does not list those with which AWS refuses."""
    transport = connection.transport
    listed = (KombuError, OSError, *transport.connection_errors, *transport.channel_errors)
    if transport.driver_type != "sqs":
        return listed
    sqs: Any = import_module("kombu.transport.SQS")
    refused = import_module("botocore.exceptions").ClientError
    return (*listed, refused, *_no_such_queue(), sqs.AccessDeniedQueueException)


def only_once(options: Mapping[str, Any]) -> dict[str, Any]:
    """Transport options with which botocore sends nothing again by itself, and waits shortly."""
    waits = {"connect_timeout": _CONNECT_SECONDS, "read_timeout": _REPLY_SECONDS}
    given = options.get("client-config") or {}
    return {"client-config": {**waits, **given, "retries": {"total_max_attempts": 1}}}


def unshare_clients(channel: Any) -> None:
    """Make a channel use clients with its own options, also for predefined queues.

    Before kombu 5.7 all channels of a process share those.
    """
    if isinstance(getattr(type(channel), "_predefined_queue_clients", None), dict):
        channel._predefined_queue_clients = {}  # noqa: SLF001 - as a later kombu does


def fate_of_send(exc: Exception) -> tuple[bool, bool]:
    """Whether to send a message again after an error, and whether SQS may have it already."""
    known: Any = import_module("botocore.exceptions")
    if isinstance(exc, known.ClientError):
        status = exc.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
        code = str(exc.response.get("Error", {}).get("Code", ""))
        failed = status >= HTTPStatus.INTERNAL_SERVER_ERROR
        return failed or "Throttl" in code, failed
    maybe = isinstance(exc, (known.HTTPClientError, OSError))
    unsent = isinstance(exc, known.ConnectionError)
    return maybe or unsent, maybe and not unsent


def url_of(channel: Any, queue: str) -> str:
    """The URL of a queue that exists; asked once a channel."""
    name = channel.canonical_queue_name(queue)
    known: dict[str, str] = vars(channel).setdefault("dlq_urls", {})
    return known.get(name) or known.setdefault(name, _find_url(channel, name))


def _find_url(channel: Any, name: str) -> str:
    """Look for a queue as kombu does, which may list queues; a new one is not listed at once.

    Source: https://docs.aws.amazon.com/AWSSimpleQueueService/latest/APIReference/API_ListQueues.html
    """
    sqs: Any = import_module("kombu.transport.SQS")
    if channel.predefined_queues:
        if name in channel.predefined_queues:
            return str(channel.predefined_queues[name]["url"])
        raise sqs.UndefinedQueueException(f"expected {name} in predefined_queues")
    client = channel.sqs()
    for url in client.list_queues(QueueNamePrefix=name).get("QueueUrls", ()):
        if url.rpartition("/")[2] == name:
            return str(url)
    try:
        return str(client.get_queue_url(QueueName=name)["QueueUrl"])
    except import_module("botocore.exceptions").ClientError as exc:
        raise sqs.DoesNotExistQueueException(f"expected {name} in SQS, got no such queue") from exc


def queue_exists(channel: Any, queue: str) -> bool:
    """True if SQS has a queue; kombu's own check is true for any name."""
    try:
        url_of(channel, queue)
    except _no_such_queue():
        return False
    return True


def redrive_policies(channel: Any, queues: Iterable[str]) -> dict[str, tuple[int, str]]:
    """The most receipts of a message of each queue, and where SQS moves it then.

    Queues without a redrive policy, and those of which SQS tells nothing, are left out.
    """
    found: dict[str, tuple[int, str]] = {}
    for name in queues:
        with suppress(
            *broker_errors(channel.connection.client), LookupError, ValueError, TypeError
        ):
            reply = channel.sqs(queue=channel.canonical_queue_name(name)).get_queue_attributes(
                QueueUrl=url_of(channel, name),
                AttributeNames=["RedrivePolicy"],
            )
            policy = json.loads(reply["Attributes"]["RedrivePolicy"])
            target = str(policy["deadLetterTargetArn"]).rpartition(":")[2]
            target = target.removeprefix(channel.queue_name_prefix)
            found[name] = int(policy["maxReceiveCount"]), target
    return found


def _no_such_queue() -> tuple[type[Exception], ...]:
    """The errors of a missing or misnamed queue; before kombu 5.7 they are no KombuError."""
    sqs: Any = import_module("kombu.transport.SQS")
    names = ("UndefinedQueueException", "DoesNotExistQueueException", "InvalidQueueException")
    return tuple(getattr(sqs, name) for name in names)


def renamed(queue: str, properties: dict[str, Any], letter_id: str) -> dict[str, Any]:
    """The properties of a redrive: under its old name, a FIFO queue would drop it in silence.

    The new name is the letter's, so that publishing it again within SQS's five minutes adds
    nothing.
    """
    if not queue.endswith(".fifo"):
        return properties
    return {**properties, "MessageDeduplicationId": letter_id}


def send_body(channel: Any, queue: str, body: bytes, properties: Mapping[str, Any]) -> None:
    """Send what was received, without kombu's envelope."""
    names = ("MessageGroupId", "MessageDeduplicationId")
    more = {name: properties[name] for name in names if properties.get(name)}
    if queue.endswith(".fifo"):
        more.setdefault("MessageGroupId", "default")  # as kombu does
    channel.sqs(queue=channel.canonical_queue_name(queue)).send_message(
        QueueUrl=url_of(channel, queue),
        MessageBody=body.decode(),
        **more,
    )
