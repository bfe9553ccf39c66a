"""Makes letters: a message, its deliveries so far, and its end become one record."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.fingerprint import fingerprint
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import DeadLetter, Delivery, Outcome, Reason
from celery_dlq.policies.decisions import Die
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.metrics import INTERNAL_ERRORS, Counts
from celery_dlq.store.worker_records import Clock, MessageKey
from celery_dlq.writing.capture import Message
from celery_dlq.writing.failure import MESSAGE_LIMIT, SENTRY_TRACE, Failure
from celery_dlq.writing.lifecycle import InFlight

logger = get_logger("celery_dlq.worker")

_DETAILS = {"args_json", "kwargs_json", "argsrepr", "kwargsrepr", "eta", "expires"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterMaker:
    """Makes the letters of one process."""

    clock: Clock
    hostname: str  # Node name of the worker that dead-letters
    pid: int
    # Version of the user's code here: a message that was never delivered dies of it
    release: str | None = None
    change: Callable[[DeadLetter], DeadLetter] = lambda letter: letter  # E.g. masks it
    counts: Counts = field(default_factory=Counts)

    def __call__(
        self,
        message: Message,
        resolved: ResolvedPolicy,
        verdict: Die,
        *,
        failure: Failure | None = None,
        history: tuple[Delivery, ...] = (),
        deliveries: int = 0,
        pid: int | None = None,
    ) -> DeadLetter:
        """Make the letter of a death; after an internal error, one without its details."""
        try:
            return self._make_letter(message, resolved, verdict, failure, history, deliveries, pid)
        except Exception:
            self.counts.count(INTERNAL_ERRORS, "letter")
            logger.exception("Task %s died; its letter lacks details", message.task_id)
            nothing: dict[str, Any] = dict.fromkeys(_DETAILS)
            bare = {**message.values, **nothing, "properties": "{}"}
            message = replace(message, values=bare)
            return self._make_letter(message, resolved, verdict, None, (), deliveries, pid)

    def _make_letter(
        self,
        message: Message,
        resolved: ResolvedPolicy,
        verdict: Die,
        failure: Failure | None,
        history: tuple[Delivery, ...],
        deliveries: int,
        pid: int | None,
    ) -> DeadLetter:
        exception_type = failure.exception_type if failure else None
        traceback = failure.traceback if failure else None
        trace = failure.sentry_trace if failure else None
        letter = DeadLetter(
            **message.values,
            id=message.identity.in_queue(resolved.dead_letter_queue).letter_id,
            source_queue=resolved.queue,
            dead_letter_queue=resolved.dead_letter_queue,
            reason=verdict.reason,
            description=_description(verdict, failure, history)[:MESSAGE_LIMIT],
            dead_lettered_at=self.clock(),
            first_delivered_at=history[0].started_at if history else None,
            deliveries=deliveries,
            max_deliveries=resolved.policy.max_deliveries if resolved.policy else None,
            max_retries=resolved.max_retries,
            exception_type=exception_type,
            exception_message=failure.exception_message if failure else None,
            traceback=traceback,
            fingerprint=fingerprint(  # of the unmasked traceback
                task_name=message.task_name,
                reason=verdict.reason.value,
                exception_type=exception_type,
                traceback=traceback,
            ),
            history=history,
            worker_hostname=self.hostname,
            worker_pid=pid or self.pid,
            release=history[-1].release if history else self.release,
            sentry_event_id=failure.sentry_event_id if failure else None,
            # The reporter takes it off before the letter is stored.
            extra={SENTRY_TRACE: trace.encode()} if trace else {},
        )
        return self.change(letter)


def stripped_letter(letter: DeadLetter) -> DeadLetter:
    """Strip a letter to message, reason and time, in ASCII, which every store accepts."""
    changes: dict[str, Any] = {
        one.name: value.encode("ascii", "backslashreplace").decode()
        for one in fields(letter)
        if isinstance(value := getattr(letter, one.name), str) and not isinstance(value, Reason)
    }
    details = ("traceback", "exception_message", "first_delivered_at", "sentry_event_id")
    nothing = dict.fromkeys((*_DETAILS, *details))
    return replace(letter, **{**changes, **nothing, "history": (), "properties": "{}"})


def _description(verdict: Die, failure: Failure | None, history: tuple[Delivery, ...]) -> str:
    """The verdict's text, after the last delivery's outcome, which is what people look for."""
    if failure is not None or not history:
        return verdict.description
    last = history[-1]
    text = f": {last.exception_message.rstrip('.')}" if last.exception_message else ""
    return f"{last.outcome}{text}; {verdict.description}"


HISTORY_IN_LETTER = 50
"""Maximum number of deliveries in a letter: the first one, and the latest."""


def history_of(
    counter: DeliveryCounter, in_flight: InFlight, *, with_current: bool
) -> tuple[Delivery, ...]:
    """All deliveries of a message so far, oldest first."""
    key = in_flight.key
    earlier: tuple[Delivery, ...] = ()
    if not (in_flight.first and key.retries == 0):
        earlier = _recorded(counter, key)
    current = (key.retries, in_flight.delivery.number)
    past = [
        _with_outcome(delivery, key)
        for delivery in earlier
        if delivery.outcome is Outcome.SHUTDOWN or (delivery.retries, delivery.number) != current
    ]
    return _capped_history([*past, *([in_flight.delivery] if with_current else [])])


def history_of_adopted(counter: DeliveryCounter, key: MessageKey) -> tuple[Delivery, ...]:
    """All deliveries of a message that no worker has any more, oldest first."""
    return _capped_history([_with_outcome(delivery, key) for delivery in counter.history(key)])


def _capped_history(whole: list[Delivery]) -> tuple[Delivery, ...]:
    return tuple(whole[:1] + whole[1:][1 - HISTORY_IN_LETTER :])


def _recorded(counter: DeliveryCounter, key: MessageKey) -> tuple[Delivery, ...]:
    try:
        return counter.history(key)
    except StoreUnavailable as exc:
        logger.warning("The history of %s is missing: %s", key.task_id, exc)
    except Exception:  # another version wrote it, say: the letter is worth more
        logger.exception("The history of %s is missing", key.task_id)
    return ()


def _with_outcome(delivery: Delivery, key: MessageKey) -> Delivery:
    """An earlier delivery, with an inferred outcome if none was recorded.

    A delivery that was retried cannot have vanished: this message is its retry. Its outcome may
    be recorded only after the retry has ended.
    """
    if delivery.outcome is not None:
        return delivery
    retried = delivery.retries < key.retries
    return replace(delivery, outcome=Outcome.RETRIED if retried else Outcome.VANISHED)


def last_number(counter: DeliveryCounter, key: MessageKey) -> int:
    """The number of a message's last recorded delivery; 0 if there is none."""
    recorded = _recorded(counter, key)
    return max((one.number for one in recorded if one.retries == key.retries), default=0)
