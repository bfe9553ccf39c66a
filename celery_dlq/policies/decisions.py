"""The decisions: what happens to a message at its start, when it comes again, and at its end.

Pure functions of facts: no I/O, no clock. The worker gathers the facts and
carries the verdict out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import takewhile
from typing import Any, TypeAlias

from celery_dlq.letters.record import Delivery, Outcome, Reason
from celery_dlq.policies.policy import MAX_CRASH_DELAY_SECONDS, CrashLimit, Policy
from celery_dlq.store.worker_records import CountStatus

CRASHES = {
    Outcome.WORKER_LOST: Reason.WORKER_LOST,
    Outcome.VANISHED: Reason.WORKER_LOST,
    Outcome.TIME_LIMIT: Reason.TIME_LIMIT_EXCEEDED,
}
"""The outcomes that ``max_crashes`` counts, and the reason if the last one is the last straw.

After one of them, ``crash_delay`` lets the message wait.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A message is about to be executed."""

    retries: int  # Its `retries` header
    # What the store said when this start was counted; `None` if it was not asked, or is away
    status: CountStatus | None = None
    # How often it was delivered before, or `None` if that is not known
    deliveries: int | None = None
    # The outcomes of those that crashed and count for `max_crashes`, oldest first
    crashes: tuple[Outcome, ...] = ()
    wait_seconds: float = 0.0  # What is left of its wait after the last crash


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A delivery ended otherwise than by success."""

    outcome: Outcome  # How
    final: bool = True  # Celery is done with the message: it acknowledges or drops it
    demanded: bool = False  # The task raised `RejectToDLQ`: dead-letter whatever the policy says
    retries_spent: bool = False  # The exception came out of `Task.retry()` refusing one more
    retry_not_published: bool = False  # The exception came out of `Task.retry()` failing to publish
    # Dotted names of the exception's class and its bases, in the order in which Python looks for
    # their attributes
    exception_names: tuple[str, ...] = ()
    expected: bool = False  # The exception is one of the task's own `throws`
    text: str = ""  # What the rejecter or the exception said


@dataclass(frozen=True, slots=True)
class Run:
    """Execute the message."""


@dataclass(frozen=True, slots=True)
class PutOff:
    """Not now: the message starts again in a moment, or after some seconds."""

    seconds: float = 0.0
    # Keeps the request until then; by default, the next tick hands it to the pool again
    keep: Callable[[Any], None] | None = None


@dataclass(frozen=True, slots=True)
class Taken:
    """The message is stored in another place: acknowledge it, its task has not ended."""


@dataclass(frozen=True, slots=True)
class LateCopy:
    """A copy of a message whose letter is stored, or of one that was retried: acknowledge it."""

    died: bool = True  # There is a letter: end its task if need be. Else its retry is under way


@dataclass(frozen=True, slots=True)
class Die:
    """Dead-letter the message, then settle and acknowledge it."""

    reason: Reason  # Why
    description: str  # The same in words
    kept: bool = True  # Whether it becomes a letter; the policy's `reasons` may say no
    rule: Any = None  # What the policy's `exceptions` say about the exception, if they do


Verdict: TypeAlias = Run | PutOff | Taken | LateCopy | Die
"""What happens to a message at its start; at its end it dies, or is left to Celery (``None``)."""

_VANISHED = Outcome.VANISHED  # what a delivery without a recorded end is
_MOST_DOUBLINGS = 30
_REASON_OF_OUTCOME = {
    Outcome.FAILED: Reason.FAILED,
    Outcome.REJECTED: Reason.REJECTED,
    Outcome.REQUEUED: Reason.REJECTED,  # final only if the broker had nothing to requeue
    Outcome.TIME_LIMIT: Reason.TIME_LIMIT_EXCEEDED,
    Outcome.WORKER_LOST: Reason.WORKER_LOST,
}


def exceeds_retries(policy: Policy, retries: int) -> bool:
    """True for a retry too many: that is in the message itself and needs no store."""
    return policy.max_retries is not None and retries > policy.max_retries


def decide_start(policy: Policy, start: Start) -> Run | PutOff | LateCopy | Die:
    """Whether a message may be executed.

    A count that is not known lets the message run (fail-open). A limit holds also
    where the policy keeps no letters for it: the message ends, without one.
    """
    deliveries, status = policy.max_deliveries, start.status
    if exceeds_retries(policy, start.retries):
        reason = Reason.MAX_RETRIES_EXCEEDED
        text = f"not executed as retry {start.retries}: max_retries is {policy.max_retries}"
    elif status in (CountStatus.UNCERTAIN, CountStatus.SUSPECT):
        return PutOff()
    elif status in (CountStatus.DEAD, CountStatus.RETRIED):
        return LateCopy(died=status is CountStatus.DEAD)
    elif status in (CountStatus.COUNTED, CountStatus.RUNNING):
        return Run()
    elif deliveries is not None and start.deliveries is not None and start.deliveries >= deliveries:
        reason = Reason.MAX_DELIVERIES_EXCEEDED
        text = f"not executed again: max_deliveries is {deliveries}"
    elif (limit := CrashLimit.of(policy.max_crashes)) and len(start.crashes) >= limit.times:
        reason = CRASHES[start.crashes[-1]]
        text = f"not executed again: max_crashes is {limit}"
    elif status is CountStatus.LIMIT_REACHED and start.wait_seconds > 0:
        return PutOff(start.wait_seconds)
    else:
        return Run()
    return Die(reason, text, kept=policy.keeps(reason))


def starts_again_at(policy: Policy, retries: int, history: Iterable[Delivery]) -> datetime | None:
    """When a message may start again whose last deliveries crashed; ``None`` if now.

    The wait doubles with each crash in a row. ``history`` is the oldest first, and the last one has
    an end.
    """
    mine = [each for each in history if each.retries == retries]
    crashes = [*takewhile(lambda one: (one.outcome or _VANISHED) in CRASHES, reversed(mine))]
    first = policy.crash_delay
    if not first or not crashes or crashes[0].ended_at is None:
        return None
    doubled = first * 2.0 ** min(len(crashes) - 1, _MOST_DOUBLINGS)
    return crashes[0].ended_at + timedelta(seconds=min(doubled, MAX_CRASH_DELAY_SECONDS))


def decide_end(policy: Policy | None, end: End) -> Die | None:
    """Whether the end of a delivery is the death of its message."""
    if end.demanded:
        return Die(Reason.REJECTED, end.text)
    if policy is None or not end.final:
        return None
    reason = _reason_of(end)
    if reason is None:
        return None
    rule = _rule_of(policy, end)
    if rule is not None and rule.action == "dead_letter":
        return Die(reason, end.text, rule=rule)
    if not policy.keeps(reason) or end.expected or (rule and rule.action == "ignore"):
        return None
    return Die(reason, end.text, rule=rule)


def decide_drop(policy: Policy | None, reason: Reason, text: str) -> Die | None:
    """Whether a message that Celery drops before it could run becomes a letter."""
    if policy is None or not policy.keeps(reason):
        return None
    return Die(reason, text)


def _reason_of(end: End) -> Reason | None:
    if end.retries_spent:
        return Reason.MAX_RETRIES_EXCEEDED
    if end.retry_not_published:
        return Reason.RETRY_NOT_PUBLISHED
    return _REASON_OF_OUTCOME.get(end.outcome)


def _rule_of(policy: Policy, end: End) -> Any:
    """What the policy's ``exceptions`` say about the end.

    Of a process that was lost, only what names that very error, and says that it is no death: it
    has the bases of an exception, too, but no task raised it.
    """
    rules = policy.of("exceptions")
    if not rules:
        return None
    if end.outcome is Outcome.FAILED:
        return rules.rule_of(end.exception_names)
    rule = rules.rule_of(name for name in end.exception_names if "." in name)
    return rule if rule is not None and rule.action == "ignore" else None
