"""Publish redriven messages: always confirmed, in batches if the transport can."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from amqp.exceptions import MessageNacked  # type: ignore[import-untyped]

from celery_dlq import timing
from celery_dlq.errors import BrokerUnavailable, DLQError, RedriveError
from celery_dlq.letters.headers import CONTENT_TYPE_OF_ENTRY
from celery_dlq.letters.printable import get_logger
from celery_dlq.operations.redrive.message import Outgoing
from celery_dlq.transport.confirmed import ConfirmedProducer
from celery_dlq.transport.redis.envelopes import Envelopes
from celery_dlq.transport.sqs.aws import fate_of_send, renamed, send_body

logger = get_logger("celery_dlq")

_RETRY = {"max_retries": 3, "interval_start": 0, "interval_step": 0.2}
_MESSAGES_PER_PIPELINE = 500
_MESSAGES_PER_ROUND = 100  # published one by one
_ATTEMPTS = 4
_INTERRUPTED = "interrupted while it was published"


@dataclass
class PublishResult:
    """The results of publishing; filled message by message, so that an interrupt loses none."""

    # Ids of letters whose message the broker has
    confirmed: list[str] = field(default_factory=list)
    # Ids of letters whose message the broker does not have, with the error
    refused: dict[str, str] = field(default_factory=dict)
    # Ids of letters whose message the broker may have, with the error
    doubtful: dict[str, str] = field(default_factory=dict)
    # Number of messages that were published although the broker may have had them
    again: int = 0
    # Ids of letters whose message an interrupted operation may have published
    reclaimed: Collection[str] = ()

    def renew_when_due(self, waiting_for: str = "") -> None:
        """Renew the right to publish; called before each message, and in every wait."""

    def owns(self, letter_id: str) -> bool:  # noqa: ARG002 - of one that shares the right
        """False if another operation has taken the letter over."""
        return True

    def publishes(self, letter_id: str) -> None:
        """Note that the broker may have a message from now on, perhaps once more."""
        if letter_id in self.doubtful or letter_id in self.reclaimed:
            self.count_again(1)
        self.doubtful.setdefault(letter_id, _INTERRUPTED)

    def count_again(self, messages: int) -> None:
        """Count messages that were published once more, before they are; or take that back."""
        self.again += messages

    @property
    def confirmed_set(self) -> frozenset[str]:
        """The confirmed ids, for fast lookups."""
        return frozenset(self.confirmed)


class _Failure(NamedTuple):
    """An attempt that failed: whether to try again, and what it left behind."""

    error: Exception  # The error
    again: bool  # True to try again
    maybe: bool  # True if the broker may have the message
    away: bool  # True if the next message would fail as well


class Publisher(ConfirmedProducer):
    """Publishes to the app's broker."""

    def __init__(self, app: Any) -> None:
        super().__init__(app, connect=_RETRY, longest=timing.current.confirm)

    @property
    def batch_size(self) -> int:
        """Number of messages to publish at a time; after a crash all of them are doubtful."""
        return _MESSAGES_PER_PIPELINE if self._can_batch else _MESSAGES_PER_ROUND

    def envelopes(self) -> Envelopes | None:
        """Return what makes this broker's list entries; ``None`` if it is not kombu's Redis."""
        if self.connection.transport.driver_type != "redis":  # to look closer, we would connect
            return None
        try:
            return Envelopes(self.producer) if Envelopes.supported(self.producer) else None
        except self.errors:
            return None

    def publish(self, messages: Sequence[Outgoing], sent: PublishResult) -> None:
        """Publish messages and wait until the broker has them; fills ``sent``."""
        publish = self._publish_batch if self._can_batch else self._one_by_one
        publish(messages, sent)

    @property
    def _can_batch(self) -> bool:
        # New in kombu 5.7. Its Redis transport writes one pipeline and never replays it.
        return bool(getattr(self.producer, "supports_batch_publish", False))

    def _publish_batch(self, messages: Sequence[Outgoing], sent: PublishResult) -> None:
        try:
            self.producer.channel.connection  # noqa: B018 - connects
            self.declare({message.queue for message in messages})
        except self.errors as exc:
            sent.refused.update({m.letter_id: not_published(m, exc) for m in messages})
            self.disconnect()
            return
        sent.renew_when_due()
        ours = [message for message in messages if sent.owns(message.letter_id)]
        sent.count_again(sum(message.letter_id in sent.reclaimed for message in ours))
        sent.doubtful.update({message.letter_id: _INTERRUPTED for message in ours})
        try:
            with self.producer.batch(max_size=max(1, len(ours))):
                for message in ours:
                    try:
                        self.publish_once(message)
                    except (TypeError, ValueError, RedriveError) as exc:  # it cannot be encoded
                        del sent.doubtful[message.letter_id]
                        sent.count_again(-(message.letter_id in sent.reclaimed))
                        sent.refused[message.letter_id] = not_published(message, exc)
        except self.errors as exc:
            sent.doubtful.update(
                {m.letter_id: not_published(m, exc) for m in ours if m.letter_id in sent.doubtful}
            )
            self.disconnect()
        else:
            sent.confirmed += sent.doubtful
            sent.doubtful.clear()

    def _one_by_one(self, messages: Sequence[Outgoing], sent: PublishResult) -> None:
        for number, message in enumerate(messages):
            sent.renew_when_due()
            if not sent.owns(message.letter_id):
                continue
            away = self._until_known(message, sent)
            if away is not None:  # the next ones would wait as long
                others = [other for other in messages[number + 1 :] if sent.owns(other.letter_id)]
                sent.refused.update({m.letter_id: not_published(m, away) for m in others})
                return

    def _until_known(self, message: Outgoing, sent: PublishResult) -> Exception | None:
        """Publish a message, again if the connection is lost; return why the broker is away.

        Once again at most if the broker may have it: a letter that stays does less harm than many
        copies. The client's own retries would tell nobody that the message may be there twice.
        """
        letter_id, failure = message.letter_id, None
        for attempt in range(_ATTEMPTS):
            if attempt:
                time.sleep(attempt * timing.current.publish_retry)
                sent.renew_when_due()
            if not sent.owns(letter_id):
                break
            earlier, again = letter_id in sent.doubtful, sent.again
            failure = self._failure(message, sent)
            if failure is None:
                sent.confirmed.append(letter_id)
            elif not failure.maybe:
                sent.count_again(again - sent.again)
            if failure is None or not (earlier or failure.maybe):
                sent.doubtful.pop(letter_id, None)
            if failure is None or not failure.again or (earlier and failure.maybe):
                break
        if failure is None:
            return None
        results = sent.doubtful if letter_id in sent.doubtful else sent.refused
        results[letter_id] = not_published(message, failure.error)
        if isinstance(failure.error, BrokerUnavailable):
            raise failure.error
        return failure.error if failure.away else None

    def _failure(self, message: Outgoing, sent: PublishResult) -> _Failure | None:
        """Attempt to publish a message; return what went wrong."""
        ours = (TypeError, ValueError, RedriveError, BrokerUnavailable)
        expected: tuple[type[Exception], ...] = (*self.errors, *ours)
        try:
            self._attempt(message, sent)
        except expected as exc:
            again, maybe = self._fate_of_error(exc)
            silent = not self.is_connected or isinstance(exc, TimeoutError)
            self.disconnect()
            return _Failure(exc, again and not silent, maybe, silent or (again and not maybe))
        except BaseException:
            self.disconnect()
            raise
        return None

    def _attempt(self, message: Outgoing, sent: PublishResult) -> None:
        """Publish a message once; from the moment it may be on the broker it is doubtful."""

        def write() -> None:
            self.declare({message.queue}, retry=False)
            sent.publishes(message.letter_id)
            self.publish_once(message, mandatory=self.is_amqp)

        try:
            if not self.publish_confirmed(write, sent.renew_when_due):
                raise RedriveError("the broker has no queue of this name")
        except MessageNacked:
            raise RedriveError("the queue refused it: is it full?") from None

    def _fate_of_error(self, exc: Exception) -> tuple[bool, bool]:
        """Whether to publish again after an error, and whether the broker may have the message."""
        if self.is_sqs:
            return fate_of_send(exc)
        if isinstance(exc, (TimeoutError, BrokerUnavailable)):
            return False, True
        lost = self.is_lost(exc)
        return lost, lost

    def publish_once(self, message: Outgoing, **options: Any) -> None:
        """Write a message to the connection."""
        properties = message.properties
        if self.is_sqs:
            properties = renamed(message.queue, properties, message.letter_id)
        if message.content_type == CONTENT_TYPE_OF_ENTRY:
            self._push_message(message, properties)
            return
        if self.is_amqp:
            properties = {"priority": None, **properties}  # else kombu makes an absent one 0
        # To the queue itself, because its exchange could route copies to other queues.
        self.producer.publish(
            message.body,
            exchange="",
            routing_key=message.queue,
            content_type=message.content_type,
            content_encoding=message.content_encoding,
            headers=message.headers,
            **options,
            **properties,
        )

    def _push_message(self, message: Outgoing, properties: dict[str, Any]) -> None:
        if self.is_sqs:
            send_body(self.producer.channel, message.queue, message.body, properties)
            return
        envelopes = self.envelopes()
        if envelopes is None:
            raise RedriveError(
                "it was an entry of a Redis list, or a body of Amazon SQS, and no message; only "
                "a broker of that kind can take it back"
            )
        envelopes.push_entry(message.queue, message.properties.get("priority"), message.body)

    def declare(self, queues: set[str], *, retry: bool = True) -> list[Any]:
        """Declare those of the queues that the app knows, and return them."""
        found = [self._app.amqp.queues.get(name) for name in queues]
        # kombu before 5.5 does not declare an unbound queue when it may retry.
        known = [queue.bind(self.producer.channel) for queue in found if queue is not None]
        for queue in known:
            self.producer.maybe_declare(queue, retry=retry, **(_RETRY if retry else {}))
        return known


def not_published(message: Outgoing, exc: BaseException) -> str:
    """Return the text of a failure."""
    why = str(exc) if isinstance(exc, DLQError) else f"{type(exc).__name__}: {exc}"
    return (
        f"letter {message.letter_id} was not published to queue {message.queue!r}: {why}; "
        f"it stays in the dead-letter queue"
    )


class Pace:
    """Limits a redrive to a number of letters a second."""

    def __init__(self, rate: float | None, beat: Callable[[], object]) -> None:
        self._rate = rate
        self._beat = beat
        self._next = time.monotonic()

    @property
    def rate(self) -> float | None:
        """Letters a second, now; ``None`` for no limit."""
        return self._rate

    def wait_for_turn(self, letters: int) -> None:
        """Wait until this many letters may be published."""
        rate = self.rate
        if rate is None:
            return
        while (left := self._next - time.monotonic()) > 0:
            time.sleep(min(left, timing.current.pace_beat))
            self._beat()
        self._next = max(time.monotonic(), self._next) + letters / rate


class GrowingPace(Pace):
    """One letter in the first second, about twice as many in each later one."""

    def __init__(self, beat: Callable[[], object]) -> None:
        super().__init__(None, beat)
        self._began = time.monotonic()

    @property
    def rate(self) -> float:
        """Letters a second, now."""
        return 2.0 ** int(min(time.monotonic() - self._began, 20.0))
