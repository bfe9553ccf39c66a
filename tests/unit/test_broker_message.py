"""The form of a letter on a broker, and what was read of a queue; without a broker."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import a_letter
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.letters import headers
from celery_dlq.letters.record import DeadLetter
from celery_dlq.store.broker.message import LetterMessage, decoded, encoded, letter_message
from celery_dlq.store.broker.snapshot import Snapshot

GOLDEN = (
    '{"schema_version":"1","id":"l-1","task_id":"t-1","task_name":"shop.charge","source_queue":'
    '"orders","dead_letter_queue":"orders-DLQ","reason":"failed","description":"süß",'
    '"dead_lettered_at":"1772600767891011","deliveries":"1","fingerprint":"ab","body":"AAH/",'
    '"invented_later":"7","~base64":["body"]}'
)


def test_a_letter_of_this_version_is_read_for_ever() -> None:
    """Never edit the golden text: letters wait in queues for as long as they like."""
    fields = decoded(GOLDEN.encode(), compressed=False)
    letter = DeadLetter.from_fields({name.decode(): value for name, value in fields.items()})
    assert (letter.id, letter.description, letter.body) == ("l-1", "süß", b"\x00\x01\xff")
    assert letter.extra == {"invented_later": b"7"}
    assert json.loads(encoded(letter.to_fields()))["invented_later"] == "7"


@given(st.dictionaries(st.text(min_size=1, max_size=9).filter("~base64".__ne__), st.binary()))
def test_any_fields_come_back(fields: dict[str, bytes]) -> None:
    """Text, bytes that are none, and names of later versions."""
    fields = {name: value for name, value in fields.items() if name.isprintable()}
    back = decoded(encoded(fields), compressed=False)
    assert back == {name.encode(): value for name, value in fields.items()}


@pytest.mark.parametrize("size", [10, 3_000_000])
def test_large_letters_are_compressed_and_say_so(size: int) -> None:
    """Kombu's consumers undo it by themselves."""
    letter = a_letter(body=b"x" * size)
    made = letter_message(letter, "5-0")
    compressed = "compression" in made.headers
    assert compressed is (size > 1024 * 1024)
    assert len(made.body) < 1024 * 1024
    assert decoded(made.body, compressed=compressed)[b"body"] == letter.body


@pytest.mark.parametrize("body", [b"", b"no", b"[]", b"{}", b'{"a":1,"~base64":[]}', b"\xff"])
@pytest.mark.parametrize("compressed", [False, True])
def test_what_is_no_letter_is_an_entry_with_its_body(body: bytes, *, compressed: bool) -> None:
    """Other programs may put anything into the queue."""
    assert decoded(body, compressed=compressed) == {b"body": body}


def add(snapshot: Snapshot, made: LetterMessage, tag: int, **changes: Any) -> None:
    """Write a message down."""
    snapshot.add({**made.headers, **changes}, tag, made.body)


def test_a_snapshot_is_in_the_order_of_positions() -> None:
    """The broker may mix them; numbers, not text, are compared."""
    snapshot = Snapshot()
    for tag, position in enumerate(("10-0", "9-11", "9-2", "100-0")):
        add(snapshot, letter_message(a_letter(), position), tag)
    assert [entry.position for entry in snapshot.ordered()] == ["9-2", "9-11", "10-0", "100-0"]
    pages = list(snapshot.pages(after="9-2", until="10-0", page_size=1, newest_first=True))
    assert [[position for position, _ in page] for page in pages] == [["10-0"], ["9-11"]]


def test_copies_of_a_letter_are_one_entry_at_the_first_position() -> None:
    """Either may be read first."""
    letter = a_letter()
    snapshot = Snapshot()
    for tag, position in ((1, "7-0"), (2, "5-0"), (3, "6-0")):
        add(snapshot, letter_message(letter, position), tag)
    (entry,) = snapshot.ordered()
    assert (entry.key, entry.position, entry.tags) == (letter.id, "5-0", [1, 2, 3])
    assert snapshot.find("5-0") is entry
    assert snapshot.find("7-0") is None
    snapshot.drop(entry)
    assert snapshot.ordered() == []


def test_a_letter_whose_headers_were_lost_is_known_by_its_body() -> None:
    """As a shovel or another tool may leave it: placed by the time of its death."""
    letter = a_letter()
    made = letter_message(letter, "5-0")
    snapshot = Snapshot()
    snapshot.add({}, 1, made.body)
    (entry,) = snapshot.ordered()
    assert entry.key == letter.id
    assert entry.position.startswith(f"{int(letter.dead_lettered_at.timestamp() * 1000)}-")


@pytest.mark.parametrize("position", [5, "", "5", "x-0", "5-0; DROP", "9" * 30 + "-0"])
def test_a_position_that_is_none_is_not_believed(position: object) -> None:
    """Headers come from other programs."""
    snapshot = Snapshot()
    add(snapshot, letter_message(a_letter(), "1-0"), 1, **{headers.POSITION_HEADER: position})
    (entry,) = snapshot.ordered()
    assert entry.position != position
