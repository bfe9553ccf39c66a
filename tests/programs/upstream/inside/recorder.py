"""A pytest plugin that writes what became of each test, line by line: a run may die or hang."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import sitecustomize

PLACE = Path(os.environ["CELERY_DLQ_RECORD"])
RUNNER = os.getpid()  # not the pool processes and workers that tests start


def write(**line: Any) -> None:
    """Add a line, at once on disk."""
    if os.getpid() == RUNNER:
        with PLACE.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def pytest_runtest_logstart(nodeid: str) -> None:
    """A test begins."""
    write(test=nodeid, outcome="begun")


def pytest_runtest_logreport(report: Any) -> None:
    """Setup, call or teardown of a test, or one of its subtests, is over."""
    if report.outcome == "rerun" or (report.when != "call" and report.passed):
        return  # Celery's own second tries, of which the last one counts; fixtures that went well
    text = report.longreprtext[-4000:] if report.failed else ""
    write(test=report.nodeid, outcome=report.outcome, text=text)


def pytest_sessionfinish() -> None:
    """All tests have run."""
    write(apps=len(sitecustomize.made))
