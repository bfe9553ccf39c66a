"""Packed entries come back byte by byte, and what is broken is told."""

from __future__ import annotations

import pytest
from builders import NOW, a_letter, an_ended_delivery
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.backends.redis.packing import packed, readable, unpacked
from celery_dlq.errors import CorruptLetter

LETTER = a_letter(
    traceback="Traceback (most recent call last):\n  File x\n" * 20,
    history=tuple(an_ended_delivery(number=n) for n in range(1, 6)),
    headers='{"lang":"py","task":"shop.charge"}',
    first_delivered_at=NOW,
)

NAMES = st.one_of(
    st.sampled_from(["body", "args_json", "kwargs_json", "@args_json", "headers", "id", "a%2Cb"]),
    st.text(st.characters(codec="utf-8"), min_size=1).filter(lambda name: name != "~"),
)


def raw(entry: dict[str, bytes]) -> dict[bytes, bytes]:
    """An entry as Redis gives it back."""
    return {name.encode(): value for name, value in entry.items()}


@given(st.dictionaries(NAMES, st.binary(max_size=50)))
def test_any_fields_come_back(fields: dict[str, bytes]) -> None:
    """Whatever their names and values, also of later versions."""
    assert unpacked(raw(packed(fields))) == raw(fields)


def test_a_letter_takes_less_than_its_fields() -> None:
    """What stands in the body too is not kept twice, the rest is compressed."""
    fields = LETTER.to_fields()
    entry = packed(fields)
    assert unpacked(raw(entry)) == raw(fields)
    assert sum(map(len, entry.values())) < sum(map(len, fields.values())) / 2
    assert "args_json" not in entry


def test_what_scripts_and_filters_need_stays_plain() -> None:
    """Lua reads these fields by name."""
    entry = packed(LETTER.to_fields())
    for name in ("id", "reason", "fingerprint", "dead_lettered_at", "task_name", "body"):
        assert entry[name] == LETTER.to_fields()[name]


def test_an_entry_that_was_not_packed_is_read_as_it_is() -> None:
    """Older entries, and those of other writers."""
    fields = raw(LETTER.to_fields())
    assert unpacked(fields) == fields


@pytest.mark.parametrize("cut", [0, 1, 5, -1])
def test_a_broken_entry_is_told(cut: int) -> None:
    """It raises nothing else, and can still be shown."""
    entry = raw(packed(LETTER.to_fields()))
    entry[b"~"] = entry[b"~"][:cut]
    with pytest.raises(CorruptLetter, match="cannot be unpacked"):
        unpacked(entry)
    assert readable(entry) == entry


def test_a_place_in_a_body_that_is_gone_is_told() -> None:
    """The body is where args and kwargs stand."""
    entry = raw(packed(LETTER.to_fields()))
    del entry[b"body"]
    with pytest.raises(CorruptLetter):
        unpacked(entry)
