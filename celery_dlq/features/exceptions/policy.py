"""What the policy key ``exceptions`` says about one exception, and which names it may have."""

from __future__ import annotations

import builtins
import dataclasses
import difflib
import re
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from importlib.util import find_spec
from math import ceil
from typing import Any

from celery_dlq.errors import SettingsError
from celery_dlq.letters.record import TextEnum
from celery_dlq.policies.checks import (
    Check,
    check_names,
    expected,
    integer,
    one_of,
    qualified_name,
    queue_name,
    seconds,
)
from celery_dlq.policies.policy import KeyValue
from celery_dlq.policies.queue_names import did_you_mean

DEFAULT_COUNTDOWN = 1.0
BACKOFF_MAX_SECONDS = 600.0
_MAX_DOUBLINGS = 64  # the number of retries comes over the wire


class ExceptionAction(TextEnum):
    """What happens to a message whose task raised the exception."""

    RETRY = "retry"
    DEAD_LETTER = "dead_letter"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExceptionRule:
    """What to do about one exception and its subclasses. ``None`` means: not set.

    The names are those of ``Task.retry``, and mean the same.

    Attributes:
        action: ``retry``, ``dead_letter`` (at once) or ``ignore`` (no letter).
        max_retries: Of ``retry``: at most this many retries. Unset: the task's own.
        countdown: Of ``retry``: seconds (or timedelta) before the first retry. Each further wait
            may be twice as long, 600 seconds at most, and is a random part of that in whole
            seconds, as with Celery's ``retry_backoff``. Unset: 1.
        dead_letter_queue: Of ``dead_letter``: the queue of the letters. Unset: the policy's.

    Source: https://docs.celeryq.dev/en/stable/userguide/tasks.html#Task.retry_backoff
    """

    action: ExceptionAction
    max_retries: int | None = None
    countdown: float | None = None
    dead_letter_queue: str | None = None

    def seconds_before_retry(self, retries: int, share: float) -> int:
        """Whole seconds before the next retry.

        Whole as Celery's own: its native delay on RabbitMQ refuses half a second.
        ``share`` is a random number of at least 0 and less than 1, for the jitter.
        """
        first = DEFAULT_COUNTDOWN if self.countdown is None else self.countdown
        doubled: float = first * 2.0 ** min(max(retries, 0), _MAX_DOUBLINGS)
        return int(share * (ceil(min(BACKOFF_MAX_SECONDS, doubled)) + 1))

    def __str__(self) -> str:
        keys = self.to_json().items()
        more = ", ".join(f"{key} {value}" for key, value in keys if key != "action")
        return f"{self.action} ({more})" if more else str(self.action)

    def to_json(self) -> dict[str, Any]:
        """The keys that are set, JSON-ready."""
        values = ((f.name, getattr(self, f.name)) for f in dataclasses.fields(self))
        return {
            name: value.value if isinstance(value, Enum) else value
            for name, value in values
            if value is not None
        }


@dataclass(frozen=True, slots=True)
class ExceptionPolicy(KeyValue):
    """What a policy says about exceptions."""

    merges = True
    rules: tuple[tuple[str, ExceptionRule], ...]  # By name, in the order of names

    @property
    def names(self) -> tuple[str, ...]:
        """The exceptions that it names."""
        return tuple(name for name, _rule in self.rules)

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        """The queues for letters that it names."""
        named = (rule.dead_letter_queue for _name, rule in self.rules)
        return tuple(name for name in named if name is not None)

    def rule_of(self, exception_names: Iterable[str]) -> ExceptionRule | None:
        """What to do about an exception; of its class and bases, the first with a rule counts."""
        rules = dict(self.rules)
        return next((rules[name] for name in exception_names if name in rules), None)

    def over(self, weaker: ExceptionPolicy) -> ExceptionPolicy:
        """Each exception counts as a key of its own."""
        return ExceptionPolicy(tuple(sorted({**dict(weaker.rules), **dict(self.rules)}.items())))

    def __str__(self) -> str:
        return "\n".join(f"{name}: {rule}" for name, rule in self.rules)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping, as the policy takes it."""
        return {name: rule.to_json() for name, rule in self.rules}


KEYS_OF_ACTION = {
    ExceptionAction.RETRY: ("max_retries", "countdown"),
    ExceptionAction.DEAD_LETTER: ("dead_letter_queue",),
    ExceptionAction.IGNORE: (),
}
_RULE_CHECKS: Mapping[str, Check[Any]] = {
    "max_retries": integer(0),
    "countdown": seconds,
    "dead_letter_queue": queue_name,
}
_DOTTED_NAME = re.compile(r"[\w<>]+(\.[\w<>]+)*")


def exceptions(where: str, value: object) -> ExceptionPolicy | None:
    """Check a mapping of exceptions to what is done about them."""
    if isinstance(value, ExceptionPolicy):
        value = dict(value.rules)
    if not isinstance(value, Mapping):
        raise expected(where, "a mapping of exceptions to actions", value)
    rules = {}
    for key, given in value.items():
        rule = _checked_rule(f"{where}[{key!r}]", given)
        name = _exception_name(where, key, ignored=rule.action is ExceptionAction.IGNORE)
        rules[name] = rule
    return ExceptionPolicy(tuple(sorted(rules.items()))) if rules else None


def _exception_name(where: str, value: object, *, ignored: bool) -> str:
    if isinstance(value, type) and issubclass(value, BaseException):
        value = qualified_name(value)
    if not isinstance(value, str) or not _DOTTED_NAME.fullmatch(value):
        raise expected(where, "exception classes or their dotted names", value)
    if why := why_never(value, ignored=ignored):
        error = expected(where, "exceptions that a task can fail with", value)
        raise SettingsError(f"{error}: {why}")
    return value


def _checked_rule(where: str, value: object) -> ExceptionRule:
    if isinstance(value, ExceptionRule):
        value = value.to_json()
    if isinstance(value, str):
        value = {"action": value}
    if not isinstance(value, Mapping) or "action" not in value:
        raise expected(
            where, "an action (retry, dead_letter or ignore), or a mapping with one", value
        )
    action = one_of(ExceptionAction)(f"{where}['action']", value["action"])
    if "backoff" in value:
        raise SettingsError(
            f"expected no 'backoff' in {where}, whose waits grow as with Celery's retry_backoff; "
            f"for equal waits write autoretry_for and default_retry_delay at the task, and no rule"
        )
    known = ("action", *KEYS_OF_ACTION[action])
    check_names(f"keys of the action {action} in {where}", value, known, SettingsError)
    given = {key: item for key, item in value.items() if key != "action" and item is not None}
    return ExceptionRule(
        action=action,
        **{key: _RULE_CHECKS[key](f"{where}[{key!r}]", item) for key, item in given.items()},
    )


# -- names of exceptions ------------------------------------------------------------------

_BUILTINS = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_CONTROL_FLOW = "by it a task says itself what becomes of its message"
_REPORTED = "a worker reports it for a process that is gone; no task raises it"
_NEVER = {
    **dict.fromkeys(
        ("SystemExit", "KeyboardInterrupt", "GeneratorExit"),
        "it ends the process, and is no failure of the task",
    ),
    **dict.fromkeys(("Retry", "Ignore", "Reject", "TaskPredicate", "RejectToDLQ"), _CONTROL_FLOW),
    **dict.fromkeys(("WorkerLostError", "TimeLimitExceeded", "Terminated"), _REPORTED),
}
_OURS = ("", "celery.exceptions", "billiard.exceptions", "celery_dlq", "celery_dlq.decorators")


def why_never(name: str, *, ignored: bool = False) -> str:
    """Why a name can never act in any process; empty if it may.

    What a worker reports for a lost process can be ignored, by its full name.
    """
    module, _, last = name.rpartition(".")
    why = _NEVER.get(last, "") if module in _OURS else ""
    if why and not (ignored and module and why == _REPORTED):
        return why
    if module or name in _BUILTINS:
        return ""
    close = difflib.get_close_matches(name, _BUILTINS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "write its module, too: shop.errors.SoldOut"
    return f"it is no built-in exception; {hint}"


def why_not_here(name: str) -> str:
    """Why a name does not act in this process; empty if it does, or if that is not known.

    Nothing is imported for it, so a module that is there but not imported yet says nothing.
    """
    found = imported(name)
    if found is None:
        return _missing(name)
    if not isinstance(found, type) or not issubclass(found, BaseException):
        return f"it is no exception but {type(found).__name__}"
    names = {qualified_name(base) for base in found.__mro__}
    return _CONTROL_FLOW if "celery.exceptions.TaskPredicate" in names else ""


def imported(name: str) -> object:
    """What a dotted name stands for, if its module is imported; imports and calls nothing."""
    if "." not in name:
        return getattr(builtins, name, None)
    module, path = _imported_prefix(name)
    found: Any = module
    for part in path if module is not None else ():
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _imported_prefix(name: str) -> tuple[Any, list[str]]:
    """The longest prefix of a name that is an imported module, and the rest."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            return found, parts[end:]
    return None, parts


def _missing(name: str) -> str:
    module, path = _imported_prefix(name)
    if "<" in name or hasattr(module, "__getattr__"):  # of a function, or made when it is asked for
        return ""
    if module is not None and (len(path) == 1 or path[0] in vars(module)):
        hint = did_you_mean(path[0], vars(module))
        return "" if len(path) > 1 else f"there is no {path[0]} in {module.__name__}{hint}"
    place = path[0] if module is None else f"{module.__name__}.{path[0]}"
    try:
        return "" if find_spec(place) else f"there is no module {place} here"
    except (ImportError, ValueError, AttributeError):
        return f"there is no module {place} here"
