"""Odd messages of the fuzz: some that plain Celery runs, some that end its main process.

Only what both brokers can carry, and what leaves the task's id as it is: the books need it.
"""

from __future__ import annotations

from typing import Any

from fuzz.cases import BODIES, Case, Change

Draft = dict[str, Any]

RUNS = (
    (("headers", "retries"), None),
    (("headers", "group"), 5),
    (("headers", "root_id"), [1]),
    (("headers", "parent_id"), {"a": 1}),
    (("headers", "argsrepr"), 1.5),
    (("headers", "kwargsrepr"), []),
    (("headers", "origin"), None),
    (("headers", "shadow"), 5),
    (("headers", "stamps"), "x"),
    (("headers", "dlq_redrives"), "x"),
    (("headers", "dlq_redrives"), True),
    (("headers", "dlq_redrive"), {}),
    (("headers", "dlq_redriven_at"), 5),
    (("headers", "dlq_letter"), [1]),
    (("headers", "dlq_default_delay"), "x"),
    (("headers", "lang"), 5),
    (("headers", "x-death"), "x"),
    (("headers", "replaced_task_nesting"), "x"),
    (("headers", "group_index"), {}),
)
"""Celery takes them as they are: the task succeeds."""

KILLS = (
    (("payload",), {"a": 1}),
    (("body",), b""),
    (("headers", "stamped_headers"), True),
    (("headers", "stamped_headers"), 5),
    (("headers", "timelimit"), True),
    (("headers", "timelimit"), 5),
    (("headers", "timelimit"), [1]),
    (("headers", "eta"), "x"),
    (("headers", "expires"), "x"),
    (("body",), BODIES["nested 900 deep"]),
)
"""Celery's main process dies of them, at their receipt or when it gives them to the pool."""


def odd(kind: str, choice: float, task_id: str, task: str) -> Draft:
    """A message.

    Args:
        kind: ``odd`` for one that runs, ``poison`` for one that kills.
        choice: Which one, from 0 to below 1.
        task_id: Its task's id.
        task: The name of its task.
    """
    changes = RUNS if kind == "odd" else KILLS
    path, value = changes[int(choice * len(changes))]
    draft = Case(0, "echo", (Change(path, "", value),)).draft(task_id)
    draft["headers"]["task"] = task
    return draft
