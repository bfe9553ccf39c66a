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
from struct import unpack_from
from typing import Any

from amqp import serialization  # type: ignore[import-untyped]
from amqp.spec import Basic  # type: ignore[import-untyped]
from celery.utils.log import get_logger
from kombu.exceptions import ContentDisallowed

from celery_dlq.letters import printable
from celery_dlq.letters.record import Reason
from celery_dlq.worker.guard import Guard
from celery_dlq.worker.shutdown_signals import is_stopping
from celery_dlq.writing.failure import dropped_failure
from celery_dlq.writing.lifecycle import DUMPING, HANDLING, DeliveryState, is_held

logger = printable.get_logger("celery_dlq.worker")

UNREADABLE_HEADERS = "dlq_unreadable_headers"
"""Header that stands for headers which cannot be read: their bytes, in AMQP's encoding."""

_NUMBERS = {"delivery_mode": ">B", "priority": ">B", "timestamp": ">Q"}
_PROPERTIES = (
    "content_type",
    "content_encoding",
    "application_headers",
    "delivery_mode",
    "priority",
    "correlation_id",
    "reply_to",
    "expiration",
    "message_id",
    "timestamp",
    "type",
    "user_id",
    "app_id",
    "cluster_id",
)
"""In AMQP's order; the first bit of the flags is the first one's."""


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


# -- AMQP properties that py-amqp cannot read ---------------------------------------------


def read_leniently() -> None:
    """Let py-amqp read any properties, in this process; a second call changes nothing.

    RabbitMQ takes any bytes for a text, a timestamp in milliseconds and a table of any depth.
    py-amqp fails on them while it reads a frame: Celery takes that for an error of its own and
    ends, RabbitMQ redelivers the message, and the next worker ends. Read leniently, it is a message
    like any other, and is dropped where its content cannot be used.

    Source: ``decode_properties_basic`` in
    https://github.com/celery/py-amqp/blob/main/amqp/serialization.py
    """
    strict = serialization.PROPERTY_CLASSES[Basic.CLASS_ID]
    if hasattr(strict, "dlq_strict"):
        return

    @wraps(strict)
    def decode(buf: bytes, offset: int) -> tuple[dict[str, Any], int]:
        try:
            properties, end = strict(buf, offset)
        except Exception:  # noqa: BLE001 - whatever the reader of a value raises
            return _read_leniently(bytes(buf), offset)
        return properties, end

    decode.dlq_strict = strict  # type: ignore[attr-defined]
    serialization.PROPERTY_CLASSES[Basic.CLASS_ID] = decode


def are_unreadable(headers: object) -> bool:
    """True for headers in place of which `UNREADABLE_HEADERS` stands."""
    return isinstance(headers, Mapping) and UNREADABLE_HEADERS in headers


def _read_leniently(buf: bytes, offset: int) -> tuple[dict[str, Any], int]:
    """Read properties; a text that is not UTF-8 stays bytes, as py-amqp does it in headers."""
    properties: dict[str, Any] = {}
    (flags,) = unpack_from(">H", buf, offset)
    offset += 2
    for place, name in enumerate(_PROPERTIES):
        if not flags & (0x8000 >> place):
            continue
        if name == "application_headers":
            end = offset + 4 + unpack_from(">I", buf, offset)[0]
            properties[name] = _lenient_headers(buf[offset:end])
        elif name in _NUMBERS:
            (properties[name],) = unpack_from(_NUMBERS[name], buf, offset)
            end = offset + (8 if name == "timestamp" else 1)
        else:
            end = offset + 1 + buf[offset]
            properties[name] = _lenient_text(buf[offset + 1 : end])
        offset = end
    return properties, offset


def _lenient_headers(table: bytes) -> dict[str, Any]:
    try:
        (headers,), _end = serialization.loads("F", table, 0)
    except Exception:  # noqa: BLE001 - as above
        return {UNREADABLE_HEADERS: table}
    return dict(headers)


def _lenient_text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
