"""Golden letters: what was once written stays readable, and is always written the same.

``*_v1.fields`` is the storage form (field name to base64 of its bytes), ``*_v1.packed`` the fields
of an entry in Redis, ``*_v1.json`` what ``--json`` prints. The files are never edited. A field that
is added later gets a file of its own, ``letter_v1_2.json`` and so on, with both of its forms:
``{"release": {"stored": "MS4y", "shown": "1.2"}}``. A new schema version gets new files.
"""

from __future__ import annotations

import base64
import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from celery_dlq.letters.packed import fields_of, letter_from
from celery_dlq.letters.record import (
    SCHEMA_VERSION,
    DeadLetter,
    Delivery,
    Outcome,
    Reason,
    field_kinds,
)

HERE = Path(__file__).parent

_DIED = datetime(2026, 2, 28, 23, 59, 59, 999999, tzinfo=timezone.utc)
_SENT = datetime(1969, 7, 20, 20, 17, 40, tzinfo=timezone.utc)

# Spelled out, not built: a change of a builder's or a default value must not change them.
LETTERS = {
    "letter": DeadLetter(
        schema_version=1,
        id="8a3c1f0e-55a4-5c8f-9a0e-0d9c2f3b7a11",
        task_id="0f9f2b1e-7d61-4f7e-8a53-2c1d6a1b9e42",
        task_name="shop.orders.charge",
        source_queue="orders",
        dead_letter_queue="orders-DLQ",
        reason=Reason.MAX_DELIVERIES_EXCEEDED,
        description="vanished; not executed again: max_deliveries is 3",
        dead_lettered_at=_DIED,
        published_at=_SENT,
        first_delivered_at=_DIED - timedelta(hours=1),
        deliveries=3,
        retries=2,
        redrives=1,
        max_deliveries=3,
        max_retries=5,
        exception_type="shop.errors.SoldOut",
        exception_message="süß \x00 \N{PILE OF POO} 'quoted' \"twice\" \\ \n end",
        traceback='Traceback (most recent call last):\n  File "/srv/shop.py", line 7, in pay\n',
        fingerprint="0123456789abcdef",
        history=(
            Delivery(
                number=1,
                retries=2,
                started_at=_DIED - timedelta(hours=1),
                ended_at=_DIED - timedelta(minutes=59, microseconds=1),
                worker_hostname="celery@web-1",
                worker_pid=4711,
                outcome=Outcome.WORKER_LOST,
                exception_type="billiard.exceptions.WorkerLostError",
                exception_message="signal 9 (SIGKILL)",
            ),
            Delivery(
                number=2,
                retries=2,
                started_at=_DIED,
                worker_hostname="celery@süd",
                outcome=Outcome.VANISHED,
            ),
        ),
        exchange="shop",
        routing_key="orders.eu",
        content_type="application/json",
        content_encoding="utf-8",
        headers='{"id":"0f9f2b1e","retries":2,"raw":{"__type__":"bytes","__value__":"AP8="}}',
        properties='{"correlation_id":"0f9f2b1e","delivery_mode":2,"priority":null}',
        body=b'[[1, "\xc3\xbc"], {"a": null}, {"callbacks": null}]\x00\xff',
        args_json='[1, "ü"]',
        kwargs_json='{"a": null}',
        argsrepr="(1, 'ü')",
        kwargsrepr="{'a': None}",
        root_id="root-1",
        parent_id="parent-1",
        group_id="group-1",
        origin="gen1@laptop",
        worker_hostname="celery@web-2",
        worker_pid=4712,
        eta=_DIED - timedelta(days=1),
        expires=_DIED + timedelta(days=1),
        release="shop@1.2.3",
        sentry_event_id="9f86d081884c7d659a2feaa0c55ad015",
        native_death='[{"count":1,"reason":"rejected","queue":"orders"}]',
        extra={"field_of_tomorrow": b"\x00\xfftomorrow"},
    ),
    "smallest": DeadLetter(
        schema_version=1,
        id="11111111-1111-5111-8111-111111111111",
        task_id="",
        task_name="",
        source_queue="q",
        dead_letter_queue="q-DLQ",
        reason=Reason.ADOPTED,
        dead_lettered_at=_SENT,
        fingerprint="fedcba9876543210",
    ),
}


ADDITIONS = sorted(path.stem for path in HERE.glob("letter_v1_*.json"))
"""The files of fields that were added to version 1 later."""


def read(file: str) -> dict[str, bytes]:
    """The values in a golden file of bytes."""
    values = json.loads((HERE / file).read_text("utf-8"))
    return {field: base64.b64decode(value) for field, value in values.items()}


def stored(name: str) -> dict[str, bytes]:
    """The storage form in a golden file."""
    return read(f"{name}_v1.fields")


def shown(name: str) -> Any:
    """The JSON form in a golden file."""
    return json.loads((HERE / f"{name}_v1.json").read_text("utf-8"))


def added(name: str) -> tuple[dict[str, bytes], dict[str, Any]]:
    """Both forms of fields that were added later."""
    forms = json.loads((HERE / f"{name}.json").read_text("utf-8")).items()
    as_stored = {field: base64.b64decode(form["stored"]) for field, form in forms}
    return as_stored, {field: form["shown"] for field, form in forms}


@pytest.mark.parametrize("name", LETTERS)
def test_a_stored_letter_is_read_as_it_was_meant(name: str) -> None:
    """The bytes of a golden file mean the letter that was written, field by field."""
    assert DeadLetter.from_fields(stored(name)) == LETTERS[name]


@pytest.mark.parametrize("name", LETTERS)
def test_a_letter_is_stored_as_it_always_was(name: str) -> None:
    """Older workers and exporters read the same bytes as before."""
    assert LETTERS[name].to_fields() == stored(name)


@pytest.mark.parametrize("name", LETTERS)
def test_a_letter_is_shown_as_it_always_was(name: str) -> None:
    """Scripts read the JSON form; fields may be added, none may change."""
    letter = LETTERS[name].to_json()
    golden = shown(name)
    assert {field: letter[field] for field in golden} == golden


@pytest.mark.parametrize("name", LETTERS)
def test_a_stored_letter_is_shown_as_it_always_was(name: str) -> None:
    """From the bytes of one file to the JSON of the other, through today's reader."""
    golden = shown(name)
    letter = DeadLetter.from_fields(stored(name)).to_json()
    assert {field: letter[field] for field in golden} == golden


def test_fields_that_were_added_are_read_and_written_as_they_always_were() -> None:
    """By a letter that has them and all that was there before."""
    for name in ADDITIONS:
        as_stored, as_shown = added(name)
        fields = {**stored("letter"), **as_stored}
        letter = DeadLetter.from_fields(fields)
        assert letter.to_fields() == fields
        assert letter.to_json() == {**LETTERS["letter"].to_json(), **as_shown}
        assert replace(letter, **dict.fromkeys(as_shown)) == LETTERS["letter"]


@pytest.mark.parametrize("name", LETTERS)
def test_a_packed_letter_is_read_as_it_was_meant(name: str) -> None:
    """An entry that an older worker stored."""
    entry = read(f"{name}_v1.packed")
    parts = [part for field, value in entry.items() for part in (field.encode(), value)]
    assert letter_from(fields_of(parts)) == LETTERS[name]


def test_the_golden_letters_set_every_field_of_their_version() -> None:
    """A field of version 1 that no golden file holds would be unguarded."""
    assert SCHEMA_VERSION == 1, "expected golden files of the new version beside the old ones"
    later = [field for name in ADDITIONS for field in added(name)[0]]
    names = [*shown("letter"), *later]
    missing, file = {*field_kinds()} - {*names}, f"letter_v1_{len(ADDITIONS) + 2}.json"
    assert not missing, f"expected a golden file of {missing}: write {file}"
    assert names == [*field_kinds()], "expected new fields after the others"
    assert {*stored("letter"), *later} - {"field_of_tomorrow"} == {*names}


def test_all_golden_files_are_read() -> None:
    """A file that no test reads guards nothing."""
    ends = (".fields", ".json", ".packed")
    names = {path.name for path in HERE.iterdir() if path.suffix in ends}
    names.remove("store_v1.json")  # tests/acceptance/test_store_format.py reads it
    golden = {f"{name}_v1{end}" for name in LETTERS for end in ends}
    assert names == golden | {f"{name}.json" for name in ADDITIONS}
