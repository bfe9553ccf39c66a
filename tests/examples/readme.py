"""The commands of an example's README, run as a reader would run them."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def commands(name: str) -> list[str]:
    """All lines of its console blocks but those that install things."""
    text = (EXAMPLES / name / "README.md").read_text("utf-8")
    blocks = re.findall(r"^```console\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines()]
    assert lines, f"expected console blocks in the README of {name}"
    return [line for line in lines if not line.startswith("pip install")]


def run_readme(name: str, folder: Path, *, bin_folder: Path | None = None, **env: str) -> str:
    """Run them in one shell, in a copy of the example; everything it started is ended.

    Args:
        name: The example.
        folder: Gets the copy.
        bin_folder: Where ``python`` and ``celery`` are; defaults to this Python's.
        env: More of the environment.

    Returns:
        All that the commands printed.
    """
    place = folder / name
    shutil.copytree(EXAMPLES / name, place, ignore=shutil.ignore_patterns("__pycache__"))
    path = f"{bin_folder or Path(sys.executable).parent}:{os.environ['PATH']}"
    process = subprocess.Popen(
        ["bash", "-euxo", "pipefail", "-c", "\n".join(commands(name))],
        cwd=place,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        encoding="utf-8",
        start_new_session=True,
        env={
            **os.environ,
            "PATH": path,
            "COLUMNS": "80",
            "PYTHONUNBUFFERED": "1",
            "PYTHONIOENCODING": "utf-8",
            **env,
        },
    )
    log: list[str] = []
    try:
        code = _wait(process, log)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert code == 0, "".join(log)
    return "".join(log)


def _wait(process: subprocess.Popen[str], log: list[str]) -> int:
    """Read until the shell ends; what it left running holds the pipe open."""
    assert process.stdout is not None
    reader = threading.Thread(target=lambda: log.extend(process.stdout or ()), daemon=True)
    reader.start()
    code = process.wait(120)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    reader.join(10)
    process.stdout.close()
    return code
