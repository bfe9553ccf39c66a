"""Which letters an operation is about: one value object for API, command line and web."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from functools import lru_cache
from typing import Any

from celery_dlq.errors import DLQError
from celery_dlq.record import DeadLetter, Reason, check_aware, from_micros, iso, to_micros

_JSON_SHORT = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t", "/": "\\/"}
_BEYOND_BASIC = 0x10000


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Matches letters; every field that is set must match.

    Attributes:
        ids: Letter ids; also positions in the store, for entries that are no letters.
        reason: A `Reason` or its name.
        task_name: Registered task name, exact.
        fingerprint: The fingerprint, or the first digits of it.
        exception_type: Dotted name of the exception, or its last part.
        worker_hostname: Node name of the worker that saw the death.
        since: Dead-lettered at or after this aware time.
        until: Dead-lettered before this aware time.
        grep: Text to find in the description, the exception's message or the body, however
            JSON spells it there.
    """

    ids: frozenset[str] | None = None
    reason: Reason | str | None = None
    task_name: str | None = None
    fingerprint: str | None = None
    exception_type: str | None = None
    worker_hostname: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    grep: str | None = None

    def __post_init__(self) -> None:
        check_aware("since", self.since)
        check_aware("until", self.until)
        if self.reason is not None and str(self.reason) not in {r.value for r in Reason}:
            known = ", ".join(sorted(r.value for r in Reason))
            raise DLQError(f"expected reason to be one of {known}, got {str(self.reason)!r}")
        if self.since is not None and self.until is not None and self.since > self.until:
            raise DLQError(
                f"expected since to be before until, got since {iso(self.since)} and until "
                f"{iso(self.until)}, between which nothing can have died"
            )

    def __bool__(self) -> bool:
        return any(getattr(self, f.name) is not None for f in fields(self))

    def matches(self, letter: DeadLetter) -> bool:
        """Whether a letter fits all fields that are set."""
        return (
            (self.ids is None or letter.id in self.ids)
            and (self.reason is None or letter.reason.value == str(self.reason))
            and (self.task_name is None or letter.task_name == self.task_name)
            and (self.fingerprint is None or letter.fingerprint.startswith(self.fingerprint))
            and (self.worker_hostname is None or letter.worker_hostname == self.worker_hostname)
            and (self.since is None or letter.dead_lettered_at >= self.since)
            and (self.until is None or letter.dead_lettered_at < self.until)
            and self._fits_exception(letter.exception_type or "")
            and self._fits_text(letter.description, letter.exception_message or "", letter.body)
        )

    def matches_fields(self, entry: Mapping[bytes, bytes]) -> bool:
        """As `matches`, on a letter's storage form: only what is asked for is decoded."""
        return (
            (self.ids is None or _text(entry, b"id") in self.ids)
            and (self.reason is None or _text(entry, b"reason") == str(self.reason))
            and (self.task_name is None or _text(entry, b"task_name") == self.task_name)
            and (
                self.fingerprint is None
                or _text(entry, b"fingerprint").startswith(self.fingerprint)
            )
            and (
                self.worker_hostname is None
                or _text(entry, b"worker_hostname") == self.worker_hostname
            )
            and self._fits_time(entry)
            and self._fits_exception(_text(entry, b"exception_type"))
            and (
                self.grep is None
                or self._fits_text(
                    _text(entry, b"description"),
                    _text(entry, b"exception_message"),
                    entry.get(b"body", b""),
                )
            )
        )

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping of the fields that are set; times in microseconds since 1970."""
        found: dict[str, Any] = {}
        for f in fields(self):
            value = getattr(self, f.name)
            if isinstance(value, datetime):
                value = to_micros(value)
            elif isinstance(value, frozenset):
                value = sorted(value)
            elif isinstance(value, Reason):
                value = value.value
            if value is not None:
                found[f.name] = value
        return found

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> LetterFilter:
        """Read what `to_json` wrote."""
        known = dict(value)
        for name in ("since", "until"):
            if name in known:
                known[name] = from_micros(known[name])
        if "ids" in known:
            known["ids"] = frozenset(known["ids"])
        return cls(**known)

    def _fits_time(self, entry: Mapping[bytes, bytes]) -> bool:
        if self.since is None and self.until is None:
            return True
        try:
            died = int(entry[b"dead_lettered_at"])
        except (KeyError, ValueError):
            return False
        return (self.since is None or died >= to_micros(self.since)) and (
            self.until is None or died < to_micros(self.until)
        )

    def _fits_exception(self, full: str) -> bool:
        return self.exception_type is None or (
            self.exception_type in (full, full.rpartition(".")[2])
        )

    def _fits_text(self, description: str, message: str, body: bytes) -> bool:
        if self.grep is None:
            return True
        return (
            self.grep in description
            or self.grep in message
            or _pattern(self.grep).search(body) is not None
        )


def _text(entry: Mapping[bytes, bytes], name: bytes) -> str:
    return entry.get(name, b"").decode("utf-8", "replace")


@lru_cache(maxsize=32)
def _pattern(text: str) -> re.Pattern[bytes]:
    r"""Finds a text in a body in every spelling of JSON: ``ü`` is also ``\u00fc``."""
    return re.compile(b"".join(_spellings(character) for character in text))


def _spellings(character: str) -> bytes:
    plain = re.escape(character.encode("utf-8", "surrogatepass"))
    if character.isascii() and character.isprintable() and character not in _JSON_SHORT:
        return plain
    ways = [plain]
    if character in _JSON_SHORT:
        ways.append(re.escape(_JSON_SHORT[character].encode()))
    code = ord(character)
    if code < _BEYOND_BASIC:
        units = [code]
    else:
        code -= _BEYOND_BASIC
        units = [0xD800 + (code >> 10), 0xDC00 + (code & 0x3FF)]
    ways.append(b"".join(rb"\\u(?i:%04x)" % unit for unit in units))
    return b"(?:" + b"|".join(ways) + b")"
