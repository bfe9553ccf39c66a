"""Runs of Celery's own test suites, each in a process and, where it needs one, with a Redis."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from servers import RedisServer

SUITES = {
    "worker": "t/unit/worker",
    "tasks": "t/unit/tasks",
    "app": "t/unit/app",
    "concurrency": "t/unit/concurrency",
    "integration": "t/integration",
}
INSIDE = Path(__file__).parent / "inside"
LONGEST_SECONDS = 3600
LONGEST_TEST_SECONDS = 300
_WORST = ("", "begun", "passed", "skipped", "failed")


def fetch(folder: Path) -> None:
    """Unpack the source distribution of the installed Celery: its tests are in no wheel.

    Without the package itself, so that the tests import the installed one.
    """
    wanted = f"celery=={version('celery')}"
    with tempfile.TemporaryDirectory() as place:
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        subprocess.run([*pip, "--no-binary", "celery", "--dest", place, wanted], check=True)
        (archive,) = Path(place).glob("celery-*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(place, filter="data")
        (unpacked,) = (path for path in Path(place).glob("celery-*") if path.is_dir())
        for own in ("celery", "celery.egg-info"):
            shutil.rmtree(unpacked / own)
        shutil.copytree(unpacked, folder, dirs_exist_ok=True)


@dataclass
class Run:
    """The outcome of each test.

    Attributes:
        outcomes: ``passed``, ``failed`` or ``skipped`` by test id, ``begun`` if it did not end; an
            expected failure is skipped.
        texts: What pytest said of those that failed.
        apps: How many of its apps had the plugin; ``None`` if it did not come to its end.
        last: The test that began last.
    """

    outcomes: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    apps: int | None = None
    last: str = ""

    def counted(self) -> str:
        """Numbers of passed, failed and skipped tests."""
        counts = Counter(self.outcomes.values())
        return ", ".join(f"{counts[name]} {name}" for name in _WORST[1:] if counts[name])

    def add(self, line: dict[str, Any]) -> None:
        """Take a line of the recorder's; the worst part of a test is its outcome."""
        if "apps" in line:
            self.apps = line["apps"]
            return
        test, outcome = line["test"], line["outcome"]
        if outcome == "begun":
            self.last = test
        if _WORST.index(outcome) >= _WORST.index(self.outcomes.get(test, "")):
            self.outcomes[test] = outcome
            self.texts[test] = line.get("text", "")


def run(source: Path, selected: str, log: Path, *, plugin: bool) -> Run:
    """Run some of Celery's tests, without or with the plugin on every app.

    Args:
        source: What `fetch` unpacked; is left as it is.
        selected: A folder, a file or a test id.
        log: Where the output of pytest goes.
        plugin: Whether with it.
    """
    with tempfile.TemporaryDirectory() as place, RedisServer() as server:
        folder = Path(place) / "celery"
        shutil.copytree(source, folder)
        record = Path(place) / "record"
        env = {
            **os.environ,
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(INSIDE),
            "CELERY_DLQ_RECORD": str(record),
            "CELERY_DLQ_EVERYWHERE": server.url if plugin else "",
            "TEST_BROKER": server.url,
            "TEST_BACKEND": server.url,  # its tests look for results where their tasks leave marks
            "PYTEST_TIMEOUT": str(LONGEST_TEST_SECONDS),
            "REDIS_HOST": "127.0.0.1",
            "REDIS_PORT": str(server.port),
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "recorder",
            "-p",
            "no:cacheprovider",
            "--quiet",
            selected,
        ]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=env,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.wait(LONGEST_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        found = Run()
        for line in record.read_text("utf-8").splitlines() if record.exists() else ():
            found.add(json.loads(line))
        return found
