"""Letters of messages that wait in the lists of a Redis broker, made by an operator's process."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from celery.app.task import Context
from celery.exceptions import TaskRevokedError

from celery_dlq.config import Settings
from celery_dlq.decorators import policy_of
from celery_dlq.events import DeadLettered, Events
from celery_dlq.features.adopt.letter import request_fields
from celery_dlq.features.redaction.masking import Redaction
from celery_dlq.letters.record import DeadLetter, Reason
from celery_dlq.logs import get_logger
from celery_dlq.metrics import DEAD_LETTERS, Measuring
from celery_dlq.policies.decisions import Die
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.policies.table import PolicyTable
from celery_dlq.store.base import Backend, Clock, Demand, LetterOutbox, MessageKey
from celery_dlq.transport.redis.waiting import WaitingEntry, WaitingMessages
from celery_dlq.writing.capture import Message, captured
from celery_dlq.writing.letter import Death, letter_of
from celery_dlq.writing.memory_limit import MemoryLimit

logger = get_logger("celery_dlq")

_LEASE_SECONDS = 60.0


class WaitingLetters:
    """Dead-letters messages that wait in the lists of a Redis broker; a context manager."""

    def __init__(
        self,
        app: Any,
        settings: Settings,
        backend: Backend,
        *,
        policies: Callable[[], PolicyTable],
        queues: Callable[[], frozenset[str]],
        outbox: LetterOutbox | None,
        limit: MemoryLimit,
        events: Events,
        measuring: Measuring,
        clock: Clock,
    ) -> None:
        self._app = app
        self._settings = settings
        self._backend = backend
        self._policies = policies
        self._queues = queues
        self._outbox = outbox
        self._limit = limit
        self._events = events
        self._measuring = measuring
        self._clock = clock
        self._waiting = WaitingMessages(app)

    def __enter__(self) -> WaitingLetters:  # noqa: PYI034 - Self came with Python 3.11
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.close()

    def find(self, task_id: str) -> list[WaitingEntry]:
        """The entries of a task; empty if the broker is no Redis."""
        if not self._waiting.supported:
            return []
        wanted, queues = _names(task_id), sorted(self._queues())
        found = (one for queue in queues for one in self._waiting.in_lists(queue, wanted))
        return [one for one in found if self._is_of(one, task_id)]

    def may_be_taken(self, task_id: str) -> bool:
        """True if a worker has taken the message of a task; or if only the broker knows."""
        if not self._waiting.supported:
            return True
        return any(self._is_of(one, task_id) for one in self._waiting.held(_names(task_id)))

    def _is_of(self, found: WaitingEntry, task_id: str) -> bool:
        return bool(_fields(self._waiting.message(found)).get("id") == task_id)

    def dead_letter(self, found: WaitingEntry, demand: Demand) -> DeadLetter | None:
        """Take a message, store its letter, end its task, remove the message; in this order."""
        message = self._waiting.message(found)
        tag = self._waiting.take(found, _LEASE_SECONDS)
        if tag is None:
            return None
        fields = _fields(message)
        try:
            letter = self._store(captured(message, fields), found.queue, demand)
        except Exception:
            self._waiting.give_back(tag)
            raise
        self._fail(letter, message, fields)
        self._waiting.acknowledge(tag)
        return letter

    def _store(self, message: Message, queue: str, demand: Demand) -> DeadLetter:
        resolved = self._resolved(message, queue)
        key = MessageKey(
            dead_letter_queue=resolved.dead_letter_queue,
            task_id=message.task_id,
            retries=message.retries,
            redrives=message.redrives,
            nesting=message.nesting,
        )
        history = self._backend.counter.history(key)
        death = Death(
            resolved=resolved,
            key=key,
            message=message,
            verdict=Die(Reason.OPERATOR, demand.text),
            failure=None,
            history=history,
            deliveries=max(
                (one.number for one in history if one.retries == key.retries), default=0
            ),
            now=self._clock(),
            hostname=socket.gethostname(),
            pid=os.getpid(),
            release=history[-1].release if history else None,
            redaction=Redaction.of(self._settings),
        )
        self._limit.tick()
        letter = self._limit.fit(letter_of(death))
        if self._outbox is not None:
            self._outbox.add(letter)
        self._backend.letters.dead_letter(letter, key)
        queues = (letter.source_queue, letter.dead_letter_queue)
        self._measuring.counts.count(DEAD_LETTERS, *queues, letter.reason.value)
        self._measuring.tick()
        self._events.emit(DeadLettered(at=letter.dead_lettered_at, letter=letter))
        return letter

    def _resolved(self, message: Message, queue: str) -> ResolvedPolicy:
        table, task = self._policies(), self._app.tasks.get(message.task_name)
        task_policy = None if task is None else policy_of(task)
        policy = table.resolve(queue, task_policy)
        target = table.dead_letter_queue_of(queue, task_policy)
        return ResolvedPolicy(queue, target, policy, policy.max_retries if policy else None)

    def _fail(self, letter: DeadLetter, message: Any, fields: Mapping[str, Any]) -> None:
        """End the task with a failure, so that callers stop waiting; its chord fails, too.

        Callbacks are in the body, which is read here only if it is JSON.
        """
        embed: Mapping[str, Any] = {}
        with suppress(ValueError, TypeError, LookupError, RecursionError):
            if message.content_type == "application/json" and "compression" not in message.headers:
                embed = json.loads(message.body)[2] or {}
        task = self._app.tasks.get(letter.task_name)
        backend = self._app.backend if task is None else task.backend
        where = f"is in {letter.dead_letter_queue}: {letter.description}"
        exc = TaskRevokedError(f"{letter.task_name}[{letter.task_id}] {where}")
        try:
            backend.mark_as_failure(
                letter.task_id,
                exc,
                request=Context({**fields, **embed}),
                store_result=not fields.get("ignore_result"),
            )
        except Exception:
            logger.exception(
                "Task %s is dead-lettered, but its result is not stored", letter.task_id
            )


def _names(task_id: str) -> Callable[[bytes], bool]:
    needle = json.dumps(task_id)[1:-1].encode()
    return lambda entry: needle in entry


def _fields(message: Any) -> Mapping[str, Any]:
    """The fields of a task message, whatever its protocol; empty if it is none."""
    if message is None or not isinstance(message.headers, Mapping):
        return {}
    return request_fields(message, message.headers)
