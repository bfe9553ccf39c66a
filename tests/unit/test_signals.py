"""Events as Celery-style signals."""

from __future__ import annotations

from typing import Any

import pytest
from builders import NOW, a_letter, an_app
from fresh import fresh_conf

from celery_dlq import DeadLetters
from celery_dlq.events import Action, Change, DeadLettered, Redriven
from celery_dlq.signals import task_dead_lettered, task_redriven


@pytest.fixture
def dlq() -> DeadLetters:
    """An installation whose events become signals."""
    return DeadLetters(an_app(**fresh_conf()))


def test_a_receiver_gets_the_letters_of_its_task_alone(dlq: DeadLetters) -> None:
    """The sender is the task's name."""
    received: list[Any] = []

    def receiver(sender: str, letter: Any, regressed: bool, **_: Any) -> None:
        received.append((sender, letter, regressed))

    task_dead_lettered.connect(receiver, sender="shop.charge")
    try:
        letter = a_letter()
        dlq.events.emit(DeadLettered(at=NOW, letter=letter))
        dlq.events.emit(DeadLettered(at=NOW, letter=letter, regressed=True))
        dlq.events.emit(DeadLettered(at=NOW, letter=a_letter(task_name="shop.mail")))
        dlq.events.emit(Change(at=NOW, action=Action.PURGED, actor="ann@desk", target="orders-DLQ"))
    finally:
        task_dead_lettered.disconnect(receiver, sender="shop.charge")
    assert received == [("shop.charge", letter, False), ("shop.charge", letter, True)]


def test_a_receiver_that_raises_harms_nothing(dlq: DeadLetters) -> None:
    """The others are called all the same."""
    received: list[Any] = []

    def broken(**_: Any) -> None:
        raise LookupError("this receiver is broken")

    def receiver(redrive_id: str, **_: Any) -> None:
        received.append(redrive_id)

    task_redriven.connect(broken)
    task_redriven.connect(receiver)
    try:
        dlq.events.emit(Redriven(at=NOW, letter=a_letter(), redrive_id="r-1"))
    finally:
        task_redriven.disconnect(broken)
        task_redriven.disconnect(receiver)
    assert received == ["r-1"]
