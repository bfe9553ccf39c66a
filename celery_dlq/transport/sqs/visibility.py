"""The messages of Amazon SQS that a worker holds, and the thread that keeps them invisible.

SQS shows a message to others when the visibility timeout of its queue has passed since it was
received. A worker that lives renews it; one that is stopped or killed does not. SQS ends every
receipt after 12 hours.

Source:
https://docs.aws.amazon.com/AWSSimpleQueueService/latest/SQSDeveloperGuide/sqs-visibility-timeout.html
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError
from kombu.exceptions import KombuError

from celery_dlq.letters.printable import get_logger
from celery_dlq.transport.held import LeasedMessages, LeaseThread, seconds_since_boot

logger = get_logger("celery_dlq.transport")

LONGEST_SECONDS = 12 * 3600 - 60
"""SQS's limit for one receipt, without the minute by which our clocks may differ."""

CALL_SECONDS = 5
"""Longest wait for a connection, and for a reply: one that hangs must not cost other receipts."""

_PER_CALL = 10  # SQS takes no more
_TICK_SECONDS = 0.25
_MAX_RETRY_SECONDS = 10.0
_MAX_DOUBLINGS = 6
_MAX_SETTLE_SECONDS = 1.0
_NO_ANSWER = (BotoCoreError, KombuError, OSError)
# SQS says so of a receipt that is not valid any more.
_GONE = ("InvalidParameterValue", "MessageNotInflight", "ReceiptHandleIsInvalid")


class RenewalError(Exception):
    """SQS did not renew the visibility of a message; it may do so later."""


@dataclass(slots=True, kw_only=True)
class Receipt:
    """One delivery of a message to this worker. Times are of `seconds_since_boot`."""

    queue: str  # The queue's name in Celery
    url: str  # The queue's URL
    received_at: float  # When SQS gave it away, or a little later
    until: float  # When SQS shows the message to others
    renewed_at: float  # The last renewal; at first `received_at`
    lost: bool = False  # True once it was found out that `until` has passed


class Receipts(LeasedMessages):
    """What one worker holds, by receipt handle, which is kombu's delivery tag."""

    def __init__(self, now: Callable[[], float] = seconds_since_boot) -> None:
        super().__init__()
        self._now = now
        self.timeouts: dict[str, int] = {}
        self.held: dict[str, Receipt]
        self._proven = False  # that SQS lets this worker renew
        self._closed = False
        self._given_up: set[str] = set()
        self._released: set[str] = set()  # since the thread's last look
        self._to_settle: dict[str, tuple[Receipt, bool]] = {}  # by the thread; delete it?

    # -- the event loop, and the threads of a pool ----------------------------------

    def received(self, tag: str, queue: str, url: str, requested_at: float, waits: float) -> None:
        """Hold a message."""
        timeout = self.timeouts.get(url, 0)
        if timeout > 0:
            # A late reply lay in the socket while this process was busy: nobody knows since when.
            now = self._now()
            received_at = now if now <= requested_at + waits + 1 else requested_at
            self.held[tag] = Receipt(
                queue=queue,
                url=url,
                received_at=received_at,
                until=received_at + timeout,
                renewed_at=received_at,
            )
            self._idle.add(tag)

    def drop_message(self, tag: str) -> None:
        """Hold it no longer: it is deleted."""
        super().drop_message(tag)
        self._given_up.discard(tag)

    def released(self, tag: str) -> None:
        """Hold it no longer: it returns to its queue. Call this before SQS learns of it."""
        super().drop_message(tag)
        self._released.add(tag)

    def still_holds(self, tag: object) -> bool:
        """True if a message may start; if not, it is in its queue again, or at another worker."""
        receipt = self.held.get(tag) if isinstance(tag, str) else None
        if receipt is None:
            return tag not in self._given_up
        if self._now() < receipt.until:
            return True
        self.let_lapse(str(tag))
        return False

    def let_lapse(self, tag: str) -> None:
        """Hold a message no longer; SQS shows it to others when its visibility timeout ends."""
        super().drop_message(tag)
        self._given_up.add(tag)

    def is_known(self, tag: object) -> bool:  # noqa: ARG002 - as of the leases of Redis
        """True: SQS loses no record of what it gave away."""
        return True

    def gave_up(self, tag: str) -> bool:
        """True if it must not be deleted, because it did not start here."""
        return tag in self._given_up

    def receipt(self, tag: str) -> Receipt | None:
        """The receipt of a message that is held."""
        return self.held.get(tag)

    def is_own(self, tag: object) -> bool:
        """True if a message is held; of a queue without a timeout none is."""
        return tag in self.held

    def _give_back(self, tag: str) -> None:
        receipt = self.held.pop(tag, None)
        if receipt is not None:
            self._to_settle[tag] = (receipt, False)

    def connection_closes(self, tags: Iterable[str]) -> list[str]:
        """Go on holding the messages that are at work."""
        if self._closed:
            return []
        held = [tag for tag in tags if tag in self.held]
        return [tag for tag in held if not self._goes_back(tag)]

    def hand_over(self, tag: str, *, delete: bool) -> bool:
        """Let the thread delete, or give back, a message of a lost connection."""
        if tag not in self._orphans:
            return False
        self._forget(tag)
        receipt = self.held.pop(tag, None)
        if receipt is not None:
            self._to_settle[tag] = (receipt, delete)
        return True

    def close(self) -> None:
        """Let the thread give back what lost connections delivered: no task runs any more."""
        self._closed = True
        for tag in list(self._orphans):
            self.hand_over(tag, delete=False)

    # -- the thread -----------------------------------------------------------------

    def due_by_queue(self) -> dict[str, dict[str, Receipt]]:
        """What is to be renewed now, by queue's URL."""
        now = self._now()
        self._released.clear()
        found: dict[str, dict[str, Receipt]] = defaultdict(dict)
        urgent: set[str] = set()
        lost: list[Receipt] = []
        # What could not be deleted yet stays invisible: it has been executed.
        ended = {tag: one for tag, (one, delete) in list(self._to_settle.items()) if delete}
        for tag, receipt in [*self.held.items(), *ended.items()]:
            third = self.timeouts[receipt.url] / 3
            if now >= receipt.until:
                if tag in ended:
                    continue
                if not receipt.lost:
                    receipt.lost = True
                    lost.append(receipt)
            elif now >= receipt.renewed_at + third / 2 or not self._proven:
                if receipt.received_at + LONGEST_SECONDS - now < 1:
                    continue
                found[receipt.url][tag] = receipt  # those that are not urgent fill the calls
                if now >= receipt.renewed_at + third or not self._proven:
                    urgent.add(receipt.url)
        self._report(lost)
        return {url: receipts for url, receipts in found.items() if url in urgent}

    def seconds_for(self, receipt: Receipt) -> int:
        """The visibility timeout to ask for, in seconds."""
        left = receipt.received_at + LONGEST_SECONDS - self._now()
        return int(min(self.timeouts[receipt.url], left))

    def renewed(self, receipt: Receipt, requested_at: float, seconds: int) -> None:
        """Note that SQS has renewed a receipt."""
        self._proven = True
        receipt.renewed_at = requested_at
        receipt.until = requested_at + seconds

    def refused(self, tags: Iterable[str]) -> None:
        """Note receipts that are not valid any more."""
        for tag in tags:
            receipt = self.held.get(tag)
            if receipt is not None:
                receipt.until = float("-inf")

    def released_among(self, tags: Iterable[str]) -> list[str]:
        """Those that were given back while the thread renewed them."""
        return [tag for tag in tags if tag in self._released]

    def to_settle(self) -> dict[str, tuple[Receipt, bool]]:
        """What is to be deleted or given back, until its receipt ends: then it runs again."""
        for tag, (receipt, _delete) in list(self._to_settle.items()):
            if receipt.received_at + LONGEST_SECONDS <= self._now():
                self.settled(tag)
        return dict(self._to_settle)

    def settled(self, tag: str) -> None:
        """Forget what was deleted or given back."""
        self._to_settle.pop(tag, None)

    def settle_later(self, tag: str, receipt: Receipt, *, delete: bool) -> None:
        """Let the thread delete, or give back, what could not be now."""
        self._to_settle[tag] = (receipt, delete)

    def _report(self, lost: list[Receipt]) -> None:
        self.taken += len(lost)
        walled = sum(one.until >= one.received_at + LONGEST_SECONDS - 2 for one in lost)
        if walled:
            logger.warning(
                "%d messages were held for 12 hours, the longest that SQS allows: it gives them "
                "to other workers now. Those that wait for their ETA wait there; tasks that still "
                "run here run twice",
                walled,
            )
        if len(lost) > walled:
            logger.error(
                "This worker stood still, or could not renew at SQS, for longer than the "
                "visibility timeout: %d of its messages are in their queues again, or at others. "
                "It does not start those that have not started",
                len(lost) - walled,
            )


class VisibilityKeeper(LeaseThread):
    """The thread that renews the visibility of the messages a worker holds."""

    what = (
        "Messages are not renewed, deleted or given back (workers need "
        "sqs:ChangeMessageVisibility and sqs:DeleteMessage)"
    )
    expected_errors = (ClientError, BotoCoreError, KombuError, OSError, RenewalError)
    # A client of boto3 takes long to make: renewals would be late while something is denied.
    refusals = (ClientError, RenewalError)

    def __init__(self, receipts: Receipts, connect: Callable[[], Any]) -> None:
        super().__init__()
        self._receipts = receipts
        self._connect = connect
        self._connection: Any = None
        self._silent: set[str] = set()  # the queues that did not answer in the last round

    def successor(self) -> VisibilityKeeper:
        """Another one, for the same receipts."""
        made = VisibilityKeeper(self._receipts, self._connect)
        made.errors = self.errors
        return made

    def patience(self) -> float:
        """A quarter of the shortest visibility timeout, or as long as a call may take."""
        return max(self._shortest() / 4, 2 * CALL_SECONDS)

    def _pause_seconds(self) -> float:
        longest = max(_TICK_SECONDS, self._shortest() / 6)
        return min(_TICK_SECONDS * 2.0 ** min(self._failures, _MAX_DOUBLINGS), longest)

    def _finish(self) -> None:
        self.tick()  # what is still to be deleted or given back

    def _give_sign_of_life(self) -> None:
        failure: Exception | None = None
        silent: set[str] = set()
        for url, act in self._in_turn():
            if url in silent:
                continue  # each call would wait for its timeout
            self.give_sign_of_life()
            try:  # no queue keeps another one waiting
                act()
            except Exception as exc:  # noqa: BLE001
                failure = failure or exc
                if isinstance(exc, _NO_ANSWER):
                    silent.add(url)
        self._silent = silent
        if failure is not None:
            raise failure

    def _in_turn(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """All work, last that of the queues that did not answer in the last round."""
        for late in (False, True):
            yield from (one for one in self._pending_calls() if (one[0] in self._silent) is late)

    def _pending_calls(self) -> Iterator[tuple[str, Callable[[], None]]]:
        for url, found in self._receipts.due_by_queue().items():
            tags = list(found)
            for start in range(0, len(tags), _PER_CALL):
                some = {tag: found[tag] for tag in tags[start : start + _PER_CALL]}
                yield url, partial(self._renew_batch, url, some)
        until = seconds_since_boot() + min(_MAX_SETTLE_SECONDS, self._shortest() / 10)
        for tag, (receipt, delete) in self._receipts.to_settle().items():
            yield receipt.url, partial(self._settle, tag, receipt, delete=delete)
            if seconds_since_boot() > until and not self.stopped:
                return  # the others in the next round: what is held is renewed first

    def _shortest(self) -> float:
        return min(self._receipts.timeouts.values(), default=_MAX_RETRY_SECONDS)

    def _renew_batch(self, url: str, found: Mapping[str, Receipt]) -> None:
        receipts, requested_at = self._receipts, seconds_since_boot()
        queue = next(iter(found.values())).queue
        seconds = {tag: receipts.seconds_for(receipt) for tag, receipt in found.items()}
        failed = self._change_visibility(queue, url, seconds)
        for tag in found.keys() - failed.keys():
            receipts.renewed(found[tag], requested_at, seconds[tag])
        gone = [tag for tag, code in failed.items() if code in _GONE]
        receipts.refused(gone)
        back = receipts.released_among(found)
        if back:  # the renewal may have come after it was given back
            self._change_visibility(queue, url, dict.fromkeys(back, 0))
        if len(failed) > len(gone):
            raise RenewalError(f"SQS refused with {', '.join(sorted({*failed.values()}))}")

    def _change_visibility(
        self, queue: str, url: str, seconds: Mapping[str, int]
    ) -> dict[str, str]:
        """Change the visibility of at most ten messages; return the codes of those refused."""
        tags = list(seconds)
        entries = [
            {"Id": str(number), "ReceiptHandle": tag, "VisibilityTimeout": seconds[tag]}
            for number, tag in enumerate(tags)
        ]
        reply = self._client_of(queue).change_message_visibility_batch(
            QueueUrl=url, Entries=entries
        )
        return {
            tags[int(one["Id"])]: str(one["Code"]).rpartition(".")[2]
            for one in reply.get("Failed", ())
        }

    def _settle(self, tag: str, receipt: Receipt, *, delete: bool) -> None:
        try:
            if delete:
                client = self._client_of(receipt.queue)
                client.delete_message(QueueUrl=receipt.url, ReceiptHandle=tag)
            else:
                self._change_visibility(receipt.queue, receipt.url, {tag: 0})
        except Exception as exc:
            if error_code(exc) not in _GONE:
                raise
        self._receipts.settled(tag)

    def _client_of(self, queue: str) -> Any:
        """The client of boto3 for a queue, as kombu makes it: each may have its credentials."""
        if self._connection is None:
            self._connection = self._connect()
            self._connection.connect()
        channel = self._connection.default_channel
        return channel.sqs(queue=channel.canonical_queue_name(queue))

    def disconnect(self) -> None:
        """Close the connection, if one is open."""
        connection, self._connection = self._connection, None
        if connection is not None:
            with suppress(Exception):  # it is gone either way
                connection.close()


def timeout_of(client: Any, url: str) -> int:
    """Read the visibility timeout of a queue, in seconds."""
    found = client.get_queue_attributes(QueueUrl=url, AttributeNames=["VisibilityTimeout"])
    return int(found["Attributes"]["VisibilityTimeout"])


def error_code(exc: BaseException) -> str:
    """The code that AWS gives an error; empty if it is none of AWS."""
    response = getattr(exc, "response", None)
    error = response.get("Error") if isinstance(response, Mapping) else None
    return str(error.get("Code", "")) if isinstance(error, Mapping) else ""
