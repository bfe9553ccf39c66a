"""The commands as an operator types them: real output, exit codes; a process where it matters."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import command_line
import pytest
from builders import a_letter, key_of
from command_line import Dlq
from workers import HERE, Worker, environment, run_python

from celery_dlq import DeadLetter, Reason

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]


@pytest.fixture
def dead(poison: ModuleType, start_worker: Start, letters: Letters) -> list[DeadLetter]:
    """Three letters, made by a real worker that has gone."""
    worker = start_worker()
    poison.fails.delay("a")
    poison.fails.delay("b")
    poison.to_dlq.delay("c")
    found = letters(count=3)
    worker.stop()
    return found


def test_json_prints_one_object_a_line_with_the_names_of_the_record(
    dlq: Dlq, dead: list[DeadLetter]
) -> None:
    """`--json` prints the fields that Python has."""
    (queue,) = dlq("queues", "--json").lines
    assert (queue["name"], queue["letters"]) == ("orders-DLQ", 3)
    assert queue["reasons"] == {"failed": 2, "rejected": 1}
    assert dlq("list", "orders-DLQ", "--json", "--oldest-first").lines == [
        letter.to_json() for letter in dead
    ]
    (one,) = dlq("list", "orders-DLQ", "--json", "--reason", "rejected").lines
    assert one["description"] == "no such order"
    assert dlq("show", one["id"][:8], "--json").lines == [one]
    assert [group["letters"] for group in dlq("groups", "orders-DLQ", "--json").lines] == [2, 1]


def test_tables_show_what_an_operator_looks_for(dlq: Dlq, dead: list[DeadLetter]) -> None:
    """Without a terminal: no colours, no traceback, the facts."""
    shown = dlq("list", "orders-DLQ")
    assert shown.exit_code == 0, shown.stderr
    for text in ("poison_app.fails", "LookupError: no price", "no such order", "rejected"):
        assert text in shown.stdout
    assert "\x1b[" not in shown.stdout
    rejected = next(letter for letter in dead if letter.reason.value == "rejected")
    detail = dlq("show", rejected.id)
    for text in (rejected.id, rejected.task_id, "no such order", '["c"]', "history", "Traceback"):
        assert text in detail.stdout
    assert "orders-DLQ" in dlq("queues").stdout


def test_notes_are_written_and_shown(dlq: Dlq, poison: ModuleType) -> None:
    """The first thing that the next operator reads."""
    letter = a_letter(fingerprint="0123456789abcdef")
    poison.dlq.store.dead_letter(letter, key_of(letter))
    there = ("note", letter.fingerprint, "--queue", "orders-DLQ")
    assert "There are no notes on 0123456789abcdef of orders-DLQ." in dlq(*there).stdout
    assert "Noted on 0123456789abcdef of orders-DLQ." in dlq(*there, "see SHOP-17").stdout
    (second,) = dlq(*there, "fixed\x1b[2J", "--json").lines
    assert [note["text"] for note in dlq(*there, "--json").lines] == [second["text"], "see SHOP-17"]
    shown = dlq(*there).stdout
    assert "see SHOP-17" in shown
    assert "\x1b" not in shown
    assert "noted" in dlq("audit").stdout
    refused = dlq("note", "0124", "text", "--queue", "orders-DLQ")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert "expected the fingerprint of letters in 'orders-DLQ', got '0124'" in refused.stderr
    assert "see SHOP-17" in dlq("note", "0123").stdout


def test_a_group_is_resolved_muted_and_reopened(dlq: Dlq, poison: ModuleType) -> None:
    """`groups` shows the state, and finds groups by it; the audit has who did it."""
    letter = a_letter(fingerprint="0123456789abcdef", release="2026.2")
    poison.dlq.store.dead_letter(letter, key_of(letter))
    of_group = (letter.fingerprint, "--queue", "orders-DLQ")

    said = dlq("resolve", *of_group, "--release", "2026.3", "--note", "see SHOP-17").stdout
    assert "Resolved 0123456789abcdef of orders-DLQ in release 2026.3." in said
    assert "see SHOP-17" in dlq("note", *of_group).stdout
    again = a_letter(fingerprint=letter.fingerprint, release="2026.4")
    poison.dlq.store.dead_letter(again, key_of(again))
    (group,) = dlq("groups", "orders-DLQ", "--state", "regressed", "--json").lines
    assert (group["state"], group["letters"]) == ("regressed", 2)
    status = group["status"]
    assert (status["release"], status["regressed_in"]) == ("2026.3", "2026.4")
    assert (status["releases"], status["letter_id"]) == (["2026.2"], again.id)
    assert "regressed" in dlq("groups", "orders-DLQ").stdout
    assert (
        "orders-DLQ has no resolved cause."
        in dlq("groups", "orders-DLQ", "--state", "resolved").stdout
    )

    assert (
        "Muted 0123456789abcdef of orders-DLQ until 2"
        in dlq("mute", *of_group, "--for", "2h").stdout
    )
    assert dlq("mute", *of_group, "--json").lines[0]["until"] is None
    assert "Reopened 0123456789abcdef of orders-DLQ." in dlq("reopen", *of_group).stdout
    (group,) = dlq("groups", "orders-DLQ", "--json").lines
    assert group["state"] == "open"
    audit = dlq("audit").stdout
    assert all(word in audit for word in ("resolved", "muted", "reopened"))
    refused = dlq("resolve", "0124", "--queue", "orders-DLQ")
    assert (refused.exit_code, refused.stdout) == (1, "")
    assert dlq("mute", *of_group, "--for", "0").exit_code == 1
    assert dlq("mute", *of_group, "--for", "9" * 20).exit_code == 2
    assert dlq("groups", "orders-DLQ", "--state", "fixed").exit_code == 2


def test_redrive_and_export_do_what_they_say(
    dlq: Dlq, dead: list[DeadLetter], tmp_path: Path, poison: ModuleType
) -> None:
    """Once each; a second export has nothing to do."""
    exported = dlq("export", str(tmp_path / "letters"), "--json").lines[0]
    assert (exported["letters"], exported["by_queue"]) == (3, {"orders-DLQ": 3})
    assert dlq("export", str(tmp_path / "letters"), "--json").lines[0]["letters"] == 0
    report = dlq("redrive", "orders-DLQ", "--yes", "--exception", "LookupError", "--json").lines[0]
    assert (report["published"], report["failed"]) == (2, {})
    assert [letter.reason.value for letter in poison.dlq.letters("orders-DLQ")] == ["rejected"]
    assert "1 letter" in dlq("redrive", "orders-DLQ", "--yes", "--all").stdout


def test_a_page_past_the_last_is_no_mistake(dlq: Dlq, dead: list[DeadLetter]) -> None:
    """A script that turns pages ends there."""
    past = dlq("list", "orders-DLQ", "--page", "999", "--json")
    assert (past.exit_code, past.lines) == (0, [])


MISTAKES = [
    (("list", "nowhere"), 1, "'nowhere'; there are: orders-DLQ"),
    (("groups", "nowhere"), 1, "'nowhere'"),
    (("show", "no-such-id"), 1, "'no-such-id', found none"),
    (("list", "orders-DLQ", "--reason", "bored"), 1, "got 'bored'"),
    (("list", "orders-DLQ", "--since", "never"), 2, "got 'never'"),
    (("list", "orders-DLQ", "--limit", "0"), 2, "0"),
    (("redrive", "orders-DLQ"), 2, "or with --all"),
    (("redrive", "orders-DLQ", "--yes", "--all", "--rate", "0"), 1, "rate to be more than 0"),
    (("redrive", "orders-DLQ", "no-such-id"), 1, "'no-such-id'"),
    (("export", "/proc/letters"), 1, "can be written"),
    (("export", "x", "--queue", "nowhere"), 1, "'nowhere'"),
    (("export", ""), 1, "got an empty name"),
    (("export", "x", "--roll-seconds", "nan"), 1, "roll seconds to be more than 0, got nan"),
    (("export", "x", "--redact-key-file", __file__), 2, "--redact-key-file needs --redact"),
    (("export", "x", "--since", "1h", "--until", "2h"), 1, "expected since to be before until"),
    (("triage", "no-such-folder"), 1, "no-such-folder"),
    (("triage", ""), 1, "got an empty name"),
    (("list", "orders-DLQ", "--task", "nobody"), 1, "matches the filter"),
    (("list", "orders-DLQ", "--task", "fails"), 1, "; did you mean 'poison_app.fails'?"),
    (
        ("redrive", "orders-DLQ", "--task", "fails", "--yes"),
        1,
        "; did you mean 'poison_app.fails'?",
    ),
    (("dead-letter", "poison_app.fails"), 1, "the name of a task; nothing was done. `dlq hold"),
    (("list", "\udcff-DLQ"), 1, "expected the name of a dead-letter queue"),
    (("list", "orders-DLQ", "--grep", "\udcff"), 1, "matches the filter"),
    (("list", "orders-DLQ", "--where", "kwargs.x=\udcff"), 1, "matches the filter"),
    (("list", "orders-DLQ", "--where", "tenant=1"), 1, "args, kwargs or headers at character 1"),
    (("list", "orders-DLQ", "--min-deliveries", "0"), 2, "0"),
    (("purge", "orders-DLQ", "--where", "args[0]==a", "--yes"), 1, "at character 8"),
    (("export", "x", "--where", "kwargs.x"), 1, "of the condition 'kwargs.x', got its end"),
    (("show", "\udcff\udcfe"), 1, "found none"),
    (("show", "1-1"), 1, "'1-1', found none"),
    (("redrive", "orders-DLQ", "--yes", "--fingerprint", "ffff"), 1, "matches the filter"),
    (("redrive", "orders-DLQ", "--yes", "--all", "--rate", "fast"), 2, "got 'fast'"),
    (("redrive", "orders-DLQ", "--yes", "--all", "--delay", "soon"), 2, "got 'soon'"),
    (("redrive", "orders-DLQ", "--yes", "--all", "--limit", "0"), 1, "limit to be 1 or more"),
    (("redrive", "orders-DLQ", "--yes", "--all", "--canary", "0"), 1, "canary to be 1"),
    (
        ("redrive", "orders-DLQ", "--yes", "--all", "--to-queue", "orders-DLQ"),
        1,
        "got the dead-letter",
    ),
    (("redrive", "orders-DLQ", "--all", "--set", "kwargs.a=1"), 2, "the ID of exactly one letter"),
    (("redrive", "orders-DLQ", "--all", "--dry-run", "--to-queue", "no"), 1, ""),
    (("discard", "orders-DLQ"), 2, "or with --all"),
    (("discard", "orders-DLQ", "--all"), 2, "--yes is needed to discard 3 letters"),
    (("purge", "orders-DLQ", "--reason", "failed"), 2, "--yes is needed to purge letters"),
    (("purge", "orders-DLQ", "--task", "nobody", "--yes"), 1, "matches the filter"),
    (("redrive", "orders-DLQ", "--all"), 2, "--yes is needed to redrive 3 letters of orders-DLQ"),
    (("redrive", "orders-DLQ", "--task", "poison_app.fails", "--at", "+1h"), 2, "--yes is needed"),
    (("redrive", "orders-DLQ", "--all", "--limit", "-1"), 1, "limit to be 1 or more"),
    (("discard", "orders-DLQ", "--reason", "failed", "--limit", "-1"), 1, "limit to be 1 or more"),
    (("purge", "orders-DLQ", "--all", "--limit", "1"), 2, "--yes is needed to purge 1 letter of"),
    (("restore",), 2, "by ID, by --job, or with --queue by a filter"),
    (("restore", "--all"), 2, "or with --queue by a filter such as --fingerprint or with --all"),
    (("restore", "x", "--all", "--queue", "orders-DLQ"), 2, "or by a filter or --all; got both"),
    (("restore", "x", "y"), 2, "--yes is needed to restore 2 letters of all queues"),
    (("restore", "--all", "--queue", "orders-DLQ"), 1, "no discarded letter of 'orders-DLQ'"),
    (("breaker", "open", "shop.typo"), 1, "expected a task that the app or a live worker knows"),
    (("breaker", "open", "poison_app.fale"), 1, "did you mean 'poison_app.fails'"),
    (("breaker", "open", "poison_app.fails", "--queue", "ordres"), 1, "did you mean 'orders'"),
    (("restore", "no-such-id"), 1, "expected the id of a discarded letter"),
    (("restore", "x", "--queue", "nowhere"), 1, "'nowhere'"),
    (("jobs", "status", "no-such-job"), 1, "expected the id of a job"),
    (("jobs", "cancel", "no-such-job"), 1, "expected the id of a job"),
    (("jobs", "resume", "no-such-job"), 1, "expected the id of a job"),
    (("tail", "nowhere"), 1, "'nowhere'"),
    (("audit", "--limit", "0"), 2, "0"),
    (("frobnicate",), 2, "frobnicate"),
]


def stored(poison: ModuleType, name: str) -> DeadLetter:
    """A letter, stored as a worker would have stored it."""
    from builders import a_letter, a_request, key_of

    letter = a_letter(
        task_id=f"task-{name}",
        task_name="poison_app.fails",
        reason=Reason.REJECTED if name == "c" else Reason.FAILED,
        headers=json.dumps(a_request(id=f"task-{name}", task="poison_app.fails")),
        body=json.dumps([[name], {}, {"callbacks": None}]).encode(),
        args_json=json.dumps([name]),
    )
    poison.dlq.store.dead_letter(letter, key_of(letter))
    return letter


@pytest.fixture
def three(poison: ModuleType) -> list[DeadLetter]:
    """Three letters."""
    for name in ("a", "b", "c"):
        stored(poison, name)
    return list(poison.dlq.letters("orders-DLQ"))


def test_mistakes_get_one_clear_line_and_change_nothing(
    dlq: Dlq, three: list[DeadLetter], poison: ModuleType
) -> None:
    """Exit code 1 for refused or failed, 2 for wrong usage; never a traceback."""
    for arguments, code, text in MISTAKES:
        done = dlq(*arguments)
        assert (arguments, done.exit_code) == (arguments, code), done.stderr
        assert text in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr + done.stdout, arguments
        if text:
            last = done.stderr.strip().splitlines()[-1]
            assert last.startswith("Error: "), (arguments, done.stderr)
    assert poison.dlq.jobs() == poison.dlq.changes() == []
    assert [letter.id for letter in poison.dlq.letters("orders-DLQ")] == [x.id for x in three]


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"dlq_quues": {}}, "did you mean 'dlq_queues'"),
    ({"dlq_queues": {"orders": {"max_delivries": 3}}}, "did you mean 'max_deliveries'"),
    ({"dlq_queues": {"orders": {"max_deliveries": -1}}}, "1 or more, got -1"),
    ({"dlq_queues": {"orders": {"dead_letter_queue": "orders"}}}, "another queue, got 'orders'"),
    ({"dlq_url": "amqp://guest:hush@localhost"}, "to be a Redis URL"),
    (
        {
            "dlq_url": "redis://:hush@127.0.0.1:1/0",
            "dlq_start_timeout": 0.1,
        },
        "check that Redis runs",
    ),
]


@pytest.mark.parametrize(("conf", "text"), BAD_SETTINGS)
def test_a_worker_with_bad_settings_refuses_to_start_in_one_line(
    start_worker: Start, conf: dict[str, Any], text: str
) -> None:
    """Exit code 1, what was expected and what came, no traceback, no password."""
    worker = start_worker(conf, wait=False)
    assert worker.process.wait(60) == 1, worker.output
    assert text in worker.output
    assert "Traceback" not in worker.output
    assert "hush" not in worker.output
    assert len([x for x in worker.output.splitlines() if x.startswith("Error: ")]) == 1


@pytest.mark.parametrize(("conf", "text"), BAD_SETTINGS)
def test_commands_with_bad_settings_say_the_same_line(
    dlq: Dlq, conf: dict[str, Any], text: str
) -> None:
    """The operator's commands check what the worker checks."""
    done = dlq("queues", conf=conf)
    assert (done.exit_code, done.stdout) == (1, "")
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert "hush" not in done.stderr


def test_a_missing_extra_is_one_line_that_says_what_to_install(
    redis_url: str, dead: list[DeadLetter], tmp_path: Path, poison: ModuleType
) -> None:
    """``export`` without pyarrow and ``triage`` without PySpark."""
    letters = str(tmp_path / "letters")
    poison.dlq.export(letters)
    for module, arguments, extra in (
        ("pyarrow", ("export", letters), "parquet"),
        ("pyspark", ("triage", letters), "spark"),
    ):
        hide = tmp_path / module
        hide.mkdir(exist_ok=True)
        (hide / f"{module}.py").write_text("raise ImportError('hidden by the test')")
        env = environment(redis_url)
        env["PYTHONPATH"] = f"{hide}:{env['PYTHONPATH']}"
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *arguments],
            env=env,
            cwd=HERE,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1, done.stderr
        assert f"pip install 'celery_dlq[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr


def test_undecodable_arguments_of_a_shell_are_one_clear_line(
    redis_url: str, three: list[DeadLetter]
) -> None:
    """Bytes that are no UTF-8 reach Python as lone surrogates."""
    done = run_python(redis_url, "-m", "celery", "-A", "poison_app", "dlq", "show", b"\xff")
    assert done.returncode == 1
    assert "found none" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_discard_is_asked_for_and_can_be_taken_back(
    dlq: Dlq, three: list[DeadLetter], poison: ModuleType
) -> None:
    """One letter needs no answer; many need --yes; the bin gives them back; the audit has both."""
    one = three[0]
    assert "Discarded from orders-DLQ: 1 letter" in dlq("discard", "orders-DLQ", one.id[:8]).stdout
    (binned,) = dlq("list", "orders-DLQ", "--discarded", "--json").lines
    assert binned == one.to_json()
    assert "Restored" in dlq("restore", one.id).stdout
    (report,) = dlq("purge", "orders-DLQ", "--all", "--yes", "--json").lines
    assert (report["removed"], report["state"]) == (3, "done")
    assert list(poison.dlq.letters("orders-DLQ")) == []
    changes = dlq("audit", "--json").lines
    assert [c["action"] for c in changes] == ["purged", "restored", "discarded"]
    assert {c["target"] for c in changes} == {"orders-DLQ"}
    assert "purged" in dlq("audit").stdout
    jobs = dlq("jobs", "--json").lines
    assert [job["kind"] for job in jobs] == ["purge", "discard"]
    status = dlq("jobs", "status", jobs[0]["id"])
    assert "purge of orders-DLQ: done" in status.stdout
    assert not [line for line in status.stdout.splitlines() if line.split()[1:] == ["0"]]
    assert jobs[0]["id"] in dlq("jobs").stdout
    some = dlq("audit", "--actor", changes[0]["actor"][:3], "--action", "purge", "--json").lines
    assert some == changes[:1]
    assert dlq("audit", "--actor", "nobody", "--json").lines == []


def test_many_discarded_letters_come_back_at_once(
    dlq: Dlq, three: list[DeadLetter], poison: ModuleType
) -> None:
    """By ID, by filter, or all of a queue, in their order; one that cannot does not stop others."""
    ids = [letter.id for letter in three]
    there = [letter.id for letter in poison.dlq.letters("orders-DLQ")]
    assert dlq("discard", "orders-DLQ", "--all", "--yes").exit_code == 0
    assert "--yes is needed to restore 3" in dlq("restore", "--all", "--queue", "orders-DLQ").stderr
    some = dlq("restore", ids[0], "0" * 36, ids[1], "--yes")
    assert (some.exit_code, some.stdout.count("Restored")) == (1, 2)
    assert "expected the id of a discarded letter" in " ".join(some.stderr.split())
    assert len(dlq("list", "orders-DLQ", "--json").lines) == 2
    (task,) = {letter.task_name for letter in three if letter.id == ids[2]}
    done = dlq("restore", "--queue", "orders-DLQ", "--task", task, "--limit", "1", "--yes")
    assert "Restored 1 letter to orders-DLQ." in done.stdout
    assert dlq("discard", "orders-DLQ", "--all", "--yes").exit_code == 0
    assert "Restored 3 letters" in dlq("restore", "--queue", "orders-DLQ", "--all", "--yes").stdout
    assert sorted(letter.id for letter in poison.dlq.letters("orders-DLQ")) == sorted(there)
    change = dlq("audit", "--json").lines[0]
    assert (change["action"], change["target"], change["letters"]) == ("restored", "orders-DLQ", 3)


@pytest.mark.parametrize("verb", ["purge", "redrive"])
def test_a_terminal_is_asked(
    redis_url: str, three: list[DeadLetter], poison: ModuleType, verb: str
) -> None:
    """No is no: nothing is changed."""
    command = ["-m", "celery", "-A", "poison_app", "dlq", verb, "orders-DLQ", "--all"]
    command += ["--force"] * (verb == "redrive")  # without a worker
    for answer, left in (("n", 3), ("y", 0)):
        ours, theirs = pty.openpty()
        with subprocess.Popen(
            [sys.executable, *command],
            stdin=theirs,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=HERE,
            env=environment(redis_url),
        ) as process:
            os.write(ours, f"{answer}\n".encode())
            output, said = process.communicate(timeout=30)
        os.close(ours)
        os.close(theirs)
        assert f"{verb.title()} 3 letters of orders-DLQ? [y/N]" in said
        assert "[y/N]" not in output  # which may be piped
        assert sum(queue.letters for queue in poison.dlq.queues()) == left
    assert three


def test_yesterday_is_a_time(dlq: Dlq, poison: ModuleType) -> None:
    """It begins at midnight, as today does; the times that are shown are UTC as well."""
    midnight = datetime.now(timezone.utc).replace(hour=0, minute=0, second=0, microsecond=0)
    for number, hours in enumerate((25, 23, -23)):
        letter = a_letter(
            task_id=f"task-{number}", dead_lettered_at=midnight - timedelta(hours=hours)
        )
        poison.dlq.store.dead_letter(letter, key_of(letter))
    for option, value, found in (("--since", "yesterday", 2), ("--until", "today", 2)):
        assert len(dlq("list", "orders-DLQ", option, value, "--json").lines) == found


def test_letters_are_found_by_arguments_headers_and_ids(
    dlq: Dlq, three: list[DeadLetter], poison: ModuleType, tmp_path: Path
) -> None:
    """Every command that takes filters takes these, alone and together."""
    from builders import a_letter, key_of

    a, b, c = sorted(three, key=lambda letter: letter.task_id)
    other = a_letter(
        headers=json.dumps({"x-tenant": "acme", "retries": 2}),
        kwargs_json='{"tenant": 42, "note": "say \\"hi\\""}',
        release="2026.3",
        root_id="root-1",
        group_id="group-1",
        deliveries=4,
    )
    poison.dlq.store.dead_letter(other, key_of(other))

    def found(*options: str, command: str = "list") -> list[str]:
        shown = dlq(command, "orders-DLQ", "--json", *options).lines
        return sorted(line["id"] for line in shown)

    assert found("--where", "args[0]=b") == [b.id]
    assert found("--where", "args[0]!=b") == sorted([a.id, c.id, other.id])
    assert found("--where", "args[0]!=b", "--where", "args.0>b") == [c.id]
    assert found("--where", "headers.id~task-", "--where", "args[0]<b") == [a.id]
    for options in (
        ("--where", "kwargs.tenant=42"),
        ("--where", 'kwargs.note="say \\"hi\\""'),
        ("--where", "headers.x-tenant~cm"),
        ("--where", "headers.retries>=2"),
        ("--release", "2026.3"),
        ("--root-id", "root-1"),
        ("--group-id", "group-1"),
        ("--min-deliveries", "4"),
    ):
        assert found(*options) == found(*options, command="tail") == [other.id], options
    folder = str(tmp_path / "letters")
    (exported,) = dlq("export", folder, "--where", "args[0]<c", "--json").lines
    assert exported["letters"] == 2
    (plan,) = dlq("redrive", "orders-DLQ", "--where", "args[0]=a", "--dry-run", "--json").lines
    assert plan["letters"] == 1
    (report,) = dlq("discard", "orders-DLQ", "--where", "kwargs.tenant=42", "--yes", "--json").lines
    assert report["removed"] == 1
    assert found("--discarded", "--release", "2026.3") == [other.id]
    (change, *_) = dlq("audit", "--json").lines
    assert change["detail"]["filter"] == {"conditions": ["kwargs.tenant=42"]}


@pytest.mark.parametrize(
    "options",
    [["--all"], ["--all", "--limit", "2"], ["--where", "args[0]!=x"]],
)
@pytest.mark.parametrize("more", [[], ["--background"]])
@pytest.mark.parametrize("verb", ["discard", "purge", "redrive"])
def test_a_yes_is_for_the_letters_that_the_question_counted(
    dlq: Dlq,
    three: list[DeadLetter],
    poison: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    more: list[str],
    options: list[str],
) -> None:
    """While it is asked, another operator removes one of them, and other letters arrive."""
    late: list[str] = []

    def asked(question: str, **_: object) -> None:
        assert question.startswith(
            f"{verb.capitalize()} {2 if '--limit' in options else 3} letters"
        )
        poison.dlq.purge("orders-DLQ", ids=frozenset({three[0].id}))
        late.append(stored(poison, "d").id)

    terminal = SimpleNamespace(stdin=SimpleNamespace(isatty=lambda: True))
    monkeypatch.setattr("celery_dlq.cli.context.sys", terminal)
    monkeypatch.setattr("click.confirm", asked)
    done = dlq(verb, "orders-DLQ", *options, *more)
    assert done.exit_code == 0, done.stderr
    if more:
        assert poison.dlq.assembly.jobs().run_next(lambda: False).state == "done"
    expected = {late[0], three[2].id} if "--limit" in options else {late[0]}
    assert {letter.id for letter in poison.dlq.letters("orders-DLQ")} == expected


REFUSED_REDRIVES = [
    (["--rate", "0"], "rate to be more than 0"),
    (["--rate", "-1/s"], "rate to be more than 0"),
    (["--limit", "0"], "limit to be 1 or more"),
    (["--delay", "inf"], "seconds"),
    (["--canary", "0"], "canary to be 1"),
    (["--canary", "1001"], "canary to be 1"),
    (["--canary", "1", "--max-failures", "-1"], "max_failures to be 0 or more"),
    (["--canary", "1", "--canary-wait", "0"], "canary_wait to be more than 0"),
    (["--to-queue", "orders-DLQ"], "got the dead-letter"),
    (["--to-queue", " "], "to_queue to be the name of a queue"),
    (["--set", "tenant=1"], "args, kwargs or headers at character 1 of the assignment"),
    (["--set", "args[7]=1"], "does not exist in the message"),
    (["--set", "headers.id=1"], "expected a header of your own"),
    (["--set", "args[0]=1", "--rate", "0"], "rate to be more than 0"),
]


@pytest.mark.parametrize(("options", "text"), REFUSED_REDRIVES)
def test_what_a_redrive_refuses_its_dry_run_and_its_plan_refuse(
    dlq: Dlq,
    three: list[DeadLetter],
    poison: ModuleType,
    options: list[str],
    text: str,
) -> None:
    """With the same line; nothing is changed, nothing is planned."""
    ways: list[list[str]] = [[], ["--dry-run"], *([] if "--set" in options else [["--background"]])]
    said = []
    for more in ways:
        done = dlq("redrive", "orders-DLQ", three[0].id, *options, *more)
        assert done.exit_code > 0, more
        said.append(done.stderr.strip().splitlines()[-1])
    assert set(said) == {said[0]}
    assert said[0].startswith("Error: ")
    assert text in said[0]
    assert poison.dlq.jobs() == poison.dlq.changes() == []
    assert len(list(poison.dlq.letters("orders-DLQ"))) == 3


def test_a_dry_run_of_several_letters_takes_no_edit(dlq: Dlq, three: list[DeadLetter]) -> None:
    """As the redrive, which edits one."""
    for edit in (["--set", "args[0]=1"], ["--edit"]):
        for more in ([], ["--dry-run"]):
            done = dlq("redrive", "orders-DLQ", "--all", *edit, *more)
            assert (done.exit_code, "the ID of exactly one letter" in done.stderr) == (2, True)
    dry = dlq("redrive", "orders-DLQ", three[0].id, "--set", "args[0]=1", "--dry-run")
    assert (dry.exit_code, "Would redrive 1 letter" in dry.stdout) == (0, True)


def test_a_dry_run_promises_no_letters_that_another_command_has(
    dlq: Dlq, three: list[DeadLetter], poison: ModuleType
) -> None:
    """A redrive would skip them."""
    claims = poison.dlq.store.claims
    claims.claim("orders-DLQ", [three[0].id], owner="other", lease_seconds=60)
    dry = dlq("redrive", "orders-DLQ", "--all", "--dry-run")
    assert "Would redrive 2 letters" in dry.stdout
    assert "1 would be skipped now: another command works on them" in dry.stdout


def test_a_redrive_can_be_tried_dry_edited_and_watched(
    dlq: Dlq, three: list[DeadLetter], poison: ModuleType
) -> None:
    """Tables for people, lines for programs, the same facts."""
    dry = dlq("redrive", "orders-DLQ", "--all", "--dry-run")
    assert "Would redrive 3 letters" in dry.stdout
    assert "poison_app.fails" in dry.stdout
    (plan,) = dlq("redrive", "orders-DLQ", "--all", "--dry-run", "--json").lines
    assert plan["letters"] == 3
    letter = three[0]
    (report,) = dlq("redrive", "orders-DLQ", letter.id, "--set", "kwargs.tenant=42", "--json").lines
    assert report["published"] == 1
    (report,) = dlq(
        "redrive", "orders-DLQ", "--yes", "--all", "--rate", "1000/s", "--delay", "1h", "--json"
    ).lines
    assert (report["published"], report["state"]) == (2, "done")
    (job, *_) = dlq("jobs", "--json").lines
    assert job["id"] == report["redrive_id"]
    assert job["options"] == {"rate": 1000.0, "delay_seconds": 3600.0}


def test_an_editor_changes_the_arguments_of_one_letter(
    dlq: Dlq,
    three: list[DeadLetter],
    poison: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The saved text is redriven; unchanged text, or text that is no JSON, is not."""
    letter = next(letter for letter in three if letter.args_json == '["a"]')
    editor = tmp_path / "editor"
    for script, code in (("true", 1), ("echo nonsense >", 1), ('sed -i s/"a"/"b"/', 0)):
        command = f'#!/bin/sh\n{script} "$1"\n' if script != "true" else "#!/bin/sh\ntrue\n"
        editor.write_text(command.replace('s/"a"/"b"/', '\'s/"a"/"b"/\''))
        editor.chmod(0o755)
        monkeypatch.setenv("EDITOR", str(editor))
        monkeypatch.delenv("VISUAL", raising=False)
        done = dlq("redrive", "orders-DLQ", letter.id, "--edit")
        assert done.exit_code == code, (script, done)
        assert ("nothing was done" in done.stdout + done.stderr) is bool(code)
    with poison.app.connection_for_read() as connection:
        raw = json.loads(connection.default_channel.client.lindex("orders", 0))
    assert json.loads(raw["headers"]["dlq_edited"])[0]["to"] == '[["b"], {}]'


def test_an_entry_that_is_no_letter_has_a_row_and_a_page(
    dlq: Dlq, three: list[DeadLetter], redis_url: str
) -> None:
    """It stops nothing, and can be shown and discarded by its position."""
    import redis

    with redis.Redis.from_url(redis_url) as client:
        position = client.xadd("dlq:{orders-DLQ}:letters", {"mood": b"\xff"}).decode()
    shown = dlq("list", "orders-DLQ")
    assert shown.exit_code == 0
    assert position in shown.stdout
    assert "not a letter" in shown.stdout
    assert dlq("list", "orders-DLQ", "--json").lines[0]["position"] == position
    assert "mood" in dlq("show", position).stdout
    assert dlq("show", position, "--json").lines[0]["corrupt"]
    assert dlq("discard", "orders-DLQ", position, "--forever").exit_code == 0
    assert dlq("show", position).exit_code == 1
    assert len(dlq("list", "orders-DLQ", "--json").lines) == 3


def test_lists_have_pages_and_tails(dlq: Dlq, three: list[DeadLetter]) -> None:
    """The second page begins where the first ended."""
    pages = [
        dlq("list", "orders-DLQ", "--json", "--limit", "2", "--page", str(page))
        for page in (1, 2, 3)
    ]
    ids = [[x["id"] for x in page.lines] for page in pages]
    assert ids == [[three[2].id, three[1].id], [three[0].id], []]
    tail = dlq("tail", "orders-DLQ", "--lines", "2", "--json").lines
    assert [x["id"] for x in tail] == [three[1].id, three[2].id]
    assert three[2].id[:8] in dlq("tail", "orders-DLQ").stdout


def test_tail_follows_until_it_is_interrupted(
    redis_url: str, three: list[DeadLetter], poison: ModuleType
) -> None:
    """A new letter is a new line; Ctrl-C is a normal end."""
    import signal

    from builders import a_letter, key_of

    command = ("tail", "orders-DLQ", "--follow", "--lines", "1", "--json")
    with command_line.process(*command, redis_url=redis_url, PYTHONUNBUFFERED="1") as process:
        assert process.stdout is not None
        assert json.loads(process.stdout.readline())["id"] == three[2].id
        letter = a_letter()
        poison.dlq.store.dead_letter(letter, key_of(letter))
        assert json.loads(process.stdout.readline())["id"] == letter.id
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
