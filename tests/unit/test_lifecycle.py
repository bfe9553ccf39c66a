"""The states of a delivery: which transitions are legal, and what an illegal one does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from celery_dlq.worker.request import DeadLetterRequest
from celery_dlq.writing.lifecycle import DECIDED, HELD, NEXT, OVER, DeliveryState

LEGAL = """
    new               -> dispatched running ending waiting_for_store stored done
    dispatched        -> new running ending waiting_for_store stored done
    running           -> ending released done
    ending            -> running released waiting_for_store stored done
    released          -> done
    waiting_for_store -> stored done
    stored            ->
    done              ->
"""
PAIRS = {
    (DeliveryState(state), DeliveryState(to))
    for line in LEGAL.strip().splitlines()
    for state, _, targets in [line.strip().partition("->")]
    for state in [state.strip()]
    for to in targets.split()
}


@pytest.mark.parametrize("state", DeliveryState)
def test_every_pair_of_states_is_legal_or_refused(state: DeliveryState) -> None:
    """A refused one is logged and counted, and the state stays as it is."""
    for to in DeliveryState:
        errors: list[str] = []
        request: Any = DeadLetterRequest()
        request.id = "t-1"
        request.dlq_guard = SimpleNamespace(
            count_internal_error=errors.append, accepted=lambda _request: None
        )
        request.dlq_state = state
        request.dlq_move(to)
        legal = (state, to) in PAIRS
        assert (request.dlq_state, errors) == ((to, []) if legal else (state, ["transition"])), to


def test_only_dead_and_released_messages_are_held_back() -> None:
    """And nothing that Celery may acknowledge by itself becomes one of them again."""
    assert {state for state in DeliveryState if state in HELD} == {
        DeliveryState.WAITING_FOR_STORE,
        DeliveryState.RELEASED,
    }
    assert all(NEXT[state] <= DECIDED for state in OVER)
    assert NEXT[DeliveryState.WAITING_FOR_STORE].isdisjoint(HELD)
