"""What ``dlq_redact`` does: masks values wherever people look; the message itself stays whole."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dlq.errors import DLQError
from celery_dlq.features.redaction.replacing import (
    MARKER,
    Replacement,
    Scrubber,
    Unreadable,
    encoded,
    parsed,
    walk,
)
from celery_dlq.features.redaction.rules import WHOLE, Rules
from celery_dlq.letters import json_codec
from celery_dlq.letters.record import DeadLetter, Delivery
from celery_dlq.logs import get_logger

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    from celery_dlq.config import Settings

    _Shown = TypeVar("_Shown", bound=DataclassInstance)

__all__ = ["MARKER", "NO_REDACTION", "Redaction"]

logger = get_logger("celery_dlq")

MAX_BODY_BYTES = 1024 * 1024
"""A larger body is not parsed: it is shown as the marker."""
MAX_VALUES = 500
"""With more hidden values in one letter, all its texts are shown as the marker."""

_JSON_TYPES = ("application/json",)
_REPRS = ("argsrepr", "kwargsrepr")
_AT_CAPTURE = ("args_json", "kwargs_json")
_JSON_FIELDS = (*_AT_CAPTURE, "headers", "properties", "native_death")


@dataclass(frozen=True, slots=True)
class Redaction:
    """Masks what ``dlq_redact`` names; every masked value is shown as ``[redacted]``.

    None of the methods raises because of what a publisher wrote: what cannot be looked into is
    masked as a whole. Without rules, all return what they were given.
    """

    rules: Rules = field(default_factory=Rules)  # What is masked

    @classmethod
    def of(cls, settings: Settings) -> Redaction:
        """The redaction of the settings of an app."""
        return _redaction(tuple(settings.of("redact") or ()))

    def __bool__(self) -> bool:
        return bool(self.rules)

    def letter(self, letter: DeadLetter) -> DeadLetter:
        """The letter as people may see it: all texts, headers, properties and the body masked.

        Not for a redrive: its body is not the message's.
        """
        return self._safely(letter, display=True)

    def captured(self, letter: DeadLetter) -> DeadLetter:
        """The letter as it is stored: its descriptive fields are masked, the message is whole."""
        return self._safely(letter, display=False)

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Args and kwargs, masked; they are of JSON."""
        if not self:
            return list(args), dict(kwargs)
        found = self._replacement()
        try:
            parts = found.root("args", list(args)), found.root("kwargs", dict(kwargs))
            scrub = found.scrubber()
            shown_args, shown_kwargs = (walk(part, scrub) for part in parts)
        except RecursionError:  # nested too deep to look into
            return [MARKER], {}
        return shown_args, shown_kwargs

    def headers(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Headers, masked, as values of JSON."""
        if not self:
            return dict(headers)
        found = self._replacement()
        try:
            masked = found.part("headers", json.loads(json_codec.dumps(dict(headers))))
            shown = walk(masked, found.scrubber())
        except RecursionError:
            return {}
        return shown if isinstance(shown, dict) else {}

    def text(self, text: str) -> str:
        """A text of unknown origin: what patterns match is masked."""
        return self._replacement().scrubber()(text)

    def value(
        self, value: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A JSON-ready value of other origin, e.g. a job's options, or an event of a task."""
        if not self:
            return value
        found = self._replacement()
        try:
            found.root("args", json.loads(json_codec.dumps(list(args))))
            found.root("kwargs", json.loads(json_codec.dumps(dict(kwargs or {}))))
            return walk(found.part("", value), found.scrubber())
        except RecursionError:
            return MARKER

    def shown(self, found: _Shown, *names: str) -> _Shown:
        """What people wrote, e.g. a note: a dataclass with what patterns match in it masked."""
        if not self:
            return found
        return replace(found, **{name: self._people(getattr(found, name)) for name in names})

    def _people(self, value: Any) -> Any:
        return tuple(map(self.text, value)) if isinstance(value, tuple) else self.value(value)

    def json_body(self, body: bytes, content_type: str) -> bytes:
        """A message's body for display: JSON with masked values, any other as ``[redacted]``."""
        if not self:
            return body
        found = self._replacement()
        try:
            value = found.part("body", _parsed_body(body, content_type))
            shown = MARKER if value is Unreadable else encoded(walk(value, found.scrubber()))
        except RecursionError:
            shown = MARKER
        return shown.encode()

    def fields(self, fields: Mapping[str, str]) -> dict[str, str]:
        """The fields of an entry that is no letter: their names only."""
        return dict.fromkeys(fields, MARKER) if self else dict(fields)

    def hides(self, path: str) -> bool:
        """True if the value at a path such as ``kwargs.card.number`` is masked by a path."""
        return self.rules.hide(path)

    def restored(
        self,
        before: tuple[Sequence[Any], Mapping[str, Any]],
        after: tuple[Sequence[Any], Mapping[str, Any]],
    ) -> tuple[list[Any], dict[str, Any]]:
        """Arguments as somebody edited them, with the values that they could not see.

        Masked values are put back by their place, so a list that has some keeps its length.
        """
        if not self:
            return list(after[0]), dict(after[1])
        masked = self.arguments(*before)
        args = self._back("args", list(before[0]), masked[0], list(after[0]))
        kwargs = self._back("kwargs", dict(before[1]), masked[1], dict(after[1]))
        return args, kwargs

    def _back(self, path: str, before: Any, masked: Any, after: Any) -> Any:
        """One value of the edited arguments."""
        hidden = not _same(before, masked)
        if _same(after, before) or (hidden and _same(after, masked)):
            return before
        if hidden and self.hides(path):
            raise DLQError(
                f"expected the value at {path!r} to stay as it is, got another: dlq_redact masks "
                f"it; leave {MARKER!r} there"
            )
        if isinstance(after, dict):
            old = before if isinstance(before, dict) else {}
            if any(MARKER in str(name) and name not in old for name in after):
                raise DLQError(
                    f"expected names without {MARKER!r} in {path!r}, got one: dlq_redact masks a "
                    f"name there; change single values by their path instead"
                )
            return {
                name: self._back(f"{path}.{name}", old.get(name), _at(masked, name), value)
                for name, value in after.items()
            }
        if isinstance(after, list):
            if hidden and (not isinstance(before, list) or len(before) != len(after)):
                raise DLQError(
                    f"expected the list at {path!r} to keep its items, got {len(after)}: "
                    f"dlq_redact masks some of them, which are told by their place"
                )
            return [
                self._back(f"{path}.{at}", _at(before, at), _at(masked, at), value)
                for at, value in enumerate(after)
            ]
        if isinstance(after, str) and MARKER in after:
            raise DLQError(
                f"expected the value at {path!r} to be without {MARKER!r}, got {MARKER!r} where "
                f"nothing is masked, or in a text that was changed"
            )
        return after

    def _replacement(self) -> Replacement:
        return Replacement(self.rules, _marker, MAX_VALUES)

    def _safely(self, letter: DeadLetter, *, display: bool) -> DeadLetter:
        if not self:
            return letter
        try:
            return self._masked(letter, display=display)
        except Exception as exc:  # noqa: BLE001 - a malformed letter must not be seen, nor lost
            logger.warning(
                "Letter %s cannot be looked into, its texts are masked: %s",
                letter.id,
                type(exc).__name__,
            )
            return _masked_whole(letter, display=display)

    def _masked(self, letter: DeadLetter, *, display: bool) -> DeadLetter:
        found = self._replacement()
        texts = {name: getattr(letter, name) for name in _JSON_FIELDS}
        parts = {name: parsed(text) for name, text in texts.items() if text is not None}
        if display or parts.keys().isdisjoint(_AT_CAPTURE):
            parts["body"] = _parsed_body(letter.body, letter.content_type)
        masked = {name: found.part(name, value) for name, value in parts.items()}
        for name in self.rules.whole:
            found.text(getattr(letter, name))
        found.part("history", [one.to_json() for one in letter.history])
        scrub = found.scrubber()
        changes: dict[str, Any] = {
            name: _text_of(value, parts[name], texts[name], scrub)
            for name, value in masked.items()
            if name in texts and (display or name in _AT_CAPTURE)
        }
        for name in WHOLE:
            changes[name] = self._text(name, getattr(letter, name), scrub)
        changes["history"] = tuple(self._delivery(one, scrub) for one in letter.history)
        if display:
            body = masked["body"]
            shown = MARKER if body is Unreadable else encoded(walk(body, scrub))
            changes["body"] = shown.encode()
        return replace(letter, **changes)

    def _text(self, name: str, text: str | None, scrub: Scrubber) -> str | None:
        if not text:
            return text
        hidden = name in self.rules.whole or (name in _REPRS and self.rules.hide_arguments())
        return MARKER if hidden else scrub(text)

    def _delivery(self, delivery: Delivery, scrub: Scrubber) -> Delivery:
        message = self._text("exception_message", delivery.exception_message, scrub)
        return replace(delivery, exception_message=message)


NO_REDACTION = Redaction()
"""Masks nothing."""


@lru_cache(maxsize=8)
def _redaction(texts: tuple[str, ...]) -> Redaction:
    return Redaction(Rules.parse(texts))


def _marker(_value: Any) -> str:
    return MARKER


def _parsed_body(body: bytes, content_type: str) -> Any:
    if content_type not in _JSON_TYPES or len(body) > MAX_BODY_BYTES:
        return Unreadable
    return parsed(body)


def _text_of(value: Any, before: Any, text: str | None, scrub: Scrubber) -> str | None:
    """The text of a masked part; the original one, if nothing is masked in it."""
    if value is Unreadable:
        return json.dumps(MARKER)
    shown = walk(value, scrub)
    return text if shown == before else encoded(shown)


def _masked_whole(letter: DeadLetter, *, display: bool) -> DeadLetter:
    marked = json.dumps(MARKER)
    changes: dict[str, Any] = {name: MARKER for name in WHOLE if getattr(letter, name) is not None}
    changes |= {name: marked for name in _AT_CAPTURE if getattr(letter, name) is not None}
    changes["history"] = tuple(
        replace(one, exception_message=one.exception_message and MARKER) for one in letter.history
    )
    if display:
        hidden = {"headers": "{}", "properties": "{}", "body": MARKER.encode()}
        changes |= {**hidden, "native_death": letter.native_death and marked}
    return replace(letter, **changes)


def _at(value: Any, at: Any) -> Any:
    try:
        return value[at]
    except (LookupError, TypeError):
        return None


def _same(one: Any, other: Any) -> bool:
    """True if two values are the same in JSON, where 1, 1.0 and True differ."""
    return _json(one) == _json(other)


def _json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)
