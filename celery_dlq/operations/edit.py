"""Editing the arguments of one letter's message before it is redriven."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from celery_dlq.errors import DLQError, RedriveError
from celery_dlq.headers import EDITED_HEADER
from celery_dlq.letters.printable import shortened
from celery_dlq.operations.message import Outgoing
from celery_dlq.record import iso
from celery_dlq.redaction.masking import NO_REDACTION, Redaction

__all__ = ["Edit"]

_JSON_TYPES = ("application/json",)
MAX_EDITS = 20
MAX_SHOWN_CHARS = 2000
MAX_DESCRIBED_CHARS = 1024
MAX_CHANGE_CHARS = 65_536  # a longer change is not kept with its job
_MAX_PATHS_NAMED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of a message's arguments.

    Where ``dlq_redact`` masks a value, leave ``[redacted]`` or the value itself: it is kept.

    Attributes:
        args: The new positional arguments; ``None`` keeps them.
        kwargs: The new keyword arguments; ``None`` keeps them.
        assign: Single values by their path, e.g. ``{"kwargs.tenant": 42, "args.0": "x"}``;
            applied after ``args`` and ``kwargs``.
    """

    args: Sequence[Any] | None = None
    kwargs: Mapping[str, Any] | None = None
    assign: Mapping[str, Any] = field(default_factory=dict)

    def paths(self) -> list[str]:
        """What it changes, without the values: ``args``, ``kwargs``, and the first 20 paths."""
        whole = [name for name in ("args", "kwargs") if getattr(self, name) is not None]
        return [*whole, *islice(self.assign, _MAX_PATHS_NAMED)]

    def to_text(self) -> str:
        """JSON text, for a job; `from_text` reads it."""
        return json.dumps({"args": self.args, "kwargs": self.kwargs, "assign": dict(self.assign)})

    @classmethod
    def from_text(cls, text: str) -> Edit:
        """Read what `to_text` wrote."""
        return cls(**json.loads(text))


def assignment(text: str) -> tuple[str, Any]:
    """Parse ``kwargs.tenant=42``: a path, and a value that is JSON or else plain text.

    Raises:
        DLQError: The text has another form.
    """
    path, equals, value = text.partition("=")
    if not equals or not re.fullmatch(r"(args\.\d+|kwargs\.[^.]+)(\.[^.]+)*", path):
        raise DLQError(f"expected kwargs.NAME=VALUE or args.NUMBER=VALUE, got {text!r}")
    try:
        return path, json.loads(value)
    except ValueError:
        return path, value


def arguments(
    content_type: str, body: bytes, headers: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any], Any]:
    """The parts of a message's body: args, kwargs and the links of its workflow.

    Raises:
        DLQError: The body is not plain JSON of protocol 2.
    """
    found = None
    if content_type in _JSON_TYPES and not headers.get("compression"):
        try:
            found = json.loads(body)
        except (ValueError, RecursionError):
            found = None
    if (
        not isinstance(found, list)
        or len(found) != 3  # noqa: PLR2004 - args, kwargs, links
        or not isinstance(found[0], list)
        or not isinstance(found[1], dict)
    ):
        raise DLQError(
            f"expected a plain JSON message of Celery's protocol 2 to edit, got a body of type "
            f"{content_type or 'unknown'!r}; signed, compressed, pickled and foreign bodies "
            f"cannot be edited"
        )
    return found[0], found[1], found[2]


def edited(
    edit: Edit, *, actor: str, now: datetime, redaction: Redaction = NO_REDACTION
) -> Callable[[Outgoing], Outgoing]:
    """A function that applies an edit to a message and records it in the headers, masked."""

    def apply(message: Outgoing) -> Outgoing:
        try:
            return _apply(edit, message, actor=actor, now=now, redaction=redaction)
        except RedriveError:
            raise
        except DLQError as exc:
            raise RedriveError(str(exc)) from exc

    return apply


def _apply(
    edit: Edit, message: Outgoing, *, actor: str, now: datetime, redaction: Redaction
) -> Outgoing:
    args, kwargs, links = arguments(message.content_type, message.body, message.headers)
    before = _shown(*redaction.arguments(args, kwargs))
    new: dict[str, Any] = {
        "args": list(args if edit.args is None else edit.args),
        "kwargs": dict(kwargs if edit.kwargs is None else edit.kwargs),
    }
    for path, value in edit.assign.items():
        _assign(new, path.split("."), value, path)
    # Once more, because `_assign` may have changed the others.
    old_args, old_kwargs, _ = arguments(message.content_type, message.body, message.headers)
    new_args, new_kwargs = redaction.restored((old_args, old_kwargs), (new["args"], new["kwargs"]))
    try:
        body = json.dumps([new_args, new_kwargs, links]).encode()
    except (TypeError, ValueError, RecursionError) as exc:
        raise DLQError(
            f"expected arguments that JSON can encode, got {type(exc).__name__}: {exc}"
        ) from exc
    if message.headers.get("argsrepr") is not None:
        message.headers["argsrepr"] = _described(tuple(new_args))
    if message.headers.get("kwargsrepr") is not None:
        message.headers["kwargsrepr"] = _described(new_kwargs)
    trail = _trail(message.headers.get(EDITED_HEADER))
    trail.append(
        {
            "at": iso(now),
            "actor": actor,
            "from": before,
            "to": _shown(*redaction.arguments(new_args, new_kwargs)),
        }
    )
    message.headers[EDITED_HEADER] = json.dumps(trail[-MAX_EDITS:])
    message.body, message.content_encoding = body, "utf-8"
    return message


def _assign(target: Any, keys: Sequence[str], value: Any, path: str) -> None:
    *parents, last = keys
    try:
        for key in parents:
            target = target[int(key)] if isinstance(target, list) else target[key]
        target[int(last) if isinstance(target, list) else last] = value
    except (KeyError, IndexError, ValueError, TypeError):
        raise DLQError(f"{path!r} does not exist in the arguments") from None


def _described(value: object) -> str:
    return shortened(repr(value), MAX_DESCRIBED_CHARS)


def _shown(args: object, kwargs: object) -> str:
    return shortened(json.dumps([args, kwargs], ensure_ascii=False), MAX_SHOWN_CHARS)


def _trail(header: object) -> list[Any]:
    try:
        found = json.loads(header) if isinstance(header, str) else []
    except ValueError:
        return []
    return found if isinstance(found, list) else []
