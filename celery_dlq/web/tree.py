"""Values of a message as a tree that a template can show: bounded in nodes, depth and text.

Anyone who can publish chooses these values, so a body may be nested a thousand deep or be 50 MB.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.conditions import MAX_CHARS
from celery_dlq.letters.conditions import MAX_DEPTH as MAX_CONDITION_DEPTH
from celery_dlq.letters.headers import EDITED_HEADER, REDRIVE_HEADER
from celery_dlq.letters.links import MAX_PARSED_BYTES
from celery_dlq.letters.printable import json_text, shortened
from celery_dlq.letters.replacing import MARKER

if TYPE_CHECKING:
    from celery_dlq.letters.record import DeadLetter

_PLAIN = re.compile(r"[A-Za-z_][\w-]*")

MAX_NODES = 2000
MAX_DEPTH = 40
MAX_CHILDREN = 200
MAX_TEXT = 2000


@dataclass(slots=True, kw_only=True)
class Node:
    """One value."""

    key: str  # Its name in its mapping, or its number in its list
    path: str  # How a filter or an edit names it, e.g. `kwargs.order.id`
    text: str = ""  # The value as JSON; empty for a mapping or list
    kind: str = "value"  # `mapping`, `list` or `value`
    size: int = 0  # Number of children, shown or not
    children: list[Node] = field(default_factory=list)  # Those that are shown
    filter: str = ""  # A condition that finds letters with this value; empty if there is none


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a letter says of its arguments."""

    nodes: list[Node]  # Positional and keyword arguments, if the letter has them as JSON
    text: str = ""  # Celery's description, else
    note: str = ""  # Why there is no tree


class _Budget:
    def __init__(self) -> None:
        self.left = MAX_NODES


def of(value: Any, name: str) -> Node:
    """Make the tree of a value."""
    return _node(value, name, name, 0, _Budget())


def arguments(letter: DeadLetter) -> Arguments:
    """Make the trees of the arguments of a letter that is masked already."""
    described = ", ".join(text for text in (letter.argsrepr, letter.kwargsrepr) if text)
    described = shortened(described, MAX_PARSED_BYTES)
    if letter.args_json is None and letter.kwargs_json is None:
        return Arguments(nodes=[], text=described, note="The body is not plain JSON of Celery.")
    texts = [letter.args_json or "[]", letter.kwargs_json or "{}"]
    if sum(map(len, texts)) > MAX_PARSED_BYTES:
        note = "The arguments are larger than 256 KB; the body can be downloaded."
        return Arguments(nodes=[], text=described, note=note)
    try:
        args, kwargs = (json.loads(text) for text in texts)
    except (ValueError, RecursionError):
        return Arguments(nodes=[], text=described, note="The arguments cannot be read.")
    return Arguments(nodes=[of(args, "args"), of(kwargs, "kwargs")])


def trail(headers: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Edits of a message, and its last redrive, from headers that are masked already."""
    try:
        edits = json.loads(headers.get(EDITED_HEADER) or "[]")
    except (ValueError, TypeError, RecursionError):
        edits = []
    found = [
        {
            "what": "edited",
            "at": str(edit.get("at", "")),
            "actor": str(edit.get("actor", "")),
            "before": str(edit.get("from", "")),
            "after": str(edit.get("to", "")),
        }
        for edit in islice(edits if isinstance(edits, list) else [], 20)
        if isinstance(edit, Mapping)
    ]
    if isinstance(headers.get(REDRIVE_HEADER), str):
        found.append({"what": "redriven", "job": headers[REDRIVE_HEADER]})
    return found


def _node(value: Any, key: str, path: str, depth: int, budget: _Budget) -> Node:
    budget.left -= 1
    if isinstance(value, (dict, list)):
        kind = "mapping" if isinstance(value, dict) else "list"
        node = Node(key=key, path=path, kind=kind, size=len(value))
        if depth >= MAX_DEPTH:
            return node
        for name, below, one in islice(_children(value, path), MAX_CHILDREN):
            if budget.left <= 0:
                break
            node.children.append(_node(one, name, below, depth + 1, budget))
        return node
    text = json_text(value)
    condition = f"{path}={text}"
    usable = (
        len(condition) <= MAX_CHARS
        and depth <= MAX_CONDITION_DEPTH
        and value != MARKER
        and path.startswith(("args", "kwargs", "headers"))  # no conditions on properties
    )
    shown = shortened(text, MAX_TEXT)
    return Node(key=key, path=path, text=shown, filter=condition if usable else "")


def _children(value: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    if isinstance(value, list):
        yield from ((str(n), f"{path}[{n}]", one) for n, one in enumerate(value))
    else:
        yield from ((str(k), f"{path}{_step(str(k))}", one) for k, one in value.items())


def _step(key: str) -> str:
    """A name as the conditions of a filter spell it."""
    return f".{key}" if _PLAIN.fullmatch(key) else f"[{json.dumps(key)}]"
