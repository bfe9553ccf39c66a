"""The dead-letter record: its storage form, its JSON form and what it refuses."""

from __future__ import annotations

import base64
import dataclasses
import json
from datetime import datetime, timedelta, timezone

import pytest
from builders import NOW, a_delivery, a_letter, an_ended_delivery
from hypothesis import given
from hypothesis import strategies as st

from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import json_codec
from celery_dlq.letters.record import (
    DeadLetter,
    Delivery,
    Kind,
    Outcome,
    Reason,
    field_kinds,
    from_micros,
    letter_id,
    to_micros,
)

# Every character there is: NUL, emoji, and the lone surrogates of badly decoded names.
ANY_TEXT = st.text(st.characters(exclude_categories=()))
VALID_TEXT = st.text()
TIMES = st.datetimes(timezones=st.just(timezone.utc))
NUMBERS = st.integers(-(2**63), 2**63 - 1)

DELIVERIES = st.builds(
    Delivery,
    number=st.integers(1, 99),
    retries=st.integers(0, 99),
    started_at=TIMES,
    ended_at=st.none() | TIMES,
    worker_hostname=VALID_TEXT,
    worker_pid=st.none() | st.integers(1, 2**22),
    outcome=st.none() | st.sampled_from(Outcome),
    exception_type=st.none() | VALID_TEXT,
    exception_message=st.none() | VALID_TEXT,
)

_VALUES = {
    Kind.TEXT: VALID_TEXT,
    Kind.INTEGER: NUMBERS,
    Kind.BOOLEAN: st.booleans(),
    Kind.TIME: TIMES,
    Kind.BYTES: st.binary(),
    Kind.JSON: st.dictionaries(VALID_TEXT, VALID_TEXT).map(json_codec.dumps),
    Kind.HISTORY: st.lists(DELIVERIES, max_size=3).map(tuple),
}
_NULLABLE = {f.name for f in dataclasses.fields(DeadLetter) if f.default is None}


def _letters() -> st.SearchStrategy[DeadLetter]:
    values = {
        name: st.none() | _VALUES[kind] if name in _NULLABLE else _VALUES[kind]
        for name, kind in field_kinds().items()
    }
    return st.builds(DeadLetter, **{**values, "reason": st.sampled_from(Reason)})


@given(letter=_letters())
def test_any_letter_comes_back_from_its_fields(letter: DeadLetter) -> None:
    """For all values of fields, reading the storage form gives an equal letter."""
    assert DeadLetter.from_fields(letter.to_fields()) == letter


@given(letter=_letters())
def test_any_letter_has_a_json_form_with_every_field(letter: DeadLetter) -> None:
    """The JSON form holds exactly the record's fields and can be written as JSON text."""
    shown = letter.to_json()
    assert list(shown) == list(field_kinds())
    assert json.loads(json.dumps(shown)) == shown


@given(delivery=DELIVERIES)
def test_any_delivery_comes_back_from_json(delivery: Delivery) -> None:
    """A delivery survives its JSON text with all attributes."""
    assert Delivery.from_json(json.loads(json.dumps(delivery.to_json()))) == delivery


@given(text=ANY_TEXT)
def test_text_with_lone_surrogates_is_stored_as_valid_utf8(text: str) -> None:
    """No text makes bytes that a Parquet reader refuses, and valid text is stored as it is."""
    stored = a_letter(description=text).to_fields()["description"]
    shown = stored.decode("utf-8")
    if text.isascii() or text.encode("utf-8", "ignore").decode() == text:
        assert shown == text


@given(text=ANY_TEXT)
def test_json_fields_keep_lone_surrogates_through_the_storage_form(text: str) -> None:
    """A header's odd text is spelled out as a JSON escape, so that nothing of it is lost."""
    letter = a_letter(headers=json_codec.dumps({"note": text}))
    assert DeadLetter.from_fields(letter.to_fields()).decoded("headers") == {"note": text}


@given(text=ANY_TEXT)
def test_history_keeps_lone_surrogates_through_the_storage_form(text: str) -> None:
    """The message of an earlier exception comes back whole, whatever its characters."""
    letter = a_letter(history=(an_ended_delivery(exception_message=text),))
    assert DeadLetter.from_fields(letter.to_fields()).history == letter.history


@given(time=TIMES)
def test_times_are_exact_microseconds_before_and_after_1970(time: datetime) -> None:
    """No time is rounded on its way to an integer and back."""
    assert from_micros(to_micros(time)) == time


def test_a_time_before_1970_is_a_negative_number() -> None:
    """The storage form of a time is signed decimal digits."""
    before = datetime(1969, 12, 31, 23, 59, 59, 999999, tzinfo=timezone.utc)
    assert a_letter(published_at=before).to_fields()["published_at"] == b"-1"


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("0001-01-01T00:00:00+14:00", "0001-01-01T00:00:00.000000+00:00"),
        ("9999-12-31T23:59:59-14:00", "9999-12-31T23:59:59.999999+00:00"),
    ],
)
def test_a_time_that_utc_does_not_have_is_the_nearest_one(text: str, nearest: str) -> None:
    """Celery takes it as an expiry; its letter must be read, shown and exported all the same."""
    letter = a_letter(expires=datetime.fromisoformat(text))
    assert letter.to_json()["expires"] == nearest
    again = DeadLetter.from_fields(letter.to_fields())
    assert again.expires == datetime.fromisoformat(nearest)
    assert again.to_json()["expires"] == nearest


def test_a_time_of_another_zone_is_the_same_moment_in_utc() -> None:
    """Zones other than UTC are accepted and shown in UTC."""
    berlin = timezone(timedelta(hours=1))
    letter = a_letter(dead_lettered_at=datetime(2026, 1, 1, 0, 30, tzinfo=berlin))
    assert letter.to_json()["dead_lettered_at"] == "2025-12-31T23:30:00.000000+00:00"


@pytest.mark.parametrize("name", [n for n, kind in field_kinds().items() if kind is Kind.TIME])
def test_a_naive_time_in_a_letter_is_refused(name: str) -> None:
    """A datetime without a zone would be read as another hour elsewhere."""
    with pytest.raises(
        ValueError, match=rf"expected {name} to be an aware datetime, got the naive"
    ):
        a_letter(**{name: datetime(2026, 1, 1)})  # noqa: DTZ001 - naive on purpose


@pytest.mark.parametrize("name", ["started_at", "ended_at"])
def test_a_naive_time_in_a_delivery_is_refused(name: str) -> None:
    """Histories hold aware times only."""
    with pytest.raises(ValueError, match=rf"expected {name} to be an aware datetime"):
        a_delivery(**{name: datetime(2026, 1, 1)})  # noqa: DTZ001 - naive on purpose


def test_fields_that_are_not_set_are_left_out() -> None:
    """``None`` takes no place in the store; empty text is something else and stays."""
    fields = a_letter(traceback=None, argsrepr="").to_fields()
    assert "traceback" not in fields
    assert fields["argsrepr"] == b""


def test_fields_of_later_versions_survive_a_round_trip() -> None:
    """A reader keeps what it does not know and writes it back untouched."""
    fields = {**a_letter().to_fields(), "schema_version": b"2", "mood": b"\xff\x00bad"}
    assert DeadLetter.from_fields(fields).to_fields() == fields


def test_a_field_of_the_record_wins_over_an_unknown_one_of_its_name() -> None:
    """``extra`` can add to the storage form, but never change a letter."""
    letter = a_letter(extra={"id": b"forged", "mood": b"good"})
    assert letter.to_fields()["id"] == letter.id.encode()


def test_history_keys_of_later_versions_are_passed_over() -> None:
    """A newer worker's history does not stop an older reader."""
    value = {**a_delivery().to_json(), "cpu_seconds": 3}
    assert Delivery.from_json(value) == a_delivery()


@pytest.mark.parametrize("name", ["id", "task_id", "reason", "dead_lettered_at", "fingerprint"])
def test_an_entry_without_a_required_field_is_corrupt(name: str) -> None:
    """The error of an entry that is no letter names what is missing."""
    fields = a_letter().to_fields()
    del fields[name]
    with pytest.raises(CorruptLetter, match=name):
        DeadLetter.from_fields(fields)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("reason", b"boredom"),
        ("retries", b"many"),
        ("retries", b"9" * 5000),
        ("dead_lettered_at", b"yesterday"),
        ("dead_lettered_at", b"9" * 30),
        ("history", b"not json"),
        ("history", b"\xff\xfe"),
        ("history", b"17"),
        ("history", b'["first"]'),
        ("history", b"[null]"),
        ("history", b'{"number": 1}'),
        ("history", b'[{"number": 1}]'),
        ("history", b'[{"number": 1, "started_at": "soon"}]'),
        ("history", b'[{"number": 1, "started_at": "2026-01-01T00:00:00"}]'),
        ("history", b'[{"number": 1, "started_at": 5}]'),
        pytest.param("history", b"[" * 100_000, id="a history of extreme depth"),
        ("headers", b"not json"),
        ("properties", b"{"),
        ("native_death", b""),
    ],
)
def test_an_entry_with_an_unreadable_field_is_corrupt(name: str, value: bytes) -> None:
    """A foreign or damaged entry gives the one error that readers pass over."""
    with pytest.raises(CorruptLetter, match="expected a dead letter, got an entry"):
        DeadLetter.from_fields({**a_letter().to_fields(), name: value})


def test_broken_utf8_in_a_text_field_is_readable() -> None:
    """Bytes of a foreign writer show as replacement characters and stop nothing."""
    fields = {**a_letter().to_fields(), "description": b"caf\xe9"}
    assert DeadLetter.from_fields(fields).description == "caf\N{REPLACEMENT CHARACTER}"


def test_json_form_nests_json_fields_and_encodes_the_body() -> None:
    """Headers and history are nested; the body is base64, because it may be any bytes."""
    body = b"\x80\x04\x00"
    letter = a_letter(
        body=body,
        headers=json_codec.dumps({"retries": 2}),
        history=(a_delivery(),),
        native_death='[{"reason":"expired"}]',
    )
    shown = letter.to_json()
    assert shown["headers"] == {"retries": 2}
    assert shown["native_death"] == [{"reason": "expired"}]
    assert shown["history"] == [a_delivery().to_json()]
    assert base64.b64decode(shown["body"]) == body
    assert shown["reason"] == "failed"
    assert shown["traceback"] is None


def test_decoded_gives_the_values_of_json_fields() -> None:
    """Tagged types come back as they were in the message; a missing field is ``None``."""
    letter = a_letter(headers=json_codec.dumps({"at": NOW, "raw": b"\x00\xff"}))
    assert letter.decoded("headers") == {"at": NOW, "raw": b"\x00\xff"}
    assert letter.decoded("native_death") is None


def test_one_message_always_gets_one_letter_id() -> None:
    """Storing a letter twice finds the first, also after a restart of the worker."""
    assert letter_id("orders-DLQ", "t-1", 0, 0) == letter_id("orders-DLQ", "t-1", 0, 0)
    assert letter_id("orders-DLQ", "t-1", 0, 0) == "8118bf66-68de-5081-961e-f9f1b18e3535"


@pytest.mark.parametrize(
    "other",
    [
        ("other-DLQ", "t-1", 0, 0),
        ("orders-DLQ", "t-2", 0, 0),
        ("orders-DLQ", "t-1", 1, 0),
        ("orders-DLQ", "t-1", 0, 1),
        ("orders-DLQ", "t-1\ud800", 0, 0),
    ],
)
def test_other_messages_get_other_letter_ids(other: tuple[str, str, int, int]) -> None:
    """Queue, task, retries and redrives all make different messages."""
    assert letter_id(*other) != letter_id("orders-DLQ", "t-1", 0, 0)


def test_records_are_frozen() -> None:
    """A letter that somebody else holds cannot be changed."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        a_letter().reason = Reason.EXPIRED  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Reason, Outcome])
def test_reasons_and_outcomes_print_as_their_names(kind: type[Reason | Outcome]) -> None:
    """In logs and messages a reason is its stored name, on every Python version."""
    assert [f"{member}" for member in kind] == [member.value for member in kind]
