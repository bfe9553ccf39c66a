"""Policies: the limits and delays of one queue or task.

A policy is written as keyword arguments of ``dead_letter_policy(...)`` or as a
mapping in the setting ``dlq_queues``; both take the same keys, which are the
fields of `Policy`. How policies combine is in `celery_dlq.policies.table`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypedDict

from celery_dlq.errors import SettingsError
from celery_dlq.features.auto_redrive.policy import AutoRedrive, auto_redrive
from celery_dlq.features.circuit_breaker.policy import CircuitBreaker, circuit_breaker
from celery_dlq.features.exceptions.policy import (
    IGNORE,
    ExceptionRule,
    exception_name,
    exceptions,
)
from celery_dlq.features.exchange.policy import (
    DeadLetterExchange,
    dead_letter_exchange,
    dead_letter_routing_key,
)
from celery_dlq.letters.record import Reason
from celery_dlq.policies.checks import (
    Check,
    check_names,
    expected,
    flag,
    integer,
    is_off,
    positive_seconds,
    queue_name,
    seconds,
    some_of,
)

DLQ_SUFFIX = "-DLQ"

Off = Literal[False]


class PolicyKeys(TypedDict, total=False):
    """The keys of a policy as users write them; `Policy` says what they mean."""

    max_deliveries: int | Off | None
    max_crashes: int | Off | None
    crash_window: float | timedelta | Off | None
    max_retries: int | Off | None
    dead_letter_queue: str | Off | None
    dead_letter_exchange: DeadLetterExchange | str | Mapping[str, str] | Off | None
    dead_letter_routing_key: str | Off | None
    default_delay: float | timedelta | Off | None
    ignore_message_delay: bool | Off | None
    dead_letter_ttl: float | timedelta | Off | None
    dead_letter_max_length: int | Off | None
    auto_redrive: AutoRedrive | Mapping[str, Any] | Off | None
    reasons: Collection[Reason | str] | Off | None
    ignore: type[BaseException] | str | Collection[type[BaseException] | str] | Off | None
    exceptions: Mapping[Any, ExceptionRule | Mapping[str, Any]] | Off | None
    circuit_breaker: CircuitBreaker | Mapping[str, Any] | Off | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits and delays of one queue or task.

    ``None`` means: not set here, so a weaker policy counts. ``False``, or the text ``off``,
    ``none`` or ``null``, ends a key: it counts as unset, whatever a weaker policy says. Where a
    name is expected, only ``False`` does.

    Attributes:
        max_deliveries: A message is executed at most this many times; the delivery
            after that is not executed, the message is dead-lettered. At least 1.
            Unset: not limited by count.
        max_crashes: A message whose deliveries ended this often by a crash (its process or
            worker was lost, or a hard time limit) is dead-lettered before the next one, even if
            ``max_deliveries`` allows more. 1 to 50. Unset: only ``max_deliveries`` counts.
        crash_window: Only crashes of the last so many seconds (or timedelta) count for
            ``max_crashes``. More than 0. Unset: all that are on record.
        max_retries: A message that ``Task.retry()`` published is executed at most up
            to this retry number; the next one is dead-lettered. 0 or more. Unset:
            only the task's own ``max_retries`` counts.
        dead_letter_queue: Name of the dead-letter queue. Unset: ``<queue>-DLQ``.
        dead_letter_exchange: Exchange to which each letter is published too, for other
            services: its name, or a mapping of ``name`` and ``type`` (direct, fanout,
            topic). Unset: none.
        dead_letter_routing_key: Routing key of what is published there. Unset: the name
            of the queue that the message came from.
        default_delay: Seconds (or timedelta) that a message published without its own
            countdown or eta waits before it may run. 0 to ``dlq_max_delay``. Unset: 0.
        ignore_message_delay: Whether a message's own countdown or eta is dropped when it is
            published to a queue without ``default_delay``. Retries keep theirs. Unset: no.
        dead_letter_ttl: Seconds (or timedelta) after it was stored when a letter is trimmed.
            More than 0. Unset: a letter ends when its message would have expired, and has
            no end if the message has none or died of it.
        dead_letter_max_length: Most letters in the dead-letter queue; the oldest are trimmed.
            At least 1. Unset: no limit.
        auto_redrive: When letters are redriven without an operator: a mapping of ``after``
            (seconds, timedelta or text such as 30m), ``times``, and perhaps ``backoff`` (2),
            ``reasons`` and ``canary``. Unset: never.
        reasons: Which deaths are kept, as reason names. Unset: all.
        ignore: Exception types (classes or dotted names) that are expected: a failure
            with one of them is no death. Unset: none.
        exceptions: What to do about an exception, by its class or dotted name, for subclasses
            too: a mapping of names to mappings with the keys of
            `celery_dlq.features.exceptions.policy.ExceptionRule`. Unset: as Celery does.
        circuit_breaker: When nearly all executions of a task die of one cause, its messages are
            held, and probes find out when they may run again: a mapping with any of ``deaths``
            (20 letters of one fingerprint), ``window`` (within 60 seconds), ``share`` (0.9 of
            the executions), ``probe_every`` (30 seconds) and ``probes`` (3 that succeed in a
            row). Unset: none.
    """

    max_deliveries: int | None = None
    max_crashes: int | None = None
    crash_window: float | None = None
    max_retries: int | None = None
    dead_letter_queue: str | None = None
    dead_letter_exchange: DeadLetterExchange | None = None
    dead_letter_routing_key: str | None = None
    default_delay: float | None = None
    ignore_message_delay: bool | None = None
    dead_letter_ttl: float | None = None
    dead_letter_max_length: int | None = None
    auto_redrive: AutoRedrive | None = None
    reasons: frozenset[Reason] | None = None
    ignore: tuple[str, ...] | None = None
    exceptions: tuple[tuple[str, ExceptionRule], ...] | None = None
    circuit_breaker: CircuitBreaker | None = None

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Policy:
        """Check and convert policy keys.

        Args:
            values: Keys and values as the user wrote them.
            where: What to call this policy in an error, e.g. ``dlq_queues['orders']``.

        Raises:
            SettingsError: A key is unknown or a value is not usable.
        """
        if not isinstance(values, Mapping):
            raise expected(where, "a mapping of policy keys", values)
        check_names(f"policy keys in {where}", values, _CHECKS, SettingsError)
        return cls(
            **{
                key: value if value is None else _checked(where, key, value)
                for key, value in values.items()
            }
        )

    def over(self, other: Policy) -> Policy:
        """This policy; fields that it does not set are taken from ``other``.

        Each exception of ``exceptions`` counts as a field of its own.
        """
        filled = {
            f.name: getattr(other, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) is None
        }
        if self.exceptions and other.exceptions:
            filled["exceptions"] = tuple(
                sorted({**dict(other.exceptions), **dict(self.exceptions)}.items())
            )
        return dataclasses.replace(self, **filled)

    def to_json(self) -> dict[str, Any]:
        """The fields that are set, JSON-ready; `parse` reads it."""
        return {
            f.name: _plain(value)
            for f in dataclasses.fields(self)
            if (value := getattr(self, f.name)) is not None
        }

    @property
    def says_delay(self) -> bool:
        """True if the policy affects the delay of a message when it is published."""
        return bool(self.default_delay or self.ignore_message_delay)

    def keeps(self, reason: Reason) -> bool:
        """True if deaths with this reason become letters."""
        return self.reasons is None or reason in self.reasons

    def dead_letter_queue_of(self, queue: str) -> str:
        """The dead-letter queue of a source queue under this policy."""
        return self.dead_letter_queue or f"{queue}{DLQ_SUFFIX}"

    @property
    def other_dead_letter_queues(self) -> tuple[str, ...]:
        """The dead-letter queues that ``exceptions`` names."""
        named = {rule.dead_letter_queue for _name, rule in self.exceptions or ()}
        return tuple(sorted(name for name in named if name is not None))

    def rule_of(self, exception_names: Iterable[str]) -> ExceptionRule | None:
        """What to do about an exception; ``None`` if no key says anything about it.

        Args:
            exception_names: The names of its class and bases; the first one with a rule counts.
        """
        rules = {**dict.fromkeys(self.ignore or (), IGNORE), **dict(self.exceptions or ())}
        return next((rules[name] for name in exception_names if name in rules), None)


def ends(policy: Policy, key: str) -> bool:
    """True if a policy says that a key is off."""
    return getattr(policy, key) is False


def named_exceptions(policy: Policy) -> tuple[str, ...]:
    """The exceptions that ``exceptions`` and ``ignore`` name."""
    return (*(name for name, _rule in policy.exceptions or ()), *(policy.ignore or ()))


def _ignored(where: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, type)):
        value = (value,)
    if not isinstance(value, Collection):
        raise expected(where, "exception classes or their dotted names", value)
    return tuple(exception_name(where, item, ends=True) for item in value)


def _checked(where: str, key: str, value: object) -> Any:
    if value is False or (key not in _NAMES and is_off(value)):
        return False
    return _CHECKS[key](f"{where}[{key!r}]", value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {name: rule.to_json() for name, rule in value}
    if isinstance(value, (DeadLetterExchange, AutoRedrive, CircuitBreaker)):
        return value.to_json()
    if isinstance(value, frozenset):
        return sorted(str(item) for item in value)
    return list(value) if isinstance(value, tuple) else value


_NAMES = ("dead_letter_queue", "dead_letter_exchange", "dead_letter_routing_key")
MAX_CRASHES = 50
_CHECKS: dict[str, Check[Any]] = {
    "max_deliveries": integer(1),
    "max_crashes": integer(1, MAX_CRASHES, ", the deliveries that are kept on record"),
    "crash_window": positive_seconds,
    "max_retries": integer(0),
    "dead_letter_queue": queue_name,
    "dead_letter_exchange": dead_letter_exchange,
    "dead_letter_routing_key": dead_letter_routing_key,
    "default_delay": seconds,
    "ignore_message_delay": flag,
    "dead_letter_ttl": positive_seconds,
    "dead_letter_max_length": integer(1),
    "auto_redrive": auto_redrive,
    "reasons": some_of(Reason, "reasons"),
    "ignore": _ignored,
    "exceptions": exceptions,
    "circuit_breaker": circuit_breaker,
}
