"""What commands say of what they did, and their exit codes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from datetime import datetime, timezone
from types import ModuleType
from typing import Any

import pytest
from builders import a_letter
from command_line import Dlq
from rich.console import Console
from test_operations import QUEUE, left, put

from celery_dlq.cli.jobs import unfinished
from celery_dlq.cli.letters import letters
from celery_dlq.letters.record import DeadLetter
from celery_dlq.operations.redrive.work import RedriveReport
from celery_dlq.operations.release import OPENED_AGAIN
from celery_dlq.store.claims import Claims
from celery_dlq.store.letters import Letters


@pytest.mark.parametrize("command", ["redrive", "discard", "purge"])
def test_what_did_nothing_exits_with_1(poison: ModuleType, dlq: Dlq, command: str) -> None:
    """All letters are another command's, or there are none: nothing was done."""
    ids = [put(poison).id for _ in range(4)]
    poison.dlq.store.claims.claim(QUEUE, ids, owner="other", lease_seconds=60)
    done = dlq(command, QUEUE, "--all", "--yes")
    assert done.exit_code == 1
    assert "4 skipped: another command works on them" in done.stdout
    poison.dlq.store.remove(QUEUE, ids)
    done = dlq(command, QUEUE, "--all", "--yes")
    assert (done.exit_code, "has no letters" in done.stderr) == (1, True)


@pytest.mark.parametrize("command", ["redrive", "discard", "purge"])
@pytest.mark.parametrize("way", ["here", "elsewhere"])
def test_letters_that_are_gone_are_not_said_to_come_back(
    poison: ModuleType, dlq: Dlq, monkeypatch: pytest.MonkeyPatch, command: str, way: str
) -> None:
    """Another operator was faster: trying again later would not help."""
    for _ in range(3):
        put(poison)
    name = "redrive" if command == "redrive" and way == "here" else "claim"
    inner = getattr(Claims, name)

    def late(self: Claims, queue: str, *args: Any, **more: Any) -> Any:
        poison.dlq.store.remove(queue, left(poison))
        return inner(self, queue, *args, **more)

    monkeypatch.setattr(Claims, name, late)
    if way == "elsewhere":
        monkeypatch.setattr(Claims, "marker", lambda *_: None)
    done = dlq(command, QUEUE, "--all", "--yes")
    assert done.exit_code == 1
    assert "3 skipped: others have redriven, discarded or trimmed them" in done.stdout
    assert "try again" not in done.stdout


def test_a_dry_run_that_keeps_counts_promises_what_the_redrive_does(
    poison: ModuleType, dlq: Dlq
) -> None:
    """A letter without a delivery left stays."""
    put(poison, deliveries=3, max_deliveries=3)
    put(poison, deliveries=2, max_deliveries=3)
    how = ("redrive", QUEUE, "--all", "--keep-count")
    dry = dlq(*how, "--dry-run")
    assert dry.exit_code == 1
    assert "Would redrive 1 letter of orders-DLQ" in dry.stdout
    assert "1 would stay: with --keep-count no delivery is left" in dry.stdout
    done = dlq(*how, "--yes")
    assert (done.exit_code, len(left(poison))) == (1, 1)
    assert dlq(*how, "--force", "--dry-run").exit_code == 0


def test_without_a_terminal_no_queue_is_read_before_yes_is_asked_for(
    poison: ModuleType, dlq: Dlq, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 400,000 letters that would take a minute."""
    put(poison)

    def refuse(*_args: Any, **_more: Any) -> Any:
        raise AssertionError("the queue was read")

    monkeypatch.setattr(Letters, "fields", refuse)
    done = dlq("redrive", QUEUE, "--task", "fails")
    assert (done.exit_code, "--yes is needed" in done.stderr) == (2, True)


def test_the_next_command_is_named() -> None:
    """After *held* the release; after a breaker that opened again, none that sends more."""
    held = RedriveReport(
        redrive_id="j1", state="stopped", note="the canary is held by hold-1: release that first"
    )
    text = unfinished("redrive", held, "j1")
    assert text.index("hold-1: release that first") < text.index("dlq jobs resume j1")
    again = RedriveReport(redrive_id="j1", state="cancelled", note=OPENED_AGAIN)
    text = unfinished("release", again, "j1")
    assert "the circuit breaker has opened again" in text
    assert "resume" not in text
    person = RedriveReport(redrive_id="j1", state="cancelled", note="cancelled by ann@host")
    assert "by ann@host" in unfinished("redrive", person, "j1")


def test_a_job_says_who_cancelled_it(poison: ModuleType, dlq: Dlq) -> None:
    """In the list, on its page and in the command that it ended."""
    put(poison)
    job = poison.dlq.plan("purge", QUEUE)
    poison.dlq.start(job.id)
    assert dlq("jobs", "cancel", job.id).exit_code == 0
    assert dlq("jobs", "status", job.id, "--json").lines[0]["note"].startswith("cancelled by ")


def test_a_wrong_discard_is_taken_back_by_its_job_and_not_a_colleagues(
    poison: ModuleType, dlq: Dlq
) -> None:
    """The command names the way back; whoever discarded at the same time keeps what they did."""
    mine = {put(poison, fingerprint="aaa").id for _ in range(5)}
    theirs = {put(poison, fingerprint="bbb").id for _ in range(3)}
    done = dlq("discard", QUEUE, "--fingerprint", "aaa", "--yes")
    poison.dlq.discard(QUEUE, fingerprint="bbb")
    job = next(job for job in poison.dlq.jobs() if job.filter == {"fingerprint": "aaa"})
    assert f"`dlq restore --job {job.id}`" in done.stdout
    assert left(poison) == []
    back = dlq("restore", "--job", job.id, "--yes")
    assert (back.exit_code, "Restored 5 letters to orders-DLQ" in back.stdout) == (0, True)
    assert set(left(poison)) == mine
    assert {one.key for one in poison.dlq.discarded(QUEUE)} == theirs
    again = dlq("restore", "--job", job.id, "--yes")
    assert (again.exit_code, "no discarded letter" in again.stderr) == (1, True)
    purge = poison.dlq.purge(QUEUE)
    refused = dlq("restore", "--job", purge.job_id, "--yes")
    assert (refused.exit_code, "a purge" in refused.stderr) == (1, True)


def test_audit_and_job_are_for_people(poison: ModuleType, dlq: Dlq) -> None:
    """Times as people write them, no JSON in the way, no zeros, nothing cut in the middle."""
    put(poison)
    since = datetime(2026, 1, 2, 3, 4, tzinfo=timezone.utc)
    poison.dlq.purge(QUEUE, since=since, task_name="poison_app.fails")
    poison.dlq.hold(queue="orders", reason="gateway down " * 30)
    held, purged = poison.dlq.changes()
    assert purged.detail["filter"]["since"].startswith("2026-01-02T03:04")
    assert held.detail.keys() == {"task", "queue", "reason"}
    shown = dlq("audit", columns=200).stdout
    assert "2026-01-02T03:04" in shown
    assert not re.search(r"\d{12}", shown.replace(purged.detail["job"], ""))
    job = poison.dlq.jobs()[0]
    status = dlq("jobs", "status", job.id).stdout
    assert "removed     1" in status
    assert not re.search(r"\s0$", status, re.MULTILINE)
    assert "{" not in status
    assert "since 2026-01-02T03:04" in status


def test_a_redrive_of_a_part_of_a_chord_says_so(poison: ModuleType, dlq: Dlq) -> None:
    """Also without a dry run: the chord fails, its body does not run."""
    links = '{"callbacks": null, "errbacks": null, "chain": null, "chord": {"task": "shop.sum"}}'
    put(poison, body=f"[[1], {{}}, {links}]".encode())
    done = dlq("redrive", QUEUE, "--all", "--yes", "--force")
    assert "Parts of chords: 1" in done.stdout


def test_a_long_list_begins_before_it_has_read_all() -> None:
    """``list --limit 3000 | head`` shows the first rows at once."""
    text = io.StringIO()

    def found() -> Iterator[DeadLetter]:
        yield from (a_letter() for _ in range(250))
        assert text.getvalue().count("shop.charge") == 200
        yield a_letter()

    assert letters(Console(file=text, width=200), QUEUE, found()) == 251
    assert text.getvalue().count("shop.charge") == 251
