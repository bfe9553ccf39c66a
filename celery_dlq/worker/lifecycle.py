"""The states of one delivery, the legal ways between them, and what the guard sees of a request.

A state says what an acknowledgement by Celery means now:

| state | Celery acknowledges or rejects the message |
|---|---|
| NEW, DISPATCHED, RUNNING, DONE, STORED | as ever |
| ENDING | only after it was decided whether this is a death, and its letter is stored |
| WAITING_FOR_STORE, RELEASED | not at all |

An illegal transition is an error of this plugin, and so never the task's: it is logged and counted
(``internal_errors``), and the state stays as it is. That loses nothing: the states that hold an
acknowledgement back are left only by the transitions below.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from celery_dlq.backends.base import MessageKey
from celery_dlq.record import Delivery
from celery_dlq.worker.policy_cache import ResolvedPolicy


class DeliveryState(str, Enum):  # text: every task hashes three of them
    """Where one delivery of a message is."""

    NEW = "new"
    """Received and not counted: prefetched, put off, or dropped by its pool before its start."""
    DISPATCHED = "dispatched"
    """Counted and given to a prefork pool; no process has accepted it yet."""
    RUNNING = "running"
    """Its task runs; or Celery handled an end that was none."""
    ENDING = "ending"
    """Celery handles its end: the next acknowledgement or rejection is the moment of death."""
    RELEASED = "released"
    """Given back to its queue by a shutdown or a lost connection; it may still succeed."""
    WAITING_FOR_STORE = "waiting_for_store"
    """Dead, but the store did not answer: its letter is in memory, the message at the broker."""
    STORED = "stored"
    """Dead: its letter is stored, or its policy keeps none."""
    DONE = "done"
    """Over without a letter: it succeeded, was revoked, comes again, or is left to Celery."""


_S = DeliveryState

NEXT: Mapping[DeliveryState, frozenset[DeliveryState]] = {
    _S.NEW: frozenset(
        {_S.DISPATCHED, _S.RUNNING, _S.ENDING, _S.WAITING_FOR_STORE, _S.STORED, _S.DONE}
    ),
    _S.DISPATCHED: frozenset(
        {_S.NEW, _S.RUNNING, _S.ENDING, _S.WAITING_FOR_STORE, _S.STORED, _S.DONE}
    ),
    _S.RUNNING: frozenset({_S.ENDING, _S.RELEASED, _S.DONE}),
    _S.ENDING: frozenset({_S.RUNNING, _S.RELEASED, _S.WAITING_FOR_STORE, _S.STORED, _S.DONE}),
    _S.RELEASED: frozenset({_S.DONE}),
    _S.WAITING_FOR_STORE: frozenset({_S.STORED, _S.DONE}),
    _S.STORED: frozenset(),
    _S.DONE: frozenset(),
}
"""The one table of legal transitions."""

DECIDED = frozenset({_S.WAITING_FOR_STORE, _S.STORED, _S.DONE})
"""States in which what becomes of the message is decided for good."""

OVER = DECIDED | {_S.RELEASED}
"""States in which the end was dealt with: a failure that Celery tells of later changes nothing."""

HELD = frozenset({_S.RELEASED, _S.WAITING_FOR_STORE})
"""States in which the message is neither acknowledged nor rejected."""

HANDLING: ContextVar[bool] = ContextVar("dlq_handling", default=False)
"""Whether Celery now handles the end of a guarded delivery, in this thread or greenlet.

For observers of what is logged meanwhile, which know no request: the letter tells of it.
"""


@dataclass(slots=True)
class InFlight:
    """One guarded message between its start and its end.

    Attributes:
        resolved: What guards it.
        key: Which message it is.
        delivery: Its present delivery.
        first: It was never delivered before.
        charged: The delivery is counted now. Not so before its start, or if the message
            already runs elsewhere.
        uncounted: It could not be counted: the store did not answer.
        seen_at: When it was first put off, in monotonic seconds.
        suspect: Its last delivery vanished: it may have killed its worker.
    """

    resolved: ResolvedPolicy
    key: MessageKey
    delivery: Delivery
    first: bool
    charged: bool = False
    uncounted: bool = False
    seen_at: float | None = None
    suspect: bool = False


class WaitsForStore(Protocol):
    """Who is told how waiting for the store ended."""

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """The letter is ``STORED``, or cannot be: the message is left to Celery, ``DONE``."""


class GuardedRequest(WaitsForStore, Protocol):
    """What the guard asks of Celery's request, and what it keeps there.

    Attributes:
        dlq_state: Where the delivery is.
        dlq_in_flight: The guarded message, from its start on.
    """

    dlq_state: DeliveryState
    dlq_in_flight: InFlight | None

    @property
    def id(self) -> Any:
        """The task's id: a text, where nobody made the message up."""

    @property
    def task(self) -> Any:
        """Celery's task."""

    @property
    def message(self) -> Any:
        """The message as kombu has it."""

    @property
    def request_dict(self) -> dict[str, Any]:
        """The message's headers, in the form of protocol 2."""

    @property
    def delivery_info(self) -> dict[str, Any]:
        """Exchange, routing key, and whether it was delivered before."""

    @property
    def expires(self) -> Any:
        """When the message expires; ``None`` for never."""

    @property
    def worker_pid(self) -> int | None:
        """The process that accepted it."""

    @property
    def time_start(self) -> float | None:
        """When a process accepted it."""

    @property
    def acknowledged(self) -> bool:
        """Whether the broker has the message no more."""

    def dlq_move(self, state: DeliveryState) -> None:
        """Go on to another state, if that is legal."""
