"""The setting ``dlq_adopt``: queues into which the broker itself puts dead messages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from celery_dlq.errors import SettingsError
from celery_dlq.policies.checks import expected, name_text, queue_name

if TYPE_CHECKING:
    from celery_dlq.config import Settings


def adopt(where: str, value: object) -> Mapping[str, str | None]:
    """Check the setting: a mapping of queue to dead-letter queue."""
    if not isinstance(value, Mapping):
        raise expected(where, "a mapping of queue to dead-letter queue", value)
    adopted = {}
    for queue, target in value.items():
        source = name_text(f"a queue name in {where}", queue)
        adopted[source] = None if target is None else queue_name(f"{where}[{source!r}]", target)
    return adopted


def check(settings: Settings) -> None:
    """Refuse to adopt from or into a queue that has a policy."""
    for queue, target in settings.of("adopt").items():
        check_adoption(settings, queue, target, "dlq_adopt")


def check_adoption(settings: Settings, queue: str, target: str | None, where: str) -> None:
    """Refuse to adopt from or into a queue that has a policy; ``None``: its message's own."""
    if queue in settings.queues:
        raise SettingsError(
            f"expected {where} to name a queue of messages that are dead, got {queue!r}, whose "
            f"tasks are guarded by dlq_queues[{queue!r}]; all of them would become letters"
        )
    if target is not None and target in settings.queues:
        raise SettingsError(
            f"expected {where} to put the letters of {queue!r} into a dead-letter queue, "
            f"got {target!r}, which has a policy in dlq_queues"
        )


def consumed_already(queue: str, hostname: str, *, by: str) -> SettingsError:
    """Make the error for a queue that a worker consumes."""
    return SettingsError(
        f"expected {by} to name a queue of messages that are dead, got {queue!r}, which worker "
        f"{hostname} consumes; all its tasks would become letters"
    )
