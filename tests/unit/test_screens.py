"""Screens with and without rich: the same facts at 80 columns, and no text steers a terminal."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from builders import DLQ, NOW, a_letter

from celery_dlq.cli.render import Screen, age
from celery_dlq.record import Reason

_DRAW = """
import sys
if sys.argv[1] == "plain":
    sys.modules["rich"] = None
from builders import NOW, a_letter
from celery_dlq.cli.render import Screen, Unreadable
from celery_dlq.backends.base import Group, QueueSummary
from celery_dlq.record import Delivery, Outcome

screen = Screen()
ids = {"id": "0f9f2b1e-7d61", "task_id": "7d61-4f7e"}
long = a_letter(**ids, task_name="shop.orders.charge", description="no such order " * 30)
evil = a_letter(**ids, task_name="\\x1b[2Jshop.mail", exception_type="a.\\x1b]0;mine\\x07Bad",
                description="\\u202egnp.exe \\x9b31m",
                traceback="\\x1b[31mfake\\x1b[0m\\r\\n  line",
                history=(Delivery(number=1, started_at=NOW, worker_hostname="w", worker_pid=1,
                                  outcome=Outcome.FAILED, exception_message="\\x1b[A"),))
screen.queues([])
screen.queues([QueueSummary(name="orders-DLQ", letters=1234, oldest_at=NOW, newest_at=NOW,
                            last_hour=7, reasons={"failed": 234, "worker_lost": 1000})])
screen.queues([QueueSummary(name="a\\nforged", letters=3, reasons={"b\\rforged": 3})])
screen.letters("c\\nforged", [a_letter(id="d\\nforged", task_id="t", task_name="e\\nforged")], 1)
screen.groups("f", [Group(
    fingerprint="g\\nforged", letters=5, task_name="h\\nforged", reason="i\\nforged",
    exception_type="j\\nforged", first_seen_at=NOW, last_seen_at=NOW, example_id="e")])
screen.line(a_letter(**ids, task_name="k\\nforged", description="l\\rforged"))
screen.say("m\\nforged")
screen.letters("orders\\x1b[31m-DLQ", [long, evil, Unreadable(position="17-1", error="no id")], 3)
screen.groups("orders-DLQ", [Group(
    fingerprint="c6a56e9b25a57fc5", letters=5, task_name="shop.\\x1b[Jcharge", reason="failed",
    exception_type="x.\\x1bSoldOut", first_seen_at=NOW, last_seen_at=NOW, example_id="e")])
screen.letter(evil)
screen.line(evil)
with screen.counting("done") as progress:
    progress(1)
loaded = sorted({name.partition(".")[0] for name in sys.modules if sys.modules[name]})
print("rich loaded:", "rich" in loaded)
"""
FORGERIES = 12


def drawn(how: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", _DRAW, how],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
        env={
            "COLUMNS": "80",
            "PYTHONPATH": str(Path(__file__).parents[1]),
            "PYTHONIOENCODING": "utf-8",
        },
    )
    assert done.returncode == 0, done.stderr
    assert f"rich loaded: {how == 'rich'}" in done.stdout
    return done.stdout


@pytest.mark.parametrize("how", ["plain", "rich"])
def test_no_text_of_a_letter_steers_the_terminal(how: str) -> None:
    """Escape sequences in an exception's message could rewrite what the operator sees."""
    text = drawn(how)
    steering = [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
    assert not steering, json.dumps(steering)
    assert "\u202e" not in text
    assert "\\x1b[2Jshop.mail" in text


@pytest.mark.parametrize("how", ["plain", "rich"])
def test_no_name_forges_a_line(how: str) -> None:
    """A queue whose name has a line end would be two queues to who looks at them."""
    text = drawn(how)
    assert text.count("forged") == FORGERIES
    assert len(re.findall(r"\\[nr]forged", text)) == FORGERIES


def test_tables_without_rich_say_the_same() -> None:
    """A worker's container has the core only; its operator must not miss a word."""
    words = {how: set(drawn(how).replace("─", "").split()) for how in ("plain", "rich")}
    assert words["rich"] - words["plain"] - {"True"} == set()


@pytest.mark.parametrize("how", ["plain", "rich"])
def test_tables_fit_80_columns(how: str) -> None:
    """That is what a terminal has; a line that the terminal wraps is unreadable in a table."""
    assert [line for line in drawn(how).splitlines() if len(line.rstrip()) > 80] == []


def test_cells_are_folded_at_spaces_and_numbers_stand_right() -> None:
    """A column that never wraps keeps its words whole, the others give way."""
    from celery_dlq.cli.plain import Table

    table = Table(title="Letters")
    table.add_column("id", no_wrap=True)
    table.add_column("letters", justify="right")
    table.add_column("said")
    table.add_row("0123456789", "1,234", "one two three\nfour " + "x" * 12)

    assert table.lines(31) == [
        "Letters",
        "id          letters  said",
        "----------  -------  ----------",
        "0123456789    1,234  one two",
        "                     three",
        "                     four",
        "                     xxxxxxxxxx",
        "                     xx",
    ]


@pytest.mark.parametrize(
    ("seconds", "said"),
    [
        (0, "0 s ago"),
        (-1, "0 s ago"),
        (-2, "in 2 s"),
        (-3600, "in 60 min"),
        (-3 * 3600, "in 3 h"),
        (-5 * 86400, "in 5 d"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (2 * 86400, "2 d ago"),
    ],
)
def test_ages_say_when_a_date_is_in_the_future(seconds: int, said: str) -> None:
    """A worker's clock is wrong then; only a second or so is no news."""
    assert age(NOW - timedelta(seconds=seconds), NOW) == said
    assert age(None) == "-"


def test_deliveries_of_a_message_are_no_retries_of_its_task(capsys: Any) -> None:
    """Each retry is a message of its own, so its letter has both numbers."""
    letter = a_letter(
        reason=Reason.MAX_RETRIES_EXCEEDED, deliveries=1, max_deliveries=3, retries=2, max_retries=2
    )
    Screen().letters(DLQ, [letter, a_letter()], 9)
    table = capsys.readouterr().out
    assert table.count("1 of 3 deliveries") == 1
    assert table.count("retry 2 of 2") == table.count("retry") == 1
    Screen().letter(letter)
    shown = " ".join(capsys.readouterr().out.split())
    assert "deliveries 1 of 3, of this message retries 2 of 2, of this task" in shown
