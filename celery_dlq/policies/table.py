"""How the policies of an app combine, and which combinations are refused.

For each field, and for each exception of ``exceptions``, an override made at run time wins, then
the task's decorator, then the exact queue name, then the most specific pattern.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import lru_cache, reduce
from typing import Any

from celery_dlq import registry
from celery_dlq.errors import SettingsError
from celery_dlq.policies.checks import suggestion
from celery_dlq.policies.policy import DLQ_SUFFIX, KeyValue, Policy, policy_keys
from celery_dlq.policies.queue_names import KnownQueues

MAX_CACHED_POLICIES = 4096
NOTHING_GUARDED = (
    "No queue and no task of this app has a policy, so failed tasks leave no letters: "
    'set dlq_queues, for example {"orders": {"max_deliveries": 5}}'
)
RETENTION = ("dead_letter_ttl", "dead_letter_max_length")
"""Policy keys that say how long letters are kept."""


@dataclass(frozen=True, slots=True)
class SourcedValue:
    """The value of one policy key and its source."""

    value: Any  # The value; `False` if the source ends the key, `None` if no policy sets it
    source: str  # E.g. `dlq_queues['orders']`, or `default`


@dataclass(frozen=True, slots=True)
class PolicyTable:
    """All policies of one app; finds the one that guards a message."""

    # Policies by queue name or glob pattern (`*`, `?`, `[…]`)
    queues: Mapping[str, Policy] = field(default_factory=dict)
    # Policies of task decorators by task name; used for whole dead-letter queues, because
    # `resolve` gets the policy of a message's task
    tasks: Mapping[str, Policy] = field(default_factory=dict)
    # Policies made at run time, by queue name, with who made them
    overrides: Mapping[str, tuple[Policy, str]] = field(default_factory=dict)
    # Queues for which such a change has yet to begin: their letters are left alone
    resting: frozenset[str] = frozenset()
    lifted: frozenset[str] = frozenset()
    cached: Callable[[str, Policy | None], Policy | None] = field(
        init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        # Bounded: queues may be named at run time.
        object.__setattr__(self, "cached", lru_cache(MAX_CACHED_POLICIES)(self._merge_layers))

    def named_policies(self) -> Iterator[tuple[str, Policy]]:
        """Every configured policy with what to call it."""
        yield from ((f"dlq_queues[{name!r}]", policy) for name, policy in self.queues.items())
        yield from ((f"dead_letter_policy of {name}", p) for name, p in self.tasks.items())

    def resolve(self, queue: str, task_policy: Policy | None = None) -> Policy | None:
        """The policy of a message, or ``None`` if no policy guards it."""
        return self.cached(queue, task_policy)

    def explain(self, queue: str, task_name: str | None = None) -> dict[str, SourcedValue]:
        """The value and source of every key, for a queue or for one task from it."""
        task_policy = self.tasks.get(task_name) if task_name else None
        layers = list(self._layers_of(queue, task_policy, task_name or ""))
        return {key: _sourced(key, layers) for key in policy_keys()}

    def dead_letter_queue_of(self, queue: str, task_policy: Policy | None = None) -> str:
        """The queue of a message's letters; that of a dead-letter queue is itself: no chain."""
        if self.is_dead_letter_queue(queue):
            return queue
        policy = self.resolve(queue, task_policy) or Policy()
        return policy.dead_letter_queue_of(queue)

    def of_dead_letter_queue(self, name: str) -> Policy | None:
        """The policy that says what happens to the letters of a dead-letter queue, or none."""
        for where, policy in self._targeting():
            if policy.dead_letter_queue_of(where) == name:
                return policy
        named = [policy for _where, policy, target in self._by_exception() if target == name]
        if named:
            return next((policy for policy in named if _retains(policy)), named[0])
        source = name.removesuffix(DLQ_SUFFIX)
        ruling = self.resolve(source) if source != name else None
        return ruling if ruling and ruling.dead_letter_queue_of(source) == name else None

    def value_of(self, dead_letter_queue: str, key: str) -> Any:
        """The value of a key for a dead-letter queue; ``None`` if no policy sets it."""
        policy = self.of_dead_letter_queue(dead_letter_queue)
        return policy.of(key) if policy is not None else None

    def never_trims(self, dead_letter_queue: str) -> bool:
        """True if nothing may be trimmed or redriven by policy: a change of it has yet to begin."""
        return any(self.dead_letter_queue_of(queue) == dead_letter_queue for queue in self.resting)

    def trims_by_override(self, dead_letter_queue: str) -> bool:
        """True if an operator has changed what retention does with a dead-letter queue."""
        return any(
            self.dead_letter_queue_of(queue) == dead_letter_queue
            for queue in (*self.lifted, *(q for q, (p, _) in self.overrides.items() if _retains(p)))
        )

    def values_of(self, key: str) -> list[Any]:
        """All values that the policies have for a key, without those that end it."""
        overrides = (policy for policy, _source in self.overrides.values())
        policies = (*self.queues.values(), *self.tasks.values(), *overrides)
        return [value for policy in policies if (value := policy.of(key))]

    def unbounded(self, known: Iterable[str]) -> list[str]:
        """The dead-letter queues, or patterns of them, whose letters no policy ever removes."""
        found = {
            policy.dead_letter_queue_of(where)
            for where, policy in self._targeting()
            if not (policy.dead_letter_ttl or policy.dead_letter_max_length)
        }
        for target in self.by_exception:
            policy = self.of_dead_letter_queue(target)
            if not policy or not (policy.dead_letter_ttl or policy.dead_letter_max_length):
                found.add(target)
        if not all(policy.dead_letter_queue for policy in self.tasks.values()):
            found |= {
                Policy().dead_letter_queue_of(queue)
                for queue in known
                if self.resolve(queue) is None and not self.is_dead_letter_queue(queue)
            }
        return sorted(found)

    def is_dead_letter_queue(self, queue: str) -> bool:
        """True if a policy names this queue for letters, or its name ends with ``-DLQ``.

        A queue with a policy of its own is none.
        """
        if queue in self.queues:
            return False
        policies = (*self.queues.values(), *self.tasks.values())
        named = (policy.dead_letter_queue for policy in policies)
        return queue.endswith(DLQ_SUFFIX) or queue in named or queue in self.by_exception

    @property
    def by_exception(self) -> frozenset[str]:
        """The dead-letter queues that the ``exceptions`` of policies name."""
        policies = (*self.queues.values(), *self.tasks.values())
        return frozenset(name for policy in policies for name in policy.other_dead_letter_queues)

    def counted_in(self, letter_queue: str | None, queue: str, task_name: str) -> str:
        """The dead-letter queue beside whose letters a redriven message is counted."""
        if letter_queue is not None and letter_queue not in self.by_exception:
            return letter_queue
        return self.dead_letter_queue_of(queue, self.tasks.get(task_name))

    def unknown_queues(self, known: KnownQueues) -> dict[str, str]:
        """Queue names with a policy that the app does not have, each with a suggestion."""
        if not known.complete:
            return {}
        exact = [name for name in self.queues if not re.search(r"[*?\[]", name)]
        return {name: suggestion(name, known.names) for name in exact if name not in known.names}

    def check(self) -> None:
        """Refuse policies that contradict each other."""
        check_targets(self.queues)
        for task, policy in self.tasks.items():
            _check_task(task, policy, self.queues)
        self._check_retention()

    def __bool__(self) -> bool:
        """True if any queue policy or override exists."""
        return bool(self.queues) or bool(self.overrides)

    def _merge_layers(self, queue: str, task_policy: Policy | None) -> Policy | None:
        layers = [policy for _source, policy in self._layers_of(queue, task_policy, "")]
        merged = reduce(lambda weak, strong: strong.over(weak), reversed(layers), Policy())
        return merged.without_off() if layers else None  # from the weakest on: one ends those below

    def _layers_of(
        self, queue: str, task_policy: Policy | None, task_name: str
    ) -> Iterator[tuple[str, Policy]]:
        """The policies that apply to a message with their sources, the strongest first."""
        if queue in self.overrides and not self.is_dead_letter_queue(queue):
            policy, actor = self.overrides[queue]
            yield f"override by {actor}", policy
        if task_policy is not None:
            yield f"dead_letter_policy of {task_name}", task_policy
        for name in self._matching(queue):
            yield f"dlq_queues[{name!r}]", self.queues[name]

    def _matching(self, queue: str) -> list[str]:
        if self.is_dead_letter_queue(queue):
            return []  # no pattern guards a dead-letter queue
        names = [name for name in self.queues if name == queue or fnmatchcase(queue, name)]
        names.sort(key=lambda name: (name != queue, [-n for n in _specificity(name)], name))
        return names

    def _targeting(self) -> Iterator[tuple[str, Policy]]:
        """Every policy with the queue, pattern or task that has it; merged for queues."""
        for queue in {**self.overrides, **self.queues}:
            policy = self.resolve(queue)
            if policy is not None:
                yield queue, policy
        for task, policy in self.tasks.items():
            if policy.dead_letter_queue:
                yield f"task {task}", policy.without_off()

    def _by_exception(self) -> Iterator[tuple[str, Policy, str]]:
        """Every dead-letter queue that ``exceptions`` name, with the policy that does."""
        tasks = ((f"task {task}", policy) for task, policy in self.tasks.items())
        for where, policy in (*self.queues.items(), *tasks):
            for target in policy.other_dead_letter_queues:
                yield where, policy.without_off(), target

    def _check_retention(self) -> None:
        seen: dict[tuple[str, str], tuple[str, Any]] = {}
        for where, policy in self._targeting():
            target = policy.dead_letter_queue_of(where)
            for key in of_whole_queues():
                value = policy.of(key)
                other, before = seen.setdefault((target, key), (where, value))
                if before != value:
                    raise SettingsError(
                        f"expected one {key} for the dead-letter queue {target!r}, got "
                        f"{before!r} from {other!r} and {value!r} from {where!r}; make them "
                        f"equal or name another dead_letter_queue"
                    )
        for where, policy, target in self._by_exception():
            for key in RETENTION:
                value = getattr(policy, key)
                other, before = seen.get((target, key), (where, value))
                if value is not None and before not in (None, value):
                    raise SettingsError(
                        f"expected one {key} for the dead-letter queue {target!r}, got "
                        f"{before!r} from {other!r} and {value!r} from {where!r}, whose "
                        f"exceptions name it; make them equal or name another queue there"
                    )
                if value is not None:
                    seen[target, key] = (where, value)


def of_whole_queues() -> tuple[str, ...]:
    """The keys that are about a whole dead-letter queue: those that remove or redrive letters."""
    features = registry.policy_keys().items()
    return (*RETENTION, *(key for key, (_feature, found) in features if found.redrives))


def check_targets(queues: Mapping[str, Policy]) -> None:
    """Refuse chains: a dead-letter queue must not itself be a guarded queue."""
    for name, policy in queues.items():
        if policy.dead_letter_queue == name:
            raise SettingsError(
                f"expected dlq_queues[{name!r}]['dead_letter_queue'] to be another queue, "
                f"got {name!r} itself; letters would circle. Leave it out to get "
                f"{name + DLQ_SUFFIX!r}"
            )
    targets = {policy.dead_letter_queue_of(name): name for name, policy in queues.items()}
    for name, policy in queues.items():
        _check_by_exception(f"dlq_queues[{name!r}]", policy, queues)
    table = PolicyTable(queues)
    for name in queues:  # the DLQ of a queue that only a pattern guards
        source = name.removesuffix(DLQ_SUFFIX)
        guarding = table.resolve(source) if source != name else None
        if guarding is not None and guarding.dead_letter_queue_of(source) == name:
            targets.setdefault(name, source)
    for name in queues:
        if name in targets and targets[name] != name:
            raise SettingsError(
                f"expected {name!r} to be either a guarded queue or a dead-letter queue, got both: "
                f"it has a policy and is the dead-letter queue of {targets[name]!r}. "
                f"Remove dlq_queues[{name!r}] or name another dead_letter_queue"
            )


def _check_by_exception(where: str, policy: Policy, queues: Mapping[str, Policy]) -> None:
    for name in policy.other_dead_letter_queues:
        if name in queues:
            raise SettingsError(
                f"expected each dead_letter_queue in the exceptions of {where} to be no guarded "
                f"queue, got {name!r}, which has a policy in dlq_queues; name another"
            )


def _retains(policy: Policy) -> bool:
    return any(getattr(policy, key) is not None for key in RETENTION)


def _check_task(task: str, policy: Policy, queues: Mapping[str, Policy]) -> None:
    _check_by_exception(f"dead_letter_policy of {task}", policy, queues)
    if policy.dead_letter_queue in queues:
        raise SettingsError(
            f"expected the dead_letter_queue of task {task} to be no guarded queue, got "
            f"{policy.dead_letter_queue!r}, which has a policy in dlq_queues; name another"
        )
    for key in of_whole_queues():
        named = policy.dead_letter_queue or policy.other_dead_letter_queues
        if policy.of(key) is not None and not named:
            raise SettingsError(
                f"expected {key} of task {task} beside a dead_letter_queue of its own, got it "
                f"alone; it is about a whole dead-letter queue, so set it in dlq_queues"
            )


def _sourced(key: str, layers: list[tuple[str, Policy]]) -> SourcedValue:
    """The value of the strongest policy that sets a key, or of all of them if values merge."""
    found: SourcedValue | None = None
    for source, policy in layers:
        value = policy.of(key)
        if value is None:
            continue
        if found is None:
            found = SourcedValue(value, source)
        elif value is not False:
            found = SourcedValue(found.value.over(value), f"{found.source}, {source}")
        if not (isinstance(value, KeyValue) and value.merges):
            break
    return found or SourcedValue(None, "default")


def _specificity(pattern: str) -> tuple[int, int]:
    """Specificity of a pattern: number of literal characters, then of one-character wildcards."""
    plain, classes = re.subn(r"\[[^]]*\]", "", pattern)
    literals = sum(character not in "*?" for character in plain)
    return literals, classes + plain.count("?")
