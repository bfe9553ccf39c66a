"""Messages that Celery drops before they become a request.

An unknown task, an invalid message, a body that cannot be decoded or whose content type is not
accepted: Celery logs them and rejects or even acknowledges them, undecodable ones without a
signal. This module stores the letter first.

Source: https://github.com/celery/celery/blob/main/celery/worker/consumer/consumer.py
(``on_unknown_message``, ``on_unknown_task``, ``on_invalid_task``, ``on_decode_error``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from celery.utils.log import get_logger
from kombu.exceptions import ContentDisallowed

from celery_dlq import logs
from celery_dlq.letters.record import Reason
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.shutdown_signals import is_stopping
from celery_dlq.writing.amqp_properties import are_unreadable
from celery_dlq.writing.failure import dropped_failure
from celery_dlq.writing.lifecycle import HANDLING, DeliveryState, is_held

logger = logs.get_logger("celery_dlq.worker")


def watch(consumer: Any, guard: Guard, on_close: Callable[[], None]) -> None:
    """Wrap a consumer's handlers of dropped messages.

    Call it before the consumer builds its message handler; a second call changes nothing.
    """
    if getattr(consumer, "dlq_watched", False):
        return
    consumer.dlq_watched = True
    drop = _Drop(consumer, guard)
    unknown_message, unknown_task = consumer.on_unknown_message, consumer.on_unknown_task
    invalid_task, decode_error = consumer.on_invalid_task, consumer.on_decode_error

    def on_unknown_message(body: Any, message: Any) -> None:
        unreadable = are_unreadable(message.headers)
        reason = Reason.UNDECODABLE_MESSAGE if unreadable else Reason.INVALID_MESSAGE
        drop(message, body, reason, None, lambda: unknown_message(body, message))

    def on_unknown_task(body: Any, message: Any, exc: Exception) -> None:
        drop(message, body, Reason.UNKNOWN_TASK, exc, lambda: unknown_task(body, message, exc))

    def on_invalid_task(body: Any, message: Any, exc: Exception) -> None:
        disallowed = isinstance(exc, ContentDisallowed)
        reason = Reason.UNDECODABLE_MESSAGE if disallowed else Reason.INVALID_MESSAGE
        drop(message, body, reason, exc, lambda: invalid_task(body, message, exc))

    def on_decode_error(message: Any, exc: Exception) -> None:
        drop(message, None, Reason.UNDECODABLE_MESSAGE, exc, lambda: decode_error(message, exc))

    consumer.on_unknown_message = on_unknown_message
    consumer.on_unknown_task = on_unknown_task
    consumer.on_invalid_task = on_invalid_task
    consumer.on_decode_error = on_decode_error
    _watch_receiving(consumer, drop, invalid_task)
    _watch_closing(consumer, guard, on_close)


def _watch_receiving(consumer: Any, drop: _Drop, invalid_task: Callable[..., None]) -> None:
    """Dead-letter a message that Celery cannot parse and that would stop the worker."""
    create_task_handler = consumer.create_task_handler

    def create_watched_handler(*args: Any, **kwargs: Any) -> Callable[[Any], None]:
        handle = create_task_handler(*args, **kwargs)

        def on_task_received(message: Any) -> None:
            try:
                handle(message)
            except Exception as exc:
                # Celery's handler of a cold shutdown runs, and may raise, in here too.
                if is_stopping() or _is_not_the_messages(exc, consumer):
                    raise
                # Once it was dispatched, the error is not in the message's form.
                celerys = getattr(message, "dlq_is_dispatched", False)
                on_invalid = partial(invalid_task, None, message, exc)
                if celerys or not drop.instead(message, exc, on_invalid):
                    raise

        return on_task_received

    consumer.create_task_handler = create_watched_handler


def _watch_closing(consumer: Any, guard: Guard, on_close: Callable[[], None]) -> None:
    """Uncount starts that Celery drops when the connection is lost or the worker stops."""
    celerys_on_close = consumer.on_close

    def on_connection_closed() -> None:
        on_close()
        guard.pool_flushes(consumer.pool, celerys_on_close)

    consumer.on_close = consumer.blueprint.on_close = on_connection_closed


def _is_not_the_messages(exc: Exception, consumer: Any) -> bool:
    """True if an error is the broker's or the machine's.

    kombu's Redis transport lists plain `KeyError` as a connection error; here it means that a
    header is missing.
    """
    theirs = (*consumer.connection_errors, *consumer.channel_errors)
    return isinstance(exc, (MemoryError, *theirs)) and type(exc) is not KeyError


def _reason_of_unreadable(message: Any) -> Reason:
    try:
        message.decode()
    except Exception:  # noqa: BLE001 - whatever a decoder raises
        return Reason.UNDECODABLE_MESSAGE
    return Reason.INVALID_MESSAGE


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
        """Store the letter, then let Celery drop the message."""
        state = self._decide(message, body, reason, exc, go_on)
        if state is DeliveryState.DONE:
            go_on()
        elif state is DeliveryState.STORED:
            self.settle(message, go_on)

    def instead(self, message: Any, exc: Exception, go_on: Callable[[], None]) -> bool:
        """Dead-letter a message that would stop the worker; False leaves it to Celery."""
        state = self._decide(message, None, _reason_of_unreadable(message), exc, go_on)
        if state is DeliveryState.STORED:
            self.settle(message, go_on)
        return state is not DeliveryState.DONE

    def _decide(
        self,
        message: Any,
        body: Any,
        reason: Reason,
        exc: Exception | None,
        go_on: Callable[[], None],
    ) -> DeliveryState:
        """Store the letter; after an internal error, leave the message to Celery."""
        try:
            keep_bytes = getattr(message, "dlq_keep_bytes", None)  # of reliable fetch
            known = reason is not Reason.UNKNOWN_TASK
            if keep_bytes is not None and known and keep_bytes():
                reason = Reason.UNDECODABLE_MESSAGE
            headers, failure = (
                _headers(message, body),
                dropped_failure(exc, "not a Celery task message"),
            )
            if reason is Reason.UNKNOWN_TASK:
                text = f"no worker here knows the task {headers.get('task')!r}"
                failure = dropped_failure(None, text)
            return self._guard.dropped(
                message, headers, reason, failure, _Waiting(self, message, go_on)
            )
        except Exception:
            self._guard.failed("drop")
            logger.critical("A dropped message is left to Celery, without a letter", exc_info=True)
            return DeliveryState.DONE

    def settle(self, message: Any, go_on: Callable[[], None]) -> None:
        """Let Celery drop a message whose letter is stored."""
        self._acknowledge_instead(message)
        handling = HANDLING.set(True)
        try:
            go_on()
        except Exception:
            # With malformed headers, Celery fails while it logs the drop.
            logger.exception("A message was dead-lettered, but Celery cannot report it")
            message.reject_log_error()
        finally:
            HANDLING.reset(handling)

    def _acknowledge_instead(self, message: Any) -> None:
        """Acknowledge: a rejection copies it to the broker's DLX, and keeps it on SQS."""
        errors = self._consumer.connection_errors

        def acknowledge(*_: Any, **__: Any) -> None:
            if not message.acknowledged:
                message.ack_log_error(get_logger("celery.worker"), errors)

        message.reject_log_error = acknowledge


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A dropped message whose letter waits for the store."""

    drop: _Drop
    message: Any
    go_on: Callable[[], None]

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """Let Celery drop the message: its letter is stored, or cannot be stored."""
        if state is DeliveryState.STORED or self.dlq_is_held():
            self.drop.settle(self.message, self.go_on)

    def dlq_is_held(self) -> bool:
        """False if the message went back to its broker, which delivers it again."""
        return is_held(self.message)


def _headers(message: Any, body: Any) -> dict[str, Any]:
    """The headers in the form of protocol 2; in protocol 1 they are part of the body."""
    if isinstance(message.headers, Mapping) and "task" in message.headers:
        return dict(message.headers)
    return dict(body) if isinstance(body, Mapping) else {}
