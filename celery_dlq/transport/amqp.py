"""RabbitMQ: reading several frames with one call, and acknowledging with one.

py-amqp reads the beginning, the content and the last byte of each of a message's three frames by
a call of their own, and sets the socket's timeout twice a frame: 15 calls a message. In a pool of
threads, each also lets another thread go first. Reading ahead saves more than counting costs. What
was read and not yet handled stays in py-amqp's own buffer, so its own reads go on there.

Source: ``_AbstractTransport.read_frame`` in
https://github.com/celery/py-amqp/blob/main/amqp/transport.py
"""

from __future__ import annotations

from functools import wraps
from socket import MSG_DONTWAIT
from struct import pack, unpack_from
from typing import Any

from amqp import Connection, RecoverableConnectionError, serialization  # type: ignore[import-untyped]
from amqp.exceptions import UnexpectedFrame  # type: ignore[import-untyped]
from amqp.spec import Basic  # type: ignore[import-untyped]
from amqp.transport import TCPTransport  # type: ignore[import-untyped]

from celery_dlq.letters.headers import UNREADABLE_HEADERS
from celery_dlq.transport.held import LOOP_GOES_ON

_READ_BYTES = 8192  # a dozen messages of usual size
_MOST_BYTES = 1 << 20
_AROUND = 8  # bytes of a frame around its content: type, channel, size; end
_END = 0xCE
_ACKNOWLEDGE_IN_LOOP = frozenset(f"celery.concurrency.{name}" for name in ("prefork", "solo"))
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


def read_ahead(consumer: Any) -> None:
    """Let a consumer read a few messages at a time, and acknowledge at once, where that is safe.

    Not with TLS, whose socket cannot be read without waiting. Not with solo:
    tasks run while their message is handled, and the event loop must have its turn in between.
    """
    connection = consumer.connection.connection
    if not isinstance(connection, Connection) or type(connection.transport) is not TCPTransport:
        return
    frames = Frames(connection)
    if consumer.hub is None:
        if consumer.pool.is_green:
            connection.drain_events = frames.drain_events
    elif type(consumer.pool).__module__ in LOOP_GOES_ON:
        consumer.hub.add_reader(connection.sock, frames.on_readable)
        if type(consumer.pool).__module__ in _ACKNOWLEDGE_IN_LOOP:
            acknowledge_at_once(consumer.connection.default_channel)


def acknowledge_at_once(channel: Any) -> None:
    """Let a channel acknowledge with one call: py-amqp makes a dozen calls to write 21 bytes.

    Where several threads write to its connection, they need py-amqp's lock.

    Source: https://www.rabbitmq.com/amqp-0-9-1-reference#basic.ack
    """
    theirs = channel.basic_ack
    begin = pack(">BHIHH", 1, channel.channel_id, 13, *Basic.Ack)

    def basic_ack(delivery_tag: int, multiple: bool = False, **kwargs: Any) -> Any:  # noqa: FBT001, FBT002 - py-amqp's signature
        connection = channel.connection
        if connection is None or not connection.connected:
            return theirs(delivery_tag, multiple, **kwargs)
        connection.transport.write(begin + pack(">Q?B", delivery_tag, multiple, _END))
        connection.bytes_sent += 1  # else heartbeats are sent more often
        return None

    channel.basic_ack = basic_ack


def keep_prefetch_count(worker: Any) -> None:
    """Let only the event loop ask for another prefetch count: threads and greenlets do not.

    After a lost connection Celery lowers the count, and raises it again where a message is
    acknowledged. There it reads the reply, while the loop reads the same socket: the worker
    receives nothing more, and does not end.

    Source: https://docs.celeryq.dev/en/stable/userguide/configuration.html
    """
    if worker.pool_cls.__module__ not in _ACKNOWLEDGE_IN_LOOP:
        worker.app.conf.worker_enable_prefetch_count_reduction = False


class Frames:
    """The frames that arrive on a connection."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection
        self._transport = connection.transport
        self.recv = connection.transport.sock.recv
        self._missing = 0  # bytes of the frame of which only a part has arrived

    def on_readable(self) -> None:
        """Read once, without waiting, and handle all frames that are whole.

        Called by kombu's event loop. It waits for the socket afterwards, so no whole frame may
        be left.
        """
        if not self._connection.connected:
            raise RecoverableConnectionError("Socket was disconnected")
        try:
            self._read(MSG_DONTWAIT)
        except TimeoutError:
            return
        while self._handle_next() is not None:
            pass

    def drain_events(self, timeout: float | None = None) -> None:
        """Handle frames until one ends a message, as py-amqp does it."""
        ended: bool | None = False
        while not ended:
            ended = self._handle_next()
            if ended is None:
                self._transport.sock.settimeout(timeout)
                try:
                    self._read()
                finally:
                    self._transport.sock.settimeout(None)  # as py-amqp leaves it

    def _read(self, flags: int = 0) -> None:
        transport = self._transport
        try:
            data = self.recv(min(max(_READ_BYTES, self._missing), _MOST_BYTES), flags)
            if not data:
                raise OSError("Server unexpectedly closed connection")  # noqa: TRY301 - as py-amqp
        except (BlockingIOError, TimeoutError):
            raise TimeoutError("nothing to read") from None
        except OSError:
            transport.connected = False
            raise
        transport._read_buffer += data  # noqa: SLF001 - shared with py-amqp's own reads

    def _handle_next(self) -> bool | None:
        """Handle a frame; True if it ended a message or method, ``None`` if none is whole."""
        transport = self._transport
        data = transport._read_buffer  # noqa: SLF001
        self._missing = 0
        if len(data) < _AROUND:
            return None
        kind, channel, size = unpack_from(">BHI", data)
        if len(data) < size + _AROUND:
            self._missing = size + _AROUND - len(data)
            return None
        if data[size + 7] != _END:
            raise UnexpectedFrame(f"frame ends with {data[size + 7]:#04x}, not with {_END:#04x}")
        # Before it is handled: whoever handles it may read the next one.
        transport._read_buffer = data[size + _AROUND :]  # noqa: SLF001
        return bool(self._connection.on_inbound_frame((kind, channel, data[7 : size + 7])))


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
