"""Commands of pages that no test runs as they stand, each with the reason. Keep it short."""

from __future__ import annotations

import re

EXEMPT: tuple[tuple[str, str, str], ...] = (
    # page, beginning of the command (a regular expression), why
    (".*", r"(\S+ -m )?pip install", "tests do not install; .ci/run and tests of packaging do"),
    (".*", r"python3 -m venv", "the same"),
    (".*", r"redis-server", "the test has started one"),
    ("README.md", r"pip install tox", "this is such a run"),
    (".*", r".* --follow$", "runs until Ctrl-C: test_cli.py, test_adopting.py, test_export.py"),
    (".*", r".*dlq doctor", "exits with 1, for it finds the test's Redis wanting: test_doctor.py"),
    (".*", r".*dlq web ?", "serves until it is stopped: test_web_server.py"),
    (
        "docs/how-to/django.md",
        r"python manage.py",
        "its admin is in tests/acceptance/test_django.py",
    ),
    ("README.md", r".*dlq (show|discard)", "the id is another each time: tutorial.md has a list"),
    (
        "README.md",
        r".*dlq redrive .*--canary",
        "asks first; its bug is not mended: outage.md runs it",
    ),
    (
        "docs/guarantees.md",
        r".*python -m chaos.(run|table)",
        "take from three minutes to forty; test_chaos.py does not",
    ),
    ("docs/how-to/apps-you-do-not-own.md", r".*(airflow|superset)", "needs them: tried by hand"),
    ("docs/how-to/after-a-month.md", r".*dlq triage ", "starts Spark: test_buckets.py has it"),
    ("docs/how-to/triage.md", r"spark-submit|databricks|aws ", "needs somebody's cluster"),
    (
        "docs/how-to/circuit-breaker.md",
        r".*dlq breaker (open|close)",
        "the task of these pages has no breaker: test_circuit_watch.py",
    ),
    (
        r"README.md|docs/how-to/dead-letter-a-task.md",
        r".*dlq dead-letter ",
        "the id is another each time: test_dead_letter_command.py",
    ),
    (".*", r".*--edit$", "opens an editor: test_cli.py has one that types"),
)


def why_exempt(page: str, command: str) -> str | None:
    """Why a command of a page is not run; ``None`` if it is."""
    for pages, beginning, reason in EXEMPT:
        if re.fullmatch(pages, page) and re.match(beginning, command):
            return reason
    return None
