"""The demo cleans up after itself, also when somebody stops it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from waiting import poll


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_that_is_stopped_leaves_no_process_and_no_temporary_folder(
    tmp_path: Path, number: signal.Signals
) -> None:
    """Ctrl-C in the middle: Redis, worker and folder are gone, and there is no traceback."""
    pytest.importorskip("pyspark")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            [sys.executable, "-m", "celery_dlq", "demo", "--folder", str(tmp_path / "demo")],
            env={**os.environ, "TMPDIR": str(temporary), "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    poll(lambda: "Send tasks" in output.read_text("utf-8"), timeout_seconds=60)
    children = _descendants(demo.pid)
    assert len(children) >= 2  # Redis and the worker

    demo.send_signal(number)
    demo.wait(60)

    # Click ends with 1 or, in newer versions, with the signal itself.
    assert demo.returncode in (1, 130, -signal.SIGINT)
    assert "Traceback" not in output.read_text("utf-8")
    poll(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert list(temporary.iterdir()) == []


def test_the_demo_says_what_a_user_types_on_one_screen(tmp_path: Path) -> None:
    """Whole in 60 lines on a narrow terminal; a command at each step; the report is there."""
    pytest.importorskip("pyspark")
    done = subprocess.run(
        [sys.executable, "-m", "celery_dlq", "demo", "--folder", "demo"],
        cwd=tmp_path,
        env={**os.environ, "COLUMNS": "80"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) <= 60
    steps = re.split(r"^\d\. ", done.stdout, flags=re.MULTILINE)[1:]
    assert [step for step in steps[:-1] if "\n$ celery -A " not in step] == []
    report = re.search(r"^Report: file://(\S+)$", done.stdout, re.MULTILINE)
    assert report is not None
    page = Path(report[1]).read_text("utf-8")
    assert "ZeroDivisionError" in page
    # Why: what was planted is found against what succeeded.
    assert "All 12 letters have kwargs.parts = 0 (others: 0 of 24)" in done.stdout
    planted = {("parts", "0", 12), ("country", "GB", 8), ("product", "lamp", 5)}
    for name, value, letters in {*planted, ("width", "40000", 5)}:
        assert f"All {letters} letters have kwargs.{name} = {value} (others: 0 of 24)" in page
    for name, value, _letters in planted:
        assert f"have kwargs.{name} = {value}, against none of the sampled successes" in page
    assert "Nothing stands out" not in page
    assert "\nPage: " in done.stdout


def _descendants(parent: int) -> list[int]:
    listed = subprocess.run(
        ["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True
    ).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found, known = [], {parent}
    for pid, ppid in sorted(pairs):
        if ppid in known:
            known.add(pid)
            found.append(pid)
    return found


def test_the_demo_shows_its_letters_in_a_browser_until_it_is_stopped(tmp_path: Path) -> None:
    """Redis and the worker stay for it, and end with it."""
    pytest.importorskip("pyspark")
    output = tmp_path / "output"
    with output.open("wb") as file:
        demo = subprocess.Popen(
            [sys.executable, "-m", "celery_dlq", "demo", "--web", "--folder", str(tmp_path)],
            env={**os.environ, "COLUMNS": "100"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        found = poll(
            lambda: re.search(r"Serving dead letters at (http://\S+) ", output.read_text("utf-8")),
            timeout_seconds=240,
        )
        with urllib.request.urlopen(found[1], timeout=10) as answer:  # noqa: S310 - our own
            page = answer.read().decode()
        assert "orders-DLQ" in page
        children = _descendants(demo.pid)
        demo.send_signal(signal.SIGTERM)
        demo.wait(60)
        poll(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
        assert "Traceback" not in output.read_text("utf-8")
    finally:
        demo.kill()
        demo.wait()
