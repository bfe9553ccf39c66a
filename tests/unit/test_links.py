"""What follows a message in its workflow."""

from __future__ import annotations

import json

import pytest

from celery_dlq.letters.links import WHEN, is_in_chord, links_of

JSON = "application/json"


def test_what_follows_a_message_is_in_its_order() -> None:
    """Celery keeps a chain in reverse."""
    links = {
        "callbacks": [{"task": "c"}],
        "errbacks": ["e"],
        "chain": [{"task": "last"}, {"task": "next"}],
        "chord": {"task": "body"},
    }
    body = json.dumps([[], {}, links]).encode()
    found = links_of(JSON, body)
    assert found == [
        ("callback", "c"),
        ("errback", "e"),
        ("chain", "next"),
        ("chain", "last"),
        ("chord", "body"),
    ]
    assert {kind for kind, _ in found} == set(WHEN)
    assert is_in_chord(JSON.encode(), body)


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"{}", b"[1,2,3]", b"[[],{},7]", b"\x80", b"[" * 2000]
)
def test_nothing_follows_a_body_of_any_other_form(body: bytes) -> None:
    """And it ends no page."""
    assert links_of(JSON, body) == []
    assert links_of("application/x-python-serialize", body) == []


@pytest.mark.parametrize("value", [{"chord": {"task": "x"}}, '"chord": {', {"chord": None}])
def test_an_argument_that_looks_like_a_chord_is_none(value: object) -> None:
    """Only the links of the message count."""
    body = json.dumps([[value], {"chord": value}, {"chord": None}]).encode()
    assert not is_in_chord(JSON.encode(), body)
