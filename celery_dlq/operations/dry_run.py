"""Dry run: report what a redrive would do, and whether its queues and tasks exist."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

from celery_dlq.backends.base import WorkerInfo
from celery_dlq.operations.message import RedriveOptions
from celery_dlq.operations.selection import RawEntry
from celery_dlq.transport.aws import is_sqs, queue_exists

_MAX_NAMES = 1000
_OTHERS = "(others)"

Progress = Callable[[int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A queue or task that a redrive needs.

    Attributes:
        name: The queue or the task.
        letters: Number of letters that need it.
        found: True if it exists; ``None`` if that is unknown.
        why: The place where it was found, or the places that were searched.
    """

    name: str
    letters: int
    found: bool | None
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The effect that a redrive would have.

    Attributes:
        letters: Number of letters that it would publish.
        corrupt: Number of entries that are no letters; it would skip them.
        bytes: Total size of the bodies.
        queues: The queues that it would publish to.
        tasks: The tasks that would run.
    """

    letters: int = 0
    corrupt: int = 0
    bytes: int = 0
    queues: tuple[Check, ...] = field(default=())
    tasks: tuple[Check, ...] = field(default=())

    @property
    def ready(self) -> bool:
        """True unless a queue or task is known to be missing."""
        return all(check.found is not False for check in (*self.queues, *self.tasks))

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names, and ``ready``."""
        return {**asdict(self), "ready": self.ready}


def dry_run(
    app: Any,
    found: Iterable[RawEntry],
    options: RedriveOptions,
    workers: Sequence[WorkerInfo],
) -> DryRun:
    """Report what a redrive would do; changes nothing.

    Args:
        app: The Celery app.
        found: The letters.
        options: The options of the redrive.
        workers: The infos of live workers.
    """
    queues: Counter[str] = Counter()
    tasks: Counter[str] = Counter()
    letters = corrupt = size = 0
    for entry in found:
        if not entry.is_letter:
            corrupt += 1
            continue
        letters += 1
        size += len(entry.fields.get(b"body", b""))
        _count(queues, options.to_queue or entry.text("source_queue"))
        _count(tasks, entry.text("task_name"))
    return DryRun(
        letters=letters,
        corrupt=corrupt,
        bytes=size,
        queues=tuple(_queue(app, name, count, workers) for name, count in queues.most_common()),
        tasks=tuple(_task(name, count, workers) for name, count in tasks.most_common()),
    )


def _count(names: Counter[str], name: str) -> None:
    names[name if name in names or len(names) < _MAX_NAMES else _OTHERS] += 1


def _task(name: str, letters: int, workers: Sequence[WorkerInfo]) -> Check:
    if name == _OTHERS or not workers:
        why = "no live worker has registered its tasks" if name != _OTHERS else "too many to check"
        return Check(name=name, letters=letters, found=None, why=why)
    able = [info.hostname for info in workers if name in info.tasks]
    if able:
        more = f" and {len(able) - 1} more" if len(able) > 1 else ""
        return Check(name=name, letters=letters, found=True, why=f"registered by {able[0]}{more}")
    why = f"registered by none of {len(workers)} live workers"
    return Check(name=name, letters=letters, found=False, why=why)


def _queue(app: Any, name: str, letters: int, workers: Sequence[WorkerInfo]) -> Check:
    consumers = [info.hostname for info in workers if name in info.queues]
    if consumers:
        return Check(name=name, letters=letters, found=True, why=f"consumed by {consumers[0]}")
    if name == _OTHERS:
        return Check(name=name, letters=letters, found=None, why="too many to check")
    exists = _on_broker(app, name)
    if exists:
        why = "on the broker; no live worker consumes it"
    elif exists is None:
        why = "this broker does not answer"
    elif dict.get(app.amqp.queues, name) is not None:
        why = "declared by the app; the broker creates it at the first publish"
        return Check(name=name, letters=letters, found=True, why=why)
    else:
        why = "neither on the broker, nor declared by the app, nor consumed by a live worker"
    return Check(name=name, letters=letters, found=exists, why=why)


def _on_broker(app: Any, name: str) -> bool | None:
    """True if the broker has a queue; ``None`` if that is unknown."""
    try:
        with app.connection_for_write() as connection:
            if connection.transport.driver_type == "amqp":
                return _declared(connection, name)
            channel = connection.default_channel
            if connection.transport.driver_type == "redis":
                key = channel.keyprefix_queue % name
                return bool(channel.client.exists(key) or channel.client.exists(name))
            if is_sqs(connection):
                return queue_exists(channel, name)
            return bool(channel._has_queue(name))  # noqa: SLF001 - kombu's virtual transports have no other way
    except Exception:  # noqa: BLE001 - a check that fails leaves it unknown
        return None


def _declared(connection: Any, name: str) -> bool | None:
    try:
        connection.default_channel.queue_declare(queue=name, passive=True)
    except connection.channel_errors as exc:
        code = getattr(exc, "reply_code", getattr(exc, "code", None))
        return False if code == 404 else None  # noqa: PLR2004 - AMQP's NOT_FOUND
    finally:
        with suppress(Exception):
            connection.default_channel.close()
    return True
