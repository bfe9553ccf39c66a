"""Holds in a worker: which messages are not executed, and where they go instead."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta

from celery_dlq.errors import StoreUnavailable
from celery_dlq.letters import conditions
from celery_dlq.letters.headers import HOLD_HEADER
from celery_dlq.letters.record import DeadLetter, Reason, to_micros
from celery_dlq.logs import get_logger
from celery_dlq.metrics import HELD_MESSAGES, STORE_ERRORS, Counts
from celery_dlq.policies.decisions import Die
from celery_dlq.policies.resolved import PolicyCache, ResolvedPolicy
from celery_dlq.store.instructions import OPEN, Hold
from celery_dlq.store.letters import Letters
from celery_dlq.writing.capture import Message
from celery_dlq.writing.letter import LetterMaker
from celery_dlq.writing.lifecycle import GuardedRequest
from celery_dlq.writing.memory_limit import MemoryLimitReached

logger = get_logger("celery_dlq.worker")

_COUNTED_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Held:
    """A message that is not executed now."""

    hold: Hold  # The hold that it matches
    queue: str  # Its queue
    # True if it is in the queue of the hold: acknowledge it. False if that is full: it goes back
    # to its own, which is not consumed for now
    stored: bool


class Holding:
    """Holds the messages of one worker."""

    def __init__(
        self,
        policies: PolicyCache,
        store: Letters,
        make: LetterMaker,
        *,
        broker: str,
        most: int,
        fit: Callable[[DeadLetter], DeadLetter],
        counts: Counts,
    ) -> None:
        self._policies = policies
        self._store = store
        self._make = make
        self._broker = broker
        self._most = most
        self._fit = fit
        self._counts = counts
        self._lengths: dict[str, tuple[float, int]] = {}
        self.holds: tuple[Hold, ...] = ()
        self.ended: tuple[Hold, ...] = ()
        self.probe: Callable[[Hold], str | None] = _no_probe
        self._ahead = timedelta(0)  # the store's clock minus this one's

    def apply(self, holds: Sequence[Hold], now: datetime) -> None:
        """Apply the holds of the app, in place of those before."""
        before = {hold.id for hold in self.holds}
        self._ahead = now - self._make.clock()
        ours = [hold for hold in holds if hold.broker in ("", self._broker)]
        self.ended = tuple(hold for hold in ours if not hold.in_force(now))
        self.holds = tuple(hold for hold in ours if hold.in_force(now))
        self._lengths.clear()
        for hold in self.holds:
            if hold.id not in before:
                logger.warning(
                    "%s of %s: tasks %s of queues %s%s are not executed until %s (%s)",
                    hold.id,
                    hold.actor,
                    hold.task,
                    hold.queue,
                    "".join(f", {text}" for text in hold.where),
                    hold.until or "it is released",
                    hold.reason or "no reason given",
                )
        for hold_id in before - {hold.id for hold in self.holds}:
            logger.warning("%s has ended", hold_id)

    def take(self, request: GuardedRequest) -> Held | None:
        """Put a message that is about to start into the queue of the first hold that it matches."""
        resolved = self._policies.of(request.delivery_info, request.task)
        hold, message = self._match(request, resolved.queue)
        if hold is None or message is None:
            return None
        try:
            if not self._is_below(hold):
                marker = self.probe(hold) if self.probe_is_due(hold) else None
                if marker is None:
                    return Held(hold, resolved.queue, stored=False)
                request.request_dict[HOLD_HEADER] = marker
                return None
            self._put(hold, message, resolved, request.request_dict.get(HOLD_HEADER))
        except MemoryLimitReached:
            return Held(hold, resolved.queue, stored=False)
        except StoreUnavailable as exc:
            self._counts.count(STORE_ERRORS, "hold")
            logger.error(  # noqa: TRY400 - no traceback for an outage
                "Task %s cannot be held by %s, it runs: %s", request.id, hold.id, exc
            )
            return None
        self._counts.count(HELD_MESSAGES, resolved.queue)
        logger.info("Task %s[%s] is held by %s", message.task_name, request.id, hold.id)
        return Held(hold, resolved.queue, stored=True)

    def has_room(self, hold: Hold) -> bool:
        """False while a hold that is in force has too many messages, by a count of this second.

        True also if one of its messages is to run as a probe: a probe out of a full hold would
        have to wait behind all that are on the broker.
        """
        known = next((one for one in self.holds if one.id == hold.id), None)
        return known is None or self._is_below(known) or self.probe_is_due(known)

    def probe_is_due(self, hold: Hold) -> bool:
        """True if a circuit breaker made the hold, and may send a probe now."""
        circuit = hold.circuit
        if circuit is None or circuit.state != OPEN:
            return False
        return circuit.micros_until_probe(to_micros(self._make.clock() + self._ahead)) <= 0

    def _is_below(self, hold: Hold) -> bool:
        now = time.monotonic()
        counted_at, length = self._lengths.get(hold.id, (float("-inf"), 0))
        if now - counted_at > _COUNTED_SECONDS:
            length = self._store.length(hold.id)
            self._lengths[hold.id] = now, length
        return length < self._most

    def _match(
        self, request: GuardedRequest, queue: str
    ) -> tuple[Hold, Message] | tuple[None, None]:
        released, message = request.request_dict.get(HOLD_HEADER), None
        for hold in self.holds:
            if not hold.admits(released) and hold.covers(request.task.name, queue):
                message = message or Message.of(request.message, request.request_dict)
                if not hold.where or _meets(hold.where, message):
                    return hold, message
        return None, None

    def _put(
        self, hold: Hold, message: Message, resolved: ResolvedPolicy, released: object
    ) -> None:
        key = message.key(hold.id)
        verdict = Die(Reason.HELD, hold.reason or f"held by {hold.actor}")
        letter = self._make(message, replace(resolved, dead_letter_queue=hold.id), verdict)
        if hold.circuit is not None and released is not None:
            # Held once more: the entry of the first time may not be removed yet.
            letter = replace(letter, id=replace(key, dead_letter_queue=str(released)).letter_id)
        self._store.dead_letter(self._fit(letter), key)
        counted_at, length = self._lengths.get(hold.id, (float("-inf"), 0))
        self._lengths[hold.id] = counted_at, length + 1


def _meets(texts: tuple[str, ...], message: Message) -> bool:
    return conditions.all_hold(texts, lambda name: getattr(message, name) or "")


def _no_probe(_hold: Hold) -> None:
    """Of an app without circuit breakers."""
