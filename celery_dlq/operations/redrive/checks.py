"""What is checked before letters are changed: queues, tasks, the bin, an edit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypedDict

from celery_dlq.config import Settings
from celery_dlq.errors import DLQError
from celery_dlq.events import whoami
from celery_dlq.features.redaction.masking import Redaction
from celery_dlq.operations.edit import MAX_CHANGE_CHARS, Edit, edited
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.redrive.canary import Canary
from celery_dlq.operations.redrive.dry_run import Check, DryRun, Targets, refuse_lost
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions, outgoing
from celery_dlq.operations.redrive.publisher import broker_name
from celery_dlq.operations.redrive.selection import RawEntry
from celery_dlq.store.instructions import Hold
from celery_dlq.store.records import Clock
from celery_dlq.store.store import Store


class Checks:
    """Refuses what would lose letters, or cannot be done."""

    def __init__(
        self, app: Any, settings: Settings, backend: Store, policies: PolicyAdmin, clock: Clock
    ) -> None:
        self._app = app
        self._settings = settings
        self._store = backend.letters
        self._registry = backend.workers
        self._instructions = backend.instructions
        self._policies = policies
        self._clock = clock

    def check_target(self, to_queue: str | None) -> None:
        """Refuse a dead-letter queue as the queue to publish to."""
        if to_queue is None:
            return
        if to_queue in self._store.names() or self._policies.is_dead_letter_queue(to_queue):
            raise DLQError(
                f"expected to_queue to be a queue of tasks, got the dead-letter queue {to_queue!r}"
            )

    def targets(self, to_queue: str | None) -> Targets:
        """The queues and tasks of a redrive."""
        return Targets(
            self._app,
            self._registry.workers(),
            configured=self._policies.configured_queues(),
            guarded=self._policies.guarded_queues(),
            holds=self._holds_in_force,
            to_queue=to_queue,
        )

    def _holds_in_force(self) -> Sequence[Hold]:
        now, brokers = self._instructions.now(), ("", broker_name(self._app))
        holds = self._instructions.of(Hold)
        return [one for one in holds if one.in_force(now) and one.broker in brokers]

    def loss(self, to_queue: str | None) -> Callable[[RawEntry], str]:
        """What says why the message of a letter would be lost."""
        targets = self.targets(to_queue)
        if to_queue is not None:
            there, why = targets.queue(to_queue)
            check = Check(name=to_queue, letters=0, found=there, why=why)
            refuse_lost(DryRun(queues=(check,)))
        return targets.loss

    def check_edit(self, change: Edit, found: RawEntry, options: Mapping[str, Any]) -> str:
        """Apply an edit, to see if it fits; return it as its job keeps it, empty if too long."""
        self.check_target(options.get("to_queue"))
        message = self.message(found, options)
        self.edited(change)(message)
        text = change.to_text()
        return text if len(text) <= MAX_CHANGE_CHARS else ""

    def edited(self, change: Edit, actor: str | None = None) -> Callable[[Outgoing], Outgoing]:
        """A function that applies an edit; values that people cannot see stay as they are."""
        redaction = Redaction.of(self._settings)
        return edited(change, actor=actor or whoami(), now=self._clock(), redaction=redaction)

    def message(self, found: RawEntry, options: Mapping[str, Any]) -> Outgoing:
        """The message of a letter, as a redrive with these options would publish it."""
        return outgoing(found, RedriveOptions.from_json(options), redrive_id="", now=self._clock())


class RedriveKeys(TypedDict, total=False):
    """The options of a redrive; `Operations.redrive` says what they mean."""

    rate: float | None
    limit: int | None
    to_queue: str | None
    delay: float | timedelta
    new_id: bool
    keep_count: bool
    canary: int | None
    max_failures: int
    canary_wait: float | timedelta


def redrive_options(
    *,
    delay: float | timedelta = 0,
    canary: int | None = None,
    max_failures: int = 0,
    canary_wait: float | timedelta = 60,
    **options: Any,
) -> dict[str, Any]:
    """The checked options of a redrive, as its job keeps them."""
    kept = RedriveOptions(delay_seconds=_seconds(delay), **options).to_json()
    if canary is not None:
        wait_seconds = _seconds(canary_wait)
        trial = Canary(letters=canary, max_failures=max_failures, wait_seconds=wait_seconds)
        kept["canary"] = trial.to_json()
    return kept


def _seconds(value: float | timedelta) -> float:
    return value.total_seconds() if isinstance(value, timedelta) else float(value)
