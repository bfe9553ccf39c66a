"""The commands as an operator types them: real processes, real output, exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from workers import HERE, Worker, environment

from celery_dlq import DeadLetter

Letters = Callable[..., list[DeadLetter]]
Start = Callable[..., Worker]
Dlq = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def dlq(redis_url: str) -> Dlq:
    """Run ``celery -A poison_app dlq …``."""

    def run(*arguments: str, conf: dict[str, Any] | None = None) -> Any:
        return subprocess.run(
            [sys.executable, "-m", "celery", "-A", "poison_app", "dlq", *arguments],
            env=environment(redis_url, conf), cwd=HERE, capture_output=True, text=True,
            timeout=120, check=False,
        )  # fmt: skip

    return run


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


def lines(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_json_prints_one_object_a_line_with_the_names_of_the_record(
    dlq: Dlq, dead: list[DeadLetter]
) -> None:
    """What programs read is what Python has."""
    (queue,) = lines(dlq("queues", "--json"))
    assert (queue["name"], queue["letters"]) == ("orders-DLQ", 3)
    assert queue["reasons"] == {"failed": 2, "rejected": 1}
    assert lines(dlq("list", "orders-DLQ", "--json", "--oldest-first")) == [
        letter.to_json() for letter in dead
    ]
    (one,) = lines(dlq("list", "orders-DLQ", "--json", "--reason", "rejected"))
    assert one["description"] == "no such order"
    assert lines(dlq("show", one["id"][:8], "--json")) == [one]
    assert [group["letters"] for group in lines(dlq("groups", "orders-DLQ", "--json"))] == [2, 1]


def test_tables_show_what_an_operator_looks_for(dlq: Dlq, dead: list[DeadLetter]) -> None:
    """Without a terminal: no colours, no traceback, the facts."""
    shown = dlq("list", "orders-DLQ")
    assert shown.returncode == 0, shown.stderr
    for text in ("poison_app.fails", "LookupError: no price", "no such order", "rejected"):
        assert text in shown.stdout
    assert "\x1b[" not in shown.stdout
    rejected = next(letter for letter in dead if letter.reason.value == "rejected")
    detail = dlq("show", rejected.id)
    for text in (rejected.id, rejected.task_id, "no such order", '["c"]', "history", "Traceback"):
        assert text in detail.stdout
    assert "orders-DLQ" in dlq("queues").stdout


def test_redrive_and_export_do_what_they_say(
    dlq: Dlq, dead: list[DeadLetter], tmp_path: Path, poison: ModuleType
) -> None:
    """Once each; a second export has nothing to do."""
    exported = lines(dlq("export", str(tmp_path / "letters"), "--json"))[0]
    assert (exported["letters"], exported["by_queue"]) == (3, {"orders-DLQ": 3})
    assert lines(dlq("export", str(tmp_path / "letters"), "--json"))[0]["letters"] == 0
    report = lines(dlq("redrive", "orders-DLQ", "--exception", "LookupError", "--json"))[0]
    assert (report["published"], report["failed"]) == (2, {})
    assert [letter.reason.value for letter in poison.dlq.letters("orders-DLQ")] == ["rejected"]
    assert "1 letter" in dlq("redrive", "orders-DLQ", "--all").stdout


MISTAKES = [
    (("list", "nowhere"), 1, "'nowhere'; there are: orders-DLQ"),
    (("groups", "nowhere"), 1, "'nowhere'"),
    (("show", "no-such-id"), 1, "'no-such-id', found none"),
    (("list", "orders-DLQ", "--reason", "bored"), 1, "got 'bored'"),
    (("list", "orders-DLQ", "--since", "never"), 2, "got 'never'"),
    (("list", "orders-DLQ", "--limit", "0"), 2, "0"),
    (("redrive", "orders-DLQ"), 2, "or --all; got none of them"),
    (("redrive", "orders-DLQ", "--all", "--rate", "0"), 1, "rate to be more than 0"),
    (("redrive", "orders-DLQ", "no-such-id"), 1, "'no-such-id'"),
    (("export", "/proc/letters"), 1, "can be written"),
    (("export", "x", "--queue", "nowhere"), 1, "'nowhere'"),
    (("triage", "no-such-folder"), 1, "no-such-folder"),
    (("frobnicate",), 2, "frobnicate"),
]


def test_mistakes_get_one_clear_line_and_change_nothing(
    dlq: Dlq, dead: list[DeadLetter], poison: ModuleType
) -> None:
    """Exit code 1 for refused or failed, 2 for wrong usage; never a traceback."""
    for arguments, code, text in MISTAKES:
        done = dlq(*arguments)
        assert (arguments, done.returncode) == (arguments, code), done.stderr
        assert text in done.stderr, (arguments, done.stderr)
        assert "Traceback" not in done.stderr + done.stdout, arguments
        last = done.stderr.strip().splitlines()[-1]
        assert last.startswith("Error: "), (arguments, done.stderr)
    assert [letter.id for letter in poison.dlq.letters("orders-DLQ")] == [x.id for x in dead]


BAD_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"dlq_quues": {}}, "did you mean 'dlq_queues'"),
    ({"dlq_queues": {"orders": {"max_delivries": 3}}}, "did you mean 'max_deliveries'"),
    ({"dlq_queues": {"orders": {"max_deliveries": -1}}}, "1 or more, got -1"),
    ({"dlq_queues": {"orders": {"dead_letter_queue": "orders"}}}, "another queue, got 'orders'"),
    ({"dlq_url": "amqp://guest:hush@localhost"}, "to be a Redis URL"),
    ({"dlq_url": "redis://:hush@127.0.0.1:1/0", "dlq_start_timeout": 0}, "check that Redis runs"),
]


@pytest.mark.parametrize(("conf", "text"), BAD_SETTINGS)
def test_a_worker_with_bad_settings_refuses_to_start_in_one_line(
    redis_url: str, conf: dict[str, Any], text: str
) -> None:
    """Exit code 1, what was expected and what came, no traceback, no password."""
    done = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "poison_app", "worker", "-c", "1"],
        env=environment(redis_url, conf), cwd=HERE, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert "hush" not in done.stderr + done.stdout
    assert len([x for x in done.stderr.splitlines() if x.startswith("Error: expected")]) == 1


@pytest.mark.parametrize(("conf", "text"), BAD_SETTINGS)
def test_commands_with_bad_settings_say_the_same_line(
    dlq: Dlq, conf: dict[str, Any], text: str
) -> None:
    """The operator's commands check what the worker checks."""
    done = dlq("queues", conf=conf)
    assert (done.returncode, done.stdout) == (1, "")
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
            env=env, cwd=HERE, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 1, done.stderr
        assert f"pip install 'celery_dlq[{extra}]'" in done.stderr
        assert "Traceback" not in done.stderr
