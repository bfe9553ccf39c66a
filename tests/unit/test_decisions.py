"""The decision table: what happens to a message at its start and at its end."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from builders import NOW, a_delivery

from celery_dlq.features.exceptions.policy import ExceptionAction, ExceptionPolicy, ExceptionRule
from celery_dlq.letters.record import Outcome, Reason
from celery_dlq.policies.decisions import (
    Die,
    End,
    LateCopy,
    PutOff,
    Run,
    Start,
    Verdict,
    decide_drop,
    decide_end,
    decide_start,
    starts_again_at,
)
from celery_dlq.policies.policy import CrashLimit, Policy
from celery_dlq.store.worker_records import CountStatus

FAILED = End(
    outcome=Outcome.FAILED,
    text="bad order",
    exception_names=("shop.Bad", "ValueError", "Exception"),
)

ELSEWHERE = ExceptionRule(action=ExceptionAction.DEAD_LETTER, dead_letter_queue="fatal-DLQ")
RETRIED = ExceptionRule(action=ExceptionAction.RETRY, max_retries=2)
IGNORED = ExceptionRule(action=ExceptionAction.IGNORE)


def ruled(*rules: tuple[str, ExceptionRule], **keys: Any) -> Policy:
    """A policy with rules for exceptions."""
    return Policy(**keys, features=(("exceptions", ExceptionPolicy(rules)),))


@pytest.mark.parametrize(
    ("policy", "start", "dies"),
    [
        (Policy(), Start(retries=99, deliveries=99), None),
        (Policy(max_deliveries=3), Start(retries=0, deliveries=None), None),
        (Policy(max_deliveries=3), Start(retries=0, deliveries=0), None),
        (Policy(max_deliveries=3), Start(retries=0, deliveries=2), None),
        (Policy(max_deliveries=3), Start(retries=0, deliveries=3), Reason.MAX_DELIVERIES_EXCEEDED),
        (Policy(max_deliveries=3), Start(retries=0, deliveries=4), Reason.MAX_DELIVERIES_EXCEEDED),
        (Policy(max_deliveries=1), Start(retries=5, deliveries=0), None),
        (Policy(max_retries=2), Start(retries=2), None),
        (Policy(max_retries=2), Start(retries=3), Reason.MAX_RETRIES_EXCEEDED),
        (Policy(max_retries=0), Start(retries=0), None),
        (Policy(max_retries=0), Start(retries=1), Reason.MAX_RETRIES_EXCEEDED),
        (
            Policy(max_retries=0, max_deliveries=1),
            Start(retries=1, deliveries=9),
            Reason.MAX_RETRIES_EXCEEDED,
        ),
    ],
)
def test_a_message_starts_unless_a_limit_is_used_up(
    policy: Policy, start: Start, dies: Reason | None
) -> None:
    """Retries come first, and a count that is not known lets the message run."""
    verdict = decide_start(policy, start)
    assert getattr(verdict, "reason", None) is dies
    assert isinstance(verdict, Run if dies is None else Die)


@pytest.mark.parametrize(
    ("policy", "start", "limit"),
    [
        (Policy(max_deliveries=3), Start(retries=0, deliveries=3), "max_deliveries is 3"),
        (Policy(max_retries=2), Start(retries=5), "retry 5: max_retries is 2"),
    ],
)
def test_a_death_at_the_start_names_its_limit(policy: Policy, start: Start, limit: str) -> None:
    """The description is what an operator reads first."""
    verdict = decide_start(policy, start)
    assert isinstance(verdict, Die)
    assert limit in verdict.description


@pytest.mark.parametrize(
    ("policy", "start"),
    [
        (Policy(max_deliveries=3), Start(retries=0, deliveries=3)),
        (Policy(max_retries=2), Start(retries=3)),
    ],
)
def test_a_limit_holds_also_where_its_letters_are_not_kept(policy: Policy, start: Start) -> None:
    """``reasons`` decides on letters, not on limits: the message ends without one."""
    assert getattr(decide_start(policy, start), "kept", None) is True
    without = replace(policy, reasons=frozenset({Reason.FAILED}))
    assert getattr(decide_start(without, start), "kept", None) is False


THREE = Policy(max_deliveries=3)
AGAIN = "not executed again: max_deliveries is 3"
NINE = "not executed again: max_deliveries is 9"
TWO_CRASHES = Policy(max_deliveries=9, max_crashes=CrashLimit(2, 60.0))


@pytest.mark.parametrize(
    ("policy", "status", "number", "verdict"),
    [
        (THREE, CountStatus.COUNTED, 1, Run()),
        (THREE, CountStatus.COUNTED, 3, Run()),
        (THREE, CountStatus.LIMIT_REACHED, 3, Die(Reason.MAX_DELIVERIES_EXCEEDED, AGAIN)),
        (THREE, CountStatus.LIMIT_REACHED, 7, Die(Reason.MAX_DELIVERIES_EXCEEDED, AGAIN)),
        (
            replace(THREE, reasons=frozenset({Reason.FAILED})),
            CountStatus.LIMIT_REACHED,
            3,
            Die(Reason.MAX_DELIVERIES_EXCEEDED, AGAIN, kept=False),
        ),
        (THREE, CountStatus.RUNNING, 3, Run()),
        (THREE, CountStatus.UNCERTAIN, 3, PutOff()),
        (THREE, CountStatus.SUSPECT, 3, PutOff()),
        (THREE, CountStatus.DEAD, 3, LateCopy()),
        (TWO_CRASHES, CountStatus.COUNTED, 3, Run()),
        (TWO_CRASHES, CountStatus.RUNNING, 2, Run()),
        (
            TWO_CRASHES,
            CountStatus.LIMIT_REACHED,
            2,
            Die(Reason.TIME_LIMIT_EXCEEDED, "not executed again: max_crashes is 2 within 60 s"),
        ),
        (TWO_CRASHES, CountStatus.LIMIT_REACHED, 9, Die(Reason.MAX_DELIVERIES_EXCEEDED, NINE)),
        (Policy(), CountStatus.COUNTED, 99, Run()),
        (Policy(), CountStatus.UNCERTAIN, 1, PutOff()),
        (Policy(), CountStatus.SUSPECT, 1, PutOff()),
        (Policy(), CountStatus.RUNNING, 1, Run()),
        (Policy(), CountStatus.DEAD, 1, LateCopy()),
    ],
)
def test_what_a_count_found_and_the_policy_decide_on_a_redelivery(
    policy: Policy, status: CountStatus, number: int, verdict: Verdict
) -> None:
    """A copy of what runs elsewhere runs; one of what is dead does not; the rest waits or ends."""
    crashes = (Outcome.WORKER_LOST, Outcome.TIME_LIMIT)
    start = Start(retries=0, status=status, deliveries=number, crashes=crashes)
    assert decide_start(policy, start) == verdict


@pytest.mark.parametrize(
    ("policy", "verdict"),
    [
        (None, None),
        (Policy(), Die(Reason.EXPIRED, "too late")),
        (Policy(reasons=frozenset({Reason.EXPIRED})), Die(Reason.EXPIRED, "too late")),
        (Policy(reasons=frozenset({Reason.FAILED})), None),
    ],
)
def test_a_dropped_message_is_a_death_where_the_policy_keeps_it(
    policy: Policy | None, verdict: Die | None
) -> None:
    """Celery drops expired, unknown and unreadable messages before they could run."""
    assert decide_drop(policy, Reason.EXPIRED, "too late") == verdict


def test_a_retry_that_could_not_be_published_has_its_own_reason() -> None:
    """The broker refused, not the task."""
    end = End(outcome=Outcome.REJECTED, retry_not_published=True, text="broker down")
    assert decide_end(Policy(), end) == Die(Reason.RETRY_NOT_PUBLISHED, "broker down")


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome.FAILED, Reason.FAILED),
        (Outcome.REJECTED, Reason.REJECTED),
        (Outcome.TIME_LIMIT, Reason.TIME_LIMIT_EXCEEDED),
        (Outcome.WORKER_LOST, Reason.WORKER_LOST),
        (Outcome.RETRIED, None),
        (Outcome.REQUEUED, Reason.REJECTED),
        (Outcome.SHUTDOWN, None),
        (Outcome.VANISHED, None),
    ],
)
def test_a_final_end_is_a_death_for_the_reason_of_its_outcome(
    outcome: Outcome, reason: Reason | None
) -> None:
    """A message that Celery gives up becomes a letter; one that comes again does not."""
    verdict = decide_end(Policy(), End(outcome=outcome, text="why"))
    assert verdict == (None if reason is None else Die(reason, "why"))


@pytest.mark.parametrize(
    ("policy", "end", "verdict"),
    [
        (None, FAILED, None),
        (Policy(), replace(FAILED, final=False), None),
        (Policy(), replace(FAILED, expected=True), None),
        (Policy(), FAILED, Die(Reason.FAILED, "bad order")),
        (
            Policy(),
            replace(FAILED, retries_spent=True),
            Die(Reason.MAX_RETRIES_EXCEEDED, "bad order"),
        ),
        (Policy(reasons=frozenset({Reason.REJECTED})), FAILED, None),
        (Policy(reasons=frozenset({Reason.FAILED})), FAILED, Die(Reason.FAILED, "bad order")),
        (
            Policy(reasons=frozenset({Reason.FAILED})),
            replace(FAILED, retries_spent=True),
            None,
        ),
        (ruled(("shop.Bad", IGNORED)), FAILED, None),
        (ruled(("KeyError", IGNORED), ("ValueError", IGNORED)), FAILED, None),
        (ruled(("KeyError", IGNORED)), FAILED, Die(Reason.FAILED, "bad order")),
        (ruled(("Bad", IGNORED)), FAILED, Die(Reason.FAILED, "bad order")),
        (ruled(("ValueError", IGNORED)), replace(FAILED, retries_spent=True), None),
    ],
)
def test_a_failure_is_a_death_unless_it_is_expected_or_not_kept(
    policy: Policy | None, end: End, verdict: Die | None
) -> None:
    """``throws``, ``ignore`` (with base classes) and ``reasons`` each spare a message."""
    assert decide_end(policy, end) == verdict


@pytest.mark.parametrize(
    "policy",
    [
        None,
        Policy(),
        Policy(reasons=frozenset()),
        ruled(("Exception", IGNORED), ("celery_dlq.decorators.RejectToDLQ", IGNORED)),
    ],
)
@pytest.mark.parametrize("final", [True, False])
def test_a_demanded_death_needs_no_policy(policy: Policy | None, final: bool) -> None:
    """``RejectToDLQ`` is obeyed whatever the policy says."""
    end = End(
        outcome=Outcome.REJECTED,
        final=final,
        demanded=True,
        text="no such order",
        exception_names=("Exception", "celery_dlq.decorators.RejectToDLQ"),
        expected=True,
    )
    assert decide_end(policy, end) == Die(Reason.REJECTED, "no such order")


@pytest.mark.parametrize(
    ("policy", "end", "verdict"),
    [
        (ruled(("shop.Bad", ELSEWHERE)), FAILED, Reason.FAILED),
        (ruled(("ValueError", ELSEWHERE)), FAILED, Reason.FAILED),
        (
            ruled(("ValueError", ELSEWHERE), reasons=frozenset()),
            replace(FAILED, expected=True),
            Reason.FAILED,
        ),
        (
            ruled(("ValueError", ELSEWHERE)),
            replace(FAILED, retries_spent=True),
            Reason.MAX_RETRIES_EXCEEDED,
        ),
        (ruled(("ValueError", ELSEWHERE)), replace(FAILED, final=False), None),
        (ruled(("shop.Bad", IGNORED), ("ValueError", ELSEWHERE)), FAILED, None),
        (ruled(("ValueError", RETRIED)), replace(FAILED, expected=True), None),
        (
            ruled(("ValueError", RETRIED)),
            replace(FAILED, retries_spent=True),
            Reason.MAX_RETRIES_EXCEEDED,
        ),
        (
            ruled(("shop.Bad", RETRIED), ("ValueError", IGNORED)),
            FAILED,
            Reason.FAILED,
        ),
        (ruled(("KeyError", IGNORED)), FAILED, Reason.FAILED),
        # A process that was lost, or killed at its time limit, raised nothing.
        (
            ruled(("Exception", IGNORED)),
            End(outcome=Outcome.WORKER_LOST, exception_names=("Exception",)),
            Reason.WORKER_LOST,
        ),
        (
            ruled(("Exception", IGNORED)),
            End(outcome=Outcome.TIME_LIMIT, exception_names=("Exception",)),
            Reason.TIME_LIMIT_EXCEEDED,
        ),
    ],
)
def test_a_rule_for_its_exception_decides_on_a_failure(
    policy: Policy, end: End, verdict: Reason | None
) -> None:
    """``dead_letter`` beats ``throws`` and ``reasons``; the most specific rule counts."""
    decided = decide_end(policy, end)
    assert (decided.reason if isinstance(decided, Die) else None) is verdict
    if isinstance(decided, Die) and policy.of("exceptions").rules[0][1] is ELSEWHERE:
        assert decided.rule is ELSEWHERE


LOST, LIMIT, VANISHED = Outcome.WORKER_LOST, Outcome.TIME_LIMIT, Outcome.VANISHED


@pytest.mark.parametrize(
    ("delay", "outcomes", "waits"),
    [
        (10.0, [LOST], 10),
        (10.0, [LIMIT], 10),
        (10.0, [VANISHED], 10),
        (10.0, [LOST, LIMIT], 20),
        (10.0, [LOST, None, LOST], 40),
        (10.0, [LOST] * 9, 300),
        (10.0, [LOST] * 50, 300),
        (300.0, [LOST], 300),
        (10.0, [LOST, Outcome.REQUEUED], None),
        (10.0, [LOST, Outcome.SHUTDOWN], None),
        (10.0, [Outcome.REQUEUED, LOST], 10),
        (10.0, [LOST, Outcome.SHUTDOWN, LOST], 10),
        (10.0, [], None),
        (0.0, [LOST], None),
        (None, [LOST], None),
    ],
)
def test_a_message_waits_after_a_crash_twice_as_long_each_time(
    delay: float | None, outcomes: list[Outcome | None], waits: int | None
) -> None:
    """From the end of the last one; only crashes in a row make it longer, five minutes at most."""
    history = [
        a_delivery(number=n, started_at=NOW, ended_at=NOW, outcome=one)
        for n, one in enumerate(outcomes, 1)
    ]
    others = [a_delivery(number=1, retries=1, outcome=LOST, ended_at=NOW)]
    due = starts_again_at(Policy(crash_delay=delay), 0, [*others, *history])
    assert due == (None if waits is None else NOW + timedelta(seconds=waits))


@pytest.mark.parametrize(
    ("policy", "start", "verdict"),
    [
        (Policy(max_deliveries=3), {"deliveries": 1}, PutOff(7.0)),
        (Policy(), {"deliveries": 1}, PutOff(7.0)),
        (Policy(max_deliveries=3), {"deliveries": 3}, Reason.MAX_DELIVERIES_EXCEEDED),
        (Policy(max_crashes=1), {"deliveries": 1, "crashes": (LOST,)}, Reason.WORKER_LOST),
        (Policy(max_deliveries=3), {"deliveries": 1, "status": CountStatus.COUNTED}, Run()),
        (Policy(max_deliveries=3), {"deliveries": 1, "status": CountStatus.RUNNING}, Run()),
        (Policy(max_deliveries=3), {"deliveries": 1, "status": CountStatus.UNCERTAIN}, PutOff()),
        (Policy(max_deliveries=3), {"deliveries": 1, "status": CountStatus.DEAD}, LateCopy()),
        (Policy(max_deliveries=3), {"deliveries": 1, "status": None}, Run()),
    ],
)
def test_only_what_would_start_waits(
    policy: Policy, start: dict[str, Any], verdict: Verdict | Reason
) -> None:
    """What is at its limit dies at once, and an outage of the store lets it run."""
    facts = {"retries": 0, "status": CountStatus.LIMIT_REACHED, "wait_seconds": 7.0, **start}
    found = decide_start(policy, Start(**facts))
    assert (found.reason if isinstance(found, Die) else found) == verdict
