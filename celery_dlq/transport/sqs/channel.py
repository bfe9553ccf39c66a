"""kombu's transport for Amazon SQS, with visibility that is renewed and messages of any form.

kombu receives; what this module adds is in the subclasses. Loaded where the broker is SQS only:
it needs boto3, as kombu does.

Source: https://github.com/celery/kombu/blob/main/kombu/transport/SQS/__init__.py
"""

from __future__ import annotations

import logging
from base64 import b64decode
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from kombu.transport import SQS

from celery_dlq.config import Settings, visibility_timeout
from celery_dlq.letters.printable import get_logger
from celery_dlq.registry import Metric
from celery_dlq.store.metrics import LOST_LEASES, STORE_ERRORS
from celery_dlq.transport.held import WatchedFetch, seconds_since_boot
from celery_dlq.transport.redis.entries import EntryMessage, FetchedEntry
from celery_dlq.transport.sqs.aws import queue_exists, url_of
from celery_dlq.transport.sqs.visibility import (
    CALL_SECONDS,
    Receipt,
    Receipts,
    VisibilityKeeper,
    timeout_of,
)

logger = get_logger("celery_dlq.transport")

_ATTRIBUTES = {"ApproximateReceiveCount", "DeadLetterQueueSourceArn", "MessageGroupId"}
_ON = (
    "Amazon SQS: this worker renews the visibility of its messages while their tasks run and "
    "while they wait for their ETA or countdown, which SQS's 15 minutes for DelaySeconds do not "
    "limit. 12 hours after a receipt SQS gives the message to another worker"
)
_OFF = (
    "Amazon SQS: the visibility of messages is not renewed, because dlq_reliable_fetch is False. "
    "Tasks and delays that are not shorter than the visibility timeout run twice"
)


_DENIED: type[Exception] = vars(SQS)["AccessDeniedQueueException"]  # where it is, versions differ


class SqsEntry(FetchedEntry):
    """A received message: kombu's envelope, or empty if the message has another form."""

    def __init__(self, message: Mapping[str, Any], text: bytes, queue: str, url: str) -> None:
        super().__init__(text, str(message["ReceiptHandle"]), queue)
        # Base64 is how kombu writes; a message that is not kombu's is what was sent.
        self.raw = str(message["Body"]).encode()
        self.requested_at = seconds_since_boot()
        about = {name: value for name, value in message.items() if name != "Body"}
        self.about: dict[str, Any] = {"sqs_message": about, "sqs_queue": url}
        attributes = message.get("Attributes") or {}
        if attributes.get("ApproximateReceiveCount", "1") != "1":  # SQS has no other mark
            self.about["redelivered"] = True
        self.group: str | None = attributes.get("MessageGroupId")
        if self.error is None:
            self["properties"]["delivery_info"].update(self.about)
            self["properties"]["delivery_tag"] = self.tag
            if self.group is not None:  # a publisher other than kombu names it outside only
                self["properties"].setdefault("MessageGroupId", self.group)


class SqsMessage(EntryMessage):
    """A message of SQS; one that is not kombu's becomes a message that cannot be decoded."""

    def _be_the_entry(self, entry: FetchedEntry, channel: Any) -> None:
        super()._be_the_entry(entry, channel)
        if isinstance(entry, SqsEntry):
            self.delivery_info.update(entry.about)
            self.properties.update(delivery_tag=entry.tag, delivery_info=self.delivery_info)
            if entry.group is not None:
                self.properties["MessageGroupId"] = entry.group


class ReceiptQoS(SQS.QoS):
    """Tells the receipts what is acknowledged and what is given back."""

    @property
    def _receipts(self) -> Receipts:
        receipts: Receipts = self.channel.dlq_leases
        return receipts

    def append(self, message: Any, delivery_tag: Any) -> None:
        """Add a delivered message."""
        entry = message.dlq_entry
        if isinstance(entry, SqsEntry):
            waits = self.channel.wait_time_seconds or 0
            url = entry.about["sqs_queue"]
            self._receipts.received(delivery_tag, entry.queue, url, entry.requested_at, waits)
        self.channel.dlq_delivered.add(delivery_tag)
        super().append(message, delivery_tag)

    def ack(self, delivery_tag: Any) -> None:
        """Forget a message that is deleted."""
        self.channel.dlq_delivered.discard(delivery_tag)
        self._receipts.drop_message(delivery_tag)
        super().ack(delivery_tag)

    def reject(self, delivery_tag: Any, requeue: bool = False) -> None:  # noqa: FBT001, FBT002
        """Give a message back, or leave it until its visibility timeout has passed."""
        self.channel.dlq_delivered.discard(delivery_tag)
        receipt = self.channel.dlq_deleting.get(delivery_tag)
        if receipt is not None:  # kombu would let an executed message come back
            logger.warning("A message is deleted later: SQS refused for now")
            self._receipts.settle_later(delivery_tag, receipt, delete=True)
            self.ack(delivery_tag)
        elif not self._receipts.hand_over(delivery_tag, delete=False):
            self._receipts.released(delivery_tag)
            try:
                super().reject(delivery_tag, requeue=requeue)
            # At its end: kombu has forgotten the receive count of what it gave back, kombu#1824.
            except (LookupError, TypeError, ClientError) as exc:
                logger.warning("A message goes back without kombu's backoff_policy: %r", exc)
                super().ack(delivery_tag)

    def restore_unacked(self) -> Any:
        """Give back what the channel delivered, but for tasks at work: they go on."""
        at_work = self._receipts.connection_closes(sorted(self.channel.dlq_delivered))
        for tag in at_work:
            super().ack(tag)  # kombu has no more to do with it
        for tag in self.channel.dlq_delivered.difference(at_work):
            self._receipts.released(tag)
        self.channel.dlq_delivered.clear()
        failed = super().restore_unacked()
        for exc in (one[0] for one in failed if isinstance(one[0], ClientError)):
            logger.warning("A message returns when its visibility timeout has passed: %s", exc)
        return [one for one in failed if not isinstance(one[0], ClientError)]


class ReceiptChannel(SQS.Channel):
    """kombu's channel; its messages have receipts."""

    QoS = ReceiptQoS
    Message = SqsMessage
    dlq_leases: Receipts
    dlq_default_timeout: int
    dlq_deleting: dict[Any, Receipt]
    dlq_delivered: set[Any]  # the tags of what is not settled

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._requested_at: dict[str, float] = {}
        self._deleted_at_once: set[str] = set()  # queues that are consumed without acknowledgements
        self.dlq_deleting, self.dlq_delivered = {}, set()
        super().__init__(*args, **kwargs)

    @property
    def get_message_attributes(self) -> dict[str, Any]:
        """What SQS is to send with each message; new in kombu 5.6."""
        attributes: dict[str, Any] = super().get_message_attributes
        system = set(attributes["MessageSystemAttributeNames"])
        return {**attributes, "MessageSystemAttributeNames": sorted(system | _ATTRIBUTES)}

    def basic_consume(self, queue: str, no_ack: bool, *args: Any, **kwargs: Any) -> Any:  # noqa: FBT001
        """Consume; if messages are renewed, read the queue's visibility timeout first."""
        (self._deleted_at_once.add if no_ack else self._deleted_at_once.discard)(queue)
        if self.dlq_default_timeout:
            if not queue_exists(self, queue):
                self.queue_declare(queue)
            url = url_of(self, queue)
            if url not in self.dlq_leases.timeouts:
                self.dlq_leases.timeouts[url] = self._timeout_of(queue, url)
        return super().basic_consume(queue, no_ack, *args, **kwargs)

    def _timeout_of(self, queue: str, url: str) -> int:
        try:
            timeout = timeout_of(self.sqs(queue=self.canonical_queue_name(queue)), url)
        except (ClientError, BotoCoreError, OSError) as exc:
            logger.warning(
                "The visibility timeout of queue %s cannot be read, %d s are taken for it: %s. "
                "Workers need sqs:GetQueueAttributes",
                queue,
                self.dlq_default_timeout,
                exc,
            )
            return self.dlq_default_timeout
        if not timeout:
            logger.warning(
                "Queue %s has a visibility timeout of 0 s, so that SQS gives every message to "
                "every worker; set one of 30 s or more",
                queue,
            )
        return timeout

    def _get_async(self, queue: str, *args: Any, **kwargs: Any) -> Any:
        self._requested_at[queue] = seconds_since_boot()
        return super()._get_async(queue, *args, **kwargs)

    def _on_messages_ready(self, queue: str, qname: str, messages: Any) -> Any:
        # kombu 5.7 makes a list of a lost connection, takes it for a mapping and ends the worker.
        return super()._on_messages_ready(queue, qname, messages or {})

    def _message_to_python(self, message: Any, queue_name: str, q_url: str) -> Any:
        if queue_name in self._deleted_at_once:
            return super()._message_to_python(message, queue_name, q_url)
        text = message["Body"].encode()
        with suppress(ValueError):  # kombu writes Base64; any other form is no message of its own
            text = b64decode(text, validate=True)
        entry = SqsEntry(message, text, queue_name, q_url)
        entry.requested_at = self._requested_at.get(queue_name, entry.requested_at)
        return entry

    def basic_ack(self, delivery_tag: Any, multiple: bool = False) -> Any:  # noqa: FBT001, FBT002
        """Delete a message, unless it went back to its queue before it started here."""
        if self.dlq_leases.gave_up(delivery_tag):
            self.qos.ack(delivery_tag)
            return None
        if self.dlq_leases.hand_over(delivery_tag, delete=True):
            return None
        receipt = self.dlq_leases.receipt(delivery_tag)
        if receipt is not None:
            self.dlq_deleting[delivery_tag] = receipt
        try:
            return super().basic_ack(delivery_tag, multiple)
        except (BotoCoreError, OSError, _DENIED) as exc:
            if receipt is None:
                raise
            need = ". Workers need sqs:DeleteMessage" if isinstance(exc, _DENIED) else ""
            logger.warning("A message is deleted later: %s%s", exc, need)
            self.dlq_leases.settle_later(delivery_tag, receipt, delete=True)
            self.qos.ack(delivery_tag)
            return None
        finally:
            self.dlq_deleting.pop(delivery_tag, None)


def receiving(receipts: Receipts | None = None, default_timeout: int = 0) -> type:
    """A transport class for SQS that takes messages of any form."""
    channel = type(
        "ReceiptChannel",
        (ReceiptChannel,),
        {
            "dlq_leases": Receipts() if receipts is None else receipts,
            "dlq_default_timeout": default_timeout,
        },
    )
    return type("ReceiptTransport", (SQS.Transport,), {"Channel": channel})


class VisibilityRenewal(WatchedFetch):
    """Turns the renewal on for the connections of one worker's consumer."""

    def __init__(
        self,
        settings: Settings,
        options: Mapping[str, Any] | None,
        connect: Callable[..., Any],
    ) -> None:
        self.receipts = Receipts()
        super().__init__(VisibilityKeeper(self.receipts, self._connection))
        self._wanted = settings.reliable_fetch
        self._client_config = dict((options or {}).get("client-config") or {})
        self._connect_anew = connect
        timeout = int(visibility_timeout("sqs", options) or 0) if self._wanted else 0
        self._transport = receiving(self.receipts, timeout)

    def close(self) -> None:
        """Give back what lost connections delivered, and stop renewing."""
        self.receipts.close()
        self._keeper.stop()

    def _connect(self, connection: Any, ensure_connected: Callable[[Any], Any]) -> Any:
        if connection.get_transport_cls() is not SQS.Transport:
            return ensure_connected(connection)
        connection.get_transport_cls = lambda: self._transport
        connected = ensure_connected(connection)
        if self._wanted:
            self._log_once(_ON)
            self._keeper.start()
        else:
            self._log_once(_OFF, level=logging.WARNING)
        return connected

    def _totals_so_far(self) -> Mapping[Metric, int]:
        return {LOST_LEASES: self.receipts.taken, STORE_ERRORS: self._keeper.errors}

    def _connection(self) -> Any:
        """A connection for the thread, of which no call takes long."""
        config = {
            "connect_timeout": CALL_SECONDS,
            "read_timeout": CALL_SECONDS,
            **self._client_config,
            "retries": {"total_max_attempts": 1},
        }
        return self._connect_anew(transport_options={"client-config": config})
