"""The way of every message through the Redis broker, read from Redis's own log.

kombu takes a message from its list with BRPOP and only then writes it to the hash of
the unacknowledged. A worker or a connection that dies in between takes the message
with it, unless reliable fetch does both in one script. The append-only file tells these
from all other losses.
"""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chaos.facts import HEADER, Key

UNACKED = b"unacked"


@dataclass(slots=True)
class Traffic:
    """The traffic of one queue.

    Attributes:
        copies: How many messages were published with each key.
        vanished: Keys of messages that were popped and never kept by the one who popped.
        handed_out: How often messages of each key were handed to a worker.
    """

    copies: Counter[Key] = field(default_factory=Counter)
    vanished: Counter[Key] = field(default_factory=Counter)
    handed_out: Counter[Key] = field(default_factory=Counter)


def traffic(folder: Path, queue: str) -> Traffic:
    """Replay what an append-only file says of one queue of database 0."""
    result = Traffic()
    waiting: deque[bytes] = deque()
    popped: dict[str, Key] = {}
    seen: set[str] = set()
    for command in commands(folder):
        name, *rest = command
        if rest[:1] == [queue.encode()]:
            _list(name.upper(), rest[1:], waiting, popped, seen, result)
        elif name.upper() == b"HSET" and rest[0] == UNACKED:
            tag, _key = _identity(json.loads(rest[2])[0])
            key = popped.pop(tag, None)
            if key:
                result.handed_out[key] += 1
    result.vanished.update(popped.values())
    return result


def _list(
    name: bytes,
    payloads: list[bytes],
    waiting: deque[bytes],
    popped: dict[str, Key],
    seen: set[str],
    result: Traffic,
) -> None:
    if name in (b"LPUSH", b"RPUSH"):
        for payload in payloads:
            (waiting.appendleft if name == b"LPUSH" else waiting.append)(payload)
            tag, key = _identity(json.loads(payload))
            if tag not in seen:
                seen.add(tag)
                result.copies[key] += 1
    elif name in (b"RPOP", b"LPOP") and waiting:
        payload = waiting.pop() if name == b"RPOP" else waiting.popleft()
        tag, key = _identity(json.loads(payload))
        popped[tag] = key


def _identity(message: dict[str, Any]) -> tuple[str, Key]:
    headers = message["headers"]
    retries = headers.get("retries") or 0
    name = headers.get(HEADER) or headers["id"]
    return message["properties"]["delivery_tag"], (name, int(retries))


def commands(folder: Path) -> Iterator[list[bytes]]:
    """The commands of an append-only file that touch database 0, in order."""
    database = b"0"
    for path in sorted(folder.rglob("*.aof"), key=lambda p: p.stat().st_mtime):
        with path.open("rb") as file:
            while head := file.readline():
                if not head.startswith(b"*"):
                    continue  # a comment of Redis 7
                command = []
                for _ in range(int(head[1:])):
                    size = int(file.readline()[1:])
                    command.append(file.read(size + 2)[:size])
                if command[0].upper() == b"SELECT":
                    database = command[1]
                elif database == b"0":
                    yield command
