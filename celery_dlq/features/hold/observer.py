"""Holds in a worker: which messages are not executed, and where they go instead.

A message that matches a hold goes into the hold's queue. If that is full, the message goes back to
its own, which is not consumed for now: unacknowledged messages would fill the worker's prefetch
window, and so block its other queues.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery_dlq.errors import StoreUnavailable
from celery_dlq.features.hold import HELD_MESSAGES
from celery_dlq.features.hold.unread import Unread
from celery_dlq.letters import json_codec
from celery_dlq.letters.headers import HOLD_HEADER, PUBLICATION_HEADER, named_after
from celery_dlq.letters.printable import get_logger
from celery_dlq.letters.record import Reason, to_micros
from celery_dlq.policies.decisions import Die, PutOff, Taken, Verdict
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.holds import MOST_HELD, OPEN, Hold
from celery_dlq.store.instructions import Instruction
from celery_dlq.store.metrics import STORE_ERRORS
from celery_dlq.store.worker_records import Stored
from celery_dlq.transport.publications import broker_name
from celery_dlq.worker.housekeeping import LongTask, Task
from celery_dlq.worker.observer import Observer, WorkerParts
from celery_dlq.writing.capture import Message, another, is_named_after_content
from celery_dlq.writing.lifecycle import GuardedRequest
from celery_dlq.writing.memory_limit import MemoryLimitReached

logger = get_logger("celery_dlq.worker")

_RELEASE_TICKS = 5  # between two looks for holds that ended
_COUNTED_SECONDS = 1.0


class HoldObserver(Observer):
    """Takes messages that match a hold out of execution, and releases those of ended holds."""

    def __init__(self, parts: WorkerParts) -> None:
        self._parts = parts
        self._store = parts.backend.new_held
        self._unread = parts.backend.part(Unread)
        # The holds that could not read a message: a thread pool asks twice before it starts
        self._passed_over: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
        self._noted: set[str] = set()
        self._broker = broker_name(parts.app)
        self._make = replace(parts.make, release=None)  # it was not executed
        self.most = MOST_HELD
        self.lengths: dict[str, tuple[float, int]] = {}
        self._ahead = timedelta(0)  # the store's clock minus this one's
        # On their way back, with their queues. A deque: thread pools add while the timer takes
        self._going_back: deque[tuple[Any, Hold, str]] = deque()
        self._stopped: dict[str, Hold] = {}
        self.holds: tuple[Hold, ...] = ()
        self.ended: tuple[Hold, ...] = ()
        # Of circuit breakers: the header of a message that runs as a probe, if one may
        self.probe: Callable[[Hold], str | None] = lambda _hold: None
        # Whether a hold's conditions are met; `None` if nobody can say
        self._judge: Callable[..., bool | None] = lambda *_: True

    @property
    def watching(self) -> bool:  # type: ignore[override]
        """True while something is held."""
        return bool(self.holds)

    @property
    def tasks(self) -> Sequence[Task | LongTask]:
        """Release the messages of holds that ended; one worker of many does the work."""
        due, flush = partial(getattr, self, "ended"), self._unread.send_counts
        return [
            LongTask(name="releases", every=_RELEASE_TICKS, is_due=due, work=self._release),
            Task(name="unread", work=flush, close=flush),
        ]

    def _release(self, stopping: Callable[[], bool]) -> None:
        from celery_dlq.features.hold.operations import Holds  # noqa: PLC0415 - when it runs

        with self._parts.separate() as own:
            Holds(own).release_ended(stopping)

    def instructed(self, found: Sequence[Instruction], now: datetime) -> None:
        """Apply the holds of the app, in place of those before."""
        holds = [one for one in found if isinstance(one, Hold) and one.broker in ("", self._broker)]
        if any(hold.where for hold in holds):
            from celery_dlq.letters.conditions import judge_all  # noqa: PLC0415 - few holds have any

            self._judge = judge_all
        before = {hold.id for hold in self.holds}
        self._ahead = now - self._parts.clock()
        self.ended = tuple(hold for hold in holds if not hold.in_force(now))
        self.holds = tuple(hold for hold in holds if hold.in_force(now))
        self.lengths.clear()
        self._noted.intersection_update(before)
        for hold in self.holds:
            if hold.id not in before:
                what = hold.task, hold.queue, "".join(f", {text}" for text in hold.where)
                end = hold.until or "it is released", hold.reason or "no reason given"
                text = "%s of %s holds tasks %s of queues %s%s until %s (%s)"
                logger.warning(text, hold.id, hold.actor, *what, *end)
        for hold_id in before - {hold.id for hold in self.holds}:
            logger.warning("%s has ended", hold_id)

    def before_start(self, request: GuardedRequest) -> Verdict | None:
        """Put a message into the queue of the first hold that it matches, or back into its own."""
        resolved = self._parts.policies.resolve(request.delivery_info, request.task)
        hold, message = self._matching_hold(request, resolved.queue)
        if hold is None or message is None:
            return None
        go_back = PutOff(keep=lambda one: self._going_back.append((one, hold, resolved.queue)))
        try:
            if not self._is_below(hold):
                marker = self.probe(hold) if self.probe_is_due(hold) else None
                if marker is None:
                    return go_back
                request.request_dict[HOLD_HEADER] = marker
                return None
            if not self._hold_message(hold, message, resolved, request):
                # Its broker delivers it for the first time: an equal one is held already.
                self._hold_message(hold, another(message), resolved, request)
        except MemoryLimitReached:
            return go_back
        except StoreUnavailable as exc:
            self._parts.counts.count(STORE_ERRORS, "hold")
            logger.error(  # noqa: TRY400 - no traceback for an outage
                "Task %s runs, because %s cannot hold it: %s", request.id, hold.id, exc
            )
            return None
        self._parts.counts.count(HELD_MESSAGES, resolved.queue)
        logger.info("Task %s[%s] is held by %s", message.task_name, request.id, hold.id)
        return Taken()

    def probe_is_due(self, hold: Hold) -> bool:
        """True if a circuit breaker made the hold, and may send a probe now."""
        circuit, now = hold.circuit, to_micros(self._parts.clock() + self._ahead)
        return bool(circuit and circuit.state == OPEN and circuit.micros_until_probe(now) <= 0)

    def _matching_hold(
        self, request: GuardedRequest, queue: str
    ) -> tuple[Hold, Message] | tuple[None, None]:
        released, message = request.request_dict.get(HOLD_HEADER), None
        for hold in self.holds:
            if not hold.admits(released) and hold.covers(request.task.name, queue):
                message = message or Message.of(request.message, request.request_dict)
                meets = self._meets_conditions(hold.where, message)
                if meets:
                    return hold, message
                if meets is None:
                    self._pass_over(hold, request)
        return None, None

    def _meets_conditions(self, texts: tuple[str, ...], message: Message) -> bool | None:
        return self._judge(texts, lambda name: message.values.get(name) or "")

    def _pass_over(self, hold: Hold, request: GuardedRequest) -> None:
        """Count a message that runs, because nobody can say whether the hold means it."""
        holds = self._passed_over.setdefault(request, set())
        if hold.id in holds:
            return
        holds.add(hold.id)
        self._unread.add_message(hold.id)
        if hold.id not in self._noted:
            self._noted.add(hold.id)
            text = f"its arguments cannot be read, so {hold.id} does not hold it"
            text = f"{text}. `dlq holds` counts such messages"
            logger.warning("Task %s[%s] runs: %s", request.task.name, request.id, text)

    def _is_below(self, hold: Hold) -> bool:
        """True if a hold has room for more messages, by a count of this second."""
        now = time.monotonic()
        counted_at, length = self.lengths.get(hold.id, (float("-inf"), 0))
        if now - counted_at > _COUNTED_SECONDS:
            length = self._store.length(hold.id)
            self.lengths[hold.id] = now, length
        return length < self.most

    def _hold_message(
        self, hold: Hold, message: Message, resolved: ResolvedPolicy, request: GuardedRequest
    ) -> bool:
        """Hold a message; False if what is held already may be another one."""
        key, released = message.identity.in_queue(hold.id), request.request_dict.get(HOLD_HEADER)
        verdict = Die(Reason.HELD, hold.reason or f"held by {hold.actor}")
        letter = self._make(message, replace(resolved, dead_letter_queue=hold.id), verdict)
        if hold.circuit is not None and released is not None:
            # Held once more: the entry of the first time may not be removed yet.
            letter = replace(letter, id=key.in_queue(str(released)).letter_id)
        again = request.delivery_info.get("redelivered") or released is not None
        is_new = is_named_after_content(request.message) and not again
        if not message.values["published_at"]:  # its release is a copy of this very message
            name = message.identity.publication
            if is_new:  # and not of an equal one, which may be dead
                name = named_after(hold.id.encode(), name.encode())
            headers = {**json_codec.loads(letter.headers), PUBLICATION_HEADER: name}
            letter = replace(letter, headers=json_codec.dumps(headers))
        letter = self._parts.limit.fitted(letter, whole=True)
        if self._store.dead_letter(letter, key) is Stored.ALREADY_THERE:
            if is_new:
                return False
            copy, kept = (message.task_id, message.identity.publication), (hold.id, letter.id)
            text = "A copy of task %s is dropped (publication %s): %s has it, as %s"
            logger.warning(text, *copy, *kept)
        counted_at, length = self.lengths.get(hold.id, (float("-inf"), 0))
        self.lengths[hold.id] = counted_at, length + 1
        return True

    # -- while a hold is full -------------------------------------------------------

    def connected(self) -> None:
        """Forget messages on their way back: the broker redelivers them."""
        self._going_back.clear()

    def in_loop(self, consumer: Any) -> None:
        """Stop consuming the queues of held messages, and return these; consume others again.

        The broker answers here. What fails is done again.
        """
        waiting = list(self._going_back)
        for _request, hold, queue in waiting:
            if queue not in self._stopped:
                consumer.cancel_task_queue(queue)
                self._stopped[queue] = hold
                text = f"{hold.id} has room or ends: it has 100,000 messages, or the store is full"
                logger.error("Queue %s is not consumed until %s", queue, text)
        # The last one first: each goes to the head of its queue.
        for one in reversed(waiting):
            one[0].dlq_give_back()
            self._going_back.remove(one)
        for queue, hold in list(self._stopped.items()):
            if not waiting and self._has_room(hold):
                consumer.add_task_queue(queue)
                del self._stopped[queue]
                logger.warning("Queue %s is consumed again", queue)

    def _has_room(self, hold: Hold) -> bool:
        """True if a hold has ended or is not full, or one of its messages is to run as a probe.

        A probe out of a full hold would have to wait behind all that are on the broker.
        """
        known = next((one for one in self.holds if one.id == hold.id), None)
        try:
            return known is None or self._is_below(known) or self.probe_is_due(known)
        except StoreUnavailable:  # tasks go on, as in any outage
            return True
