r"""What nobody may see: masks it wherever people look, and replaces it by tokens in exports.

- ``kwargs.card.number``, ``args[0].token`` (or ``args.0.token``), ``headers.authorization``: a
  value and all below it, in the language of `conditions`. ``*`` is any name or index, ``**`` any
  number of names. The items of a list have the names that follow: ``kwargs.cards.number``. A path
  may begin with ``**``, which looks in arguments and headers. Letter case counts, except in names
  of headers.
- ``description``, ``exception_message``, ``traceback``, ``argsrepr``, ``kwargsrepr``: a text of
  the letter as a whole.
- ``re:\b\d{16}\b``: whatever matches the regular expression, in any text.

``dlq_redact`` shows ``[redacted]`` in place of a value; the message itself stays whole. An export
has a key: equal values have equal tokens under one key, so Spark can join and count, and without
the key a value cannot be found by hashing guesses.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any, TypeVar

from celery_dlq.errors import DLQError, ExportError
from celery_dlq.letters import json_codec
from celery_dlq.letters.conditions import path_of
from celery_dlq.letters.printable import get_logger, shortened
from celery_dlq.letters.record import TEXTLESS, DeadLetter, Delivery, Kind, field_kinds
from celery_dlq.letters.replacing import (
    ANY_DEPTH,
    MARKER,
    REPRS,
    ROOTS,
    TOKEN_DIGITS,
    TOKEN_PREFIX,
    Path,
    Replacement,
    Scrubber,
    Unreadable,
    encoded,
    parsed,
    scrub_texts,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

    _Shown = TypeVar("_Shown", bound=DataclassInstance)

logger = get_logger("celery_dlq")

PATTERN_PREFIX = "re:"
MAX_BODY_BYTES = 1024 * 1024
"""A larger body is not parsed: it counts as one that is no JSON."""
MIN_KEY_BYTES = 16

_JSON_TYPES = ("application/json",)
_AT_CAPTURE = ("args_json", "kwargs_json")
_JSONS = [name for name, kind in field_kinds().items() if kind is Kind.JSON]
_PARTS = (*_AT_CAPTURE, *_JSONS, "body")
# Of these, exports keep the text: no argument gets into them, and a letter is found by them.
_NAMES = (
    *("id", "task_name", "source_queue", "dead_letter_queue", "reason", "fingerprint"),
    *("content_type", "content_encoding"),
)
# Of these as well, where people look: a letter is found, and traced, by them.
_TRACES = (
    *("task_id", "root_id", "parent_id", "group_id", "sentry_event_id", "exception_type"),
    *("exchange", "routing_key", "origin", "worker_hostname", "release"),
)
_TEXTS = [name for name, kind in field_kinds().items() if kind is Kind.TEXT]
WHOLE = tuple(name for name in _TEXTS if name not in (*_NAMES, *_TRACES, *_AT_CAPTURE))
"""Texts that are masked wherever they are, and that a rule may name; so is a field of tomorrow."""
_LOOKED_AT = (*_PARTS, *WHOLE, "content_type")
# What is shown of a part that cannot be looked into; of any other the marker, as JSON.
_INSTEAD = {"headers": "{}", "properties": "{}", "body": MARKER, **dict.fromkeys(REPRS, MARKER)}


@dataclass(frozen=True, slots=True)
class Redaction:
    """Replaces what its rules name: by ``[redacted]``, or with a key by tokens.

    None of the methods raises because of what a publisher wrote: what cannot be looked into is
    masked as a whole. Without rules, all return what they were given.
    """

    paths: tuple[Path, ...] = ()  # Paths of values, e.g. `("kwargs", "card")`
    whole: tuple[str, ...] = ()  # Texts of the letter that are replaced as a whole
    patterns: tuple[re.Pattern[str], ...] = ()
    key: bytes = field(default=b"", repr=False)

    @classmethod
    def parse(cls, texts: Sequence[str], where: str = "") -> Redaction:
        """Check and parse rules."""
        paths: set[Path] = set()
        whole, patterns = set(), {}
        for number, text in enumerate(texts):
            place = f"{where}[{number}] to be " if where else ""
            if text.startswith(PATTERN_PREFIX):
                patterns[text] = _pattern(text, place)
            elif text.strip() in WHOLE:
                whole.add(text.strip())
            else:
                paths.update(_parsed_paths(text, place))
        return cls(tuple(sorted(paths)), tuple(sorted(whole)), tuple(patterns.values()))

    @classmethod
    def with_key(cls, texts: Sequence[str], key: bytes | None) -> Redaction:
        """The redaction of an export: its rules, and the secret key of its tokens."""
        try:
            rules = cls.parse(texts)
        except DLQError as exc:
            raise ExportError(str(exc)) from exc
        if key is None or len(key.strip()) < MIN_KEY_BYTES:
            got = "none" if key is None else f"one of {len(key.strip())} bytes"
            raise ExportError(
                f"expected a key of {MIN_KEY_BYTES} bytes or more to redact with, got {got}; set "
                f"DLQ_REDACT_KEY or --redact-key-file, and do not keep it with the files: with it "
                f"the values can be guessed. To make one: openssl rand -hex 32"
            )
        return replace(rules, key=key.strip())

    def __bool__(self) -> bool:
        return bool(self.paths or self.whole or self.patterns)

    def rules_and_key_id(self) -> dict[str, Any]:
        """The rules and an id of the key, without the key; JSON-ready."""
        paths = [".".join(path) for path in self.paths]
        patterns = [f"{PATTERN_PREFIX}{pattern.pattern}" for pattern in self.patterns]
        names = sorted([*paths, *self.whole, *patterns])
        return {"paths": names, "key": self._digest(b"key id")[:12]}

    def token_of(self, value: Any) -> str:
        """What stands in place of a JSON value; under one key, equal values have equal tokens."""
        if not self.key:
            return MARKER
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return f"{TOKEN_PREFIX}{self._digest(text.encode())[:TOKEN_DIGITS]}"

    def _digest(self, message: bytes) -> str:
        return hmac.new(self.key, message, sha256).hexdigest()

    @property
    def hides_arguments(self) -> bool:
        """Whether Celery's descriptions of the arguments must not be shown."""
        return any(path[0] != "headers" for path in self.paths)

    # -- letters ------------------------------------------------------------------

    def letter(self, letter: DeadLetter) -> DeadLetter:
        """The letter as people may see it: all texts, headers, properties and the body masked.

        Not for a redrive: its body is not the message's.
        """
        return self._masked(letter, _PARTS)

    def captured(self, letter: DeadLetter) -> DeadLetter:
        """The letter as it is stored: its descriptive fields are masked, the message is whole."""
        return self._masked(letter, _AT_CAPTURE)

    def _masked(self, letter: DeadLetter, parts: Collection[str]) -> DeadLetter:
        if not self:
            return letter
        texts = {name: getattr(letter, name) for name in _LOOKED_AT}
        texts["history"] = json.dumps([one.to_json() for one in letter.history])
        found = self._redacted(texts, WHOLE)
        changes: dict[str, Any] = {name: found.get(name) for name in (*parts, *WHOLE)}
        if "body" in changes:
            changes["body"] = _key_bytes(changes["body"])
        changes["history"] = tuple(map(Delivery.from_json, json.loads(found["history"])))
        return replace(letter, **changes)

    def exported(self, letter: Mapping[bytes, bytes]) -> dict[bytes, bytes]:
        """A letter's fields with tokens; never raises, and never returns a partly redacted letter.

        What cannot be parsed, such as a pickled body, is left out.
        """
        kinds, texts, kept = field_kinds(), {}, {}
        for key, value in letter.items():
            name = key.decode("utf-8", "replace")
            kind = kinds.get(name)
            if name in _NAMES or name in TEXTLESS:
                kept[key] = value
            if kind is not None:
                texts[name] = value if name == "body" else value.decode("utf-8", "replace")
        names = {*_TEXTS}.intersection(texts).difference(_NAMES, _PARTS)
        found = self._redacted(texts, names)
        return {**{name.encode(): _key_bytes(value) for name, value in found.items()}, **kept}

    def _redacted(self, texts: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        """The parts, the named texts and the history of a letter, without what is hidden."""
        try:
            return self._looked_into(texts, names)
        except Exception as exc:  # noqa: BLE001 - a malformed letter must not be seen, nor lost
            logger.warning(
                "A letter cannot be looked into, its texts are masked: %s", type(exc).__name__
            )
            found = {name: self.token_of(texts[name]) for name in names if texts.get(name)}
            found["history"] = self._history(parsed(texts.get("history")), names, self.token_of)
            return found if self.key else {**found, **_instead(_PARTS, texts)}

    def _looked_into(self, texts: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        found, result = Replacement(self), {}
        given = {name: _parsed_rules(name, texts) for name in _PARTS if texts.get(name) is not None}
        masked = {name: found.replace_part(name, value) for name, value in given.items()}
        for name in self.whole:
            found.remember_text(texts.get(name))
        history = found.replace_part("history", parsed(texts.get("history")))
        scrub = found.scrubber()
        hidden = [name for name, value in given.items() if value is Unreadable]
        for name, value in masked.items():
            if value is not Unreadable:
                shown = scrub_texts(value, scrub)
                result[name] = texts[name] if shown == given[name] else encoded(shown)
        for name in names:
            if name in REPRS and self.hides_arguments:
                hidden.append(name)
            elif texts.get(name) is not None:
                result[name] = self._text(name, texts[name], scrub)
        result["history"] = self._history(history, names, scrub)
        return result if self.key else {**result, **_instead(hidden, texts)}

    def _history(self, history: Any, names: Collection[str], scrub: Scrubber) -> str:
        """JSON text of the deliveries; their fields have the names of the letter's."""
        found = [
            {
                name: self._text(name, value, scrub)
                if name in names and isinstance(value, str)
                else value
                for name, value in one.items()
            }
            for one in (history if isinstance(history, list) else [])
            if isinstance(one, dict)
        ]
        return encoded(found)

    def _text(self, name: str, text: str, scrub: Scrubber) -> str:
        return self.token_of(text) if text and name in self.whole else scrub(text)

    # -- what else people see -----------------------------------------------------

    def arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Args and kwargs, masked; they are of JSON."""
        found = self.value([{"args": list(args)}, {"kwargs": dict(kwargs)}])
        if found == MARKER:
            return [MARKER], {}
        (shown_args,), (shown_kwargs,) = (one.values() for one in found)
        return shown_args, shown_kwargs

    def headers(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Headers, masked, as values of JSON."""
        if not self:
            return dict(headers)
        found = self.value({"headers": json.loads(json_codec.dumps(dict(headers)))})
        return {} if found == MARKER else dict(*found.values())

    def text(self, text: str) -> str:
        """A text of unknown origin: what patterns match is masked."""
        return Replacement(self).scrubber()(text)

    def value(
        self, value: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """A JSON-ready value of other origin, e.g. a job's options, or an event of a task."""
        if not self:
            return value
        found = Replacement(self)
        try:
            found.replace_root("args", json.loads(json_codec.dumps(list(args))))
            found.replace_root("kwargs", json.loads(json_codec.dumps(dict(kwargs or {}))))
            return scrub_texts(found.replace_part("", value), found.scrubber())
        except RecursionError:  # nested too deep to look into
            return MARKER

    def shown(self, found: _Shown, *names: str) -> _Shown:
        """What people wrote, e.g. a note: a dataclass with what patterns match in it masked."""
        if not self:
            return found
        return replace(found, **{name: self._masked_words(getattr(found, name)) for name in names})

    def _masked_words(self, value: Any) -> Any:
        return tuple(map(self.text, value)) if isinstance(value, tuple) else self.value(value)

    def fields(self, fields: Mapping[str, str]) -> dict[str, str]:
        """The fields of an entry that is no letter: their names only."""
        return dict.fromkeys(fields, MARKER) if self else dict(fields)

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
        args = _unmasked("args", list(before[0]), masked[0], list(after[0]))
        kwargs = _unmasked("kwargs", dict(before[1]), masked[1], dict(after[1]))
        return args, kwargs


NO_REDACTION = Redaction()
"""The redaction that masks nothing."""


def _parsed_paths(text: str, place: str) -> list[Path]:
    error = DLQError(
        f"expected {place}a path to redact such as kwargs.card, args[0].token, "
        f"headers.authorization, **.password, a pattern such as re:\\b\\d{{16}}\\b, or one of "
        f"{', '.join(WHOLE)}, got {shortened(text.strip(), 100)!r}"
    )
    try:
        root, below = path_of(text, "pattern")
    except DLQError as exc:
        raise error from exc
    path = (root, *(name for name, _index in below))
    if path.count(ANY_DEPTH) > 1 or path[-1] == ANY_DEPTH:
        raise error
    return [(name, *path) for name in ROOTS] if root == ANY_DEPTH else [path]


def _pattern(text: str, place: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text[len(PATTERN_PREFIX) :])
    except (re.error, OverflowError, RecursionError) as exc:
        raise DLQError(
            f"expected {place}re: and a regular expression of Python, "
            f"got {shortened(text, 100)!r}: {exc}"
        ) from exc
    if pattern.fullmatch(""):
        raise DLQError(
            f"expected {place}a pattern that does not match an empty text, "
            f"got {shortened(text, 100)!r}"
        )
    return pattern


def _parsed_rules(name: str, texts: Mapping[str, Any]) -> Any:
    unreadable = name == "body" and (
        texts.get("content_type") not in _JSON_TYPES or len(texts[name]) > MAX_BODY_BYTES
    )
    return Unreadable if unreadable else parsed(texts[name])


def _instead(names: Collection[str], texts: Mapping[str, Any]) -> dict[str, str]:
    """What is shown of fields that cannot be looked into."""
    marked = json.dumps(MARKER)
    return {name: _INSTEAD.get(name, marked) for name in names if texts.get(name) is not None}


def _key_bytes(value: str | bytes) -> bytes:
    return value if isinstance(value, bytes) else value.encode("utf-8", "backslashreplace")


def _unmasked(path: str, before: Any, masked: Any, after: Any) -> Any:
    """One value of the edited arguments."""
    if _same_json(after, before) or _same_json(after, masked):
        return before
    error = DLQError(
        f"expected the value at {path!r} to stay as it is where it is {MARKER!r}, got another: "
        f"dlq_redact masks it; it can only be kept in its place, or removed"
    )
    if masked == MARKER != before:
        raise error
    if isinstance(after, dict):
        known, shown = (one if isinstance(one, dict) else {} for one in (before, masked))
        if any(MARKER in str(name) for name in after.keys() - known.keys()):
            raise error
        return {
            name: _unmasked(f"{path}.{name}", known.get(name), shown.get(name), value)
            for name, value in after.items()
        }
    if isinstance(after, list) and isinstance(before, list) and len(after) == len(before):
        each = enumerate(zip(before, masked, after, strict=True))
        return [_unmasked(f"{path}.{at}", *values) for at, values in each]
    if MARKER in _json_text(after):
        raise error
    return after


def _same_json(one: Any, other: Any) -> bool:
    """True if two values are the same in JSON, where 1, 1.0 and True differ."""
    return _json_text(one) == _json_text(other)


def _json_text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=repr)
