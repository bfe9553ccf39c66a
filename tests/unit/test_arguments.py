"""Arguments are read from bodies of both protocols; none takes more memory than is allowed."""

from __future__ import annotations

import bz2
import json
import lzma
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kombu.compression import compress

from celery_dlq.letters.arguments import MAX_JSON_BYTES, hides_nothing, json_parts
from celery_dlq.letters.bodies import Arguments, plain_body, unread_text

JSON = "application/json"
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=8,
)
OTHERS = st.dictionaries(st.text(), VALUES, max_size=4)


@given(st.lists(VALUES, max_size=3), st.dictionaries(st.text(), VALUES, max_size=3), OTHERS)
def test_args_and_kwargs_are_cut_out_of_any_body_of_protocol_1(
    args: Any, kwargs: Any, others: Any
) -> None:
    """Wherever they stand in the object, and whatever else is in it."""
    before, after = dict(list(others.items())[:2]), dict(list(others.items())[2:])
    body = {**before, "kwargs": kwargs, **after, "args": args}
    for write in (json.dumps, lambda value: f" {json.dumps(value, indent=1)}\n"):
        args_json, kwargs_json = json_parts(write(body).encode(), JSON)
        assert json.loads(args_json or "") == args
        assert json.loads(kwargs_json or "") == kwargs


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b'{"kwargs": {}}',
        b'{"args": {}}',
        b'{"args": null}',
        b'{"args": [], "kwargs": []}',
        b'{"args": [1]',
        b'{"args" [1]}',
        b'{"args": [1] "kwargs": {}}',
        b'{1: 2, "args": [1]}',
        b'{"args": [1],}',
        b'{"a":' * 100_000,
    ],
)
def test_an_object_that_is_no_message_of_celery_has_no_parts(body: bytes) -> None:
    """Celery tells protocol 1 by its args."""
    assert json_parts(body, JSON) == (None, None)


def test_a_message_of_protocol_1_may_have_no_kwargs() -> None:
    """Celery then takes none."""
    assert json_parts(b'{"task": "t", "args": [1]}', JSON) == ("[1]", "{}")


@pytest.mark.parametrize("name", ["gzip", "zlib", "bzip2", "lzma", "application/x-gzip"])
def test_what_kombu_compresses_is_read(name: str) -> None:
    """By its type or its short name."""
    data, kind = compress(b"[[1], {}, {}]", name)
    for known in (name, kind):
        assert plain_body(bytes(data), known) == b"[[1], {}, {}]"
        assert hides_nothing(known)


@pytest.mark.parametrize(
    ("name", "pack"), [("gzip", zlib.compress), ("bzip2", bz2.compress), ("lzma", lzma.compress)]
)
def test_a_bomb_does_not_go_off(name: str, pack: Callable[[bytes], bytes]) -> None:
    """Tens of megabytes in a small body are never unpacked."""
    bomb = pack(b" " * 64 * MAX_JSON_BYTES)
    tracemalloc.start()
    with pytest.raises(ValueError, match="larger than 1 MiB"):
        plain_body(bomb, name)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 24 * MAX_JSON_BYTES  # lzma has a window of 8 MB


@pytest.mark.parametrize(
    ("body", "compression"),
    [
        (b"[[1], {}, {}]", "gzip"),
        (zlib.compress(b"[[1], {}, {}]")[:-3], "gzip"),
        (b"", "bzip2"),
        (b"x", "application/x-tomorrow"),
        (b"x", ["gzip"]),
        (b"x", 7),
    ],
)
def test_what_is_not_compressed_as_it_says_is_not_read(body: bytes, compression: Any) -> None:
    """It is a `ValueError`, whatever a publisher wrote."""
    with pytest.raises(ValueError, match=r"compress|cut"):
        plain_body(body, compression)


@pytest.mark.parametrize("compression", ["application/x-cipher", ["gzip"], 7])
def test_a_compression_of_ones_own_may_be_a_cipher(compression: Any) -> None:
    """What it hides is not stored beside it."""
    assert not hides_nothing(compression)


@pytest.mark.parametrize(
    ("content_type", "body", "why"),
    [
        ("application/x-yaml", b"[[1], {}, {}]", "a body of type 'application/x-yaml'"),
        ("", b"[[1], {}, {}]", "a body of type 'unknown'"),
        (JSON, b"[[1], {}]", "JSON of another form"),
        (JSON, b'{"args": {}}', "JSON of another form"),
        (JSON, b"7", "JSON of another form"),
        (JSON, b"[", "one that cannot be read"),
        (JSON, b"[" * 100_000, "one that cannot be read"),
    ],
)
def test_a_body_that_cannot_be_edited_says_what_it_is(
    content_type: str, body: bytes, why: str
) -> None:
    """For the operator who tried."""
    with pytest.raises(ValueError, match=why):
        Arguments.of(content_type, body, None)


def test_a_body_with_other_arguments_keeps_all_else() -> None:
    """The links of protocol 2; the id, callbacks and the rest of protocol 1."""
    listed = Arguments.of(JSON, b'[[1], {"a": 2}, {"chord": null}]', None)
    assert json.loads(listed.body([3], {})) == [[3], {}, {"chord": None}]
    told = Arguments.of(JSON, b'{"task": "t", "id": "i", "args": [1], "utc": true}', None)
    assert json.loads(told.body([3], {"b": 4})) == {
        "task": "t",
        "id": "i",
        "args": [3],
        "utc": True,
        "kwargs": {"b": 4},
    }


def test_what_could_not_be_read_is_counted_in_words() -> None:
    """One, or many."""
    assert unread_text(1, "message", "not held") == "1 message could not be read; it was not held"
    text = unread_text(1200, "letter", "not listed")
    assert text == "1,200 letters could not be read; they were not listed"
