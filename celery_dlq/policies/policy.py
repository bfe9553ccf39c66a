"""Policies: the limits and delays of one queue or task.

A policy is written as keyword arguments of ``dead_letter_policy(...)`` or as a
mapping in the setting ``dlq_queues``; both take the same keys, which are the
fields of `Policy`. How policies combine is in `celery_dlq.policies.table`.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any, Literal, TypedDict, TypeVar

from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.features.auto_redrive.policy import (
    MOST_CANARY,
    MOST_TIMES,
    AutoRedrive,
    auto_redrive,
    backoff,
    count,
)
from celery_dlq.features.circuit_breaker.policy import CircuitBreaker, circuit_breaker
from celery_dlq.features.exceptions.names import qualified_name, why_never
from celery_dlq.features.exceptions.policy import (
    IGNORE,
    KEYS_OF_ACTION,
    Action,
    Backoff,
    ExceptionRule,
)
from celery_dlq.features.exchange.policy import (
    DeadLetterExchange,
    dead_letter_exchange,
    dead_letter_routing_key,
)
from celery_dlq.letters.json_codec import safe_repr
from celery_dlq.letters.record import Reason

DLQ_SUFFIX = "-DLQ"

_Choice = TypeVar("_Choice", bound=Enum)
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
            raise SettingsError(_expected(where, "a mapping of policy keys", values))
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


def check_names(
    what: str, names: Iterable[str], known: Collection[str], error: type[DLQError] = DLQError
) -> None:
    """Refuse a name that is not known, with the one that is meant.

    Raises:
        DLQError: One of the names is not known.
    """
    for name in names:
        if name not in known:
            raise error(f"expected only known {what}, got {name!r}; {suggestion(name, known)}")


def ends(policy: Policy, key: str) -> bool:
    """True if a policy says that a key is off."""
    return getattr(policy, key) is False


def named_exceptions(policy: Policy) -> tuple[str, ...]:
    """The exceptions that ``exceptions`` and ``ignore`` name."""
    return (*(name for name, _rule in policy.exceptions or ()), *(policy.ignore or ()))


def suggestion(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the list of known names."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"


def seconds(where: str, value: object) -> float:
    """Check a duration of 0 or more seconds: a number or a timedelta.

    Raises:
        SettingsError: The value is neither, or negative, or longer than a thousand years.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingsError(_expected(where, "a number of seconds or a timedelta", value))
    if not 0 <= value <= MAX_DURATION_SECONDS:  # also refuses NaN and infinity
        raise SettingsError(_expected(where, "a duration of 0 or more seconds", value))
    return float(value)


def positive_seconds(where: str, value: object) -> float:
    """Check a duration of more than 0 seconds: a number or a timedelta.

    Raises:
        SettingsError: The value is something else.
    """
    duration = seconds(where, value)
    if duration <= 0:
        raise SettingsError(_expected(where, "a duration of more than 0 seconds", value))
    return duration


def _wait_seconds(where: str, value: object) -> float:
    if isinstance(value, str) and (duration := duration_seconds(value)) is not None:
        value = duration
    return positive_seconds(where, value)


def duration_seconds(text: str) -> float | None:
    """Seconds of a text such as ``90``, ``30s``, ``5m``, ``2h``, ``7d``, ``1w``; else ``None``.

    Also ``None`` for more than a thousand years, which no date of Python could be moved by.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw]?)", text.strip(), re.ASCII)
    value = None if found is None else float(found[1]) * _UNIT_SECONDS[found[2] or "s"]
    return None if value is None or value > MAX_DURATION_SECONDS else value


def age_seconds(text: str) -> float | None:
    """As `duration_seconds`, where a number without a unit may be a year, and is no age."""
    return duration_seconds(text) if text.strip()[-1:].isalpha() else None


def flag(where: str, value: object) -> bool:
    """Check ``True`` or ``False``.

    Raises:
        SettingsError: The value is something else.
    """
    if not isinstance(value, bool):
        raise SettingsError(_expected(where, "True or False", value))
    return value


def integer(minimum: int) -> Callable[[str, object], int]:
    """A check of a whole number of at least ``minimum``."""

    def check(where: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise SettingsError(_expected(where, f"a whole number of {minimum} or more", value))
        if value > MAX_INTEGER:
            raise SettingsError(_expected(where, f"a whole number up to {MAX_INTEGER:,}", value))
        return value

    return check


def text(where: str, value: object) -> str:
    """Check a name: text that is not empty.

    Raises:
        SettingsError: The value is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(_expected(where, "a name (text that is not empty)", value))
    return value


def queue_name(where: str, value: object) -> str:
    """Check the name of a dead-letter queue.

    Raises:
        SettingsError: The value is something else.
    """
    name = text(where, value)
    if "{" in name or "}" in name:
        # Braces mark the hash slot in Redis keys.
        raise SettingsError(_expected(where, "a queue name without braces", value))
    return name


def _reasons(where: str, value: object) -> frozenset[Reason]:
    if isinstance(value, str) or not isinstance(value, Collection):
        raise SettingsError(_expected(where, "a list of reasons", value))
    known = {reason.value: reason for reason in Reason}
    for item in value:
        if str(item) not in known:
            hint = suggestion(str(item), known)
            raise SettingsError(
                f"expected only known reasons in {where}, got {str(item)!r}; {hint}"
            )
    return frozenset(known[str(item)] for item in value)


def _some_reasons(where: str, value: object) -> frozenset[Reason]:
    if not (found := _reasons(where, value)):
        raise SettingsError(_expected(where, "at least one reason, or left out for all", value))
    return found


def _ignored(where: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, type)):
        value = (value,)
    if not isinstance(value, Collection):
        raise SettingsError(_expected(where, "exception classes or their dotted names", value))
    return tuple(_exception_name(where, item, ends=True) for item in value)


def _exception_name(where: str, value: object, *, ends: bool = False) -> str:
    if isinstance(value, type) and issubclass(value, BaseException):
        value = qualified_name(value)
    if not isinstance(value, str) or not _DOTTED_NAME.fullmatch(value):
        raise SettingsError(_expected(where, "exception classes or their dotted names", value))
    if why := why_never(value, ends=ends):
        what = "exceptions that a task can fail with"
        raise SettingsError(f"{_expected(where, what, value)}: {why}")
    return value


def _exceptions(where: str, value: object) -> tuple[tuple[str, ExceptionRule], ...] | None:
    if isinstance(value, tuple):  # of a policy that was parsed before
        with suppress(TypeError, ValueError):
            value = dict(value)
    if not isinstance(value, Mapping):
        raise SettingsError(_expected(where, "a mapping of exceptions to actions", value))
    rules = {}
    for key, rule in value.items():
        name = _exception_name(where, key)
        rules[name] = _exception_rule(f"{where}[{name!r}]", rule)
    return tuple(sorted(rules.items())) or None


def _exception_rule(where: str, value: object) -> ExceptionRule:
    if isinstance(value, ExceptionRule):
        value = value.to_json()
    if not isinstance(value, Mapping) or "action" not in value:
        what = "a mapping with an action (retry, dead_letter or ignore)"
        raise SettingsError(_expected(where, what, value))
    action = _one_of(Action)(f"{where}['action']", value["action"])
    known = ("action", *KEYS_OF_ACTION[action])
    for key in value:
        if key not in known:
            raise SettingsError(
                f"expected only keys of the action {action} in {where}, got "
                f"{safe_repr(key, _SHOWN_CHARS)}; {suggestion(str(key), known)}"
            )
    set_ = {key: item for key, item in value.items() if key != "action" and item is not None}
    rule = ExceptionRule(
        action=action,
        **{key: _RULE_CHECKS[key](f"{where}[{key!r}]", item) for key, item in set_.items()},
    )
    if rule.backoff is Backoff.FIXED:
        for key in ("retry_backoff_max", "retry_jitter"):
            if key in set_:
                what = "left out with a fixed backoff"
                raise SettingsError(_expected(f"{where}[{key!r}]", what, set_[key]))
    return rule


def _one_of(kind: type[_Choice]) -> Callable[[str, object], _Choice]:
    """A check of a value of an enumeration, or its text."""

    def check(where: str, value: object) -> _Choice:
        known = {item.value: item for item in kind}
        if not isinstance(value, str) or value not in known:
            hint = suggestion(str(value), known) if isinstance(value, str) else ""
            what = f"one of {', '.join(known)}"
            text = _expected(where, what, value)
            raise SettingsError(f"{text}; {hint}" if hint.startswith("did") else text)
        return known[value]

    return check


def _crashes(where: str, value: object) -> int:
    number = integer(1)(where, value)
    if number > MAX_CRASHES:
        what = f"a whole number of 1 to {MAX_CRASHES}, the deliveries that are kept on record"
        raise SettingsError(_expected(where, what, value))
    return number


def is_off(value: object) -> bool:
    """True for what ends a key: ``False``, ``off``, ``none`` or ``null``."""
    return value is False or (isinstance(value, str) and value.strip().lower() in _OFF)


def _checked(where: str, key: str, value: object) -> Any:
    if value is False or (key not in _NAMES and is_off(value)):
        return False
    return _CHECKS[key](f"{where}[{key!r}]", value)


def _auto_redrive(where: str, value: object) -> AutoRedrive:
    return auto_redrive(where, value, _AUTO_REDRIVE_CHECKS)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple) and value and isinstance(value[0], tuple):
        return {name: rule.to_json() for name, rule in value}
    if isinstance(value, (DeadLetterExchange, AutoRedrive, CircuitBreaker)):
        return value.to_json()
    if isinstance(value, frozenset):
        return sorted(str(item) for item in value)
    return list(value) if isinstance(value, tuple) else value


def _expected(where: str, what: str, got: object) -> str:
    shown = " ".join(safe_repr(got, _SHOWN_CHARS).split())  # one line, whatever it is
    return f"expected {where} to be {what}, got {shown}"


_OFF = ("off", "none", "null")
_NAMES = ("dead_letter_queue", "dead_letter_exchange", "dead_letter_routing_key")
_SHOWN_CHARS = 200
MAX_CRASHES = 50
MAX_INTEGER = 10**15
_DOTTED_NAME = re.compile(r"[\w<>]+(\.[\w<>]+)*")
MAX_DURATION_SECONDS = 1000 * 366 * 86400.0
_UNIT_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

_AUTO_REDRIVE_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "after": _wait_seconds,
    "times": count(MOST_TIMES),
    "backoff": backoff,
    "reasons": _some_reasons,
    "canary": count(MOST_CANARY),
}
_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "max_deliveries": integer(1),
    "max_crashes": _crashes,
    "crash_window": positive_seconds,
    "max_retries": integer(0),
    "dead_letter_queue": queue_name,
    "dead_letter_exchange": dead_letter_exchange,
    "dead_letter_routing_key": dead_letter_routing_key,
    "default_delay": seconds,
    "ignore_message_delay": flag,
    "dead_letter_ttl": positive_seconds,
    "dead_letter_max_length": integer(1),
    "auto_redrive": _auto_redrive,
    "reasons": _reasons,
    "ignore": _ignored,
    "exceptions": _exceptions,
    "circuit_breaker": circuit_breaker,
}

_RULE_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "max_retries": integer(0),
    "backoff": _one_of(Backoff),
    "countdown": seconds,
    "retry_backoff_max": positive_seconds,
    "retry_jitter": flag,
    "dead_letter_queue": queue_name,
}
