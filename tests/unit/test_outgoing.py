"""The message of a letter: what is kept as text equals what was decoded."""

from __future__ import annotations

import json
from datetime import timedelta
from typing import Any

import pytest
from builders import NOW, a_letter, a_request
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import headers, redriven
from celery_dlq.letters.copies import DEATH_HEADERS
from celery_dlq.letters.packed import fields_of
from celery_dlq.letters.packing import packed
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions, outgoing
from celery_dlq.operations.redrive.select import RawEntry

NAMES = st.one_of(
    st.text(max_size=5),
    st.sampled_from(
        ["retries", "eta", "expires", "redelivered", "x-death", "x-y", "dlq_letter", "dlq_redrives"]
    ),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text()),
    lambda inner: st.one_of(st.lists(inner), st.dictionaries(NAMES, inner)),
    max_leaves=5,
)
FORMS: list[dict[str, Any]] = [
    {},
    {"separators": (",", ":")},
    {"indent": 1},
    {"ensure_ascii": False},
]


def found(entry: dict[str, bytes]) -> RawEntry:
    """An entry as a store gives it."""
    return RawEntry("1-1", fields_of([part for n, v in entry.items() for part in (n.encode(), v)]))


def sent(entry: dict[str, bytes], **options: Any) -> Outgoing:
    """What it becomes."""
    options = RedriveOptions(**options)  # type: ignore[assignment]
    return outgoing(found(entry), options, redrive_id="redrive", now=NOW)  # type: ignore[arg-type]


@given(st.dictionaries(NAMES, VALUES), st.sampled_from(FORMS), st.sampled_from(["", " ", "\n"]))
def test_headers_kept_as_text_are_those_decoded(
    headers_of_it: dict[str, Any], form: dict[str, Any], space: str
) -> None:
    """Whatever the headers, and however their text is spaced and escaped."""
    letter = a_letter(expires=NOW - timedelta(days=1))
    text = space + json.dumps(headers_of_it, **form) + space
    fields = {**letter.to_fields(), "headers": text.encode()}
    message = sent(packed(fields))
    assert message.headers["dlq_letter"] == letter.id
    if message.headers_text:
        assert json.loads(message.headers_text) == message.headers
        assert headers_of_it.items() <= message.headers.items()


@given(
    st.dictionaries(NAMES, VALUES),
    st.text(max_size=9),
    st.sampled_from([{}, {"separators": (",", ":")}]),
    st.booleans(),
)
def test_properties_are_kept_but_those_of_the_transport(
    own: dict[str, Any], task_id: str, form: dict[str, Any], tagged_last: bool
) -> None:
    """In the order of kombu's Redis transport, of which many messages share a part, or another."""
    given = {
        "correlation_id": task_id,
        "reply_to": None,
        **own,
        "delivery_info": {"routing_key": "q"},
    }
    given |= {"delivery_tag": "tag"} if tagged_last else {}
    letter = a_letter(properties=json.dumps(given, **form))
    expected = {n: v for n, v in given.items() if not n.startswith("delivery_") and v is not None}
    for _ in range(2):
        message = sent(packed(letter.to_fields()), new_id=False)
        assert message.properties == expected
        message.properties.clear()  # it is this message's own


def test_a_redrive_knows_what_becomes_of_each_header_of_ours() -> None:
    """A header that is forgotten would say of the next publication what was true of the last."""
    ours = {value for name, value in vars(headers).items() if name.endswith("_HEADER")}
    of_copies = {*DEATH_HEADERS, headers.SAMPLE_HEADER} - {headers.LETTER_HEADER}
    ways = (redriven.OF_ONE_PUBLICATION, redriven.REDRIVE_HEADERS, redriven.KEPT_HEADERS, of_copies)
    assert sorted(name for way in ways for name in way) == sorted(ours)


def test_what_was_true_of_one_publication_is_no_more() -> None:
    """What brokers set, too; other headers stay."""
    stale = {*redriven.OF_ONE_PUBLICATION, *headers.BROKER_PREFIXES, headers.REDELIVERED}
    kept = {headers.EDITED_HEADER: "[]", "x-own": 1, "redelivered_by": "Ada"}
    text = json.dumps({**dict.fromkeys(stale, 1), **kept})
    found_headers = sent(packed(a_letter(headers=text).to_fields())).headers
    assert stale.isdisjoint(found_headers)
    assert kept.items() <= found_headers.items()


def test_the_headers_of_a_plain_task_are_kept_as_text() -> None:
    """Else every letter would take the slower way."""
    letter = a_letter(headers=json.dumps(a_request()))
    assert sent(packed(letter.to_fields())).headers_text
    assert not sent(packed(letter.to_fields()), delay_seconds=5).headers_text
    assert not sent(packed(letter.to_fields()), new_id=True).headers_text


def test_headers_that_cannot_be_read_are_not_taken_for_none() -> None:
    """The message would be published without its headers."""
    task_id = "0b1c2d3e-0000-4000-8000-00000000000f"
    text = json.dumps({"lang": "py", "id": task_id})
    entry = packed(a_letter(task_id=task_id, headers=text).to_fields())
    assert sent(entry).task_id == task_id
    assert b"lang" not in entry["+"], "the message is small: its headers are compressed"
    read = found({**entry, "-": entry["-"][:5]})
    assert read.is_letter
    with pytest.raises(CorruptLetter, match="cannot be read"):
        outgoing(read, RedriveOptions(), redrive_id="redrive", now=NOW)
