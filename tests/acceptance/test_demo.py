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
from java import QUICK_JAVA
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


def test_the_demo_says_what_a_user_types_and_serves_its_letters_until_it_is_stopped(
    tmp_path: Path,
) -> None:
    """On one screen, a command at each step; then a browser has the letters it tells of."""
    pytest.importorskip("pyspark")
    output, errors = tmp_path / "output", tmp_path / "errors"
    with output.open("wb") as file, errors.open("wb") as error_file:
        demo = subprocess.Popen(
            [sys.executable, "-m", "celery_dlq", "demo", "--web", "--folder", "demo"],
            cwd=tmp_path,
            env={**os.environ, **QUICK_JAVA, "COLUMNS": "80"},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=error_file,
            start_new_session=True,
        )
    try:
        found = poll(
            lambda: (
                re.search(r"Serving dead letters at (http://\S+) ", output.read_text("utf-8"))
                or demo.poll() is not None
            ),
            timeout_seconds=300,
        )
        assert isinstance(found, re.Match), errors.read_text("utf-8")
        with urllib.request.urlopen(found[1], timeout=10) as answer:  # noqa: S310 - our own
            page = answer.read().decode()
        assert "orders-DLQ" in page
        children = _descendants(demo.pid)
        demo.send_signal(signal.SIGTERM)
        demo.wait(60)
        poll(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    finally:
        demo.kill()
        demo.wait()
    said = output.read_text("utf-8")
    assert "Traceback" not in said + errors.read_text("utf-8")
    _is_one_screen(said.partition("Look at the letters in a browser")[0])


def _is_one_screen(said: str) -> None:
    """In 60 lines on a narrow terminal; what was planted is found against what succeeded."""
    assert len(said.splitlines()) <= 60
    steps = re.split(r"^\d\. ", said, flags=re.MULTILINE)[1:]
    assert [step for step in steps[:-2] if "\n$ celery -A " not in step] == []
    report = re.search(r"^Report: file://(\S+)$", said, re.MULTILINE)
    assert report is not None
    page = Path(report[1]).read_text("utf-8")
    assert "ZeroDivisionError" in page
    assert "All 12 letters have kwargs.parts = 0 (others: 0 of 24)" in said
    planted = {("parts", "0", 12), ("country", "GB", 8), ("product", "lamp", 5)}
    for name, value, letters in {*planted, ("width", "40000", 5)}:
        assert f"All {letters} letters have kwargs.{name} = {value} (others: 0 of 24)" in page
    for name, value, _letters in planted:
        assert f"have kwargs.{name} = {value}, against none of the sampled successes" in page
    assert "Nothing stands out" not in page


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
