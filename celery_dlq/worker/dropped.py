"""Messages that Celery drops before they become a request.

An unknown task, an invalid message, a body that cannot be decoded or whose content
type is not accepted: Celery logs them and rejects or even acknowledges them, the
undecodable ones without a signal. Here the letter is stored first.

Source: https://github.com/celery/celery/blob/main/celery/worker/consumer/consumer.py
(``on_unknown_message``, ``on_unknown_task``, ``on_invalid_task``, ``on_decode_error``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery.utils.log import get_logger
from celery.worker import state
from kombu.exceptions import ContentDisallowed

from celery_dlq import logs
from celery_dlq.record import Reason
from celery_dlq.worker.failure import dropped_failure
from celery_dlq.worker.guard import HANDLING, Ending, Guard

logger = logs.get_logger("celery_dlq.worker")


def watch(consumer: Any, guard: Guard) -> None:
    """Take part in what a consumer does with messages it drops.

    Must happen before the consumer builds its message handler; again for the same
    consumer changes nothing.

    Args:
        consumer: Celery's consumer.
        guard: The worker's guard.
    """
    if getattr(consumer, "dlq_watched", False):
        return
    consumer.dlq_watched = True
    drop = _Drop(consumer, guard)
    unknown_message, unknown_task = consumer.on_unknown_message, consumer.on_unknown_task
    invalid_task, decode_error = consumer.on_invalid_task, consumer.on_decode_error

    def on_unknown_message(body: Any, message: Any) -> None:
        drop(message, body, Reason.INVALID_MESSAGE, None, lambda: unknown_message(body, message))

    def on_unknown_task(body: Any, message: Any, exc: Exception) -> None:
        drop(message, body, Reason.UNKNOWN_TASK, exc, lambda: unknown_task(body, message, exc))

    def on_invalid_task(body: Any, message: Any, exc: Exception) -> None:
        disallowed = isinstance(exc, ContentDisallowed)
        reason = Reason.UNDECODABLE_MESSAGE if disallowed else Reason.INVALID_MESSAGE
        drop(message, body, reason, exc, lambda: invalid_task(body, message, exc))

    def on_decode_error(message: Any, exc: Exception) -> None:
        drop(message, None, Reason.UNDECODABLE_MESSAGE, exc, lambda: decode_error(message, exc))

    on_close = consumer.on_close

    def on_connection_closed() -> None:
        give_up_unaccepted(guard)
        on_close()

    consumer.on_close = on_connection_closed
    consumer.on_unknown_message = on_unknown_message
    consumer.on_unknown_task = on_unknown_task
    consumer.on_invalid_task = on_invalid_task
    consumer.on_decode_error = on_decode_error


def give_up_unaccepted(guard: Guard) -> None:
    """The broker's connection is lost, and Celery empties the pool's queue.

    What was counted and not begun will be delivered anew: it is not charged.
    """
    for request in list(state.reserved_requests):
        if getattr(request, "dlq_tracked", None) is None or request.time_start is not None:
            continue
        try:
            guard.interrupted(request)
        except Exception:
            logger.exception("Task %s may be charged for a lost connection", request.id)


class _Drop:
    """Stores the letter of a dropped message, then lets Celery drop it."""

    def __init__(self, consumer: Any, guard: Guard) -> None:
        self._consumer = consumer
        self._guard = guard

    def __call__(
        self,
        message: Any,
        body: Any,
        reason: Reason,
        exc: Exception | None,
        go_on: Callable[[], None],
    ) -> None:
        try:
            ending = self._store(message, body, reason, exc, go_on)
        except Exception:
            # A bug of ours: the message stays unacknowledged rather than lost.
            logger.exception("A dropped message could not be dead-lettered")
            return
        if ending is Ending.WAITS:
            return
        if ending is Ending.BURIED:
            self._acknowledge_instead(message)
        handling = HANDLING.set(ending is Ending.BURIED)
        try:
            go_on()
        finally:
            HANDLING.reset(handling)

    def _store(
        self,
        message: Any,
        body: Any,
        reason: Reason,
        exc: Exception | None,
        go_on: Callable[[], None],
    ) -> Ending:
        def done() -> None:
            self._acknowledge_instead(message)
            go_on()

        if reason is Reason.UNKNOWN_TASK:
            text = f"no worker here knows the task {_headers(message, body).get('task')!r}"
            failure = dropped_failure(None, text)
        else:
            failure = dropped_failure(exc, "not a Celery task message")
        return self._guard.dropped(message, _headers(message, body), reason, failure, done)

    def _acknowledge_instead(self, message: Any) -> None:
        """A rejection would also copy it to the broker's own DLX, and not remove it on SQS."""
        errors = self._consumer.connection_errors

        def acknowledge(*_: Any, **__: Any) -> None:
            message.ack_log_error(get_logger("celery.worker"), errors)

        message.reject_log_error = acknowledge


def _headers(message: Any, body: Any) -> dict[str, Any]:
    """Headers in the form of protocol 2; in protocol 1 they are part of the body."""
    if isinstance(message.headers, Mapping) and "task" in message.headers:
        return dict(message.headers)
    return dict(body) if isinstance(body, Mapping) else {}
