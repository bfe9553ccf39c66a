"""Celery-style signals of letters, redrives, holds and circuit breakers.

``task_dead_lettered`` is sent in the main process of the worker that stored the letter, with
``letter`` and ``regressed``, which is true if the letter's group was resolved until then.
``task_redriven`` is sent in the process that redrives it, with ``letter`` and
``redrive_id``. The sender is the task's name, so a receiver can choose one task.
``hold_changed`` is sent in the process that made or released a hold, with ``change``, a
`celery_dlq.events.Change` with the action ``held`` or ``released``, which is the sender.
``circuit_opened`` and ``circuit_closed`` are sent, with ``change``, in the one process that opened
or closed a circuit breaker; the sender is the task's name. An error in a receiver is logged and has
no other effect. The worker waits for receivers: do slow work, such as an HTTP call, in a thread.

Example:
    .. code-block:: python

        @task_dead_lettered.connect(sender="shop.charge")
        def alert(letter, regressed, **kwargs): ...
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

from celery_dlq.events import Action, Change, DeadLettered, Event, Redriven

__all__ = [
    "circuit_closed",
    "circuit_opened",
    "hold_changed",
    "task_dead_lettered",
    "task_redriven",
]

task_dead_lettered = Signal(name="task_dead_lettered", providing_args={"letter", "regressed"})
task_redriven = Signal(name="task_redriven", providing_args={"letter", "redrive_id"})
hold_changed = Signal(name="hold_changed", providing_args={"change"})
circuit_opened = Signal(name="circuit_opened", providing_args={"change"})
circuit_closed = Signal(name="circuit_closed", providing_args={"change"})

_CIRCUITS = {Action.CIRCUIT_OPENED: circuit_opened, Action.CIRCUIT_CLOSED: circuit_closed}


def wants(kind: type[Event]) -> bool:
    """True if the signal of a kind of event has a receiver."""
    signal = {DeadLettered: task_dead_lettered, Redriven: task_redriven}.get(kind)
    return signal is not None and bool(signal.receivers)


def relay(event: Event) -> None:
    """Send the signal of an event; an observer of the event bus."""
    if isinstance(event, DeadLettered):
        task_dead_lettered.send(
            sender=event.letter.task_name, letter=event.letter, regressed=event.regressed
        )
    elif isinstance(event, Redriven):
        task_redriven.send(
            sender=event.letter.task_name, letter=event.letter, redrive_id=event.redrive_id
        )
    elif isinstance(event, Change) and event.action in (Action.HELD, Action.RELEASED):
        hold_changed.send(sender=event.action.value, change=event)
    elif isinstance(event, Change) and event.action in _CIRCUITS:
        _CIRCUITS[event.action].send(sender=event.detail.get("task"), change=event)
