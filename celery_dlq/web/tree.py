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
from celery_dlq.letters.headers import EDITED_HEADER
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
MAX_EDITS = 20


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


def of(value: Any, name: str) -> Node:
    """Make the tree of a value."""
    return _node(value, name, name, 0, iter(range(MAX_NODES)))


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


def edits(headers: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Edits of a message, from headers that are masked already; publishers may write any."""
    try:
        found = json.loads(headers.get(EDITED_HEADER) or "[]")
    except (ValueError, TypeError, RecursionError):
        return []
    found = found[:MAX_EDITS] if isinstance(found, list) else []
    return [edit for edit in found if isinstance(edit, Mapping)]


def _node(value: Any, key: str, path: str, depth: int, budget: Iterator[int]) -> Node:
    """A value and what is below it, as long as the budget of nodes lasts."""
    if isinstance(value, (dict, list)):
        kind = "mapping" if isinstance(value, dict) else "list"
        node = Node(key=key, path=path, kind=kind, size=len(value))
        found = value.items() if isinstance(value, dict) else enumerate(value)
        shown = islice(found, MAX_CHILDREN if depth < MAX_DEPTH else 0)
        for (name, one), _ in zip(shown, budget, strict=False):
            below = f"{path}{_step(name)}"
            node.children.append(_node(one, str(name), below, depth + 1, budget))
        return node
    text = json_text(value)
    condition = f"{path}={text}"
    usable = (
        len(condition) <= MAX_CHARS
        and depth <= MAX_CONDITION_DEPTH
        and value != MARKER
        and path.startswith(("args", "kwargs", "headers"))  # no conditions on properties
    )
    return Node(
        key=key,
        path=path,
        text=shortened(text, MAX_TEXT),
        filter=condition if usable else "",
    )


def _step(key: str | int) -> str:
    """A name as the conditions of a filter spell it."""
    plain = isinstance(key, str) and _PLAIN.fullmatch(key)
    return f".{key}" if plain else f"[{json.dumps(key)}]"
