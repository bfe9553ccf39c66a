"""The states of one delivery, their legal transitions, and the guard's view of a request.

A state decides what an acknowledgement by Celery does:

| state | Celery acknowledges or rejects the message |
|---|---|
| NEW, DISPATCHED, RUNNING, DONE, STORED | unchanged |
| ENDING | once it is decided whether this is a death, and the letter is stored |
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

from celery_dlq.letters.record import Delivery
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.worker_records import MessageKey


class DeliveryState(str, Enum):  # a str hashes faster, and every task hashes three states
    """The state of one delivery of a message."""

    NEW = "new"
    """Received and not counted: prefetched, put off, or dropped by its pool before its start."""
    DISPATCHED = "dispatched"
    """Counted and handed to a prefork pool; no process has accepted it yet."""
    RUNNING = "running"
    """The task runs, or Celery reported an end that was not one."""
    ENDING = "ending"
    """Celery handles the end: the next acknowledgement or rejection is the moment of death."""
    RELEASED = "released"
    """Returned to its queue by a shutdown or a lost connection; it may still succeed."""
    WAITING_FOR_STORE = "waiting_for_store"
    """Dead, but the store is down: the letter is in memory, the message at the broker."""
    STORED = "stored"
    """Dead: its letter is stored, or its policy keeps none."""
    DONE = "done"
    """Over without a letter: it succeeded, was revoked, will be redelivered, or is Celery's."""


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
"""Legal transitions."""

DEAD = frozenset({_S.WAITING_FOR_STORE, _S.STORED})
"""States of a message that died: its letter is stored, or waits for the store."""

DECIDED = DEAD | {_S.DONE}
"""States in which the message's outcome is final."""

OVER = DECIDED | {_S.RELEASED}
"""States in which the end was handled: a failure that Celery reports later changes nothing."""

HELD = frozenset({_S.RELEASED, _S.WAITING_FOR_STORE})
"""States in which the message is neither acknowledged nor rejected."""

HANDLING: ContextVar[bool] = ContextVar("dlq_handling", default=False)
"""True while Celery handles the end of a guarded delivery in this thread or greenlet.

For observers of log records, which see no request: the letter reports this end already.
"""

DUMPING: ContextVar[bool] = ContextVar("dlq_dumping", default=False)
"""True while Celery drops a message in this thread or greenlet: it logs the message whole."""


@dataclass(slots=True)
class InFlight:
    """One guarded message between its start and its end."""

    resolved: ResolvedPolicy  # The policy and queues that apply
    key: MessageKey  # The message's identity
    delivery: Delivery  # The current delivery
    first: bool  # True if it was never delivered before
    # True from the start to the end of a delivery that counts, also if the store could not count
    # it; not if the message already runs elsewhere
    charged: bool = False
    seen_at: float | None = None  # Time it was first put off, in monotonic seconds
    due_at: float | None = None  # After a crash, when it may start again, in monotonic seconds
    suspect: bool = False  # True if its last delivery vanished: it may have killed its worker


def leases_of(message: Any) -> Any:
    """What keeps a message this worker's while it lives; ``None`` where the broker does."""
    return getattr(message.channel, "dlq_leases", None)


def is_held(message: Any) -> bool:
    """True if a message that is not acknowledged is this worker's still."""
    leases, channel = leases_of(message), message.channel
    if leases is not None:
        return bool(leases.still_holds(message.delivery_tag))
    return getattr(channel, "connection", True) is not None  # a closed one gave all back


class WaitsForStore(Protocol):
    """The owner of a message whose letter waits for the store."""

    message: Any  # The kombu message

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """End the wait: the letter is ``STORED``, or cannot be stored (``DONE``)."""


class GuardedRequest(WaitsForStore, Protocol):
    """Celery's request as the guard uses it."""

    dlq_state: DeliveryState  # The delivery's state
    dlq_in_flight: InFlight | None  # The guarded message, from its start on
    id: Any  # The task's id: a `str`, unless a producer that is not Celery made the message
    task: Any  # Celery's task
    request_dict: Any  # The message's headers, in the form of protocol 2
    delivery_info: Any  # Exchange, routing key and redelivered flag
    expires: Any  # Expiry of the message; `None` if it has none
    worker_pid: Any  # The process that accepted it
    time_start: Any  # Time at which a process accepted it
    acknowledged: Any  # True if the broker no longer has the message

    def dlq_move(self, state: DeliveryState) -> None:
        """Change the state, if the transition is legal."""
