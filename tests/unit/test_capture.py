"""From a message to the fields of a letter: everything as it came, nothing unpickled."""

from __future__ import annotations

import json
import pickle
import zlib
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from builders import a_message, a_request, an_app, sent_message
from hypothesis import given
from hypothesis import strategies as st
from kombu.utils.json import dumps as kombu_dumps

from celery_dlq.letters import json_codec
from celery_dlq.writing.capture import Message, json_parts, wire_body

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=15,
)
ARGS = st.lists(JSON, max_size=4)
KWARGS = st.dictionaries(st.text(), JSON, max_size=4)
WRITERS = st.sampled_from(
    [
        kombu_dumps,
        lambda value: json.dumps(value, separators=(",", ":")),
        lambda value: json.dumps(value, indent=1),
        lambda value: f" \n{json.dumps(value)}\t",
    ]
)
EMBED = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}


class Bomb:
    """Unpickled, it leaves a file behind."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.place,))


@given(args=ARGS, kwargs=KWARGS, write=WRITERS)
def test_args_and_kwargs_are_cut_out_of_any_json_body(args: Any, kwargs: Any, write: Any) -> None:
    """The two texts mean what the body means, however it was written."""
    body = write([args, kwargs, EMBED]).encode()
    args_json, kwargs_json = json_parts(body, "application/json")
    assert args_json is not None
    assert kwargs_json is not None
    assert json.loads(args_json) == json.loads(body)[0]
    assert json.loads(kwargs_json) == json.loads(body)[1]
    assert args_json.encode() in body
    assert kwargs_json.encode() in body


@given(args=ARGS, kwargs=KWARGS)
def test_raw_utf8_bodies_are_cut_too(args: Any, kwargs: Any) -> None:
    """Publishers in other languages do not escape their letters."""
    text = json.dumps([args, kwargs, EMBED], ensure_ascii=False)
    body = text.encode("utf-8", "surrogatepass")
    args_json, kwargs_json = json_parts(body, "application/json")
    if text.encode("utf-8", "ignore").decode() == text:
        assert json.loads(args_json or "null") == args
        assert json.loads(kwargs_json or "null") == kwargs
    else:
        assert (args_json, kwargs_json) == (None, None)


@given(body=st.binary() | st.text().map(str.encode) | JSON.map(lambda v: json.dumps(v).encode()))
def test_other_bodies_never_raise(body: bytes) -> None:
    """Any bytes may arrive under the name of JSON."""
    for part, kind in zip(json_parts(body, "application/json"), (list, dict), strict=True):
        assert part is None or isinstance(json.loads(part), kind)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{}",
        b"[]",
        b"[[1]]",
        b"[[1], 2, {}]",
        b"[1, {}, {}]",
        b"[{}, [], {}]",
        b'"[[1], {}, {}]"',
        b"[[1] {} {}]",
        b"[[1], {",
        b"[[" + b"9" * 5000 + b"], {}, {}]",
        b"[" * 100_000,
        b"\xff\xfe[[1], {}, {}]",
    ],
)
def test_a_body_that_is_not_celerys_json_has_no_parts(body: bytes) -> None:
    """The letter then has the bytes alone."""
    assert json_parts(body, "application/json") == (None, None)


@pytest.mark.parametrize("how", [{}, {"compression": "zlib"}, {"compression": "lzma"}])
@pytest.mark.parametrize("protocol", [1, 2])
def test_the_arguments_of_any_message_of_celery_are_known(
    protocol: int, how: dict[str, Any]
) -> None:
    """Protocol 1 has one object with everything in it; kombu has decompressed what arrived."""
    app = an_app(task_protocol=protocol)
    message = sent_message(app, "shop.charge", (1,), {"a": 2}, **how)
    letter = Message.of(message, a_request()).letter
    assert (letter.args_json, letter.kwargs_json) == ("[1]", '{"a": 2}')


def test_the_arguments_of_what_is_not_decompressed_are_not_known() -> None:
    """Another compression of the user's own may be a cipher; what it hides stays hidden."""
    headers = {**a_request(), "compression": "application/x-cipher"}
    broken = a_message(headers=headers, body=b"[[1], {}, {}]")
    assert broken.errors
    plain = a_message(body=b"[[1], {}, {}]")
    plain.headers["compression"] = "application/x-cipher"  # as if that were registered
    for message in (broken, plain):
        letter = Message.of(message, message.headers).letter
        assert (letter.args_json, letter.kwargs_json) == (None, None)
        assert letter.body == b"[[1], {}, {}]"


@pytest.mark.parametrize(
    "content_type", ["application/x-python-serialize", "application/x-yaml", "", "text/json"]
)
def test_only_json_is_read(content_type: str) -> None:
    """The content type decides, not what the bytes look like."""
    assert json_parts(b"[[1], {}, {}]", content_type) == (None, None)


def test_huge_arguments_are_not_kept_twice() -> None:
    """Above a megabyte the body alone is enough."""
    body = json.dumps([["x" * 2_000_000], {}, EMBED]).encode()
    assert json_parts(body, "application/json") == (None, None)


def test_a_message_of_celery_is_captured_whole() -> None:
    """Everything a letter needs is taken from a message that Celery really sent."""
    expires = datetime(2030, 1, 1, tzinfo=timezone.utc)
    message = sent_message(
        an_app(),
        "shop.charge",
        (1, "ü"),
        {"a": [2]},
        task_id="t-1",
        root_id="r-1",
        parent_id="p-1",
        group_id="g-1",
        expires=expires,
        headers={"tenant": "acme"},
    )
    body = bytes(message.body)
    letter = Message.of(message, message.headers).letter
    assert (letter.task_id, letter.task_name, letter.retries) == ("t-1", "shop.charge", 0)
    assert (letter.root_id, letter.parent_id, letter.group_id) == ("r-1", "p-1", "g-1")
    assert letter.expires == expires
    assert letter.body == body
    assert (letter.content_type, letter.content_encoding) == ("application/json", "utf-8")
    assert letter.exchange == ""
    assert letter.routing_key == message.delivery_info["routing_key"]
    assert json.loads(letter.args_json or "") == [1, "ü"]
    assert json.loads(letter.kwargs_json or "") == {"a": [2]}
    assert letter.argsrepr == "(1, 'ü')"
    assert json_codec.loads(letter.headers) == message.headers
    assert json_codec.loads(letter.headers)["tenant"] == "acme"
    assert json_codec.loads(letter.properties) == message.properties


def test_a_pickled_body_is_never_loaded(tmp_path: Path) -> None:
    """A bomb in a body that the broker delivered does not go off."""
    place = tmp_path / "exploded"
    message = sent_message(an_app(), "shop.charge", (Bomb(place),), serializer="pickle")
    assert message.content_type == "application/x-python-serialize"
    letter = Message.of(message, message.headers).letter
    assert not place.exists()
    assert letter.args_json is None
    assert letter.body == bytes(message.body)
    pickle.loads(letter.body)
    assert place.exists(), "expected the example to be a bomb"


@pytest.mark.parametrize("compression", ["zlib", "bzip2"])
def test_a_compressed_body_is_kept_compressed(compression: str) -> None:
    """Kombu decompresses on arrival; a redriven message must match its headers again."""
    message = sent_message(an_app(), "shop.charge", (1,), compression=compression)
    letter = Message.of(message, message.headers).letter
    assert json_codec.loads(letter.headers)["compression"] == message.headers["compression"]
    assert letter.body == wire_body(message.body, compression)
    assert letter.body != bytes(message.body)


def test_the_body_in_the_queue_is_bytes_in_any_case() -> None:
    """Transports deliver bytes, text or a view of a buffer."""
    assert wire_body(b"ab", None) == b"ab"
    assert wire_body("aü", None) == "aü".encode()
    assert wire_body("\ud800", None) == b"\xed\xa0\x80"
    assert wire_body(memoryview(b"ab"), None) == b"ab"
    assert wire_body(None, None) == b""


def test_a_body_that_was_decoded_on_arrival_is_encoded_as_its_message_says() -> None:
    """py-amqp decodes by the content encoding; a redrive publishes it with that encoding."""
    assert wire_body("\xe9", None, "latin-1") == b"\xe9"
    assert wire_body("\u20ac", None, "utf-16").decode("utf-16") == "\u20ac"
    for unusable in ("utf-9", "latin-1", "zlib", "binary", None, b"\xff"):
        assert wire_body("\u20ac", None, unusable) == "\u20ac".encode()


def test_the_body_in_the_queue_is_compressed_as_its_header_says() -> None:
    """Short names and content types are both known; an unknown one changes nothing."""
    assert zlib.decompress(wire_body(b"ab", "application/x-gzip")) == b"ab"
    assert wire_body(b"ab", "zip-of-tomorrow") == b"ab"


def test_headers_of_any_type_are_kept() -> None:
    """AMQP tables carry bytes and times."""
    when = datetime(2026, 1, 1, tzinfo=timezone.utc)
    message = a_message(headers={**a_request(), "raw": b"\x00\xff", "when": when})
    headers = json_codec.loads(Message.of(message, a_request()).letter.headers)
    assert (headers["raw"], headers["when"]) == (b"\x00\xff", when)


def test_a_message_without_anything_is_captured() -> None:
    """A foreign publisher's message may have no headers, properties or body."""
    message = a_message(
        body=None,
        headers=None,
        properties=None,
        delivery_info=None,
        content_type=None,
        content_encoding=None,
    )
    letter = Message.of(message, {}).letter
    assert (letter.task_name, letter.body) == ("", b"")
    assert (letter.headers, letter.properties) == ("{}", "{}")


@pytest.mark.parametrize(
    ("request_id", "properties", "task_id"),
    [
        ("t-1", {"correlation_id": "c"}, "t-1"),
        (None, {"correlation_id": "c", "message_id": "m"}, "c"),
        ("", {"message_id": "m", "delivery_tag": "tag"}, "m"),
        (None, {"delivery_tag": "tag"}, "tag"),
        (17, {}, "17"),
    ],
)
def test_a_message_without_a_task_id_has_what_else_tells_it_from_others(
    request_id: object, properties: dict[str, str], task_id: str
) -> None:
    """When it is delivered again, under another tag, its letter must be found again."""
    message = a_message(properties=properties, delivery_tag="of this delivery")
    assert Message.of(message, a_request(id=request_id)).task_id == task_id


def test_messages_with_nothing_to_tell_them_apart_are_two() -> None:
    """AMQP's tags number deliveries: the letter of one message must not hide another's."""
    one, other = (
        Message.of(a_message(properties={}, delivery_tag=1), a_request(id=None)) for _ in range(2)
    )
    assert one.task_id != other.task_id


@pytest.mark.parametrize("value", [None, "two", -1, float("nan"), [], {}])
def test_nonsense_counts_are_zero(value: object) -> None:
    """A header that is no count must not stop a death."""
    message = a_message(headers={**a_request(), "dlq_redrives": value})
    letter = Message.of(message, a_request(retries=value)).letter
    assert (letter.retries, letter.redrives) == (0, 0)


@pytest.mark.parametrize(("value", "count"), [(True, 1), (1.5, 1), (2**63, 2**31 - 1)])
def test_odd_counts_are_taken_as_celery_takes_them(value: object, count: int) -> None:
    """It compares them with limits; a number that no column holds is as many as fit."""
    assert Message.of(a_message(), a_request(retries=value)).letter.retries == count


def test_counts_of_retries_and_redrives_are_taken() -> None:
    """Both make the key of the message."""
    message = a_message(headers={**a_request(), "dlq_redrives": 2})
    letter = Message.of(message, a_request(retries=3)).letter
    assert (letter.retries, letter.redrives) == (3, 2)


@pytest.mark.parametrize(
    ("value", "time"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        (17, None),
        ("2026-01-02T03:04:05", datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)),
        ("2026-01-02T03:04:05Z", datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)),
        ("2026-01-02T03:04:05+02:00", datetime(2026, 1, 2, 1, 4, 5, tzinfo=timezone.utc)),
        ("2026-01-02T03:04:05.1234567Z", datetime(2026, 1, 2, 3, 4, 5, 123456, timezone.utc)),
        ("2026-01-02T03:04:05.5-01:00", datetime(2026, 1, 2, 4, 4, 5, 500000, timezone.utc)),
    ],
)
def test_times_of_a_message_are_aware_or_left_out(value: object, time: datetime | None) -> None:
    """A time without a zone is UTC, as Celery means it; nonsense is no reason to fail."""
    letter = Message.of(a_message(), a_request(eta=value, expires=value)).letter
    assert letter.eta == letter.expires == time


def test_a_relative_expiry_is_left_out() -> None:
    """Only a moment can be compared later."""
    assert Message.of(a_message(), a_request(expires=timedelta(seconds=5))).letter.expires is None
