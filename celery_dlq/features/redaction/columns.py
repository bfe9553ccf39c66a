"""Redaction: values are replaced by keyed tokens everywhere in a letter.

Equal values have equal tokens under one key, so Spark can still join and count. Without the key,
a value cannot be found by hashing guesses.

`rules` says what can be named. Fields that cannot be parsed, such as a pickled body, are left out,
and so are Celery's truncated descriptions of the arguments. A letter that cannot be redacted for
any reason keeps only its ids and names, its numbers and its times.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from celery_dlq.errors import ExportError
from celery_dlq.features.redaction.replacing import (
    TOKEN_DIGITS,
    TOKEN_PREFIX,
    Replacement,
    Unreadable,
    encoded,
    parsed,
    walk,
)
from celery_dlq.features.redaction.rules import RuleError, Rules
from celery_dlq.letters.record import Kind, field_kinds
from celery_dlq.logs import get_logger

logger = get_logger("celery_dlq.export")

MIN_KEY_BYTES = 16

_REPRS = ("argsrepr", "kwargsrepr")
# Text fields that no argument gets into; they are needed to find a letter again.
_NAMES = frozenset(
    {
        "id",
        "task_name",
        "source_queue",
        "dead_letter_queue",
        "reason",
        "fingerprint",
        "content_type",
        "content_encoding",
    }
)
_KEPT = frozenset(
    {"id", "task_id", "task_name", "source_queue", "dead_letter_queue", "reason", "fingerprint"}
)

Fields = Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True, repr=False)
class Redaction:
    """Replaces values in letters."""

    rules: Rules  # What is redacted
    key: bytes  # The secret key of the tokens

    @classmethod
    def parse(cls, paths: Sequence[str], key: bytes | None) -> Redaction:
        """Check rules and key."""
        try:
            rules = Rules.parse(paths)
        except RuleError as exc:
            raise ExportError(str(exc)) from exc
        if key is None or len(key.strip()) < MIN_KEY_BYTES:
            got = "none" if key is None else f"one of {len(key.strip())} bytes"
            raise ExportError(
                f"expected a key of {MIN_KEY_BYTES} bytes or more to redact with, got {got}; set "
                f"DLQ_REDACT_KEY or --redact-key-file, and keep it apart from the files: with it "
                f"the values can be guessed. To make one: openssl rand -hex 32"
            )
        return cls(rules, key.strip())

    def about(self) -> dict[str, Any]:
        """The rules and an id of the key, without the key; JSON-ready."""
        return {"paths": self.rules.names(), "key": self._digest(b"key id")[:12]}

    def __call__(self, letter: Fields) -> dict[bytes, bytes]:
        """Redact a letter's fields; never raises, and never returns a partly redacted letter."""
        try:
            return self._redacted(letter)
        except Exception as exc:  # noqa: BLE001 - a malformed letter must not leak
            logger.warning(
                "A letter cannot be redacted, its texts are left out: %s", type(exc).__name__
            )
            return _bare(letter)

    def token(self, value: Any) -> str:
        """The token of a JSON value; equal values have equal tokens."""
        text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
        return f"{TOKEN_PREFIX}{self._digest(text.encode())[:TOKEN_DIGITS]}"

    def _digest(self, message: bytes) -> str:
        return hmac.new(self.key, message, sha256).hexdigest()

    def _redacted(self, letter: Fields) -> dict[bytes, bytes]:
        found = Replacement(self.rules, self.token)
        parts = {name: parsed(letter.get(name.encode())) for name in _parts(letter)}
        for name, value in parts.items():
            parts[name] = found.part(name, value)
        texts = {
            name: letter[name.encode()].decode("utf-8", "replace")
            for name, kind in field_kinds().items()
            if kind is Kind.TEXT and name not in parts and name.encode() in letter
        }
        for name in self.rules.whole:
            found.text(texts.get(name))
        scrub = found.scrubber()
        result = {name: value for name, value in letter.items() if _is_plain(name)}
        for name, value in parts.items():
            if value is not Unreadable:
                result[name.encode()] = encoded(walk(value, scrub)).encode()
        for name, text in texts.items():
            if not (name in _REPRS and self.rules.hide_arguments()):
                result[name.encode()] = self._text(name, text, scrub)
        return result

    def _text(self, name: str, text: str, scrub: Any) -> bytes:
        if name in self.rules.whole:
            return self.token(text).encode()
        shown = text if name in _NAMES else scrub(text)
        return str(shown).encode("utf-8", "backslashreplace")


def _parts(letter: Fields) -> list[str]:
    """Names of the fields that should hold JSON."""
    kinds = field_kinds()
    named = ["body", "args_json", "kwargs_json"]
    named += [name for name, kind in kinds.items() if kind in (Kind.JSON, Kind.HISTORY)]
    return [name for name in named if name.encode() in letter]


def _is_plain(name: bytes) -> bool:
    kind = field_kinds().get(name.decode("utf-8", "replace"))
    return kind in (Kind.INTEGER, Kind.TIME)


def _bare(letter: Fields) -> dict[bytes, bytes]:
    kept = {name: letter[name.encode()] for name in _KEPT if name.encode() in letter}
    plain = {name: value for name, value in letter.items() if _is_plain(name)}
    return {**plain, **{name.encode(): value for name, value in kept.items()}}
