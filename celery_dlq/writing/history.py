"""The delivery history of a message, for its letter."""

from __future__ import annotations

from dataclasses import replace

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters.record import Delivery, Outcome
from celery_dlq.logs import get_logger
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.records import MessageKey
from celery_dlq.writing.lifecycle import InFlight

logger = get_logger("celery_dlq.worker")

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
        _closed(delivery, key)
        for delivery in earlier
        if delivery.outcome is Outcome.SHUTDOWN or (delivery.retries, delivery.number) != current
    ]
    return _capped([*past, *([in_flight.delivery] if with_current else [])])


def history_of_adopted(counter: DeliveryCounter, key: MessageKey) -> tuple[Delivery, ...]:
    """All deliveries of a message that no worker has any more, oldest first."""
    return _capped([_closed(delivery, key) for delivery in counter.history(key)])


def _capped(whole: list[Delivery]) -> tuple[Delivery, ...]:
    if len(whole) > HISTORY_IN_LETTER:
        whole = [whole[0], *whole[1 - HISTORY_IN_LETTER :]]
    return tuple(whole)


def _recorded(counter: DeliveryCounter, key: MessageKey) -> tuple[Delivery, ...]:
    try:
        return counter.history(key)
    except StoreUnavailable as exc:
        logger.warning("The history of %s is missing: %s", key.task_id, exc)
        return ()


def _closed(delivery: Delivery, key: MessageKey) -> Delivery:
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
