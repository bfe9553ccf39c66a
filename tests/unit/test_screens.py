"""Screens: the facts at 80 columns, and no text of a letter steers the terminal."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import timedelta
from io import StringIO

import pytest
from builders import DLQ, NOW, a_letter
from rich.console import Console

from celery_dlq.cli import letters, queues
from celery_dlq.cli.letters import UnreadableEntry
from celery_dlq.cli.table import age_text, block_text, counting, print_table, say
from celery_dlq.features.circuit_breaker.command import show_breakers
from celery_dlq.features.hold.commands import show_holds
from celery_dlq.letters.record import Delivery, Outcome, Reason
from celery_dlq.operations.release import HeldMessages
from celery_dlq.store.holds import Circuit, Hold
from celery_dlq.store.records import Group, QueueSummary

FORGERIES = 13


def a_screen() -> Console:
    """80 columns, no terminal."""
    return Console(file=StringIO(), width=80, highlight=False)


def text_on(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [20, 30, 50, 60, 72, 80])
def test_no_column_is_left_out_of_a_narrow_terminal(width: int) -> None:
    """Without blocks, rich leaves out the number of letters first, and says nothing."""
    console = Console(file=StringIO(), width=width, highlight=False)
    columns = ("!fingerprint, state", ">letters", "task, cause", "!oldest\nnewest")
    cells = (
        ("0f9f2b1e7d61", "open"),
        5632,
        ("shop.orders.charge", "failed"),
        ("268 d ago", "8 min ago"),
    )
    assert print_table(console, "orders-DLQ by cause", columns, [cells, cells]) == 2
    text = text_on(console)
    assert all(len(line.rstrip()) <= width for line in text.splitlines())
    shown = "".join(text.split())
    for word in ("fingerprint", "state", "letters", "cause", "0f9f2b1e7d61", "5,632", "268dago"):
        assert word in shown, text
    assert "8minago" in shown
    assert "shop.orders.charge" in shown


def drawn() -> str:
    """Every screen of letters, with texts that would forge a line or steer the terminal."""
    console = a_screen()
    ids = {"id": "0f9f2b1e-7d61", "task_id": "7d61-4f7e"}
    long = a_letter(**ids, task_name="shop.orders.charge", description="no such order " * 30)
    evil = a_letter(
        **ids,
        task_name="\x1b[2Jshop.mail",
        exception_type="a.\x1b]0;mine\x07Bad",
        description="\u202egnp \x9bm [red]",
        traceback="\x1b[31mfake\x1b[0m\r\n  line",
        history=(
            Delivery(
                number=1,
                started_at=NOW,
                worker_hostname="w",
                worker_pid=1,
                outcome=Outcome.FAILED,
                exception_message="\x1b[A",
            ),
        ),
    )
    corrupt = UnreadableEntry(position="17-1", error="no id", fields={"mood\x1b": "\x1b"})
    queues.show_queues(console, [])
    queues.show_queues(
        console,
        [
            QueueSummary(
                name="orders-DLQ",
                letters=1234,
                oldest_at=NOW,
                newest_at=NOW,
                last_hour=7,
                reasons={"failed": 234, "worker_lost": 1000},
            ),
            QueueSummary(name="a\nforged", letters=3, reasons={"b\rforged": 3}),
        ],
    )
    letters.letters(
        console, "c\nforged", [a_letter(id="d\nforged", task_id="t", task_name="e\nforged")]
    )
    group = Group(
        fingerprint="g\nforged",
        letters=5,
        task_name="h\nforged",
        reason="i\nforged",
        exception_type="j\nforged",
        first_seen_at=NOW,
        last_seen_at=NOW,
        example_id="e",
    )
    queues.show_groups(console, "f\nforged", [group])
    letters.letter_line(console, a_letter(**ids, task_name="k\nforged", description="l\rforged"))
    say(console, "m\nforged")
    letters.letters(console, "orders\x1b[31m-DLQ", [long, evil, corrupt])
    letters.letter(console, evil)
    letters.letter_line(console, evil)
    letters.unreadable(console, "orders-DLQ", corrupt)
    with counting(console, "done") as progress:
        progress(1)
        progress.expect(2)
    return text_on(console)


def test_no_text_of_a_letter_steers_the_terminal() -> None:
    """Escape sequences in an exception's message could rewrite what the operator sees."""
    text = drawn()
    steering = [c for c in text if (ord(c) < 32 and c != "\n") or 127 <= ord(c) < 160]
    assert not steering, json.dumps(steering)
    assert "\u202e" not in text
    assert "\\x1b[2Jshop.mail" in text
    assert "[red]" in text


def test_no_name_forges_a_line() -> None:
    """A queue whose name has a line end would be two queues to who looks at them."""
    text = drawn()
    assert text.count("forged") == len(re.findall(r"\\[nr]forged", text)) == FORGERIES


def test_tables_fit_80_columns() -> None:
    """That is what a terminal has; a line that the terminal wraps is unreadable in a table."""
    assert [line for line in drawn().splitlines() if len(line.rstrip()) > 80] == []


def test_cells_are_folded_at_spaces_and_names_with_a_mark_are_kept_whole() -> None:
    """A column that never wraps keeps its words whole, the others give way."""
    console = Console(file=StringIO(), width=40)
    row = ("0123456789", 1234, block_text("one two three four\nfive " + "x" * 20))
    assert print_table(console, "", ("!id", ">letters", "said"), [row]) == 1

    assert [line.rstrip() for line in text_on(console).splitlines()][3:-1] == [
        " 0123456789    1,234  one two three",
        "                      four",
        "                      five",
        "                      xxxxxxxxxxxxxxxxx",
        "                      xxx",
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
    assert age_text(NOW - timedelta(seconds=seconds), NOW) == said
    assert age_text(None) == "-"


def test_deliveries_of_a_message_are_no_retries_of_its_task() -> None:
    """Each retry is a message of its own, so its letter has both numbers."""
    letter = a_letter(
        reason=Reason.MAX_RETRIES_EXCEEDED, deliveries=1, max_deliveries=3, retries=2, max_retries=2
    )
    console = a_screen()
    assert letters.letters(console, DLQ, [letter, a_letter()]) == 2
    rows = text_on(console)
    assert rows.count("1 of 3 deliveries") == 1
    assert rows.count("retry 2 of 2") == rows.count("retry") == 1
    console = a_screen()
    letters.letter(console, letter)
    shown = " ".join(text_on(console).split())
    assert "deliveries 1 of 3, of this message retries 2 of 2, of this task" in shown


def test_tables_of_messages_that_wait_keep_every_name_whole_at_80_columns() -> None:
    """Names, ids and reasons of usual length are not cut into columns of a few characters."""
    console = a_screen()
    task, queue, reason = "shop.orders.charge_customer", "orders-high-priority", "gateway is down"
    names = {"task": task, "queue": queue}
    circuit = Circuit(**names, opened_at=1, probe_every=30, probes=5, probed_at=1)
    hold = Hold(
        **names, id="hold-5d1c0a7e", since=NOW, until=NOW, reason=reason, actor="ann@host-1"
    )
    held = HeldMessages(hold=hold, state="holding", held=123456, oldest_at=NOW)
    broken = HeldMessages(hold=replace(hold, circuit=circuit), state="releasing", held=123456)
    show_holds(console, [held])
    show_breakers(console, [broken])

    lines = text_on(console).splitlines()
    assert max(map(len, lines)) <= 80
    for text, times in {
        task: 2,
        queue: 2,
        reason: 2,
        "ann@host-1": 2,
        "hold-5d1c0a7e": 2,
    }.items():
        assert sum(text in one for one in lines) == times, text
