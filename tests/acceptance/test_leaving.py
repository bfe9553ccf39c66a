"""Tasks that leave by what no ``except Exception`` sees: in every pool as in prefork."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType

import pytest
from workers import Worker

from celery_dlq import DeadLetter, Outcome, Reason

POOLS = ("prefork", "threads", "gevent", "eventlet", "solo")

CRASHES = {
    "exit": ("SystemExit", "config is broken"),
    "exit 0": ("SystemExit", "0"),
    "interrupt": ("KeyboardInterrupt", "by hand"),
}
FAILURES = {
    "cancelled": ("asyncio.exceptions.CancelledError", "by its loop"),
    "generator": ("GeneratorExit", "closed"),
    "group": ("BaseExceptionGroup", "two (2 sub-exceptions)"),
}
if sys.version_info < (3, 11):
    del FAILURES["group"]


@pytest.mark.parametrize("pool", POOLS)
def test_a_failure_is_a_letter_and_what_ends_a_process_is_a_crash(
    poison: ModuleType,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
    pool: str,
) -> None:
    """Each letter has the true type, text and traceback."""
    start_worker(pool=pool)
    expected = {**CRASHES, **FAILURES}
    for how in expected:
        poison.leaves.apply_async((how,), task_id=how)
    if pool == "gevent":
        expected["timeout"] = ("gevent.timeout.Timeout", "0.1 seconds")
        poison.leaves_by_timeout.apply_async(("timeout",), task_id="timeout")
    found = {letter.task_id: letter for letter in letters(count=len(expected), timeout_seconds=60)}

    ends = {how: letter.history[-1] for how, letter in found.items()}
    assert {
        how: (end.exception_type, end.exception_message) for how, end in ends.items()
    } == expected
    for how, letter in found.items():
        crash = how in CRASHES
        assert letter.reason is (Reason.MAX_DELIVERIES_EXCEEDED if crash else Reason.FAILED), how
        assert ran(how) == letter.deliveries == (3 if crash else 1), how
        outcome = Outcome.WORKER_LOST if crash else Outcome.FAILED
        assert {each.outcome for each in letter.history} == {outcome}, how
        if not crash:  # then the letter is made when the fourth start is refused
            assert (letter.exception_type, letter.exception_message) == expected[how]
            assert "in leaves" in (letter.traceback or ""), how
