"""The messages of the fuzz: a sound one of Celery's, with one or two of its parts replaced."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

KINDS = ("echo", "fails", "retries")


class _Missing:
    """The part is left out."""


MISSING = _Missing()

VALUES: dict[str, Any] = {
    "missing": MISSING,
    "null": None,
    "true": True,
    "false": False,
    "0": 0,
    "-1": -1,
    "5": 5,
    "2**63": 2**63,
    "1.5": 1.5,
    "NaN": float("nan"),
    '""': "",
    '"x"': "x",
    '"x\\ud800"': "x\ud800",
    "[]": [],
    "[1]": [1],
    '["x"]': ["x"],
    "{}": {},
    '{"a": 1}': {"a": 1},
}
"""Every type of JSON, in the values that are most likely to surprise."""

HEADERS = (
    "id",
    "task",
    "lang",
    "retries",
    "eta",
    "expires",
    "group",
    "group_index",
    "root_id",
    "parent_id",
    "timelimit",
    "argsrepr",
    "kwargsrepr",
    "origin",
    "ignore_result",
    "stamped_headers",
    "stamps",
    "shadow",
    "replaced_task_nesting",
    "compression",
    "redelivered",
    "x-death",
    "meth",
    "args",
    "priority",
    "dlq_redrives",
    "dlq_redrive",
    "dlq_redriven_at",
    "dlq_letter",
    "dlq_default_delay",
    "dlq_default_delay_source",
    "dlq_edited",
)
PROPERTIES = (
    "correlation_id",
    "reply_to",
    "priority",
    "delivery_mode",
    "message_id",
    "body_encoding",
    "delivery_tag",
    "delivery_info",
)
DELIVERY_INFO = ("exchange", "routing_key", "priority", "redelivered")
ENVELOPE = ("headers", "properties", "content-type", "content-encoding", "body")
EMBED = ("callbacks", "errbacks", "chain", "chord")
PROTOCOL_1 = (
    "task",
    "id",
    "args",
    "kwargs",
    "retries",
    "eta",
    "expires",
    "utc",
    "callbacks",
    "errbacks",
    "timelimit",
    "taskset",
    "chord",
)

EXTRA: dict[tuple[str, ...], Sequence[Any]] = {
    ("headers", "timelimit"): (
        [None],
        [5, 5],
        [5, None],
        [None, 5],
        ["x", "y"],
        [{}, []],
        [-1, -1],
        [True, True],
        [1, 2, 3],
        [0.5, "x"],
        [2**63, 2**63],
        [float("nan"), 1],
    ),
    ("headers", "eta"): ("2000-01-01T00:00:00", "0001-01-01T00:00:00+14:00", "1", "2000-01-01"),
    ("headers", "expires"): (
        "2000-01-01T00:00:00",
        "0001-01-01T00:00:00+14:00",
        "9999-12-31T23:59:59-14:00",
        "1",
    ),
    ("headers", "stamped_headers"): (["stamp"], [1, 2], [["x"]], [None], "stamp"),
    ("headers", "stamps"): ({"stamp": ["a"]}, {"stamp": 5}),
    ("headers", "compression"): ("application/x-gzip", "zlib", "application/zstd"),
    ("headers", "task"): ("fuzz.nobody.knows", "fuzz.app.echo ", "a\nb"),
    ("headers", "id"): ("a\nb", "\x00", "é" * 300, "../../x", "{x}"),
    ("headers", "retries"): (2**70, "1", "-1"),
    ("headers", "dlq_redrives"): (2**70, "1"),
    ("headers", "group"): ("group-of-nobody",),
    ("content-type",): (
        "application/x-python-serialize",
        "application/x-yaml",
        "text/plain",
        "application/data",
        "APPLICATION/JSON",
        "application/json; charset=utf-8",
        "a/b/c",
    ),
    ("content-encoding",): ("utf-16", "ascii", "nonsense", "binary", "base64", "us-ascii", "rot13"),
}
"""Beyond VALUES, for places where the inside of a value is looked at."""

NESTED = "[" * 900 + "]" * 900
BODIES: dict[str, bytes] = {
    "empty": b"",
    "nested 900 deep": f'[["CASE", {NESTED}], {{}}, {{}}]'.encode(),
    "nested 900 deep in kwargs": f'[["CASE"], {{"x": {NESTED}}}, {{}}]'.encode(),
    "nested 900 deep alone": NESTED.encode(),
    "nested 100,000 deep": b"[" * 100_000 + b"]" * 100_000,
    "cut off": b'[["CASE"], {}',
    "two values": b'[["CASE"], {}, {}] []',
    "raw \\xff": b"\xff",
    "raw \\x00": b"\x00",
    "raw \\x80\\x02": b"\x80\x02]q\x00.",
    "raw utf-16": '[["CASE"], {}, {}]'.encode("utf-16"),
    "with a byte order mark": b'\xef\xbb\xbf[["CASE"], {}, {}]',
    "white space": b"  ",
    "a name": b"nothing",
    "one element": b'[["CASE"]]',
    "two elements": b'[["CASE"], {}]',
    "four elements": b'[["CASE"], {}, {}, {}]',
    "a surrogate in an argument": b'[["CASE", "\\ud800"], {}, {}]',
    "Infinity": b'[["CASE", Infinity, NaN], {}, {}]',
    "an exact type of kombu": b'[["CASE", {"__type__": "datetime", "__value__": 5}], {}, {}]',
    "an unknown type of kombu": b'[["CASE", {"__type__": "x", "__value__": 5}], {}, {}]',
    "a key twice": b'[["CASE"], {"a": 1, "a": 2}, {}]',
    "a key that is no name": b'[["CASE"], {"": 1, "self ": 2}, {}]',
    "self as keyword": b'[["CASE"], {"self": 1}, {}]',
    "5 MB": b'[["CASE", "' + b"x" * 5_000_000 + b'"], {}, {}]',
}
WIRE: dict[str, Any] = {"wrong base64": "!!!", "half of base64": "W1s", "no ASCII": "\u20ac"}
"""In place of the base64 text in the envelope of the Redis broker."""


@dataclass(frozen=True, eq=False)
class Change:
    """One part that is replaced.

    Attributes:
        path: Which.
        label: The value for people.
        value: By what; ``MISSING`` leaves the part out.
    """

    path: tuple[str, ...]
    label: str
    value: Any

    @property
    def place(self) -> str:
        """The part for people."""
        return ".".join(self.path)


@dataclass(frozen=True, eq=False)
class Case:
    """One message.

    Attributes:
        number: Tells it from all others.
        kind: Which task it is for.
        changes: What is replaced in it.
        protocol: Of Celery's messages, 1 or 2.
    """

    number: int
    kind: str
    changes: tuple[Change, ...]
    protocol: int = 2

    def __str__(self) -> str:
        said = ", ".join(f"{change.place} = {change.label}" for change in self.changes)
        old = " (protocol 1)" if self.protocol == 1 else ""
        return f"{said or 'sound'}{old} for {self.kind}"

    def draft(self, token: str) -> dict[str, Any]:
        """The message as one tree, with its body as bytes.

        Args:
            token: What it is to be recognised by.
        """
        tree = (_protocol_1 if self.protocol == 1 else _protocol_2)(self.kind, token)
        for change in self.changes:
            if change.path[0] == "payload":
                _replace(tree, change)
        tree["body"] = json.dumps(tree.pop("payload", None)).encode()
        for change in self.changes:
            if change.path[0] != "payload":
                _replace(tree, change)
        if isinstance(tree.get("body"), bytes):
            tree["body"] = tree["body"].replace(b"CASE", token.encode())
        return tree


def sound(number: int) -> Case:
    """A message with nothing wrong."""
    return Case(number, "echo", ())


def _replace(tree: Any, change: Change) -> None:
    *path, last = [int(name) if name.isdigit() else name for name in change.path]
    with suppress(LookupError, TypeError):  # a change before this one took its place away
        for name in path:
            tree = tree[name]
        if change.value is not MISSING:
            tree[last] = copy.deepcopy(change.value)
        elif last in tree or isinstance(last, int):
            tree.pop(last)


def _common(token: str) -> dict[str, Any]:
    return {
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "properties": {
            "correlation_id": token,
            "reply_to": "9f3c1c0e-6f0e-3a4f-8a44-000000000000",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": "work"},
            "priority": 0,
            "body_encoding": "base64",
            "delivery_tag": token,
            "message_id": token,
        },
    }


def _protocol_2(kind: str, token: str) -> dict[str, Any]:
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": None}
    headers = {
        "lang": "py",
        "task": f"fuzz.app.{kind}",
        "id": token,
        "shadow": None,
        "eta": None,
        "expires": None,
        "group": None,
        "group_index": None,
        "retries": 0,
        "timelimit": [None, None],
        "root_id": token,
        "parent_id": None,
        "argsrepr": f"('{token}',)",
        "kwargsrepr": "{}",
        "origin": "gen1@fuzz",
        "ignore_result": False,
        "replaced_task_nesting": 0,
        "stamped_headers": None,
        "stamps": {},
        "fuzz_case": token,
    }
    return {**_common(token), "headers": headers, "payload": [[token], {}, embed]}


def _protocol_1(kind: str, token: str) -> dict[str, Any]:
    payload = {
        "task": f"fuzz.app.{kind}",
        "id": token,
        "args": [token],
        "kwargs": {},
        "retries": 0,
        "eta": None,
        "expires": None,
        "utc": True,
        "callbacks": None,
        "errbacks": None,
        "timelimit": [None, None],
        "taskset": None,
        "chord": None,
    }
    return {**_common(token), "headers": {}, "payload": payload}


def singles() -> Iterator[tuple[int, Change]]:
    """Every change by itself, with the protocol of the message that it is for."""
    places: list[tuple[str, ...]] = [
        *(("headers", name) for name in HEADERS),
        *(("properties", name) for name in PROPERTIES),
        *(("properties", "delivery_info", name) for name in DELIVERY_INFO),
        *((name,) for name in ENVELOPE),
        ("payload",),
        *(("payload", str(n)) for n in range(3)),
        *(("payload", "2", name) for name in EMBED),
    ]
    for path in places:
        yield from ((2, Change(path, name, value)) for name, value in VALUES.items())
        yield from ((2, Change(path, repr(value), value)) for value in EXTRA.get(path, ()))
    yield from ((2, Change(("body",), name, body)) for name, body in BODIES.items())
    yield from ((2, Change(("body",), name, text)) for name, text in WIRE.items())
    for field in PROTOCOL_1:
        yield from ((1, Change(("payload", field), name, v)) for name, v in VALUES.items())
    yield from ((1, Change(("body",), name, body)) for name, body in BODIES.items())


def cases(seed: int, messages: int, kinds: Sequence[str] = KINDS) -> Iterable[Case]:
    """The messages of one run: all single changes in random order, then pairs of them.

    Args:
        seed: Decides on the order, and on the pairs.
        messages: How many.
        kinds: For which tasks.
    """
    rng = random.Random(f"fuzz {seed}")  # noqa: S311 - no secret
    every = [(kind, *single) for single in singles() for kind in kinds]
    rng.shuffle(every)
    for number in range(messages):
        if number < len(every):
            kind, protocol, change = every[number]
            yield Case(number, kind, (change,), protocol)
        else:
            kind, protocol, one = rng.choice(every)
            other = rng.choice([e for e in every if e[1] == protocol])[2]
            yield Case(number, kind, (one, other), protocol)
