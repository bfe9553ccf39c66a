"""Editing the arguments of one letter's message before it is redriven."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from datetime import datetime
from itertools import islice
from typing import Any

from kombu.compression import compress
from kombu.exceptions import KombuError

from celery_dlq.errors import DLQError, RedriveError
from celery_dlq.letters.bodies import Arguments
from celery_dlq.letters.conditions import Path, path_of
from celery_dlq.letters.headers import EDITED_HEADER
from celery_dlq.letters.printable import shortened
from celery_dlq.letters.record import iso
from celery_dlq.letters.redaction import NO_REDACTION, Redaction
from celery_dlq.operations.redrive.message import Outgoing

__all__ = ["Edit"]

MAX_EDITS = 20
MAX_SHOWN_CHARS = 2000
MAX_DESCRIBED_CHARS = 1024
MAX_CHANGE_CHARS = 262_144  # a change is kept with its job
_MAX_PATHS_NAMED = 20
# Of protocol 2: https://docs.celeryq.dev/en/stable/internals/protocol.html
_CELERYS = frozenset(
    {
        "argsrepr",
        "compression",
        "delivery_info",
        "eta",
        "expires",
        "group",
        "group_index",
        "id",
        "ignore_result",
        "kwargsrepr",
        "lang",
        "method",
        "origin",
        "parent_id",
        "redelivered",
        "replaced_task_nesting",
        "retries",
        "root_id",
        "shadow",
        "stamped_headers",
        "stamps",
        "task",
        "timelimit",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """A change of a message's arguments.

    Where ``dlq_redact`` masks a value, leave ``[redacted]`` or the value itself: it is kept.

    Attributes:
        args: The new positional arguments; ``None`` keeps them.
        kwargs: The new keyword arguments; ``None`` keeps them.
        assign: Single values by their path, e.g. ``{"kwargs.tenant": 42, "args[0].id": "x"}``;
            applied after ``args`` and ``kwargs``. The paths are those of
            `celery_dlq.letters.conditions`; a header is one of your own, not of Celery.
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
        text = json.dumps({"args": self.args, "kwargs": self.kwargs, "assign": dict(self.assign)})
        if len(text) > MAX_CHANGE_CHARS:
            raise DLQError(
                f"expected a change of at most {MAX_CHANGE_CHARS:,} characters of JSON, got a "
                f"longer one; change single values by their paths"
            )
        return text

    @classmethod
    def from_text(cls, text: str) -> Edit:
        """Read what `to_text` wrote."""
        return cls(**json.loads(text))


def arguments(content_type: str, body: bytes, headers: Mapping[str, Any]) -> Arguments:
    """The parts of a message's body: args, kwargs, and what else it has."""
    try:
        return Arguments.of(content_type, body, headers.get("compression"))
    except ValueError as exc:
        raise DLQError(
            f"expected a JSON message of Celery to edit, got {exc}; signed, encrypted, pickled and "
            f"foreign bodies cannot be edited, nor compressed ones of more than 1 MiB"
        ) from exc


def edits_of(headers: Any) -> list[dict[str, str]]:
    """The edits that headers record, the oldest first; publishers may write any text there."""
    try:
        found = json.loads(headers.get(EDITED_HEADER) or "[]")
    except (ValueError, TypeError, AttributeError, RecursionError):
        return []
    found = found[-MAX_EDITS:] if isinstance(found, list) else []
    edits = (edit for edit in found if isinstance(edit, dict))
    return [{k: text for k, text in edit.items() if isinstance(text, str)} for edit in edits]


def editing(
    edit: Edit, *, actor: str, now: datetime, redaction: Redaction = NO_REDACTION
) -> Callable[[Outgoing], Outgoing]:
    """A function that applies an edit to a message and records it in the headers, masked."""

    def apply(message: Outgoing) -> Outgoing:
        try:
            return _apply_edit(edit, message, actor=actor, now=now, redaction=redaction)
        except RedriveError:
            raise
        except DLQError as exc:
            raise RedriveError(str(exc)) from exc

    return apply


def _apply_edit(
    edit: Edit, message: Outgoing, *, actor: str, now: datetime, redaction: Redaction
) -> Outgoing:
    given = arguments(message.content_type, message.body, message.headers)
    new: dict[str, Any] = {
        "args": list(given.args if edit.args is None else edit.args),
        "kwargs": dict(given.kwargs if edit.kwargs is None else edit.kwargs),
    }
    paths = {path: path_of(path) for path in edit.assign}
    own = _own_headers(message, paths.values(), redaction)
    new["headers"] = deepcopy(own)
    for path, (root, below) in paths.items():
        _assign_at(new[root], below, edit.assign[path], path)
    # Once more, because `_assign_at` may have changed the others.
    old = arguments(message.content_type, message.body, message.headers)
    new_args, new_kwargs = redaction.restored((old.args, old.kwargs), (new["args"], new["kwargs"]))
    body = _new_body(old, new_args, new_kwargs, message.headers.get("compression"))
    if message.headers.get("argsrepr") is not None:
        message.headers["argsrepr"] = _described(tuple(new_args))
    if message.headers.get("kwargsrepr") is not None:
        message.headers["kwargsrepr"] = _described(new_kwargs)
    trail: list[Any] = edits_of(message.headers)
    trail.append(
        {
            "at": iso(now),
            "actor": actor,
            "from": _shown_arguments(*redaction.arguments(old.args, old.kwargs), own),
            "to": _shown_arguments(
                *redaction.arguments(new_args, new_kwargs), redaction.headers(new["headers"])
            ),
        }
    )
    message.headers.update(new["headers"])
    message.headers[EDITED_HEADER] = json.dumps(trail[-MAX_EDITS:])
    message.body, message.content_encoding, message.headers_text = body, "utf-8", ""
    return message


def _new_body(old: Arguments, args: list[Any], kwargs: dict[str, Any], compression: Any) -> bytes:
    """The new body, compressed as the headers say, which stay."""
    try:
        body = old.body(args, kwargs)
    except (TypeError, ValueError, RecursionError) as exc:
        raise DLQError(
            f"expected arguments that JSON can encode, got {type(exc).__name__}: {exc}"
        ) from exc
    if not compression:
        return body
    try:
        return bytes(compress(body, compression)[0])  # type: ignore[no-untyped-call]
    except (KeyError, KombuError, ValueError) as exc:
        raise DLQError(f"expected a compression that kombu has here, got {compression!r}") from exc


def _own_headers(
    message: Outgoing, paths: Iterable[tuple[str, Path]], redaction: Redaction
) -> dict[str, Any]:
    """The headers that paths name, which must be the publisher's own, and known to people."""
    names = sorted({below[0][0] for root, below in paths if root == "headers"})
    for name in names:
        if name in _CELERYS or name.startswith(("dlq_", "x-death")):
            raise DLQError(
                f"expected a header of your own, got {name!r}, which belongs to Celery or to this "
                f"package"
            )
    own = {name: message.headers[name] for name in names if name in message.headers}
    if redaction.headers(own) != own:
        raise DLQError(f"expected headers that dlq_redact does not mask, got {', '.join(own)}")
    return own


def _assign_at(within: dict[str, Any], path: Path, value: Any, text: str) -> None:
    target: Any = within
    *parents, (last, index) = path
    try:
        for name, place in parents:
            target = target[place if isinstance(target, list) else name]
        target[index if isinstance(target, list) else last] = value
    except (KeyError, IndexError, TypeError):
        raise DLQError(f"{text!r} does not exist in the message") from None


def _described(value: object) -> str:
    return shortened(repr(value), MAX_DESCRIBED_CHARS)


def _shown_arguments(args: object, kwargs: object, headers: Mapping[str, Any]) -> str:
    parts = [args, kwargs, headers] if headers else [args, kwargs]
    return shortened(json.dumps(parts, ensure_ascii=False, default=str), MAX_SHOWN_CHARS)
