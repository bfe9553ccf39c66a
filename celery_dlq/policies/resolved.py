"""Resolves the policy of a message, once per task, exchange and routing key."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from celery_dlq.letters.printable import get_logger
from celery_dlq.policies.policy import Policy, policy_of
from celery_dlq.policies.queue_names import QueueNames
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.instructions import Override

logger = get_logger("celery_dlq.worker")

_MAX_RESOLVED = 4096


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """The policy and queues of the messages of one task from one queue."""

    queue: str  # Their source queue
    dead_letter_queue: str  # The queue of their letters, also of those from `RejectToDLQ`
    policy: Policy | None  # The merged policy; `None` if they are not guarded
    max_retries: int | None  # The policy's limit, else the task's own; for the letter


class PolicyCache:
    """Resolves policies and caches the results."""

    def __init__(self, policies: PolicyTable, queues: Any, default_queue: str = "celery") -> None:
        self.policies = policies
        self._queues = queues
        self._default_queue = default_queue
        self._warned = False
        self._queue_names = QueueNames(queues)
        self._policies: dict[tuple[str, str, str], ResolvedPolicy] = {}

    def apply_overrides(self, overrides: Iterable[Override], now: datetime) -> None:
        """Apply overrides to the configured policies, in place of earlier overrides."""
        found, before = list(overrides), self.policies
        if found or before.overrides or before.resting or before.lifted:
            from celery_dlq.policies.overrides import applied  # noqa: PLC0415 - few have any

            self.policies = applied(before, found, now)
        self._policies.clear()
        for queue in self.policies.resting:
            logger.warning("Policy of queue %s changes soon; its letters are left alone", queue)
        for queue, (policy, source) in self.policies.overrides.items():
            logger.warning(
                "Policy of queue %s, overridden by %s: %s", queue, source, policy.to_json()
            )

    def may_guard(self, task: Any) -> bool:
        """True if a message of this task could be guarded; with ``None``, of any task."""
        return bool(self.policies) or (task is not None and policy_of(task) is not None)

    def have_exceptions(self, task: Any) -> bool:
        """True if a policy that could guard messages of this task has ``exceptions``."""
        policies = [*self.policies.queues.values(), policy_of(task)]
        return any(policy is not None and policy.of("exceptions") for policy in policies)

    def of_death(self, resolved: ResolvedPolicy, rule: Any) -> ResolvedPolicy:
        """The resolved policy of a message that died by an exception."""
        if rule is None:
            return resolved
        target, limit = rule.dead_letter_queue, rule.max_retries
        if target is None or self.policies.is_dead_letter_queue(resolved.queue):
            target = resolved.dead_letter_queue
        limits = [each for each in (limit, resolved.max_retries) if each is not None]
        if resolved.policy is None or resolved.policy.max_retries is None:
            limits = limits[:1]  # the rule's own before the task's
        return replace(resolved, dead_letter_queue=target, max_retries=min(limits, default=None))

    def resolve(self, delivery_info: dict[str, Any], task: Any = None) -> ResolvedPolicy:
        """The resolved policy of a message."""
        exchange, routing_key = delivery_info.get("exchange"), delivery_info.get("routing_key")
        place = (
            "" if task is None else task.name,
            exchange if type(exchange) is str else str(exchange or ""),
            routing_key if type(routing_key) is str else str(routing_key or ""),
        )
        resolved = self._policies.get(place)
        if resolved is None:
            if len(self._policies) >= _MAX_RESOLVED:  # routing keys generated at run time
                self._policies.clear()
            resolved = self._policies[place] = self._resolve(place[1], place[2], task)
        return resolved

    def _resolve(self, exchange: str, routing_key: str, task: Any) -> ResolvedPolicy:
        queue = self._known_queue(self._queue_names.queue_of(exchange, routing_key), routing_key)
        task_policy = None if task is None else policy_of(task)
        policy = self.policies.resolve(queue, task_policy)
        target = self.policies.dead_letter_queue_of(queue, task_policy)
        return ResolvedPolicy(queue, target, policy, _max_retries(policy, task))

    def _known_queue(self, queue: str, routing_key: str) -> str:
        """A queue that the app knows: else every generated routing key would count as a queue.

        Counts are kept by queue name, so every worker of the app must choose the same one.
        """
        known, policies = self._queues, self.policies
        if any(
            queue in names for names in (known, known.aliases, policies.queues, policies.overrides)
        ):
            return queue
        consumed = sorted(known.consume_from)
        if not consumed:
            return queue
        instead = consumed[0] if self._default_queue not in consumed else self._default_queue
        if not self._warned:
            self._warned = True
            logger.warning(
                "Messages with the routing key %r come from no queue that this app knows; such "
                "messages are treated as those of %r. Name their queue in task_queues",
                routing_key,
                instead,
            )
        return str(instead)


def _max_retries(policy: Policy | None, task: Any) -> int | None:
    if policy is not None and policy.max_retries is not None:
        return policy.max_retries
    limit = getattr(task, "max_retries", None)
    return limit if isinstance(limit, int) else None
