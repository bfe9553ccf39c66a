"""Policies: the limits and delays of one queue or task.

A policy is written as keyword arguments of ``dead_letter_policy(...)`` or as a
mapping in the setting ``dlq_queues``; both take the same keys, which are the
fields of `Policy`. How policies combine is in `celery_dlq.policies.table`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar

from celery_dlq import registry
from celery_dlq.errors import SettingsError
from celery_dlq.letters.record import Reason
from celery_dlq.policies.checks import (
    Check,
    check_names,
    duration,
    expected,
    integer,
    is_off,
    mapping,
    positive_seconds,
    queue_name,
    some_of,
    true_or_false,
)
from celery_dlq.registry import PolicyKey

DLQ_SUFFIX = "-DLQ"

POLICY_ATTRIBUTE = "__dead_letter_policy__"
"""Where a decorated task has its policy."""


class KeyValue:
    """The value of a feature's policy key, if it has behaviour; frozen and hashable."""

    __slots__ = ()
    merges: ClassVar[bool] = False  # `over` fills it from a weaker policy's value

    @property
    def dead_letter_queues(self) -> tuple[str, ...]:
        """The queues for letters that it names."""
        return ()

    def over(self, weaker: Any) -> Any:  # noqa: ARG002 - of those that merge
        """This value; what it does not set is taken from that of a weaker policy."""
        return self

    def to_json(self) -> Any:
        """The value, JSON-ready, as users write it."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True, slots=True)
class CrashLimit(KeyValue):
    """The value of ``max_crashes``, if only crashes of the last so many seconds count."""

    times: int
    within: float | None = None

    @classmethod
    def of(cls, value: int | CrashLimit | None) -> CrashLimit | None:
        """The limit that a value of the key is; ``None`` if it is none."""
        return cls(value) if type(value) is int else value or None  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.times}" if self.within is None else f"{self.times} within {self.within:g} s"


@dataclass(frozen=True, slots=True)
class DefaultDelay(KeyValue):
    """The value of ``default_delay``, if it replaces a message's own countdown or eta."""

    seconds: float
    always: bool = False

    @classmethod
    def of(cls, value: float | DefaultDelay | None) -> DefaultDelay:
        """The delay that a value of the key is."""
        return value if isinstance(value, DefaultDelay) else cls(value or 0.0)

    def __bool__(self) -> bool:
        return bool(self.seconds) or self.always

    def __str__(self) -> str:
        return f"{self.seconds:g} s" + (", whatever the message says" if self.always else "")


MAX_CRASHES = 50
MAX_CRASH_DELAY_SECONDS = 300
"""A waiting message is unacknowledged: RabbitMQ closes the channel after half an hour of that."""
MAX_DELAY_SECONDS = 2**28 - 1
"""Of RabbitMQ's native delays, in Celery."""
_CRASH_DELAY = duration(
    f"0 to {MAX_CRASH_DELAY_SECONDS} seconds, the longest wait after a crash",
    lambda given: given <= MAX_CRASH_DELAY_SECONDS,
)
_DELAY_SECONDS = duration(
    f"0 to {MAX_DELAY_SECONDS:,} seconds, RabbitMQ's bound",
    lambda given: given <= MAX_DELAY_SECONDS,
)


def _crashes(where: str, value: object) -> int | CrashLimit:
    times = integer(1, MAX_CRASHES, ", the deliveries that are kept on record")
    if isinstance(value, CrashLimit):
        value = value.to_json()
    if not isinstance(value, Mapping):
        return times(where, value)
    keys = mapping({"times": times, "within": positive_seconds}, required=("times",))
    limit = CrashLimit(**keys(where, value))
    return limit if limit.within else limit.times


def _checked_delay(where: str, value: object) -> float | DefaultDelay:
    if isinstance(value, DefaultDelay):
        value = value.to_json()
    if isinstance(value, Mapping):
        keys = mapping({"seconds": _checked_delay, "always": true_or_false}, required=("seconds",))
        delay = DefaultDelay(**keys(where, value))
        return delay if delay.always else delay.seconds
    return _DELAY_SECONDS(where, value)


def _key(check: Check[Any], kind: str, *, why_not: str = "", is_name: bool = False) -> Any:
    """A key of the core, and what users write; `Policy` says what it means."""
    key = PolicyKey(check=check, kind=kind, doc="", why_not=why_not, is_name=is_name)
    return field(default=None, metadata={"key": key})


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The limits and delays of one queue or task.

    ``None`` means: not set here, so a weaker policy counts. ``False``, or the text ``off``,
    ``none`` or ``null``, ends a key: it counts as unset, whatever a weaker policy says. Where a
    name is expected, only ``False`` does.

    The keys of features are in ``features``; `of` has any key's value.

    Attributes:
        max_deliveries: A message is executed at most this many times; the delivery
            after that is not executed, the message is dead-lettered. At least 1.
            Unset: not limited by count.
        max_crashes: A message whose deliveries ended this often by a crash (its process or
            worker was lost, or a hard time limit) is dead-lettered before the next one, even if
            ``max_deliveries`` allows more. 1 to 50, or a mapping of ``times`` and ``within``: only
            crashes of the last so many seconds (or timedelta) count. Unset: only
            ``max_deliveries`` counts.
        crash_delay: Seconds (or timedelta) that a message waits before it starts again, if its last
            delivery ended by a crash, as ``max_crashes`` counts them; twice as long after each
            further crash in a row. The wait is not charged. 0 to 300, which is also the longest
            wait. Unset: 0, it starts again at once.
        max_retries: A message that ``Task.retry()`` published is executed at most up
            to this retry number; the next one is dead-lettered. 0 or more. Unset:
            only the task's own ``max_retries`` counts.
        dead_letter_queue: Name of the dead-letter queue. Unset: ``<queue>-DLQ``.
        default_delay: Seconds (or timedelta) that a message published without its own
            countdown or eta waits before it may run; or a mapping of ``seconds`` and ``always``:
            with True it replaces the message's own countdown or eta, apart from retries.
            At most 8 years, as RabbitMQ's native delays. Unset: 0.
        dead_letter_ttl: Seconds (or timedelta) after it was stored when a letter is trimmed.
            More than 0. Unset: never. But a letter whose message had an expiry, and did not
            die of it, is trimmed when the message would have expired.
        dead_letter_max_length: Most letters in the dead-letter queue; the oldest are trimmed.
            At least 1. Unset: no limit.
        reasons: Which deaths are kept, as reason names; others leave no letter. Unset: all.
    """

    max_deliveries: int | None = _key(integer(1), "int")
    max_crashes: int | CrashLimit | None = _key(_crashes, "int | Mapping[str, Any]")  # noqa: RUF009 - it makes a field
    crash_delay: float | None = _key(_CRASH_DELAY, "float | timedelta")
    max_retries: int | None = _key(integer(0), "int")
    dead_letter_queue: str | None = _key(
        queue_name,
        "str",
        why_not="the counts of messages under way are kept beside their letters",
        is_name=True,
    )
    default_delay: float | DefaultDelay | None = _key(  # noqa: RUF009 - it makes a field
        _checked_delay,
        "float | timedelta | Mapping[str, Any]",
        why_not="it acts where messages are published, and publishers do not ask Redis",
    )
    dead_letter_ttl: float | None = _key(positive_seconds, "float | timedelta")
    dead_letter_max_length: int | None = _key(integer(1), "int")
    reasons: frozenset[Reason] | None = _key(some_of(Reason, "reasons"), "Collection[str]")
    # The keys of features that are set, in order
    features: tuple[tuple[str, Any], ...] = ()

    @classmethod
    def parse(cls, values: Mapping[str, Any], where: str) -> Policy:
        """Check and convert policy keys."""
        if not isinstance(values, Mapping):
            raise expected(where, "a mapping of policy keys", values)
        check_names(f"policy keys in {where}", values, policy_keys(), SettingsError)
        given = {key: value for key, value in values.items() if value is not None}
        return _policy_of({key: _checked(where, key, given[key]) for key in given})

    def of(self, key: str) -> Any:
        """The value of a key, of the core or of a feature: `False` if it is off, `None` unset."""
        return getattr(self, key) if key in _CORE else dict(self.features).get(key)

    def over(self, other: Policy) -> Policy:
        """This policy; keys that it does not set are taken from ``other``."""
        values = dict(other.items())
        for key, mine in self.items():
            weaker = values.get(key)
            merges = isinstance(mine, KeyValue) and mine.merges and weaker
            values[key] = mine.over(weaker) if merges else mine
        return _policy_of(values)

    def to_json(self) -> dict[str, Any]:
        """The keys that are set, JSON-ready; `parse` reads it."""
        return {key: plain_value(value) for key, value in self.items()}

    def items(self) -> Iterator[tuple[str, Any]]:
        """The keys that are set, with their values."""
        yield from ((key, v) for key in _CORE if (v := getattr(self, key)) is not None)
        yield from self.features

    def without_off(self) -> Policy:
        """A policy that no weaker one fills: what is off in it is not set."""
        return _policy_of({key: value for key, value in self.items() if value is not False})

    @property
    def says_delay(self) -> bool:
        """True if the policy affects the delay of a message when it is published."""
        return bool(self.default_delay)

    def keeps(self, reason: Reason) -> bool:
        """True if deaths with this reason become letters."""
        return self.reasons is None or reason in self.reasons

    def dead_letter_queue_of(self, queue: str) -> str:
        """The dead-letter queue of a source queue under this policy."""
        return self.dead_letter_queue or f"{queue}{DLQ_SUFFIX}"

    @property
    def other_dead_letter_queues(self) -> tuple[str, ...]:
        """The dead-letter queues that values of features name, such as rules for exceptions."""
        values = (value for _key, value in self.features if isinstance(value, KeyValue))
        return tuple(sorted({name for value in values for name in value.dead_letter_queues}))


SHARED_POLICIES: list[Callable[[Any], None]] = []
"""Each gives a policy to a task that every app makes for itself, once an app is finalized."""
_GIVEN = "_celery_dlq_given"  # attribute of an app: how many of them it has


def policy_of(task: Any) -> Policy | None:
    """The policy from the decorator of a registered task, if it has one."""
    app = getattr(task, "app", None) if SHARED_POLICIES else None
    while app and app.finalized and (given := getattr(app, _GIVEN, 0)) < len(SHARED_POLICIES):
        SHARED_POLICIES[given](app)
        setattr(app, _GIVEN, given + 1)
    for place in (task, getattr(task, "run", None), getattr(task, "__wrapped__", None)):
        found = getattr(place, POLICY_ATTRIBUTE, None)
        if isinstance(found, Policy):
            return found
    return None


def task_policies(app: Any) -> dict[str, Policy]:
    """The policies of an app's decorated tasks, by task name."""
    found = ((task.name, policy_of(task)) for task in list(app.tasks.values()))
    return {name: policy for name, policy in found if policy is not None}


_CORE: dict[str, PolicyKey] = {f.name: f.metadata["key"] for f in fields(Policy) if f.metadata}


def policy_keys() -> dict[str, PolicyKey]:
    """All keys of a policy by their names, those of the core first."""
    return _CORE | {key: found for key, (_feature, found) in registry.policy_keys().items()}


def plain_value(value: Any) -> Any:
    """The value of a key, JSON-ready."""
    if isinstance(value, KeyValue):
        return value.to_json()
    return sorted(map(str, value)) if isinstance(value, frozenset) else value


def _policy_of(values: Mapping[str, Any]) -> Policy:
    """A policy of checked values; ``None`` is not set."""
    core = {key: value for key, value in values.items() if key in _CORE}
    features = ((key, v) for key, v in values.items() if key not in _CORE and v is not None)
    return Policy(**core, features=tuple(sorted(features)))


def _checked(where: str, key: str, value: object) -> Any:
    feature, found = registry.policy_keys().get(key) or (None, _CORE[key])
    if value is False or (not found.is_name and is_off(value)):
        return False
    check = feature.load(found.check) if feature else found.check
    return check(f"{where}[{key!r}]", value)
