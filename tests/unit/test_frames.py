"""Frames of RabbitMQ that are read a few at a time."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from amqp import Channel as AmqpChannel
from amqp import Connection, RecoverableConnectionError
from amqp.exceptions import UnexpectedFrame
from amqp.transport import SSLTransport, TCPTransport

from celery_dlq.transport.amqp import Frames, read_ahead

METHOD, HEADER, BODY = 1, 2, 3
SENT = [(METHOD, 1, b"deliver"), (HEADER, 1, b""), (BODY, 1, b"[]"), (METHOD, 7, b"x" * 300)]


def frame(kind: int, channel: int, content: bytes, end: int = 0xCE) -> bytes:
    """A frame as it is on the wire."""
    return struct.pack(">BHI", kind, channel, len(content)) + content + bytes([end])


class Wire:
    """A connection of py-amqp whose broker is this test; keeps the frames it was handed."""

    def __init__(self) -> None:
        ours, self.broker = socket.socketpair()
        self.transport = TCPTransport("localhost")
        self.transport.sock = self.sock = ours
        self.transport._setup_transport()
        self.transport.connected = True
        self.handed: list[tuple[int, int, bytes]] = []
        self.reads = 0
        self.frames = Frames(self)
        recv, self.frames.recv = self.frames.recv, self.recv
        self._recv = recv

    @property
    def connected(self) -> bool:
        """As py-amqp says it."""
        return bool(self.transport.connected)

    def recv(self, *args: int) -> bytes:
        """Count the calls."""
        self.reads += 1
        return bytes(self._recv(*args))

    def on_inbound_frame(self, handed: tuple[int, int, bytes]) -> bool:
        """True at the end of a message, as py-amqp says it."""
        self.handed.append(handed)
        return handed[0] == BODY

    def close(self) -> None:
        """Close both ends."""
        self.sock.close()
        self.broker.close()


@pytest.fixture
def wire() -> Iterator[Wire]:
    """Give a connection."""
    made = Wire()
    yield made
    made.close()


def test_all_frames_that_are_there_are_read_with_one_call(wire: Wire) -> None:
    """The event loop waits for the socket next, so none may stay behind."""
    wire.broker.sendall(b"".join(frame(*one) for one in SENT * 5))
    wire.frames.on_readable()
    assert wire.handed == SENT * 5
    assert wire.reads == 1


@pytest.mark.parametrize("cut", [1, 3, 7, 8, 14, 15, 20, 23, 24, 33, 34, 40, 341])
def test_frames_may_be_cut_anywhere(wire: Wire, cut: int) -> None:
    """What arrives later completes them."""
    sent = b"".join(frame(*one) for one in SENT)
    for part in (sent[:cut], sent[cut:]):
        wire.broker.sendall(part)
        wire.frames.on_readable()
    assert wire.handed == SENT


def test_a_frame_that_is_larger_than_what_is_read_at_once(wire: Wire) -> None:
    """It is read to its end, and the next one too."""
    large = (BODY, 1, bytes(range(256)) * 600)
    wire.broker.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
    wire.broker.sendall(frame(*large) + frame(*SENT[0]))
    while len(wire.handed) < 2:
        wire.frames.on_readable()
    assert wire.handed == [large, SENT[0]]


def test_whoever_handles_a_frame_may_read_the_next_one(wire: Wire) -> None:
    """A method that waits for its answer reads with py-amqp's own code; the order stays."""
    plain = wire.on_inbound_frame

    def waits_for_an_answer(handed: tuple[int, int, bytes]) -> bool:
        ended = plain(handed)
        if len(wire.handed) == 1:
            wire.handed.extend(wire.transport.read_frame() for _ in range(2))
        return ended

    wire.on_inbound_frame = waits_for_an_answer  # type: ignore[method-assign]
    wire.broker.sendall(b"".join(frame(*one) for one in SENT))
    wire.frames.on_readable()
    assert wire.handed == SENT


def test_what_py_amqp_has_read_of_a_frame_is_its_beginning(wire: Wire) -> None:
    """After a read that timed out, say."""
    sent = frame(*SENT[0])
    wire.broker.sendall(sent[:9])
    with pytest.raises(TimeoutError), wire.transport.having_timeout(0.01):
        wire.transport.read_frame()
    wire.broker.sendall(sent[9:])
    wire.frames.on_readable()
    assert wire.handed == SENT[:1]


def test_nothing_to_read_is_no_error(wire: Wire) -> None:
    """Another reader was faster."""
    wire.frames.on_readable()
    assert wire.handed == []
    assert wire.connected


def test_a_closed_connection_is_an_error_that_celery_knows(wire: Wire) -> None:
    """It connects again then."""
    wire.broker.close()
    with pytest.raises(OSError, match="unexpectedly closed"):
        wire.frames.on_readable()
    assert not wire.connected
    with pytest.raises(RecoverableConnectionError):
        wire.frames.on_readable()
    assert OSError in Connection.recoverable_connection_errors


def test_a_frame_without_its_end_is_py_amqps_error(wire: Wire) -> None:
    """Whoever speaks is no AMQP broker."""
    wire.broker.sendall(frame(*SENT[0], end=0))
    with pytest.raises(UnexpectedFrame):
        wire.frames.on_readable()


def test_a_drain_ends_with_a_message(wire: Wire) -> None:
    """With greenlets Celery drains one message after the other."""
    wire.broker.sendall(b"".join(frame(*one) for one in SENT[:3] * 2))
    wire.frames.drain_events(timeout=1)
    assert wire.handed == SENT[:3]
    wire.frames.drain_events(timeout=1)
    assert wire.handed == SENT[:3] * 2
    assert wire.reads == 1
    with pytest.raises(TimeoutError):
        wire.frames.drain_events(timeout=0.01)
    assert wire.connected


class Consumer:
    """As much of Celery's consumer as is looked at."""

    def __init__(self, pool: str, transport: type, *, hub: bool) -> None:
        amqp = Connection("localhost")
        amqp.transport = transport("localhost")
        amqp.transport.sock = SimpleNamespace(recv=None)
        channel = AmqpChannel(amqp, 1)
        self.connection = SimpleNamespace(connection=amqp, default_channel=channel)
        kind = type("TaskPool", (), {"__module__": f"celery.concurrency.{pool}"})
        self.pool: Any = kind()
        self.pool.is_green = pool == "gevent"
        self.readers: list[Any] = []
        self.hub = self if hub else None

    def add_reader(self, _: object, reader: Any) -> None:
        """As kombu's event loop."""
        self.readers.append(reader)


@pytest.mark.parametrize(
    ("pool", "transport", "hub", "expected"),
    [
        ("prefork", TCPTransport, True, "event loop"),
        ("thread", TCPTransport, True, "event loop"),
        ("gevent", TCPTransport, False, "drain"),
        ("solo", TCPTransport, True, None),
        ("thread", TCPTransport, False, None),
        ("prefork", SSLTransport, True, None),
        ("gevent", SSLTransport, False, None),
    ],
)
def test_frames_are_read_ahead_where_that_is_safe(
    pool: str, transport: type, hub: bool, expected: str | None
) -> None:
    """Elsewhere py-amqp reads as ever."""
    consumer = Consumer(pool, transport, hub=hub)
    read_ahead(consumer)
    assert len(consumer.readers) == (expected == "event loop")
    drains = "drain_events" in vars(consumer.connection.connection)
    assert drains == (expected == "drain")
    acknowledges = "basic_ack" in vars(consumer.connection.default_channel)
    assert acknowledges == (pool == "prefork" and expected is not None)  # several threads may not


def test_connections_of_other_brokers_are_left_alone() -> None:
    """Kombu's own have neither frames nor this transport."""
    consumer = SimpleNamespace(connection=SimpleNamespace(connection=object()))
    read_ahead(consumer)
    assert vars(consumer) == {"connection": consumer.connection}
