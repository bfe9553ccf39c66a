"""The Lua scripts: read once from the package, called through `redis.commands.core.Script`.

The integers that scripts reply are declared here; a unit test compares them with the headers
of the scripts.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from celery_dlq.store.keys import spelled

if TYPE_CHECKING:
    from redis.commands.core import Script


class CountReply(IntEnum):
    """First number of the replies of ``count.lua``."""

    LIMIT_REACHED = 0
    COUNTED = 1
    RUNNING = 2
    UNCERTAIN = 3
    SUSPECT = 4
    DEAD = 5


class DeadLetterReply(IntEnum):
    """Replies of ``dead_letter.lua``."""

    ALREADY_THERE = 0
    STORED = 1
    REGRESSED = 2


class ClaimReply(IntEnum):
    """Replies of ``claim.lua`` and ``redrive.lua``, one per letter id."""

    CLAIMED = 1
    RECLAIMED = 2
    PUBLISHED = 3
    HELD = 4
    GONE = 5


class ReportReply(IntEnum):
    """First number of the replies of ``report.lua``."""

    NONE = 0
    NEW = 1
    CAME_BACK = 2
    GREW = 3
    REGRESSED = 4


class RestoreReply(IntEnum):
    """Replies of ``restore.lua``."""

    NOT_THERE = 0
    RESTORED = 1
    TAKEN = 2


class InstructReply(IntEnum):
    """Replies of ``instruct.lua``."""

    CHANGED = 0
    DONE = 1
    FULL = 2


REPLIES: dict[str, type[IntEnum]] = {
    "count": CountReply,
    "dead_letter": DeadLetterReply,
    "claim": ClaimReply,
    "redrive": ClaimReply,
    "report": ReportReply,
    "restore": RestoreReply,
    "instruct": InstructReply,
}

MOST_IDS = 500
"""Maximum number of letter ids in one call of a script."""


def source(name: str, package: str = "celery_dlq.store") -> str:
    """Return the text of a script in the folder ``lua`` of a package."""
    return (files(package) / "lua" / f"{name}.lua").read_text("utf-8")


def whole(name: str, package: str = "celery_dlq.store") -> str:
    """Return the text of a script with the parts that it shares with others."""
    return _INCLUDE.sub(lambda found: source(f"parts/{found[1]}"), source(name, package))


_INCLUDE = re.compile(r"^-- include: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n|^\s+|  --.*$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class ScriptText:
    """A script as it is sent."""

    text: str  # Its text without comments and indentation, to save bytes with every task
    digest: str  # SHA-1 of the text, for `EVALSHA`

    def command(self, keys: Sequence[str], *args: Any) -> tuple[Any, ...]:
        """Return the ``EVAL`` command, which works whether Redis knows the script or not."""
        return ("EVAL", self.text, len(keys), *keys, *args)


@cache
def script_text(name: str, package: str = "celery_dlq.store") -> ScriptText:
    """Return a script of a package, ready to be sent."""
    text = _COMMENT.sub("", whole(name, package))
    return ScriptText(text, sha1(text.encode(), usedforsecurity=False).hexdigest())


class Scripts:
    """The scripts in the folder ``lua`` of a package, each registered when it is first used."""

    def __init__(self, client: Any, package: str = "celery_dlq.store") -> None:
        self._client = client
        self._package = package

    def __getattr__(self, name: str) -> Script:
        registered = self._client.register_script(script_text(name, self._package).text)
        setattr(self, name, registered)
        return registered  # type: ignore[no-any-return]


def chunks(letter_ids: Sequence[str], size: int = MOST_IDS) -> Iterator[list[str]]:
    """Split ids into lists for one call each, with unencodable characters escaped."""
    for start in range(0, len(letter_ids), size):
        yield [spelled(letter_id) for letter_id in letter_ids[start : start + size]]
