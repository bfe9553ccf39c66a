"""Values replaced by tokens: nowhere in a letter is anything of them left."""

from __future__ import annotations

import json
from typing import Any

import pytest
from builders import a_letter, an_ended_delivery

from celery_dlq.errors import ExportError
from celery_dlq.letters.redaction import Redaction

KEY = b"0123456789abcdef0123456789abcdef"
CARD = "4111111111111111"


def redacted(paths: list[str], **changes: Any) -> dict[str, bytes]:
    """The fields of a letter after redaction."""
    fields = {name.encode(): value for name, value in a_letter(**changes).to_fields().items()}
    return {k.decode(): v for k, v in Redaction.with_key(paths, KEY).exported(fields).items()}


def whole(fields: dict[str, bytes]) -> bytes:
    return b"\n".join(fields.values())


def test_a_value_is_gone_from_every_place_of_a_letter() -> None:
    """Arguments, body, chain, headers, reprs, messages, traceback, history, names."""
    kwargs = {"card": CARD, "order": 7}
    chain = [{"task": "t.next", "args": [CARD], "kwargs": {"card": CARD}, "options": {}}]
    fields = redacted(
        ["kwargs.card"],
        kwargs_json=json.dumps(kwargs),
        body=json.dumps([[], kwargs, {"chain": chain, "callbacks": None}]).encode(),
        argsrepr="()",
        kwargsrepr=repr(kwargs),
        headers=json.dumps({"kwargsrepr": repr(kwargs), "argsrepr": "()", "note": f"for {CARD}"}),
        properties=json.dumps({"correlation_id": f"charge-{CARD}"}),
        description=f"bad card {CARD}",
        exception_message=f"bad card {CARD[:9]}…",
        traceback=f"ValueError: {CARD!r}\n",
        task_id=f"charge-{CARD}",
        history=(an_ended_delivery(exception_message=f"card={CARD}"),),
        native_death=json.dumps([{"reason": CARD}]),
    )
    assert CARD.encode() not in whole(fields)
    assert CARD[:9].encode() not in whole(fields)
    token = Redaction.with_key(["kwargs.card"], KEY).token_of(CARD)
    assert json.loads(fields["kwargs_json"]) == {"card": token, "order": 7}
    _args, body_kwargs, embed = json.loads(fields["body"])
    assert body_kwargs["card"] == embed["chain"][0]["kwargs"]["card"] == token
    assert "kwargsrepr" not in fields
    assert fields["description"].decode() == f"bad card {token}"
    assert "kwargsrepr" not in json.loads(fields["headers"])


def test_equal_values_have_equal_tokens_with_one_key_only() -> None:
    """Spark joins on them; another key makes others."""
    one, other = Redaction.with_key(["kwargs.a"], KEY), Redaction.with_key(["kwargs.a"], KEY[::-1])
    assert one.token_of(CARD) == one.token_of(CARD) != one.token_of("4111111111111112")
    assert one.token_of(CARD) != other.token_of(CARD)
    assert one.rules_and_key_id()["key"] != other.rules_and_key_id()["key"]
    assert KEY not in repr(one).encode()


@pytest.mark.parametrize("body", [b"\x80\x04K\x01.4111111111111111", b"\xff{", b"[" * 5000, b""])
def test_a_body_that_cannot_be_looked_into_is_left_out(body: bytes) -> None:
    """Pickle, broken UTF-8 and nonsense: dropped, with the reprs that describe it."""
    fields = redacted(["kwargs.card"], body=body, args_json=None, kwargs_json=None, kwargsrepr=CARD)
    assert not {"body", "kwargsrepr"} & set(fields)
    assert {"id", "task_name", "reason", "dead_lettered_at"} <= set(fields)


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("kwargs.cards.number", {"cards": [{"number": CARD}, {"number": CARD}]}),
        ("kwargs.*", {"a": CARD, "b": [CARD]}),
        ("kwargs.cards.1", {"cards": ["x", CARD]}),
        ("kwargs.card", {"card": {"number": CARD}, "other": f"x{CARD}"}),
        ("kwargs.card", {"card": int(CARD), "other": [int(CARD)], CARD: 1}),
    ],
)
def test_lists_wildcards_numbers_and_nested_values(path: str, kwargs: dict[str, Any]) -> None:
    """Any value is redacted, everywhere that it is repeated."""
    text = json.dumps(kwargs)
    fields = redacted([path], kwargs_json=text, body=f"[[], {text}, {{}}]".encode())
    assert CARD.encode() not in whole(fields)
    assert b"redacted:" in fields["kwargs_json"]


def test_headers_and_whole_texts_can_be_redacted() -> None:
    """``headers.auth`` and ``traceback``; what repeats them goes too."""
    fields = redacted(
        ["headers.auth", "traceback"],
        headers='{"auth": "Bearer s3cret", "id": "x"}',
        traceback="secret story",
        description="got Bearer s3cret and secret story",
    )
    assert b"s3cret" not in whole(fields)
    assert b"secret story" not in whole(fields)
    assert fields["traceback"].startswith(b"redacted:")
    assert json.loads(fields["headers"])["id"] == "x"


def test_short_values_are_replaced_only_where_they_stand_alone() -> None:
    """A CVC of three digits must not eat into numbers of lines; tokens stay whole."""
    fields = redacted(["kwargs.cvc"], kwargs_json='{"cvc": "123"}', description="cvc 123, id 91234")
    token = Redaction.with_key(["kwargs.cvc"], KEY).token_of("123")
    assert fields["description"].decode() == f"cvc {token}, id 91234"


def test_nothing_and_already_redacted_values_stay() -> None:
    """Null is null; a second redaction changes nothing."""
    token = Redaction.with_key(["kwargs.a"], KEY).token_of("x")
    kwargs = {"a": None, "b": token}
    fields = redacted(["kwargs.a", "kwargs.b"], kwargs_json=json.dumps(kwargs))
    assert json.loads(fields["kwargs_json"]) == kwargs


@pytest.mark.parametrize("paths", [["card"], ["kwargs"], ["kwargs."], ["id"], ["body.x"], [""]])
def test_unusable_paths_are_refused(paths: list[str]) -> None:
    """The message shows what a path looks like."""
    with pytest.raises(ExportError, match=r"kwargs\.card"):
        Redaction.with_key(paths, KEY)


@pytest.mark.parametrize("key", [None, b"", b"short", b" " * 40])
def test_a_missing_or_weak_key_is_refused(key: bytes | None) -> None:
    """A key made up here and kept beside the files would protect nothing."""
    with pytest.raises(ExportError, match="DLQ_REDACT_KEY"):
        Redaction.with_key(["kwargs.card"], key)
