"""Track the unfinished messages of this process, without which "no letters" proves nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

from celery import signals

from celery_dlq.decorators import RejectToDLQ
from celery_dlq.letters.record import Delivery, Outcome
from celery_dlq.store.counter import DeliveryCounter
from celery_dlq.store.new_letters import NewLetters
from celery_dlq.store.worker_records import Count, CountStatus, MessageKey


class Ledger:
    """Messages that were published and are not finished.

    A guarded message is finished when the guard stores its letter or deletes its count; any
    other message when its task has run. The task's result comes too early: Celery stores it
    before the letter is stored and the message acknowledged.
    """

    def __init__(self) -> None:
        self.used = False
        self._under_way: dict[tuple[str, int], str] = {}
        self._guarded: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def watch_signals(self, stack: ExitStack) -> None:
        """Track the end of unguarded messages until the stack is closed."""
        for signal, receiver in (
            (signals.task_postrun, self._record_run),
            (signals.task_revoked, self._revoked),
            (signals.task_unknown, self._unknown),
        ):
            signal.connect(receiver, weak=False)
            stack.callback(signal.disconnect, receiver)

    def watch_publishing(self, app: Any, stack: ExitStack) -> None:
        """Track what an app publishes, until the stack is closed.

        Patches the last step, because a test that mocks ``send_task`` publishes nothing.
        """
        send = app.amqp.send_task_message

        def tracking(producer: Any, name: str, message: Any, *args: Any, **options: Any) -> Any:
            fields = message.headers if "id" in message.headers else message.body  # protocol 2, 1
            published = (fields["id"], fields.get("retries") or 0)
            self._published(published, name)
            try:
                return send(producer, name, message, *args, **options)
            except BaseException:
                self._check_closed(published)
                raise

        stack.enter_context(patch.object(app.amqp, "send_task_message", tracking))

    def watch_stores(self, stack: ExitStack) -> None:
        """Track the end of guarded messages until the stack is closed.

        Patches the classes: a worker has connections of its own, and one of the whole test session
        has them already.
        """
        stores: tuple[tuple[type, str, Callable[..., None]], ...] = (
            (DeliveryCounter, "count_delivery", self._counted),
            (DeliveryCounter, "count_first", self._counted_first),
            (DeliveryCounter, "record_end", self._record_end),
            (DeliveryCounter, "succeeded", self._record_done),
            (
                NewLetters,
                "dead_letter",
                lambda stored, _letter, key: self._record_done(stored, key),
            ),
        )
        for kind, name, then in stores:
            stack.enter_context(patch.object(kind, name, _followed_by(getattr(kind, name), then)))

    def under_way(self) -> list[str]:
        """The unfinished messages, as ``task[id]``."""
        with self._lock:
            return [f"{name}[{task_id}]" for (task_id, _), name in self._under_way.items()]

    def _published(self, message: tuple[str, int], name: str) -> None:
        with self._lock:
            self.used = True
            self._under_way[message] = name

    def _counted(self, count: Count, key: MessageKey, *_: Any) -> None:
        if count.status is CountStatus.COUNTED:
            self._guarded.add(_message(key))

    def _counted_first(self, _: object, key: MessageKey, *_more: Any) -> None:
        self._guarded.add(_message(key))

    def _record_end(self, _: None, key: MessageKey, delivery: Delivery) -> None:
        if delivery.outcome is Outcome.RETRIED:  # else it is delivered again
            self._check_closed(_message(key))

    def _record_done(self, _: object, key: MessageKey, *_more: Any) -> None:
        self._check_closed(_message(key))

    def _check_closed(self, *messages: tuple[str, int]) -> None:
        with self._lock:
            for message in messages:
                self._under_way.pop(message, None)

    def _closed_all(self, task_id: str) -> None:
        self._check_closed(*[message for message in list(self._under_way) if message[0] == task_id])

    def _record_run(self, task_id: str, task: Any, retval: Any, **_: Any) -> None:
        message = (task_id, task.request.retries or 0)
        if message not in self._guarded and not isinstance(retval, RejectToDLQ):
            self._check_closed(message)

    def _revoked(self, request: Any, **_: Any) -> None:
        self._closed_all(str(request.id))

    def _unknown(self, id: Any, **_: Any) -> None:  # noqa: A002 - Celery's name
        self._closed_all(str(id))


def _followed_by(method: Callable[..., Any], then: Callable[..., None]) -> Callable[..., Any]:
    """The method, after which another function gets its result and arguments."""

    def both(self: Any, *args: Any, **options: Any) -> Any:
        result = method(self, *args, **options)
        then(result, *args)
        return result

    return both


def _message(key: MessageKey) -> tuple[str, int]:
    return (key.task_id, key.retries)
