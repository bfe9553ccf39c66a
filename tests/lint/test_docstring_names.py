"""Every dotted name of this package in a docstring or a comment can be imported."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "celery_dlq"
NAME = re.compile(r"`+(celery_dlq(?:\.\w+)+)[`(]")


def test_names_in_docstrings_exist() -> None:
    """A rename that forgets a docstring sends readers to nowhere."""
    missing = [
        f"{path.relative_to(PACKAGE)}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name in NAME.findall(path.read_text("utf-8"))
        if not exists(name)
    ]
    assert missing == []


def exists(dotted: str) -> bool:
    """True if a dotted name is a module, or an attribute of one."""
    parts = dotted.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as exc:
            if not (exc.name or "").startswith("celery_dlq"):
                return True  # an extra that is not installed here
            continue
        for attribute in parts[length:]:
            if attribute in getattr(found, "__annotations__", {}):
                return True
            if not hasattr(found, attribute):
                return False
            found = getattr(found, attribute)
        return True
    return False
