"""A letter in a header of its copy."""

from __future__ import annotations

import json
import secrets
from typing import Any

import pytest
from builders import NOW, a_letter

from celery_dlq.letters.copies import MOST_CHARS, letter_of, record_of
from celery_dlq.letters.record import Delivery, Outcome

HEADERS = '{"task":"shop.charge","naïve":"\\ud83e\\udd84"}'


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"headers": HEADERS, "traceback": "Traceback …\n🦄", "native_death": '{"x-death":[]}'},
        {"body": b"\x80\xff", "extra": {"of_a_later_version": b"\xff\x00"}},
        {
            "history": (
                Delivery(
                    number=1,
                    retries=0,
                    started_at=NOW,
                    ended_at=NOW,
                    worker_hostname="celery@a",
                    worker_pid=7,
                    outcome=Outcome.FAILED,
                    exception_type="ValueError",
                    exception_message="no",
                    release="1.2",
                ),
            )
        },
    ],
    ids=["plain", "texts", "bytes", "history"],
)
def test_a_letter_comes_back_as_it_was(changes: dict[str, Any]) -> None:
    """Every field; the body is the message's own."""
    letter = a_letter(**changes)
    record = record_of(letter)
    assert record.isascii()
    assert letter_of(record, letter.body, "{}", "{}") == letter


def test_what_is_too_large_for_a_frame_goes_by_its_worth() -> None:
    """The traceback goes before the history; headers last, which the message may have itself."""
    large = secrets.token_hex(MOST_CHARS)
    letter = a_letter(headers=HEADERS, args_json=json.dumps(large), traceback=large)
    record = record_of(letter)
    assert len(record) <= MOST_CHARS
    found = letter_of(record, letter.body, "{}", "{}")
    assert found is not None
    assert (found.traceback, found.args_json, found.headers) == (None, None, HEADERS)
    assert (found.id, found.reason, found.body) == (letter.id, letter.reason, letter.body)

    letter = a_letter(headers=json.dumps({"large": large}), traceback="short")
    record = record_of(letter)
    assert len(record) <= MOST_CHARS
    found = letter_of(record, letter.body, '{"of":"the message"}', "{}")
    assert found is not None
    assert (found.headers, found.id) == ('{"of":"the message"}', letter.id)


@pytest.mark.parametrize(
    "record",
    [None, 7, "", "no base64", "aaaa", pytest.param(record_of(a_letter())[:-8], id="cut off")],
)
def test_anything_else_is_no_letter(record: object) -> None:
    """Whoever can publish to the queue chooses the header."""
    assert letter_of(record, b"", "{}", "{}") is None
