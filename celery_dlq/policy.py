"""Policies: the limits and delays of one queue or task, and how they combine.

A policy is written as keyword arguments of ``dead_letter_policy(...)`` or as a
mapping in the setting ``dlq_queues``; both take the same keys, which are the
fields of `Policy`. Field by field the task's decorator wins, then the exact
queue name, then the most specific pattern.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from fnmatch import fnmatchcase
from typing import Any

from celery_dlq.errors import SettingsError
from celery_dlq.exchange import (
    DeadLetterExchange,
    dead_letter_exchange,
    dead_letter_routing_key,
)
from celery_dlq.jsontext import safe_repr
from celery_dlq.record import Reason

DLQ_SUFFIX = "-DLQ"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits and delays of one queue or task. ``None`` means: not set here.

    Attributes:
        max_deliveries: A message is executed at most this many times; the delivery
            after that is not executed, the message is dead-lettered. At least 1.
            Unset: not limited by count.
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
        reasons: Which deaths are kept, as reason names. Unset: all.
        ignore: Exception types (classes or dotted names) that are expected: a failure
            with one of them is no death. Unset: none.
    """

    max_deliveries: int | None = None
    max_retries: int | None = None
    dead_letter_queue: str | None = None
    dead_letter_exchange: DeadLetterExchange | None = None
    dead_letter_routing_key: str | None = None
    default_delay: float | None = None
    reasons: frozenset[Reason] | None = None
    ignore: tuple[str, ...] | None = None

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
        for key in values:
            if key not in _CHECKS:
                hint = suggestion(key, _CHECKS)
                message = f"expected only known policy keys in {where}, got {key!r}; {hint}"
                raise SettingsError(message)
        return cls(
            **{
                key: None if value is None else _CHECKS[key](f"{where}[{key!r}]", value)
                for key, value in values.items()
            }
        )

    def over(self, other: Policy) -> Policy:
        """This policy, with ``other`` filling the fields that are not set here."""
        filled = {
            f.name: getattr(other, f.name)
            for f in dataclasses.fields(self)
            if getattr(self, f.name) is None
        }
        return dataclasses.replace(self, **filled)

    def keeps(self, reason: Reason) -> bool:
        """Whether deaths for this reason become letters."""
        return self.reasons is None or reason in self.reasons

    def dead_letter_queue_of(self, queue: str) -> str:
        """The dead-letter queue of a source queue under this policy."""
        return self.dead_letter_queue or f"{queue}{DLQ_SUFFIX}"


@dataclass(frozen=True, slots=True)
class PolicyBook:
    """All queue policies of one app; answers which policy guards a message.

    Attributes:
        queues: Policies by queue name or glob pattern (``*``, ``?``, ``[…]``).
    """

    queues: Mapping[str, Policy] = field(default_factory=dict)
    _resolved: dict[tuple[str, Policy | None], Policy | None] = field(
        default_factory=dict, repr=False, compare=False
    )

    def resolve(self, queue: str, task_policy: Policy | None = None) -> Policy | None:
        """The policy of a message, or ``None`` when nothing guards it.

        Args:
            queue: The queue it came from.
            task_policy: The policy of its task's decorator.

        Returns:
            One merged policy; the same object for the same arguments.
        """
        key = (queue, task_policy)
        if key not in self._resolved:
            if len(self._resolved) >= _MOST_RESOLVED:  # names made up at run time
                self._resolved.clear()
            self._resolved[key] = self._merge(queue, task_policy)
        return self._resolved[key]

    def __bool__(self) -> bool:
        """Whether any queue policy exists at all."""
        return bool(self.queues)

    def _merge(self, queue: str, task_policy: Policy | None) -> Policy | None:
        layers = [*([task_policy] if task_policy else []), *self._matching(queue)]
        if not layers:
            return None
        merged = Policy()
        for layer in layers:
            merged = merged.over(layer)
        return merged

    def _is_dead_letter_queue(self, queue: str) -> bool:
        named = (policy.dead_letter_queue for policy in self.queues.values())
        return queue.endswith(DLQ_SUFFIX) or queue in named

    def _matching(self, queue: str) -> list[Policy]:
        if queue not in self.queues and self._is_dead_letter_queue(queue):
            return []  # no pattern guards a dead-letter queue
        names = [name for name in self.queues if name == queue or fnmatchcase(queue, name)]
        names.sort(key=lambda name: (name != queue, [-n for n in _specificity(name)], name))
        return [self.queues[name] for name in names]


def check_targets(queues: Mapping[str, Policy]) -> None:
    """Refuse chains: a dead-letter queue must not itself be a guarded queue.

    Raises:
        SettingsError: A queue is its own DLQ, or a DLQ has a policy of its own.
    """
    for name, policy in queues.items():
        if policy.dead_letter_queue == name:
            raise SettingsError(
                f"expected dlq_queues[{name!r}]['dead_letter_queue'] to be another queue, "
                f"got {name!r} itself; letters would circle. Leave it out to get "
                f"{name + DLQ_SUFFIX!r}"
            )
    targets = {policy.dead_letter_queue_of(name): name for name, policy in queues.items()}
    book = PolicyBook(queues)
    for name in queues:  # the DLQ of a queue that only a pattern guards
        source = name.removesuffix(DLQ_SUFFIX)
        guarding = book.resolve(source) if source != name else None
        if guarding is not None and guarding.dead_letter_queue_of(source) == name:
            targets.setdefault(name, source)
    for name in queues:
        if name in targets and targets[name] != name:
            raise SettingsError(
                f"expected {name!r} to be either a guarded queue or a dead-letter queue, got both: "
                f"it has a policy and is the dead-letter queue of {targets[name]!r}. "
                f"Remove dlq_queues[{name!r}] or name another dead_letter_queue"
            )


def suggestion(name: str, known: Iterable[str]) -> str:
    """``did you mean 'x'?``, or the list of what there is."""
    known = sorted(known)
    close = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"expected one of {', '.join(known)}"


def seconds(where: str, value: object) -> float:
    """A duration of 0 or more, in seconds, from a number or a timedelta.

    Raises:
        SettingsError: It is neither, negative, or longer than a thousand years.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SettingsError(_expected(where, "a number of seconds or a timedelta", value))
    if not 0 <= value <= _LONGEST_SECONDS:  # also refuses NaN and infinity
        raise SettingsError(_expected(where, "a duration of 0 or more seconds", value))
    return float(value)


def integer(minimum: int) -> Callable[[str, object], int]:
    """A check for a whole number of at least ``minimum``."""

    def check(where: str, value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise SettingsError(_expected(where, f"a whole number of {minimum} or more", value))
        return value

    return check


def text(where: str, value: object) -> str:
    """A check for a name: text that is not empty.

    Raises:
        SettingsError: It is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise SettingsError(_expected(where, "a name (text that is not empty)", value))
    return value


def queue_name(where: str, value: object) -> str:
    """A check for the name of a dead-letter queue.

    Raises:
        SettingsError: It is something else.
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
            message = f"expected only known reasons in {where}, got {str(item)!r}; {hint}"
            raise SettingsError(message)
    return frozenset(known[str(item)] for item in value)


def _exception_names(where: str, value: object) -> tuple[str, ...]:
    if isinstance(value, (str, type)):
        value = (value,)
    if not isinstance(value, Collection):
        raise SettingsError(_expected(where, "exception classes or their dotted names", value))
    return tuple(_exception_name(where, item) for item in value)


def _exception_name(where: str, value: object) -> str:
    if isinstance(value, type) and issubclass(value, BaseException):
        return qualified_name(value)
    if isinstance(value, str) and value:
        return value
    raise SettingsError(_expected(where, "exception classes or their dotted names", value))


def qualified_name(cls: type) -> str:
    """``module.QualName`` of a class; built-ins without their module."""
    module = cls.__module__
    return cls.__qualname__ if module == "builtins" else f"{module}.{cls.__qualname__}"


def _expected(where: str, what: str, got: object) -> str:
    shown = " ".join(safe_repr(got, _SHOWN).split())  # one line, whatever it is
    return f"expected {where} to be {what}, got {shown}"


def _specificity(pattern: str) -> tuple[int, int]:
    """How much a pattern fixes: its literal characters, then its places for one character."""
    rest, classes = re.subn(r"\[[^]]*\]", "", pattern)
    literals = sum(character not in "*?" for character in rest)
    return literals, classes + rest.count("?")


_SHOWN = 200
_LONGEST_SECONDS = 1000 * 366 * 86400.0
_MOST_RESOLVED = 4096

_CHECKS: dict[str, Callable[[str, object], Any]] = {
    "max_deliveries": integer(1),
    "max_retries": integer(0),
    "dead_letter_queue": queue_name,
    "dead_letter_exchange": dead_letter_exchange,
    "dead_letter_routing_key": dead_letter_routing_key,
    "default_delay": seconds,
    "reasons": _reasons,
    "ignore": _exception_names,
}
