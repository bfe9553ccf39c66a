"""What an export notes durably in its folder: what it is, and how far each queue has come.

::

    _celery_dlq/about               which letters and redactions the folder is for
    _celery_dlq/<queue>.json        checkpoint and, while files are put in place, the intent
    _celery_dlq/drafts/             unfinished files; removed by the next export
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any
from uuid import uuid4

from celery_dlq.backends.base import ordered
from celery_dlq.errors import ExportError
from celery_dlq.export import partition
from celery_dlq.export.destination import NOTES, Destination
from celery_dlq.export.lease import ExportLeases
from celery_dlq.filters import LetterFilter
from celery_dlq.record import from_micros, iso, to_micros

_ABOUT = f"{NOTES}/about"
_TIMES = ("since", "until")
_STATE = ("queue", "position", "intent", "since", "trimmed")


@dataclass(slots=True)
class Checkpoint:
    """How far a queue is exported.

    Attributes:
        destination: Where it is kept.
        queue: The dead-letter queue.
        position: Letters up to here are in the files, each once.
        intent: While files are put in place: up to where their letters go.
        since: The filter's ``since`` of that intent, in microseconds since 1970.
        trimmed: Letters of the files up to here were removed from the queue.
        leases: Where it is noted first, so that other machines' exports keep out.
        folder: What tells the folder from an earlier one of the same name.
    """

    destination: Destination
    queue: str
    position: str | None = None
    intent: str | None = None
    since: int | None = None
    trimmed: str | None = None
    leases: ExportLeases | None = None
    folder: str | None = None

    @classmethod
    def taken(cls, destination: Destination, queue: str, leases: ExportLeases | None) -> Checkpoint:
        """The checkpoint of a queue, when it is this export's lease.

        Raises:
            ExportError: Another export is at work, or there is something else in its place.
        """
        noted = None if leases is None else leases.take(queue)
        found = cls.read(destination, queue)
        folder = None if leases is None else folder_id(destination)
        if noted is not None and noted.get("folder") == folder:
            kept = cls(destination, queue, *(noted.get(name) for name in _STATE[1:]))
            if found.position is None or (
                kept.position is not None and ordered(kept.position) >= ordered(found.position)
            ):
                found = kept
        found.leases, found.folder = leases, folder
        return found

    @classmethod
    def read(cls, destination: Destination, queue: str) -> Checkpoint:
        """The checkpoint of a queue; one at the beginning if there is none.

        Raises:
            ExportError: There is something else in its place.
        """
        state = _load(destination, _place(queue))
        if state is None:
            return cls(destination, queue)
        try:
            found = cls(
                destination,
                queue,
                state["position"],
                state["intent"],
                state.get("since"),
                state.get("trimmed"),
            )
            from_micros(found.since or 0)
            for position in (found.position, found.intent, found.trimmed):
                if position is not None:
                    ordered(position)
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as exc:
            raise _not_ours(destination, _place(queue), exc) from exc
        if state.get("queue") != queue:
            raise _not_ours(destination, _place(queue), ValueError(state.get("queue")))
        return found

    def intend(self, last: str, since: datetime | None) -> None:
        """Note what the files that are put in place from now on hold."""
        self.intent, self.since = last, None if since is None else to_micros(since)
        self._save()

    def commit(self) -> None:
        """Note that all of them are in place."""
        self.position, self.intent, self.since = self.intent, None, None
        self._save()

    def pass_to(self, position: str) -> None:
        """Note that there was nothing to write up to here."""
        self.position, self.intent = position, None
        self._save()

    def trim(self, position: str) -> None:
        """Note that the letters in the files up to here are removed."""
        self.trimmed = position
        self._save()

    def _save(self) -> None:
        state = {name: getattr(self, name) for name in _STATE}
        if self.leases is not None:
            self.leases.note(self.queue, {**state, "folder": self.folder})
        self.destination.save(_place(self.queue), json.dumps(state).encode())


def agree(
    destination: Destination,
    where: LetterFilter,
    redacted: Mapping[str, Any],
    of: str | None = None,
) -> None:
    """Note what a new folder is for, or check that this export is for the same.

    A checkpoint says "all up to here". With another filter that would be untrue of the letters
    that the first filter left out, and nobody would ever see it.

    Args:
        destination: The folder.
        where: Which letters. ``since`` may move on; ``until`` only says where a run ends.
        redacted: What is redacted, and with which key; JSON-ready, no secrets.
        of: What is exported, if no letters.

    Raises:
        ExportError: The folder is for other letters or other redactions.
    """
    now: dict[str, Any] = {
        "where": _identity(where),
        "since": None if where.since is None else to_micros(where.since),
        "redacted": dict(redacted),
        **({"of": of} if of is not None else {}),
    }
    before = _load(destination, _ABOUT)
    now["id"] = (before or {}).get("id") or uuid4().hex
    if before is not None:
        _check_same(destination, before, now)
    if before != now:
        destination.save(_ABOUT, json.dumps(now).encode())


def folder_id(destination: Destination) -> str | None:
    """What tells a folder from one that was there before it, at the same place."""
    found = (_load(destination, _ABOUT) or {}).get("id")
    return found if isinstance(found, str) else None


def _check_same(
    destination: Destination, before: Mapping[str, Any], now: Mapping[str, Any]
) -> None:
    for part, called in (("where", "filter"), ("redacted", "redaction")):
        if before.get(part) != now[part]:
            raise ExportError(
                f"expected the {called} with which {destination.name} was begun "
                f"({_told(before.get(part))}), got {_told(now[part])}; "
                f"give the same again, or export to a new folder"
            )
    if before.get("of") != now.get("of"):
        holds, given = before.get("of") or "letters", now.get("of") or "letters"
        raise ExportError(
            f"expected {destination.name} to be a folder of {given}, got one of {holds}; "
            f"export to a new folder"
        )
    since, new = before.get("since"), now["since"]
    if since is not None and (new is None or new < since):
        got = "none" if new is None else iso(from_micros(new))
        raise ExportError(
            f"expected since to be {iso(from_micros(since))} or later, as when "
            f"{destination.name} was last written, got {got}: older letters were left out there; "
            f"export to a new folder"
        )


def _identity(where: LetterFilter) -> dict[str, Any]:
    chosen = {f.name: getattr(where, f.name) for f in fields(where) if f.name not in _TIMES}
    return {name: _plain(value) for name, value in sorted(chosen.items()) if value is not None}


def _plain(value: Any) -> Any:
    if isinstance(value, (frozenset, set)):
        return sorted(value)
    return str(value) if not isinstance(value, datetime) else iso(value)


def _told(part: Any) -> str:
    return json.dumps(part, ensure_ascii=False) if part else "none"


def _place(queue: str) -> str:
    return f"{NOTES}/{partition.note_name(queue)}"


def _load(destination: Destination, name: str) -> Any:
    text = destination.load(name)
    if text is None:
        return None
    try:
        state = json.loads(text)
        if not isinstance(state, dict):
            raise TypeError(type(state).__name__)  # noqa: TRY301 - told as the others are
    except (ValueError, TypeError) as exc:
        raise _not_ours(destination, name, exc) from exc
    return state


def _not_ours(destination: Destination, name: str, exc: Exception) -> ExportError:
    return ExportError(
        f"expected {destination.name}/{name} to be a note of an export, got something else "
        f"({exc!r}); mend it, or export to a new folder"
    )
