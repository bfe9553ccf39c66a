"""Policies in force: shown, different between workers, overridden at run time, trimmed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from types import ModuleType
from typing import Any

import intervals
import pytest
from builders import a_letter, key_of
from command_line import Dlq
from waiting import poll
from workers import HERE, Worker, environment

from celery_dlq import DeadLetter
from celery_dlq.store.instructions import Override

Start = Callable[..., Worker]
Ran = Callable[[str], int]
Letters = Callable[..., list[DeadLetter]]


def test_every_value_is_shown_with_its_source(dlq: Dlq) -> None:
    """At 80 columns, and as lines for programs."""
    conf = {
        "dlq_queues": {
            "orders": {"max_deliveries": 3},
            "*": {"dead_letter_ttl": 3600},
            "ordesr": {},
        }
    }
    shown = dlq("policies", conf=conf, columns=80)
    assert shown.exit_code == 0, shown.stderr
    assert "queue orders → orders-DLQ" in shown.stdout
    assert "max_deliveries   3    dlq_queues['orders']" in shown.stdout
    assert "dead_letter_ttl  1 h  dlq_queues['*']" in shown.stdout
    assert "task poison_app.once from queue orders" in shown.stdout
    assert "dead_letter_policy of poison_app.once" in shown.stdout
    assert "did you mean 'orders'?" in " ".join(shown.stdout.split())
    assert all(len(line) <= 80 for line in shown.stdout.splitlines())

    lines = dlq("policies", "--json", conf=conf).lines
    (orders,) = [v for v in lines if v.get("queue") == "orders" and v["task"] is None]
    assert orders["policy"]["dead_letter_ttl"] == {"value": 3600.0, "source": "dlq_queues['*']"}
    assert orders["policy"]["max_retries"] == {"value": None, "source": "default"}


def test_an_override_reaches_running_workers_and_ends(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters, ran: Ran
) -> None:
    """No deploy, no restart; an unguarded queue is guarded until the override ends."""
    conf: dict[str, Any] = {"dlq_queues": {"orders": {"max_deliveries": 3}}}
    worker = start_worker(conf)
    assert dlq("policies", "set", "orders", "max_deliveries=1", "--for", "25s").exit_code == 0
    poll(lambda: "overridden by" in worker.output, timeout_seconds=30)

    poison.requeues.delay("under the override")
    (letter,) = letters()
    assert (letter.deliveries, letter.max_deliveries, ran("under the override")) == (1, 1, 1)
    assert "override by " in dlq("policies", conf=conf).stdout

    poll(lambda: "override by" not in dlq("policies", conf=conf).stdout, timeout_seconds=60)
    poll(
        lambda: poison.dlq.assembly.backend.instructions.in_force(Override) == [],
        timeout_seconds=10,
    )

    def three_deliveries_again() -> bool:
        known = list(poison.dlq.letters("orders-DLQ"))
        sent = poison.requeues.delay("afterwards")
        found = letters(count=len(known) + 1)
        return [letter.deliveries for letter in found if letter.task_id == sent.id] == [3]

    # A worker notices the end with its next tick, so a letter or two may be early.
    poll(three_deliveries_again, timeout_seconds=10)


def test_an_override_guards_what_nothing_guarded(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """The worker was started without any policy."""
    conf: dict[str, Any] = {"dlq_queues": {}}
    worker = start_worker(conf)
    done = dlq(
        "policies", "set", "orders", "max_deliveries=2", "reasons=", "--for", "5m", conf=conf
    )
    assert done.exit_code == 2
    done = dlq("policies", "set", "orders", "max_deliveries=2", "--for", "5m", conf=conf)
    assert done.exit_code == 0, done.stderr
    poll(lambda: "overridden by" in worker.output, timeout_seconds=30)

    poison.requeues.delay("loop")

    (letter,) = letters()
    assert letter.deliveries == 2
    assert dlq("policies", "unset", "orders", conf=conf).exit_code == 0
    again = dlq("policies", "unset", "orders", conf=conf)
    assert (again.exit_code, again.stdout) == (1, "")
    assert "expected an override of any key for queue 'orders', found none" in again.stderr


def test_workers_with_different_policies_warn_each_other(
    dlq: Dlq, poison: ModuleType, start_worker: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both logs say it, and `dlq policies` shows it."""
    intervals.change(monkeypatch, tick=0.1)
    first = start_worker(
        {"dlq_queues": {"orders": {"max_deliveries": 3}}}, arguments=("--hostname", "one@here")
    )
    second = start_worker(
        {"dlq_queues": {"orders": {"max_deliveries": 4}}}, arguments=("--hostname", "two@here")
    )
    said = "have different policies: max_deliveries"
    poll(lambda: said in first.output and said in second.output, timeout_seconds=90)
    assert "max_deliveries 3 and 4; each worker applies its own" in first.output
    assert "max_deliveries 4 and 3; each worker applies its own" in second.output
    assert said in " ".join(dlq("policies").stdout.split())

    first.stop()
    poll(lambda: [w.hostname for w in poison.dlq.registry.workers()] == ["two@here"])


def test_a_worker_trims_what_is_past_its_time(
    dlq: Dlq, poison: ModuleType, start_worker: Start, letters: Letters
) -> None:
    """Announced in its log, kept in the audit; the command line trims where no worker runs."""
    conf: dict[str, Any] = {"dlq_queues": {"orders": {"dead_letter_ttl": 1}}}
    worker = start_worker(conf)
    for n in range(3):
        poison.to_dlq.delay(f"x{n}")
    letters(count=1)

    def trimmed() -> int:
        changes = poison.dlq.registry.changes(limit=9)
        return sum(change.letters for change in changes if change.action == "trimmed")

    poll(lambda: trimmed() == 3, timeout_seconds=30)
    assert poison.dlq.store.length("orders-DLQ") == 0
    poll(lambda: "letters from orders-DLQ because of dead_letter_ttl" in worker.output)

    worker.stop()
    worker = start_worker({"dlq_queues": {"orders": {}}})
    for n in range(3):
        poison.to_dlq.delay(f"y{n}")
    letters(count=3)
    worker.stop()
    limit = {"dlq_queues": {"orders": {"dead_letter_max_length": 1}}}
    dry = dlq("trim", "--dry-run", conf=limit)
    assert "Would trim 2 letters from orders-DLQ because of dead_letter_max_length." in dry.stdout
    done = dlq("trim", conf=limit)
    assert "Trimmed 2 letters from orders-DLQ because of dead_letter_max_length." in done.stdout
    assert poison.dlq.store.length("orders-DLQ") == 1
    assert "For 24 hours `dlq restore ID` brings them back." in done.stdout
    assert len(list(poison.dlq.discarded("orders-DLQ"))) == 2
    nothing = dlq("trim", "orders-DLQ", conf=limit)
    assert "Nothing to trim." in nothing.stdout
    assert nothing.exit_code == 0


@pytest.mark.parametrize("value", ["dead_letter_ttl=1", "dead_letter_max_length=1"])
def test_a_change_removes_nothing_for_a_minute_and_nothing_for_good(
    dlq: Dlq,
    poison: ModuleType,
    start_worker: Start,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
) -> None:
    """Two workers, of which one starts meanwhile; a queue by settings shows that they trim."""
    conf: dict[str, Any] = {"dlq_queues": {"orders": {}, "slow": {"dead_letter_ttl": 1}}}
    intervals.change(monkeypatch, tick=0.2)
    start_worker(conf, arguments=("--hostname", "one@here"))
    ids = [put(poison, "orders") for _ in range(3)]

    refused = dlq("policies", "set", "orders", value, "--for", "5m", conf=conf)
    assert refused.exit_code == 2
    number = 2 if "length" in value else 3
    assert f"in one minute, this removes {number} letters of orders-DLQ" in refused.stderr
    assert poison.dlq.assembly.backend.instructions.in_force(Override) == []

    done = dlq("policies", "set", "orders", value, "--for", "5m", "--yes", conf=conf)
    assert "changes in one minute; until then its letters stay" in done.stdout
    start_worker(conf, arguments=("--hostname", "two@here"))
    for _ in range(2):
        put(poison, "slow")
        poll(lambda: poison.dlq.store.length("slow-DLQ") == 0, timeout_seconds=30)
    assert dlq("policies", "unset", "orders", "--yes", conf=conf).exit_code == 0
    assert poison.dlq.store.length("orders-DLQ") == 3

    intervals.change(monkeypatch, grace=timedelta(seconds=2))  # for those who would wait
    assert dlq("policies", "set", "orders", value, "--for", "5m", "--yes", conf=conf).exit_code == 0
    poll(lambda: poison.dlq.store.length("orders-DLQ") == 3 - number, timeout_seconds=30)
    assert dlq("policies", "unset", "orders", "--yes", conf=conf).exit_code == 0
    for letter_id in ids[:number]:
        assert dlq("restore", letter_id, conf=conf).exit_code == 0
    assert poison.dlq.store.length("orders-DLQ") == 3


@pytest.mark.parametrize(("answer", "changed"), [("y", True), ("n", False), ("", False)])
def test_a_change_of_letters_is_asked_about(
    poison: ModuleType, redis_url: str, answer: str, changed: bool
) -> None:
    """On a terminal; without an answer nothing is changed."""
    put(poison, "orders")
    put(poison, "orders")
    terminal, theirs = os.openpty()
    os.write(terminal, f"{answer}\n".encode())
    set_ = ("policies", "set", "orders", "dead_letter_max_length=1", "--for", "1h")
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *set_],
        env=environment(redis_url),
        cwd=HERE,
        stdin=theirs,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    os.close(terminal)
    os.close(theirs)
    question = "In one minute, this removes 1 letter of orders-DLQ. Change the policy?"
    assert (question in done.stderr, question in done.stdout) == (True, False)
    assert (
        done.returncode == 0,
        poison.dlq.assembly.backend.instructions.in_force(Override) != [],
    ) == (changed, changed)


def put(poison: ModuleType, queue: str) -> str:
    """Store a letter; return its id."""
    letter = a_letter(source_queue=queue, dead_letter_queue=f"{queue}-DLQ")
    poison.dlq.store.dead_letter(letter, key_of(letter))
    return letter.id


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("policies", "set", "orders", "max_deliveries=0", "--for", "2h"), 1, "1 or more, got 0"),
        (("policies", "set", "orders", "max_deliveries", "--for", "2h"), 2, "KEY=VALUE"),
        (
            ("policies", "set", "orders", "max_deliveries=3", "--for", "soon"),
            2,
            "such as 30s, 5m, 2h",
        ),
        (("policies", "set", "orders", "max_deliveries=3"), 2, "--for"),
        (("policies", "set", "orders", "max_deliveries=3", "--for", "90d"), 1, "at most 30 days"),
        (("policies", "unset", "orders", "colour"), 1, "found none"),
        (("policies", "--queue", "nobodys"), 1, "no policy applies to queue"),
        (("trim", "nobodys-DLQ"), 1, "expected the name of a dead-letter queue"),
    ],
)
def test_bad_input_changes_nothing(
    dlq: Dlq, poison: ModuleType, arguments: tuple[str, ...], code: int, said: str
) -> None:
    """One clear line, no traceback."""
    done = dlq(*arguments)
    assert done.exit_code == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert poison.dlq.registry.changes(limit=9) == []


def test_a_delay_that_outlasts_the_visibility_timeout_is_refused(start_worker: Start) -> None:
    """At the start of a worker, with the reason and the way out. Not with leases."""
    conf = {
        "dlq_queues": {"orders": {"default_delay": 30}},
        "dlq_reliable_fetch": False,
        "broker_transport_options": {"visibility_timeout": 20},
    }
    worker = start_worker(conf, wait=False)
    assert worker.process.wait(60) == 1
    assert "visibility timeout (20 s), got 30 s" in worker.output
    assert "Raise visibility_timeout in broker_transport_options" in worker.output
    assert "Traceback" not in worker.output
    start_worker({**conf, "dlq_reliable_fetch": True})


def test_an_exception_that_no_task_here_can_raise_is_warned_of(start_worker: Start) -> None:
    """At the start; the worker works."""
    rule = {"no_such_package.SoldOut": {"action": "ignore"}}
    worker = start_worker({"dlq_queues": {"orders": {"exceptions": rule}}})
    assert "'no_such_package.SoldOut' in dlq_queues['orders'] never acts here" in worker.output
    assert "there is no module no_such_package here" in worker.output
