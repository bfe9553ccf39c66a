"""Messages that no worker can run, and what an operator can do with each of their letters."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import amqp
import pyarrow.parquet
from command_line import Dlq
from raw import BODY, headers

from celery_dlq import DeadLetter, Reason

HEALTHY = "poison_app.healthy"
INVALID, UNDECODABLE = Reason.INVALID_MESSAGE, Reason.UNDECODABLE_MESSAGE


@dataclass(frozen=True)
class Odd:
    """A message.

    Attributes:
        reason: The reason for its letter.
        body: Its bytes.
        headers: Its headers; ``None``: it has none.
        content_type: Its content type; ``None``: it has none.
        content_encoding: Its content encoding; ``None``: it has none.
    """

    reason: Reason
    body: bytes = BODY
    headers: Mapping[str, Any] | None = field(default_factory=lambda: headers(HEALTHY, "odd"))
    content_type: str | None = "application/json"
    content_encoding: str | None = "utf-8"

    def named(self, task_id: str) -> Odd:
        """The same with an id of its own, if its headers have one: one id is one letter."""
        if self.headers is None or not isinstance(self.headers.get("id"), str):
            return self
        return replace(self, headers={**self.headers, "id": task_id})


def _with(reason: Reason, **more: Any) -> Odd:
    return Odd(reason, headers={**headers(HEALTHY, "odd"), **more})


ODD: dict[str, Odd] = {
    "no JSON": Odd(UNDECODABLE, b"\x00\xff{"),
    "no JSON, no headers": Odd(UNDECODABLE, b"nothing", None),
    "JSON in no form of Celery's": Odd(INVALID, b'{"hello": "world"}', None),
    "a number, no headers": Odd(INVALID, b"5", None),
    "an empty body": Odd(INVALID, b""),
    "nothing at all": Odd(INVALID, b"", None, None, None),
    "bytes, nothing else": Odd(UNDECODABLE, b"\x80\x00", None, None, None),
    "no base64": replace(_with(UNDECODABLE, body_encoding="base64"), body=b"!W1s"),
    "an unknown compression": _with(UNDECODABLE, compression="application/x-new"),
    "a compression that is no text": _with(UNDECODABLE, compression=[1]),
    "not compressed as said": _with(UNDECODABLE, compression="application/x-gzip"),
    "compressed, no JSON": replace(
        _with(UNDECODABLE, compression="application/x-gzip"), body=zlib.compress(b"\xff")
    ),
    "an unknown encoding": Odd(UNDECODABLE, b"{", content_encoding="utf-9"),
    "another encoding, no JSON": Odd(UNDECODABLE, b"{\xe9", content_encoding="latin-1"),
    "an unknown content type": Odd(UNDECODABLE, content_type="application/x-new"),
    "a forbidden content type": Odd(
        UNDECODABLE, b"cos\nsystem\n(S'true'\ntR.", content_type="application/x-python-serialize"
    ),
    "a task that is no text": _with(INVALID, task=["x"]),
    "an id that is no text": _with(INVALID, id={"a": 1}, eta="soon"),
    "20 MB, no JSON": Odd(UNDECODABLE, b"\xff" * 20_000_000),
}
"""What can be in a queue of any broker."""


def check_letters(
    dlq: Dlq, letters: Callable[..., list[DeadLetter]], expected: list[Odd], folder: Path
) -> None:
    """Each message is a letter with its bytes: listed, exported, redriven and discarded.

    Args:
        dlq: The command line, with a broker whose worker runs.
        letters: Waits for the letters of ``orders-DLQ``.
        expected: All messages that were put into ``orders``.
        folder: For the export.
    """
    wanted = _told((odd.reason.value, odd.body) for odd in expected)
    found = letters(count=len(expected), timeout_seconds=60)
    assert _told((letter.reason.value, letter.body) for letter in found) == wanted

    ids = {letter.id for letter in found}
    listed = dlq("list", "orders-DLQ", "--json", "--limit", "1000").lines
    assert {line["id"] for line in listed} == ids
    assert dlq("export", str(folder), "--json").lines[0]["letters"] == len(expected)
    table = pyarrow.parquet.read_table(folder, columns=["reason", "body"])
    assert _told(zip(*table.to_pydict().values(), strict=True)) == wanted

    # By force: no worker has the task of the one whose task is no text.
    (report,) = dlq("redrive", "orders-DLQ", "--yes", "--all", "--force", "--json").lines
    assert (report["published"], report["failed"]) == (len(expected), {})
    again = letters(count=len(expected), timeout_seconds=60)  # of the first ones, none is left
    assert not ids & {letter.id for letter in again}
    # The reason may change: what had no content type comes back as application/octet-stream.
    assert _bodies(again) == _bodies(found)

    assert dlq("discard", "orders-DLQ", "--all", "--yes", "--forever").exit_code == 0
    assert not dlq("list", "orders-DLQ", "--json").lines


def _told(found: Iterable[tuple[str, bytes]]) -> list[tuple[str, bytes, int]]:
    """Reasons and bodies in a fixed order; of a large body only its start."""
    return sorted((reason, body[:60], len(body)) for reason, body in found)


def _bodies(letters: list[DeadLetter]) -> list[bytes]:
    return sorted(letter.body for letter in letters)


def put_on_rabbit(port: int, message: amqp.Message, queue: str = "orders") -> None:
    """Put a message into a queue of RabbitMQ, past Celery and kombu."""
    with amqp.Connection(f"127.0.0.1:{port}", confirm_publish=True) as connection:
        connection.channel().basic_publish(message, "", queue)


def as_amqp(odd: Odd) -> amqp.Message:
    """The message in AMQP."""
    properties = {
        "content_type": odd.content_type,
        "content_encoding": odd.content_encoding,
        "application_headers": None if odd.headers is None else dict(odd.headers),
    }
    return amqp.Message(odd.body, delivery_mode=2, **properties)


class UnreadableMessage(amqp.Message):  # type: ignore[misc]
    """A message whose properties py-amqp can neither write nor read.

    Args:
        body: Its bytes.
        content_type: The bytes of its content type.
        correlation_id: The bytes of its correlation id.
        headers: The bytes of its header table, without their length.
    """

    def __init__(
        self,
        body: bytes,
        content_type: bytes = b"application/json",
        correlation_id: bytes = b"odd",
        headers: bytes = b"",
    ) -> None:
        super().__init__(body)
        flags = struct.pack(">H", 0x8000 | 0x2000 | 0x0400)
        texts = (bytes([len(text)]) + text for text in (content_type, correlation_id))
        self._raw = struct.pack(">I", len(headers)) + headers
        self._raw = flags + self._raw.join(texts)

    def _serialize_properties(self) -> bytes:
        return self._raw


def table_entry(name: bytes, kind: bytes, value: bytes) -> bytes:
    """One entry of a header table, in AMQP's encoding."""
    return bytes([len(name)]) + name + kind + value


def nested(depth: int) -> bytes:
    """Lists in a list in AMQP's encoding, as the value of a header."""
    value = struct.pack(">I", 0)
    for _ in range(depth):
        value = struct.pack(">I", len(value) + 1) + b"A" + value
    return value
