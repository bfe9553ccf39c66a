"""The interpreter of a page: blocks come in as lines of JSON, what they raised goes out."""

from __future__ import annotations

import json
import sys
import traceback
from typing import Any


def serve() -> None:
    """Run blocks in one namespace until there are no more."""
    answers, sys.stdout = sys.stdout, sys.stderr
    names: dict[str, Any] = {"__name__": "page"}
    tested: set[str] = set()
    for line in sys.stdin:
        block = json.loads(line)
        try:
            # With the line numbers of the page.
            code = "\n" * (block["line"] - 1) + block["text"]
            exec(compile(code, block["page"], "exec"), names)
            _check_settings(names)
            _call_tests(names, tested)
            problem = ""
        except BaseException:
            problem = traceback.format_exc()
        print(json.dumps(problem), file=answers, flush=True)


def _check_settings(names: dict[str, Any]) -> None:
    """A setting that a page shows is one that a worker would take."""
    from celery import Celery

    from celery_dlq import DeadLetters

    for thing in list(names.values()):
        if isinstance(thing, Celery):
            DeadLetters(thing).validate()


def _call_tests(names: dict[str, Any], tested: set[str]) -> None:
    from celery_dlq.testing import WatchedLetters

    for name, thing in list(names.items()):
        if name.startswith("test_") and name not in tested:
            tested.add(name)
            watched = WatchedLetters()
            try:
                thing(watched)
            finally:
                watched.close()


if __name__ == "__main__":
    serve()
