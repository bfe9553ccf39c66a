"""Names of exceptions in policies: those that can never act, and those that this process lacks."""

from __future__ import annotations

import builtins
import difflib
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from typing import Any

from celery_dlq.policies.checks import qualified_name

_BUILTINS = {
    name
    for name, kind in vars(builtins).items()
    if isinstance(kind, type) and issubclass(kind, BaseException)
}
_CONTROL_FLOW = "by it a task says itself what becomes of its message"
_REPORTED = "a worker reports it for a process that is gone; no task raises it"
_NEVER = {
    **dict.fromkeys(
        ("SystemExit", "KeyboardInterrupt", "GeneratorExit"),
        "it ends the process, and is no failure of the task",
    ),
    **dict.fromkeys(("Retry", "Ignore", "Reject", "TaskPredicate", "RejectToDLQ"), _CONTROL_FLOW),
    **dict.fromkeys(("WorkerLostError", "TimeLimitExceeded", "Terminated"), _REPORTED),
}
_OURS = ("", "celery.exceptions", "billiard.exceptions", "celery_dlq", "celery_dlq.decorators")


def why_never(name: str, *, ignored: bool = False) -> str:
    """Why a name can never act in any process; empty if it may.

    What a worker reports for a lost process can be ignored, by its full name.
    """
    module, _, last = name.rpartition(".")
    why = _NEVER.get(last, "") if module in _OURS else ""
    if why and not (ignored and module and why == _REPORTED):
        return why
    if module or name in _BUILTINS:
        return ""
    close = difflib.get_close_matches(name, _BUILTINS, n=1)
    hint = f"did you mean {close[0]!r}?" if close else "write its module, too: shop.errors.SoldOut"
    return f"it is no built-in exception; {hint}"


def why_not_here(name: str) -> str:
    """Why a name does not act in this process; empty if it does, or if that is not known.

    Nothing is imported for it, so a module that is there but not imported yet says nothing.
    """
    found = imported(name)
    if found is None:
        return _missing(name)
    if not isinstance(found, type) or not issubclass(found, BaseException):
        return f"it is no exception but {type(found).__name__}"
    names = {qualified_name(base) for base in found.__mro__}
    return _CONTROL_FLOW if "celery.exceptions.TaskPredicate" in names else ""


def imported(name: str) -> object:
    """What a dotted name stands for, if its module is imported; imports and calls nothing."""
    if "." not in name:
        return getattr(builtins, name, None)
    module, path = _place(name)
    found: Any = module
    for part in path if module is not None else ():
        found = getattr(found, "__dict__", {}).get(part)
    return found


def _place(name: str) -> tuple[Any, list[str]]:
    """The longest prefix of a name that is an imported module, and the rest."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            return found, parts[end:]
    return None, parts


def _missing(name: str) -> str:
    module, path = _place(name)
    if "<" in name or hasattr(module, "__getattr__"):  # of a function, or made when it is asked for
        return ""
    if len(path) > 1 or module is None:
        parent = "" if module is None else f"{module.__name__}."
        try:
            found = find_spec(parent + path[0])
        except (ImportError, ValueError, AttributeError):
            found = None
        known = module is not None and path[0] in vars(module)
        return "" if found or known else f"there is no module {parent}{path[0]!s} here"
    return f"there is no {path[0]} in {module.__name__}{_meant(path[0], vars(module))}"


def _meant(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
