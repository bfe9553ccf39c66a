"""The info that a worker registers: its queues, its tasks, its policies."""

from __future__ import annotations

from typing import Any

from celery_dlq.config import Settings
from celery_dlq.decorators import task_policies
from celery_dlq.letters.record import EPOCH
from celery_dlq.policies.drift import TASK_PREFIX
from celery_dlq.store.records import MAX_TASKS, WorkerInfo


def worker_info(app: Any, settings: Settings) -> WorkerInfo:
    """The info that all workers of an app share; hostname, pid, version and start are empty."""
    policies = {
        **settings.queues,
        **{f"{TASK_PREFIX}{name}": policy for name, policy in task_policies(app).items()},
    }
    tasks = sorted(name for name in app.tasks if not name.startswith("celery."))
    return WorkerInfo(
        hostname="",
        pid=0,
        version="",
        started_at=EPOCH,
        queues=tuple(sorted(app.amqp.queues.consume_from)),
        tasks=tuple(tasks[:MAX_TASKS]),
        policies={name: policy.to_json() for name, policy in policies.items()},
    )
