"""Workers, policies and problems: what changes seldom and is shown on several pages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import DLQError, NotSupported
from celery_dlq.web.templating import duration

if TYPE_CHECKING:
    from celery_dlq.operations.policies import PolicyReport

_SHOWN_KEYS = ("max_deliveries", "max_retries", "dead_letter_ttl", "dead_letter_max_length")


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What changes seldom, and is read every few seconds for all pages."""

    workers: Mapping[str, frozenset[str]]  # Live workers and the queues that they consume
    sources: Mapping[str, tuple[str, ...]]  # Source queues by dead-letter queue
    policies: Mapping[str, str]  # Policy in a line by dead-letter queue
    # Drift, unknown queues, open circuit breakers, and what endangers the letters
    problems: tuple[str, ...]
    memory: Any  # The memory of the letters' Redis; `None` if unknown
    guarded: bool = True  # False if no queue and no task has a policy

    @classmethod
    def read(cls, dlq: Any) -> Surroundings:
        """Ask the store."""
        report: PolicyReport = dlq.policy_admin().policies()
        workers = dlq.backend.workers.workers(with_tasks=False)
        sources: dict[str, list[str]] = defaultdict(list)
        policies: dict[str, str] = {}
        for view in report.views:
            if view.task is None:
                for name in view.dead_letter_queues:
                    sources[name].append(view.queue)
                    policies.setdefault(name, _line(view))
        problems, memory = [*_breakers(dlq), *report.warnings], None
        with suppress(NotSupported):
            check = dlq.memory_check()
            memory = check.memory()
            problems += [] if memory is None else check.warnings_of(memory)
        return cls(
            workers={info.hostname: frozenset(info.queues) for info in workers},
            sources={name: tuple(found) for name, found in sources.items()},
            policies=policies,
            problems=tuple(problems),
            memory=memory,
            guarded=bool(report.views),
        )

    @classmethod
    def unknown(cls, exc: DLQError) -> Surroundings:
        """What is shown when it could not be read."""
        return cls(workers={}, sources={}, policies={}, problems=(str(exc),), memory=None)

    def consumers(self, dead_letter_queue: str) -> list[str]:
        """The live workers that consume a source of a dead-letter queue."""
        sources = set(self.sources.get(dead_letter_queue, ()))
        return sorted(name for name, queues in self.workers.items() if sources & queues)


def _line(view: Any) -> str:
    shown = []
    for key, value in view.to_json()["policy"].items():
        if key in _SHOWN_KEYS and value["value"] not in (None, [], ()):
            text = duration(value["value"]) if key.endswith("_ttl") else value["value"]
            shown.append(f"{key} {text}")
    return ", ".join(shown)


def _breakers(dlq: Any) -> list[str]:
    """A line for each circuit breaker that is not closed."""
    return [
        f"The circuit breaker of {one.hold.circuit.task} is {one.state}: {one.held:,} messages of "
        f"{one.hold.circuit.queue} are held. {one.hold.reason}"
        for one in (each.shown(dlq.redaction) for each in dlq.breakers().breakers())
    ]
