"""Messages that Celery drops before they become a request.

An unknown task, an invalid message, a body that cannot be decoded or whose content type is not
accepted: Celery logs them and rejects or even acknowledges them, undecodable ones without a
signal. This module stores the letter first.

Source: https://github.com/celery/celery/blob/main/celery/worker/consumer/consumer.py
(``on_unknown_message``, ``on_unknown_task``, ``on_invalid_task``, ``on_decode_error``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

from celery.utils.log import get_logger
from kombu.exceptions import ContentDisallowed

from celery_dlq.letters import printable
from celery_dlq.letters.headers import UNREADABLE_HEADERS
from celery_dlq.letters.record import Reason
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.shutdown_signals import is_stopping
from celery_dlq.writing.failure import dropped_failure
from celery_dlq.writing.lifecycle import DUMPING, HANDLING, DeliveryState, is_held

logger = printable.get_logger("celery_dlq.worker")


def watch_dropped_messages(consumer: Any, guard: Guard) -> None:
    """Wrap a consumer's handlers of dropped messages.

    Call it before the consumer builds its message handler; a second call changes nothing.
    """
    if getattr(consumer, "dlq_watched", False):
        return
    consumer.dlq_watched = True
    unknown_message, unknown_task = map(
        dumping, (consumer.on_unknown_message, consumer.on_unknown_task)
    )
    invalid_task, decode_error = map(dumping, (consumer.on_invalid_task, consumer.on_decode_error))

    def drop(
        message: Any,
        body: Any,
        reason: Reason,
        exc: Exception | None,
        go_on: Callable[..., None],
        *args: Any,
    ) -> None:
        dropped = _Dropped(consumer, guard, message, partial(go_on, *args))
        if not dropped.dead_letter(body, reason, exc):
            go_on(*args)

    def on_unknown_message(body: Any, message: Any) -> None:
        unreadable = are_unreadable(message.headers)
        reason = Reason.UNDECODABLE_MESSAGE if unreadable else Reason.INVALID_MESSAGE
        drop(message, body, reason, None, unknown_message, body, message)

    def on_unknown_task(body: Any, message: Any, exc: Exception) -> None:
        drop(message, body, Reason.UNKNOWN_TASK, exc, unknown_task, body, message, exc)

    def on_invalid_task(body: Any, message: Any, exc: Exception) -> None:
        disallowed = isinstance(exc, ContentDisallowed)
        reason = Reason.UNDECODABLE_MESSAGE if disallowed else Reason.INVALID_MESSAGE
        drop(message, body, reason, exc, invalid_task, body, message, exc)

    def on_decode_error(message: Any, exc: Exception) -> None:
        drop(message, None, Reason.UNDECODABLE_MESSAGE, exc, decode_error, message, exc)

    consumer.on_unknown_message = on_unknown_message
    consumer.on_unknown_task = on_unknown_task
    consumer.on_invalid_task = on_invalid_task
    consumer.on_decode_error = on_decode_error
    _watch_receiving(consumer, guard, invalid_task)
    _watch_closing(consumer, guard)


def dumping(handler: Callable[..., None]) -> Callable[..., None]:
    """Wrap a handler of Celery's that drops a message: what it logs has the message whole."""

    @wraps(handler)
    def handle(*args: Any) -> None:
        token = DUMPING.set(True)
        try:
            handler(*args)
        finally:
            DUMPING.reset(token)

    return handle


def _watch_receiving(consumer: Any, guard: Guard, invalid_task: Callable[..., None]) -> None:
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
                dropped = _Dropped(
                    consumer, guard, message, partial(invalid_task, None, message, exc)
                )
                if celerys or not dropped.dead_letter(None, _reason_of_unreadable(message), exc):
                    raise

        return on_task_received

    consumer.create_task_handler = create_watched_handler


def _watch_closing(consumer: Any, guard: Guard) -> None:
    """Uncount starts that Celery drops when the connection is lost or the worker stops."""
    celerys_on_close = consumer.on_close

    def on_connection_closed() -> None:
        guard.flush_pool(consumer.pool, celerys_on_close)

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


class _Dropped:
    """A message that Celery is about to drop; its letter is stored first, now or later."""

    def __init__(
        self, consumer: Any, guard: Guard, message: Any, go_on: Callable[[], None]
    ) -> None:
        self._consumer = consumer
        self._guard = guard
        self.message = message
        self._go_on = go_on  # Celery's way to drop it

    def dead_letter(self, body: Any, reason: Reason, exc: Exception | None) -> bool:
        """Store the letter, then let Celery drop the message; False leaves it to Celery."""
        decide = partial(self._decide, body, reason, exc)
        try:
            state = decide()
        except Exception as problem:  # noqa: BLE001 - an error of ours
            state = self._guard.undecided(self, partial(self._decide_again, decide), problem)
        if state is DeliveryState.STORED:
            self._let_celery_drop()
        return state is not DeliveryState.DONE

    def _decide(self, body: Any, reason: Reason, exc: Exception | None) -> DeliveryState:
        message = self.message
        keep_bytes = getattr(message, "dlq_keep_bytes", None)  # of reliable fetch
        known = reason is not Reason.UNKNOWN_TASK
        if keep_bytes is not None and known and keep_bytes():
            reason = Reason.UNDECODABLE_MESSAGE
        headers = _headers_of(message, body)
        failure = dropped_failure(exc, "not a Celery task message")
        if reason is Reason.UNKNOWN_TASK:
            text = f"no worker here knows the task {headers.get('task')!r}"
            failure = dropped_failure(None, text)
        return self._guard.decide_dropped(message, headers, reason, failure, self)

    def _decide_again(self, decide: Callable[[], DeliveryState]) -> None:
        state = decide()
        if state is DeliveryState.DONE:
            self._go_on()
        elif state is DeliveryState.STORED:
            self._let_celery_drop()

    def dlq_wait_is_over(self, state: DeliveryState) -> None:
        """Let Celery drop the message if its letter is stored; else give it back."""
        if state is DeliveryState.STORED:
            self._let_celery_drop()
        elif is_held(self.message):
            self.message.reject_log_error(
                get_logger("celery.worker"), self._consumer.connection_errors, requeue=True
            )

    def _let_celery_drop(self) -> None:
        """Let Celery drop it, and acknowledge where Celery rejects.

        A rejection copies the message to the broker's DLX, and keeps it on SQS.
        """
        message, errors = self.message, self._consumer.connection_errors

        def acknowledge(*_: Any, **__: Any) -> None:
            if not message.acknowledged:
                message.ack_log_error(get_logger("celery.worker"), errors)

        message.reject_log_error = acknowledge
        handling = HANDLING.set(True)
        try:
            self._go_on()
        except Exception:
            # With malformed headers, Celery fails while it logs the drop.
            logger.exception("A message was dead-lettered, but Celery cannot report it")
            acknowledge()
        finally:
            HANDLING.reset(handling)


def _headers_of(message: Any, body: Any) -> dict[str, Any]:
    """The headers in the form of protocol 2; in protocol 1 they are part of the body."""
    if isinstance(message.headers, Mapping) and "task" in message.headers:
        return dict(message.headers)
    return dict(body) if isinstance(body, Mapping) else {}


def are_unreadable(headers: object) -> bool:
    """True for headers in place of which `UNREADABLE_HEADERS` stands."""
    return isinstance(headers, Mapping) and UNREADABLE_HEADERS in headers
