"""Any text as people see it, on screens and in logs."""

from __future__ import annotations

import json
import logging
import re
from typing import Any

import pytest
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.sentinel import MasterNotFoundError, Sentinel

from celery_dlq.letters.printable import (
    error_without_secrets,
    get_logger,
    json_text,
    one_line,
    printable,
)

STEERING = "\x00\x07\x08\x0b\x1b\x7f\x85\x9b\u061c\u200f\u2028\u2029\u202e\u2066\u2069\udfff\ud800"
HARMLESS = "süß 漢字 \U0001f469\u200d\U0001f4bb \\x1b"


def test_what_steers_a_terminal_is_spelled() -> None:
    """As in Python's source; lines and tabs stay where there may be several."""
    assert printable("a\n\tb\x1b[2J\u202e\udc80") == "a\n\tb\\x1b[2J\\u202e\\udc80"
    assert one_line("a\n\tb\r\u2028") == "a\\n\\tb\\r\\u2028"
    assert printable(HARMLESS) == one_line(HARMLESS) == HARMLESS
    assert printable(STEERING).isprintable()


def test_json_means_the_same_and_steers_nothing() -> None:
    """Programs read the very value; it can be shown, and sent on as UTF-8."""
    value = {STEERING: [STEERING, HARMLESS, '\n\t"\\'], "n": 1}
    for text in (json_text(value), json_text(value, indent=2)):
        assert json.loads(text) == value
        assert text.replace("\n", "").replace("\u200d", "").isprintable()
        text.encode()
    assert HARMLESS.replace("\\", "\\\\") in json_text(value)


class Hostile:
    """An object whose texts forge a line."""

    def __str__(self) -> str:
        return "s\n[forged]"

    def __repr__(self) -> str:
        return "r\n[forged]"


@pytest.mark.parametrize(
    ("message", "args", "said"),
    [
        ("%s died", ("a\n[forged]\x1b[2J",), "a\\n[forged]\\x1b[2J died"),
        ("%s %r", (Hostile(), Hostile()), "s\\n[forged] r\\n[forged]"),
        ("%(x)s", ({"x": "a\nb"},), "a\\nb"),
        ("%d of %.1f, %s, %s", (3, 2.5, None, True), "3 of 2.5, None, True"),
        ("%s", (ValueError("a\nb"),), "a\\nb"),
        ("100 %", (), "100 %"),
    ],
)
def test_no_argument_forges_a_line_of_a_log(
    caplog: pytest.LogCaptureFixture, message: str, args: tuple[Any, ...], said: str
) -> None:
    """Task names, ids and descriptions come from whoever may publish."""
    get_logger("celery_dlq.worker").warning(message, *args)
    assert caplog.records[-1].getMessage() == said


def test_no_exception_forges_a_line_of_a_log(caplog: pytest.LogCaptureFixture) -> None:
    """Its traceback is on lines of its own, none of which begins as one of the log does."""
    forged = "[2026-01-01 00:00:00,000: INFO/MainProcess] Task x succeeded"
    try:
        raise ValueError(f"a\n{forged}\x1b[2J")
    except ValueError:
        get_logger("celery_dlq").exception("It failed")
    text = logging.Formatter("[%(levelname)s] %(message)s").format(caplog.records[-1])
    first, *rest = text.splitlines()
    assert first == "[ERROR] It failed"
    assert all(line.startswith("  ") for line in rest)
    assert f"  {forged}\\x1b[2J" in rest


def test_every_logger_of_ours_is_clean() -> None:
    """None is made any other way; those that mask Celery's records are Celery's."""
    from pathlib import Path

    import celery_dlq

    package = Path(celery_dlq.__file__).parent
    others = [
        str(path)
        for path in package.rglob("*.py")
        if path.name not in ("printable.py", "masked_log.py")
        and re.search(r"\bgetLogger\(", path.read_text("utf-8"))
    ]
    assert others == []
    assert get_logger("celery_dlq").filters == get_logger("celery_dlq").filters
    assert len(get_logger("celery_dlq").filters) == 1


def test_sentinels_that_do_not_answer_are_named_by_their_addresses() -> None:
    """redis-py prints each client with all its settings, 700 characters of them."""
    known = [("127.0.0.1", 1), ("127.0.0.1", 2)]
    at_once = Retry(NoBackoff(), 0)
    found = Sentinel(known, sentinel_kwargs={"password": "hush", "retry": at_once})
    with pytest.raises(MasterNotFoundError) as raised:
        found.discover_master("orders")
    shown = error_without_secrets(raised.value)
    assert len(shown) < 300
    for text in ("'orders'", "127.0.0.1:1", "127.0.0.1:2"):
        assert text in shown
