"""``dlq_redact``: a hidden value is seen nowhere in a letter, and the message stays whole."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any

import pytest
from builders import a_letter, a_message, a_request, an_ended_delivery

from celery_dlq.config import Settings
from celery_dlq.errors import DLQError, SettingsError
from celery_dlq.letters import json_codec
from celery_dlq.letters.conditions import path_of
from celery_dlq.letters.record import DeadLetter, Reason, field_kinds
from celery_dlq.letters.redaction import Redaction
from celery_dlq.letters.replacing import MARKER, MAX_PATTERN_CHARS
from celery_dlq.operations.edit import Edit, editing
from celery_dlq.operations.job import Job
from celery_dlq.operations.redrive.message import Outgoing
from celery_dlq.policies.decisions import Die
from celery_dlq.policies.resolved import ResolvedPolicy
from celery_dlq.store.holds import Hold
from celery_dlq.writing.capture import Message
from celery_dlq.writing.failure import Failure
from celery_dlq.writing.letter import LetterMaker

CARD = "4111111111111111"
KEY = b"0123456789abcdef0123456789abcdef"
NOW = a_letter().dead_lettered_at


def of(*rules: str) -> Redaction:
    """The redaction of an app with these rules."""
    return Settings.from_conf({"dlq_redact": list(rules)}).redaction


def a_secret_letter(**changes: Any) -> DeadLetter:
    """A letter that repeats a card number wherever a letter can."""
    kwargs = {"card": {"number": CARD, "holder": "Ada"}, "order": 7}
    chain = [{"task": "t.next", "args": [], "kwargs": kwargs, "options": {}}]
    values: dict[str, Any] = {
        "args_json": "[]",
        "kwargs_json": json.dumps(kwargs),
        "body": json.dumps([[], kwargs, {"chain": chain, "callbacks": None}]).encode(),
        "argsrepr": "()",
        "kwargsrepr": repr(kwargs),
        "headers": json.dumps({"kwargsrepr": repr(kwargs), "argsrepr": "()", "note": CARD}),
        "properties": json.dumps({"x": f"charge-{CARD}"}),
        "description": f"bad card {CARD}",
        "exception_message": f"bad card {CARD[:9]}…",
        "traceback": f'  File "/a/b.py", line 3, in f\nValueError: {CARD!r}\n',
        "history": (an_ended_delivery(exception_message=f"card={CARD}"),),
        "native_death": json.dumps([{"reason": CARD}]),
        **changes,
    }
    return a_letter(**values)


def text_of(letter: DeadLetter) -> str:
    """All that ``show --json`` says of a letter, with its body as text."""
    return json.dumps(letter.to_json(), ensure_ascii=False) + letter.body.decode("latin-1")


@pytest.mark.parametrize(
    "rule",
    [
        "kwargs.card.number",
        "kwargs.card",
        "kwargs.*.number",
        "kwargs.**.number",
        "**.number",
        "args[0].number, kwargs.card.number",
        r"re:\b\d{16}\b",
    ],
)
def test_a_hidden_value_is_nowhere_in_what_is_shown(rule: str) -> None:
    """Arguments, body, chain, headers, properties, texts, traceback, history."""
    letter = a_secret_letter()
    if rule.startswith("re:"):  # a pattern does not know the beginning of what it would match
        letter = a_secret_letter(exception_message=f"bad card {CARD}")
    shown = of(*rule.split(", ")).letter(letter)
    assert CARD not in text_of(shown)
    assert CARD[:9] not in text_of(shown)
    assert shown.description == f"bad card {MARKER}"
    assert MARKER in (shown.kwargs_json or "")
    assert shown.kwargsrepr is None or CARD not in shown.kwargsrepr
    same = ("id", "task_id", "fingerprint", "dead_lettered_at", "task_name", "deliveries")
    assert all(getattr(shown, name) == getattr(letter, name) for name in same)


@pytest.mark.parametrize("spelled", [repr, json.dumps])
def test_a_hidden_object_is_hidden_with_its_names_where_a_text_spells_it(spelled: Any) -> None:
    """Not its values alone; its names are shown where a text has it in part."""
    card = {"number": CARD, "holder": "Ada", "of": [{"the bank": 1}]}
    said = f"no such card: {spelled(card)}, so not charged"
    kwargs = json.dumps({"card": card, "order": 7})
    shown = of("**.card").letter(a_letter(kwargs_json=kwargs, exception_message=said))
    assert shown.exception_message == f"no such card: {MARKER}, so not charged"


def test_what_is_stored_has_clean_texts_and_the_whole_message() -> None:
    """Body, headers and properties are what a redrive publishes."""
    letter = a_secret_letter()
    kept = of("kwargs.card.number").captured(letter)
    message = ("body", "headers", "properties", "content_type", "id", "fingerprint")
    assert all(getattr(kept, name) == getattr(letter, name) for name in message)
    rest = {name: str(getattr(kept, name)) for name in field_kinds() if name not in message}
    del rest["native_death"]  # the broker's, not ours
    assert CARD not in json.dumps(rest)
    assert json.loads(kept.kwargs_json or "")["card"] == {"number": MARKER, "holder": "Ada"}


def test_letters_stored_before_the_setting_are_masked_when_shown_and_twice_is_once() -> None:
    """A second redaction changes nothing."""
    redaction = of("kwargs.card.number")
    shown = redaction.letter(a_secret_letter())
    assert redaction.letter(shown) == shown
    assert redaction.letter(redaction.captured(a_secret_letter())).description == shown.description


def test_without_rules_nothing_is_touched() -> None:
    """The very same objects."""
    letter = a_secret_letter()
    assert of().letter(letter) is letter
    assert of().captured(letter) is letter


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"\x80\x04\x8c\x104111111111111111\x94.", "application/x-python-serialize"),
        (b'[[], {"card": "4111111111111111"', "application/json"),
        (b"[" * 5000 + CARD.encode(), "application/json"),
        (b'[["4111111111111111"], {}, {}]' + b" " * 1024 * 1024, "application/json"),
        (b"- 4111111111111111", "application/x-yaml"),
    ],
)
def test_a_body_that_cannot_be_looked_into_is_hidden(body: bytes, content_type: str) -> None:
    """Pickle is not unpickled; broken, deep and very large JSON is not guessed at."""
    redaction = of("kwargs.card")
    letter = a_secret_letter(
        body=body,
        content_type=content_type,
        args_json=None,
        kwargs_json=None,
        **dict.fromkeys(("description", "exception_message", "traceback"), "it failed"),
        headers=json.dumps({"kwargsrepr": CARD}),
        properties="{}",
        history=(),
        native_death=None,
    )
    shown = redaction.letter(letter)
    assert CARD not in text_of(shown)
    assert shown.body == MARKER.encode()
    assert (shown.argsrepr, shown.kwargsrepr) == (MARKER, MARKER)


def test_values_of_every_kind() -> None:
    """Numbers, objects, lists, booleans; null stays, because there is nothing to hide."""
    redaction = of("kwargs.secret")
    for value in (CARD, int(CARD), 12.5, True, {"a": CARD}, [CARD, 1], 0):
        _args, kwargs = redaction.arguments([], {"secret": value, "again": [CARD]})
        assert kwargs["secret"] == MARKER
    assert redaction.arguments([], {"secret": None}) == ([], {"secret": None})
    args, kwargs = redaction.arguments([int(CARD)], {"secret": int(CARD), "n": {CARD: 1}})
    assert (args, kwargs["n"]) == ([MARKER], {MARKER: 1})


def test_names_of_headers_count_whatever_their_case_and_type() -> None:
    """``Authorization`` as bytes is also found where a text repeats it."""
    redaction = of("headers.authorization")
    shown = redaction.headers({"Authorization": b"Bearer s3cret", "id": "a Bearer s3cret"})
    assert shown == {"Authorization": MARKER, "id": f"a {MARKER}"}
    letter = a_letter(
        headers=json_codec.dumps({"AUTHORIZATION": b"Bearer s3cret", "x": 1}),
        description="bytes refused: Bearer s3cret",
    )
    assert redaction.letter(letter).description == f"bytes refused: {MARKER}"
    assert redaction.captured(letter).headers == letter.headers


def test_whole_texts_and_patterns_beside_values() -> None:
    """Overlapping matches become one marker; the exception's own dot does not save it."""
    redaction = of("traceback", "exception_message", "kwargs.mail", r"re:password=\S+")
    letter = a_letter(
        kwargs_json='{"mail": "ada@example.com"}',
        exception_message="no such thing.",
        description="failed: no such thing; again",
        traceback="frames",
        history=(an_ended_delivery(exception_message="another thing"),),
        release="password=none",
    )
    shown = redaction.captured(letter)
    assert (shown.traceback, shown.exception_message) == (MARKER, MARKER)
    assert shown.description == f"failed: {MARKER}; again"
    assert shown.history[0].exception_message == MARKER
    assert redaction.text("to password=ada@example.com now") == f"to {MARKER} now"


def test_a_pattern_sees_no_very_long_text() -> None:
    """A longer one is hidden as a whole: nobody knows what is in it."""
    redaction = of(r"re:\d{16}")
    assert redaction.text("x" * MAX_PATTERN_CHARS + CARD) == MARKER
    assert redaction.text("x" * (MAX_PATTERN_CHARS - 16) + CARD).endswith("x" + MARKER)


def test_a_letter_of_a_hostile_publisher_costs_little() -> None:
    """Deep nesting, thousands of hidden values, a long traceback: a second at most."""
    deep: Any = 1
    for _ in range(150):
        deep = {"kwargs": [deep], "args": deep if isinstance(deep, int) else [], "headers": {}}
    many = {f"k{number}": f"value {number}" for number in range(20_000)}
    for kwargs in (deep, many, {"kwargs": "a" * 60_000}):
        letter = a_letter(
            kwargs_json=json.dumps(kwargs),
            body=json.dumps([[], kwargs, {}]).encode(),
            traceback="a" * 64_000 + "value 7",
        )
        before = time.process_time()
        shown = of("kwargs.*", "**.password", "**.a.*.b").letter(letter)
        assert time.process_time() - before < 5
        assert kwargs is not many or "value 7" not in text_of(shown)


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ("kwargs.card", "expected dlq_redact to be a list of texts"),
        ([1], "expected dlq_redact to be a list of texts"),
        (["kwargs.card", "card"], r"expected dlq_redact\[1\] to be a path .* got 'card'"),
        (["kwargs"], "got 'kwargs'"),
        (["args[x]"], r"got 'args\[x\]'"),
        (["**"], "to be a path"),
        (["**.a.**.b"], "to be a path"),
        (["re:("], r"expected dlq_redact\[0\] to be re: and a regular expression.*got 're:\('"),
        (["re:x*"], "does not match an empty text, got"),
    ],
)
def test_malformed_rules_are_refused_at_start(rules: Any, said: str) -> None:
    """The message says which one, what was expected, and what it is."""
    with pytest.raises(SettingsError, match=said):
        Settings.from_conf({"dlq_redact": rules})


@pytest.mark.parametrize(
    ("rule", "path", "hidden"),
    [
        ("kwargs.card", "kwargs.card", True),
        ("kwargs.card", "kwargs.card.number", True),
        ("kwargs.card.number", "kwargs.card", False),
        ("kwargs.card.number", "kwargs.card.0.number", True),
        ("args[0].token", "args.0.token", True),
        ("args.0.token", "args[0].token", True),
        ("args.0", "args.1", False),
        ("kwargs.*.password", "kwargs.db.password", True),
        ("kwargs.*.password", "kwargs.password", False),
        ("**.password", "args.0.db.password", True),
        ("**.password", "headers.password", True),
        ("headers.authorization", "headers.Authorization", True),
        ("kwargs.card", "kwargs.Card", False),
        ("kwargs.card", "args[0].card", False),
    ],
)
def test_what_is_hidden_is_known_by_its_path(rule: str, path: str, hidden: bool) -> None:
    """Wherever a path leads, its value is masked if the rule names it or a value above it."""
    root, names = path_of(path)
    value: Any = "secret"
    for name, index in reversed(names):
        value = {name: value} if index is None else [0] * index + [value]
    if root == "headers":
        shown: Any = of(rule).headers(value)
    else:
        given = {"args": [], "kwargs": {}, root: value}
        shown = of(rule).arguments(given["args"], given["kwargs"])
    assert ("secret" not in json.dumps(shown)) is hidden


BEFORE = ([1, {"pin": "0815"}], {"card": {"number": CARD, "holder": "Ada"}, "note": f"for {CARD}"})


def test_an_edit_keeps_the_values_that_nobody_saw() -> None:
    """What was masked comes back, what was changed is changed; equal values are no change."""
    redaction = of("kwargs.card.number", "args[1].pin", r"re:\d{16}")
    args, kwargs = redaction.arguments(*BEFORE)
    assert CARD not in json.dumps([args, kwargs])
    kwargs["card"]["holder"], args[0] = "Bob", True
    new_args, new_kwargs = redaction.restored(BEFORE, (args, kwargs))
    assert new_args == [True, {"pin": "0815"}]
    assert new_args[0] is True
    assert new_kwargs == {"card": {"number": CARD, "holder": "Bob"}, "note": f"for {CARD}"}
    assert redaction.restored(BEFORE, BEFORE) == BEFORE
    assert redaction.restored(BEFORE, (args, {})) == (new_args, {})


@pytest.mark.parametrize(
    ("args", "kwargs", "said"),
    [
        (BEFORE[0], {"card": {"number": "1"}}, "'kwargs.card.number' to stay as it is"),
        (BEFORE[0], {"other": MARKER}, "'kwargs.other' to stay as it is"),
        (BEFORE[0], {"note": f"not {MARKER}"}, "'kwargs.note' to stay as it is"),
        ([{"pin": MARKER}], {}, "'args' to stay as it is"),
        (BEFORE[0], {MARKER: 1}, "'kwargs' to stay as it is"),
    ],
)
def test_an_edit_that_would_change_or_move_a_hidden_value_is_refused(
    args: Any, kwargs: Any, said: str
) -> None:
    """The marker never becomes an argument."""
    redaction = of("kwargs.card.number", "args[1].pin", r"re:\d{16}")
    with pytest.raises(DLQError, match=said):
        redaction.restored(BEFORE, (args, kwargs))


def test_the_trail_of_edits_is_masked_and_so_is_an_older_one() -> None:
    """The new message is whole; its header says what changed, without the secret."""
    redaction = of("kwargs.card")
    message = Outgoing(
        letter_id="l",
        task_id="t",
        redrives=1,
        queue="orders",
        body=json.dumps([[], {"card": CARD, "order": 7}, {}]).encode(),
        content_type="application/json",
        content_encoding="utf-8",
    )
    change = Edit(assign={"kwargs.order": 8})
    done = editing(change, actor="ada", now=NOW, redaction=redaction)(message)
    assert json.loads(done.body)[:2] == [[], {"card": CARD, "order": 8}]
    assert CARD not in done.headers["dlq_edited"]
    assert json.loads(json.loads(done.headers["dlq_edited"])[0]["from"])[1]["order"] == 7
    old = json.dumps([{"at": "x", "from": json.dumps([[], {"card": "5105"}]), "to": '[[], {"ca'}])
    shown = json.loads(redaction.letter(a_letter(headers=json.dumps({"dlq_edited": old}))).headers)
    assert "5105" not in shown["dlq_edited"]
    assert json.loads(shown["dlq_edited"])[0]["to"] == MARKER


def test_exports_have_the_same_grammar_and_leave_masked_values_alone() -> None:
    """A pattern's match becomes a token; what is masked at capture stays so."""
    kept = of("kwargs.card").captured(a_secret_letter(kwargs_json=json.dumps({"card": CARD})))
    tokens = Redaction.with_key(["kwargs.card[0].number", "**.card", r"re:\d{16}"], KEY)
    fields = tokens.exported({name.encode(): value for name, value in kept.to_fields().items()})
    assert CARD.encode() not in b"".join(fields.values())
    assert json.loads(fields[b"kwargs_json"]) == {"card": MARKER}
    assert json.loads(fields[b"native_death"]) == [{"reason": tokens.token_of(CARD)}]


def test_a_redacted_export_has_every_field_of_a_letter() -> None:
    """A field of a kind that redaction does not know would be gone, without a word."""
    texts = {"headers": b"{}", "properties": b"{}", "history": b"[]", "native_death": b"[]"}
    body = {"body": b"[[], {}, {}]", "content_type": b"application/json"}
    fields = dict.fromkeys(field_kinds(), b"1") | texts | body
    redaction = Redaction.with_key([r"re:\d{16}"], KEY)
    found = redaction.exported({name.encode(): value for name, value in fields.items()})
    assert {name.decode() for name in found} == {*field_kinds()}


def test_the_fingerprint_is_that_of_the_unmasked_cause() -> None:
    """Groups stay what they were before there was the setting."""
    traceback = '  File "/srv/shop/charge.py", line 3, in charge\nValueError: bad\n'
    resolved = ResolvedPolicy("orders", "orders-DLQ", None, None)
    message = Message.of(a_message(), a_request())
    failure = Failure(None, "ValueError", "bad", traceback)
    plain = LetterMaker(clock=lambda: NOW, hostname="celery@web-1", pid=1)
    masking = replace(plain, change=of("traceback", "re:charge").captured)
    bad = Die(Reason.FAILED, "bad")
    masked = masking(message, resolved, bad, failure=failure, deliveries=1)
    assert masked.traceback == MARKER
    shown = plain(message, resolved, bad, failure=failure, deliveries=1)
    assert masked.fingerprint == shown.fingerprint


def test_what_people_wrote_is_masked_and_ids_are_not() -> None:
    """A job's filter, options, note and errors; a tuple stays one."""
    redaction = of(r"re:\d{13,}")
    letter_id = "1700000000000-0"
    job = Job(
        id=letter_id,
        kind="redrive",
        queue="orders-DLQ",
        broker="",
        actor="olga",
        started_at=NOW,
        updated_at=NOW,
        state="failed",
        filter={"grep": CARD, "conditions": [f"kwargs.card={CARD}"]},
        options={"to_queue": "elsewhere"},
        note=f"for {CARD}",
        failed={letter_id: f"no room for {CARD}"},
    )
    shown = job.shown(redaction)
    assert CARD not in json.dumps(shown.to_json(), default=str)
    assert shown.failed == {letter_id: f"no room for {MARKER}"}
    assert (shown.id, shown.options) == (job.id, job.options)
    assert job.shown(of()) == job
    hold = Hold(id="h", where=(f"kwargs.card={CARD}", "args.0=1"), since=NOW)
    assert redaction.shown(hold, "where").where == (f"kwargs.card={MARKER}", "args.0=1")
