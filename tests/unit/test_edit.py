"""Edits of a message: the paths of `--set` are those of `--where`."""

from __future__ import annotations

import json
import re
import zlib
from typing import Any

import pytest
from builders import NOW, a_letter, a_request
from hypothesis import example, given
from hypothesis import strategies as st
from kombu.compression import compress, decompress

from celery_dlq import DeadLetter, DLQError, LetterFilter
from celery_dlq.errors import RedriveError
from celery_dlq.letters.conditions import assignment
from celery_dlq.letters.redaction import Redaction
from celery_dlq.operations.edit import Edit, editing
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions, outgoing
from celery_dlq.operations.redrive.select import RawEntry

ARGS = [7, {"id": "7"}, [1, 2]]
KWARGS = {"tenant": 42, "a.b": {"c d": "deep"}, "lines": [{"sku": "A1"}], "0": "zero", "day": None}
OWN = {"x-tenant": "acme", "stamp": {"by": ["me"]}}


def message(body: bytes = b"", **headers: Any) -> Outgoing:
    """The message of a letter with arguments of all kinds."""
    letter = a_letter(
        body=body or json.dumps([ARGS, KWARGS, {"callbacks": None}]).encode(),
        headers=json.dumps({**a_request(), **OWN, **headers}),
    )
    fields = {name.encode(): value for name, value in letter.to_fields().items()}
    return outgoing(RawEntry("1-1", fields), RedriveOptions(), redrive_id="r", now=NOW)


def changed(*texts: str, redaction: Redaction | None = None) -> Outgoing:
    """The message after these assignments."""
    more = {} if redaction is None else {"redaction": redaction}
    edit = Edit(assign=dict(map(assignment, texts)))
    return editing(edit, actor="ann", now=NOW, **more)(message())


def as_letter(sent: Outgoing) -> DeadLetter:
    """The letter of such a message, if it dies."""
    args, kwargs, _ = json.loads(sent.body)
    return a_letter(
        args_json=json.dumps(args),
        kwargs_json=json.dumps(kwargs),
        headers=json.dumps(sent.headers),
    )


@pytest.mark.parametrize(
    "path",
    [
        "kwargs.tenant",
        "kwargs.new",
        'kwargs["tenant"]',
        'kwargs["a.b"]["c d"]',
        'kwargs["a.b"].new',
        "kwargs.lines[0].sku",
        "kwargs.lines.0.sku",
        "kwargs.0",
        "kwargs[0]",
        "args.0",
        "args[0]",
        "args[1].id",
        "args.2.1",
        "headers.x-tenant",
        "headers.new",
        "headers.stamp.by[0]",
        '  kwargs["ünï\\u00e9"]  ',
    ],
)
def test_what_was_set_at_a_path_is_found_at_it(path: str) -> None:
    """By the same text, with a value in JSON or without."""
    for value in ("5", '"5"', "some text", "true", "null"):
        letter = as_letter(changed(f"{path}={value}"))
        assert LetterFilter(conditions=(f"{path}={value}",)).matches(letter), value
        assert not LetterFilter(conditions=(f"{path}!={value}",)).matches(letter), value


@pytest.mark.parametrize(
    "text",
    [
        "",
        "tenant=42",
        "kwargs=1",
        "kwargs.=1",
        "kwargs.a.",
        "kwargs.a",
        "kwargs.a b=1",
        "kwargs['a']=1",
        "args[-1]=1",
        "args[x]=1",
        'kwargs["\\x"]=1',
        "kwargs.a==1",
        'kwargs.a="x',
        "kwargs" + ".a" * 21 + "=1",
    ],
)
def test_what_is_no_path_is_refused_alike(text: str) -> None:
    """With the same place in the text; each says what its own texts look like."""
    places = []
    for read in (assignment, lambda one: LetterFilter(conditions=(one,))):
        with pytest.raises(DLQError) as refused:
            read(text)
        places += re.findall(r" at character (\d+) of |at most 20 (names)", str(refused.value))
    assert len(places) == 2
    assert places[0] == places[1]


@given(st.text(max_size=20).filter(lambda text: not re.search("[~!<>]", text)))
@example('["a"].b[0]')
@example('["a~b!"].b[0]')
@example(" .a ")
def test_any_path_is_taken_by_both_or_by_none(text: str) -> None:
    """Whatever a shell lets through, but for the signs that only a condition may have."""
    text = f"kwargs{text}=1"
    taken = []
    for read in (assignment, lambda one: LetterFilter(conditions=(one,))):
        try:
            read(text)
        except DLQError:
            taken.append(False)
        else:
            taken.append(True)
    assert taken[0] == taken[1]


@pytest.mark.parametrize("sign", ["~", "!="])
def test_a_sign_of_conditions_assigns_nothing(sign: str) -> None:
    """What follows the sign is the value that a condition compares with."""
    text = f"kwargs.0{sign}0=1"
    LetterFilter(conditions=(text,))
    with pytest.raises(DLQError, match="expected =, and in double quotes"):
        assignment(text)


@pytest.mark.parametrize(
    "path",
    ["kwargs.lines[5].sku", "kwargs.tenant.id", "args[3]", "args.x", "args.00", "kwargs.n.m"],
)
def test_a_place_that_is_not_there_is_refused(path: str) -> None:
    """A list grows by no number, and nothing is made on the way."""
    with pytest.raises(RedriveError, match="does not exist in the message"):
        changed(f"{path}=1")


@pytest.mark.parametrize("path", ["kwargs", "kwargs.a=1", "body.a", ""])
def test_a_path_of_the_python_api_is_checked_alike(path: str) -> None:
    """It is no assignment, and has nothing behind it."""
    with pytest.raises(RedriveError, match="of the path"):
        editing(Edit(assign={path: 1}), actor="ann", now=NOW)(message())


@pytest.mark.parametrize("name", ["task", "id", "retries", "root_id", "dlq_redrives", "x-death"])
def test_headers_of_celery_and_of_this_package_are_not_set(name: str) -> None:
    """They say what the message is, and where it came from."""
    with pytest.raises(RedriveError, match=f"expected a header of your own, got '{name}'"):
        changed(f"headers.{name}=1")


def test_the_trail_has_the_headers_that_changed() -> None:
    """Beside the arguments, before and after; other headers are left out."""
    sent = changed("headers.x-tenant=globex", "kwargs.tenant=43")
    assert sent.headers["x-tenant"] == "globex"
    (edit,) = json.loads(sent.headers["dlq_edited"])
    assert json.loads(edit["from"]) == [ARGS, KWARGS, {"x-tenant": "acme"}]
    assert json.loads(edit["to"]) == [ARGS, {**KWARGS, "tenant": 43}, {"x-tenant": "globex"}]
    for text in ("args.0=1", "args[1].id=8", "kwargs.lines[0].sku=B2"):  # nested values, too
        (edit,) = json.loads(changed(text).headers["dlq_edited"])
        assert json.loads(edit["from"]) == [ARGS, KWARGS]
        assert json.loads(edit["to"]) != [ARGS, KWARGS]


def test_a_header_that_is_masked_is_neither_changed_nor_in_the_trail() -> None:
    """Nobody can see what they would overwrite; a new one is masked as it is set."""
    redaction = Redaction.parse(("headers.x-tenant", "headers.new"))
    with pytest.raises(RedriveError, match="headers that dlq_redact does not mask, got x-tenant"):
        changed("headers.x-tenant=secret", redaction=redaction)
    sent = changed("headers.new=secret", redaction=redaction)
    assert sent.headers["new"] == "secret"
    assert "secret" not in sent.headers["dlq_edited"]


@pytest.mark.parametrize("compression", ["application/x-gzip", "application/x-bz2", "xz"])
@pytest.mark.parametrize("protocol", [1, 2])
def test_an_edited_body_is_compressed_as_before(protocol: int, compression: str) -> None:
    """Its headers say how; whoever receives it must be able to read it."""
    links = {"callbacks": None}
    body: Any = (
        {"id": "i", "args": ARGS, "kwargs": KWARGS} if protocol == 1 else [ARGS, KWARGS, links]
    )
    given = bytes(compress(json.dumps(body), compression)[0])
    edit = Edit(assign=dict(map(assignment, ["args[0]=8", "kwargs.tenant=43"])))
    sent = editing(edit, actor="ann", now=NOW)(message(given, compression=compression))
    assert sent.headers["compression"] == compression
    found = json.loads(decompress(sent.body, compression))
    args, kwargs = [8, *ARGS[1:]], {**KWARGS, "tenant": 43}
    assert found == (
        {"id": "i", "args": args, "kwargs": kwargs} if protocol == 1 else [args, kwargs, links]
    )


@pytest.mark.parametrize(
    ("body", "compression"),
    [
        (zlib.compress(json.dumps([["x" * 2_000_000], {}, {}]).encode()), "gzip"),
        (b"[[1], {}, {}]", "gzip"),
        (b"[[1], {}, {}]", "application/x-cipher"),
    ],
)
def test_a_body_that_cannot_be_decompressed_is_not_edited(body: bytes, compression: str) -> None:
    """Nor is one that is too large when it is decompressed: it may be a bomb."""
    with pytest.raises(RedriveError, match="expected a JSON message of Celery to edit"):
        editing(Edit(args=[1]), actor="ann", now=NOW)(message(body, compression=compression))
