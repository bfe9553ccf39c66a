"""The deliveries of a message so far, for its letter."""

from __future__ import annotations

from dataclasses import replace

from celery_dlq.backends.base import DeliveryCounter, MessageKey
from celery_dlq.errors import StoreUnavailable
from celery_dlq.logs import get_logger
from celery_dlq.record import Delivery, Outcome
from celery_dlq.worker.lifecycle import InFlight

logger = get_logger("celery_dlq.worker")

HISTORY_IN_LETTER = 50
"""Most deliveries that a letter tells of: the first one, and the latest."""


def history_of(
    counter: DeliveryCounter, in_flight: InFlight, *, with_current: bool
) -> tuple[Delivery, ...]:
    """All deliveries of a message so far, oldest first.

    Args:
        counter: Remembers them; asked only if there were any before this one. If it does not
            answer, the present delivery is all there is.
        in_flight: The message.
        with_current: Whether its present delivery has begun.
    """
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
    whole = [*past, *([in_flight.delivery] if with_current else [])]
    if len(whole) > HISTORY_IN_LETTER:
        whole = [whole[0], *whole[1 - HISTORY_IN_LETTER :]]
    return tuple(whole)


def _recorded(counter: DeliveryCounter, key: MessageKey) -> tuple[Delivery, ...]:
    try:
        return counter.history(key)
    except StoreUnavailable as exc:
        logger.warning("History of %s is not at hand: %s", key.task_id, exc)
        return ()


def _closed(delivery: Delivery, key: MessageKey) -> Delivery:
    """An earlier delivery, with an outcome even if nobody recorded one.

    A message that was retried cannot have vanished: its retry is what we hold. The
    note of it may still be on its way when the retry ends first.
    """
    if delivery.outcome is not None:
        return delivery
    retried = delivery.retries < key.retries
    return replace(delivery, outcome=Outcome.RETRIED if retried else Outcome.VANISHED)
