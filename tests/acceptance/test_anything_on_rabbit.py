"""Whatever a message on RabbitMQ consists of, the worker goes on, and the message is a letter."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import command_line
import pytest
from anything import (
    HEALTHY,
    ODD,
    UNDECODABLE,
    Odd,
    UnreadableMessage,
    as_amqp,
    check_letters,
    nested,
    put_on_rabbit,
    table_entry,
)
from rabbit import RabbitServer
from raw import BODY, headers
from waiting import poll
from workers import Place, Worker

from celery_dlq import DeadLetter

UNREADABLE = {
    "a content type that is no UTF-8": UnreadableMessage(BODY, content_type=b"\xff\xfe"),
    "a timestamp in milliseconds": UnreadableMessage(
        BODY,
        correlation_id=b"milliseconds",
        headers=table_entry(b"when", b"T", struct.pack(">Q", 1_700_000_000_000)),
    ),
    "a deep header": UnreadableMessage(
        BODY, correlation_id=b"deep", headers=table_entry(b"deep", b"A", nested(2000))
    ),
    "a correlation id that is no UTF-8": UnreadableMessage(b"{", correlation_id=b"\xff\xfe"),
}
"""What py-amqp fails on while it reads a frame."""


@pytest.mark.parametrize("place", ["classic", "quorum"], indirect=True)
def test_each_message_that_cannot_run_is_a_letter_for_the_command_line(
    poison: ModuleType,
    place: Place,
    rabbit_server: RabbitServer,
    start_worker: Callable[..., Worker],
    letters: Callable[..., list[DeadLetter]],
    ran: Callable[[str], int],
    redis_url: str,
    tmp_path: Path,
) -> None:
    """It keeps its bytes, is listed, exported, redriven, and discarded; the worker lives on."""
    worker = start_worker(env=place.env)
    odd = [one.named(name) for name, one in ODD.items()]
    for one in odd:
        put_on_rabbit(rabbit_server.port, as_amqp(one))
    for message in UNREADABLE.values():
        put_on_rabbit(rabbit_server.port, message)
    odd += [Odd(UNDECODABLE, message.body) for message in UNREADABLE.values()]
    put_on_rabbit(rabbit_server.port, as_amqp(Odd(UNDECODABLE, headers=headers(HEALTHY, "after"))))

    dlq = partial(command_line.run, redis_url=redis_url, **place.env)
    check_letters(dlq, letters, odd, tmp_path / "letters")

    poll(lambda: ran("x") == 1)  # "after", and none of the others
    assert worker.process.poll() is None
    assert "Unrecoverable error" not in worker.output
