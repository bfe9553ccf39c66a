"""Which policy guards a message, found out once per task, exchange and routing key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from celery_dlq.decorators import policy_of
from celery_dlq.logs import get_logger
from celery_dlq.policies.policy import Policy
from celery_dlq.policies.queue_names import QueueNames
from celery_dlq.policies.table import PolicyTable

logger = get_logger("celery_dlq.worker")

_MOST_PLANS = 4096


@dataclass(frozen=True, slots=True)
class ResolvedPolicy:
    """What guards the messages of one task from one queue.

    Attributes:
        queue: The queue they come from.
        dead_letter_queue: Where their letters go, also those that a task demands.
        policy: The merged policy; ``None`` if they are not guarded.
        max_retries: The policy's limit, else the task's own; for the letter.
    """

    queue: str
    dead_letter_queue: str
    policy: Policy | None
    max_retries: int | None


class PolicyCache:
    """Makes and remembers policy_cache.

    Args:
        policies: The app's queue policies.
        queues: ``app.amqp.queues``.
        default_queue: The setting ``task_default_queue``.
    """

    def __init__(self, policies: PolicyTable, queues: Any, default_queue: str = "celery") -> None:
        self.policies = policies
        self._queues = queues
        self._default_queue = default_queue
        self._told = False
        self._queue_names = QueueNames(queues)
        self._policies: dict[tuple[str, str, str], ResolvedPolicy] = {}

    def obey(self, overrides: Mapping[str, tuple[Policy, str]]) -> None:
        """Put overrides over the configured policies; those of before are forgotten."""
        self.policies = PolicyTable(self.policies.queues, self.policies.tasks, overrides)
        self._policies.clear()
        for queue, (policy, source) in overrides.items():
            logger.warning(
                "Policy of queue %s, overridden by %s: %s", queue, source, policy.to_json()
            )

    def may_guard(self, task: Any) -> bool:
        """Whether any message of this task could be guarded; ``None``: of every task."""
        return bool(self.policies) or (task is not None and policy_of(task) is not None)

    def of(self, delivery_info: dict[str, Any], task: Any = None) -> ResolvedPolicy:
        """The resolved of a message.

        Args:
            delivery_info: Its exchange and routing key.
            task: Its task; ``None`` if there is no such task here.
        """
        exchange, routing_key = delivery_info.get("exchange"), delivery_info.get("routing_key")
        place = (
            "" if task is None else task.name,
            exchange if type(exchange) is str else str(exchange or ""),
            routing_key if type(routing_key) is str else str(routing_key or ""),
        )
        resolved = self._policies.get(place)
        if resolved is None:
            if len(self._policies) >= _MOST_PLANS:  # routing keys made up at run time
                self._policies.clear()
            resolved = self._policies[place] = self._make(place[1], place[2], task)
        return resolved

    def _make(self, exchange: str, routing_key: str, task: Any) -> ResolvedPolicy:
        queue = self._known_queue(self._queue_names.of(exchange, routing_key), routing_key)
        policy = self.policies.resolve(queue, None if task is None else policy_of(task))
        target = (policy or Policy()).dead_letter_queue_of(queue)
        return ResolvedPolicy(queue, target, policy, _max_retries(policy, task))

    def _known_queue(self, queue: str, routing_key: str) -> str:
        """A queue that the app knows: anybody can make up routing keys, and each would be one.

        Counts go by the queue's name, so every worker of the app must come to the same one.
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
        if not self._told:
            self._told = True
            logger.warning(
                "Messages with the routing key %r come from no queue that this app knows; they "
                "and others like them are guarded as those of %r. Name their queue in task_queues",
                routing_key,
                instead,
            )
        return str(instead)


def _max_retries(policy: Policy | None, task: Any) -> int | None:
    if policy is not None and policy.max_retries is not None:
        return policy.max_retries
    limit = getattr(task, "max_retries", None)
    return limit if isinstance(limit, int) else None
