"""The Lua scripts: read once from the package.

A worker reads all when it starts (`read_all`): when its first message dies, it may have no file
descriptor left, or the package may be another version's.

The header of a script declares its keys by their names in `celery_dlq.store.keys`, and the
numbers that it replies, which are those of an enumeration; `tests/unit/test_scripts.py` compares.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from celery_dlq.events import GroupState

MOST_IDS = 500
"""Maximum number of letter ids in one call of a script."""

_INCLUDE = re.compile(r"^-- include: (\w+)\n", re.MULTILINE)
_COMMENT = re.compile(r"^\s*--.*\n|^\s+|  --.*$", re.MULTILINE)
_KEYS = re.compile(r"^-- KEYS:(.*?)^-- ARGV:", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Script:
    """A script as it is sent."""

    text: str  # Its text without comments and indentation, to save bytes with every task
    digest: str  # SHA-1 of the text, for `EVALSHA`
    keys: tuple[str, ...]  # The names of its keys, from its header

    def command(self, keys: Sequence[str], *args: Any) -> tuple[Any, ...]:
        """Return the ``EVAL`` command, which works whether Redis knows the script or not."""
        return ("EVAL", self.text, len(keys), *keys, *args)


def script_source(name: str, package: str = "celery_dlq.store") -> str:
    """Return the text of a script in the folder ``lua`` of a package."""
    return (files(package) / "lua" / f"{name}.lua").read_text("utf-8")


def whole_script(name: str, package: str = "celery_dlq.store") -> str:
    """Return the text of a script with the parts that it shares with others."""
    text = script_source(name, package)
    text = _INCLUDE.sub(lambda found: script_source(f"parts/{found[1]}"), text)
    quiet = ", ".join(f"{state} = true" for state in GroupState if state.is_quiet)
    return text.replace("QUIET_STATES", quiet)


@cache
def script_text(name: str, package: str = "celery_dlq.store") -> Script:
    """Return a script of a package, ready to be sent."""
    made = whole_script(name, package)
    text = _COMMENT.sub("", made)
    declared = _KEYS.search(made)
    keys = tuple(re.findall(r"\d+ (\w+) \(", declared[1])) if declared else ()
    return Script(text, sha1(text.encode(), usedforsecurity=False).hexdigest(), keys)


def read_all(packages: Iterable[str]) -> None:
    """Read all scripts of some packages, and keep them."""
    for package in packages:
        folder = files(package) / "lua"
        for file in folder.iterdir() if folder.is_dir() else ():
            if file.name.endswith(".lua"):
                script_text(file.name.removesuffix(".lua"), package)
