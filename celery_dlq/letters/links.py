"""What follows a message in its workflow: the third part of a body in Celery's protocol 2."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import islice

from celery_dlq.letters.printable import shortened

MAX_PARSED_BYTES = 256 * 1024

WHEN = {
    "callback": "runs after it succeeds",
    "chain": "runs after it succeeds",
    "errback": "runs each time it fails",
    "chord": "does not run: the chord fails with this message, and a redrive does not change that",
}
"""What becomes of each kind.

Source: `on_chord_part_return` in
https://github.com/celery/celery/blob/main/celery/backends/redis.py
"""


def links_of(content_type: str | None, body: bytes) -> list[tuple[str, str]]:
    """Return pairs of kind and task; none of a body that is not plain JSON, or is large."""
    if len(body) > MAX_PARSED_BYTES or content_type != "application/json":
        return []
    try:
        links = json.loads(body)[2]
    except (ValueError, RecursionError, LookupError, TypeError):
        return []
    if not isinstance(links, Mapping):
        return []
    found = []
    for kind, label in (("callbacks", "callback"), ("errbacks", "errback"), ("chain", "chain")):
        several = links.get(kind)
        # A chain is kept in reverse: its last entry runs next.
        tasks = list(several) if isinstance(several, list) else []
        ordered = reversed(tasks) if kind == "chain" else tasks
        found += [(label, _task_of(task)) for task in islice(ordered, 50)]
    if isinstance(links.get("chord"), Mapping):
        found.append(("chord", _task_of(links["chord"])))
    return found


def is_in_chord(content_type: bytes, body: bytes) -> bool:
    """True for a part of a chord's header."""
    # Most bodies need no parsing: kombu writes the links of a message last.
    if (
        body.endswith(b'"chord": null}]')
        or b'"chord":' not in body
        or (b'"chord": {' not in body and b'"chord":{' not in body)
    ):
        return False
    return any(kind == "chord" for kind, _ in links_of(content_type.decode("latin-1"), body))


def _task_of(signature: object) -> str:
    if isinstance(signature, Mapping):
        return str(signature.get("task", "?"))
    return shortened(str(signature), 100)
