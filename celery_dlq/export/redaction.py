"""Redaction: values are replaced by keyed tokens everywhere in a letter.

Equal values have equal tokens under one key, so Spark can still join and count. Without the key,
a value cannot be found by hashing guesses.

A value is looked up by path (``kwargs.card``, ``args.0``, ``headers.auth``, ``*`` for any
name or index) in the arguments, in the body with its chain, callbacks and chord, and in the
headers. The values found are then replaced in every other text of the letter. Fields that cannot
be parsed, such as a pickled body, are left out, and so are Celery's truncated descriptions of the
arguments. A letter that cannot be redacted for any reason keeps only its ids and names, its
numbers and its times.
"""

from __future__ import annotations

import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from celery_dlq.errors import ExportError
from celery_dlq.logs import get_logger
from celery_dlq.record import Kind, field_kinds

logger = get_logger("celery_dlq.export")

MIN_KEY_BYTES = 16

_PREFIX = "redacted:"
_DIGITS = 32
_TOKEN = re.compile(rf"{_PREFIX}[0-9a-f]{{{_DIGITS}}}")
_MIN_SUBSTRING_CHARS = 4  # shorter values are replaced in texts only as whole words
_ROOTS = ("args", "kwargs", "headers")
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
# Text fields that ``--redact`` may name: the whole field is replaced.
_WHOLE = ("description", "exception_message", "traceback", "argsrepr", "kwargsrepr")
_KEPT = frozenset(
    {"id", "task_id", "task_name", "source_queue", "dead_letter_queue", "reason", "fingerprint"}
)

Fields = Mapping[bytes, bytes]
Path = tuple[str, ...]


@dataclass(frozen=True, slots=True, repr=False)
class Redaction:
    """Replaces values in letters.

    Attributes:
        paths: Paths of the values, e.g. ``("kwargs", "card")``.
        whole: Text fields that are replaced as a whole.
        key: The secret key of the tokens.
    """

    paths: tuple[Path, ...]
    whole: tuple[str, ...]
    key: bytes

    @classmethod
    def parse(cls, paths: Sequence[str], key: bytes | None) -> Redaction:
        """Check paths and key.

        Args:
            paths: E.g. ``["kwargs.card", "headers.auth", "traceback"]``.
            key: The secret, 16 bytes or more.

        Raises:
            ExportError: A path is malformed, or the key is missing or short.
        """
        texts = [text.strip() for text in paths]
        split = [tuple(text.split(".")) for text in texts if text not in _WHOLE]
        for path in split:
            if len(path) < 2 or path[0] not in _ROOTS or "" in path:  # noqa: PLR2004 - a root and a name
                raise ExportError(
                    f"expected a path to redact such as kwargs.card, args.0, headers.auth, or one "
                    f"of {', '.join(_WHOLE)}, got {'.'.join(path)!r}"
                )
        if key is None or len(key.strip()) < MIN_KEY_BYTES:
            got = "none" if key is None else f"one of {len(key.strip())} bytes"
            raise ExportError(
                f"expected a key of {MIN_KEY_BYTES} bytes or more to redact with, got {got}; set "
                f"DLQ_REDACT_KEY or --redact-key-file, and keep it apart from the files: with it "
                f"the values can be guessed. To make one: openssl rand -hex 32"
            )
        whole = tuple(sorted({text for text in texts if text in _WHOLE}))
        return cls(tuple(sorted(set(split))), whole, key.strip())

    def about(self) -> dict[str, Any]:
        """The redacted paths and an id of the key, without the key; JSON-ready."""
        paths = sorted([".".join(path) for path in self.paths] + list(self.whole))
        return {"paths": paths, "key": self._digest(b"key id")[:12]}

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
        return f"{_PREFIX}{self._digest(text.encode())[:_DIGITS]}"

    def _digest(self, message: bytes) -> str:
        return hmac.new(self.key, message, sha256).hexdigest()

    def _redacted(self, letter: Fields) -> dict[bytes, bytes]:
        found = _Match(self)
        parsed = {name: _parsed(letter.get(name.encode())) for name in _parts(letter)}
        for name, value in parsed.items():
            parsed[name] = found.part(name, value)
        texts = {
            name: letter[name.encode()].decode("utf-8", "replace")
            for name, kind in field_kinds().items()
            if kind is Kind.TEXT and name not in parsed and name.encode() in letter
        }
        for name in self.whole:
            found.text(texts.get(name))
        scrub = found.scrubber()
        result = {name: value for name, value in letter.items() if _is_plain(name)}
        for name, value in parsed.items():
            if value is not _Unreadable:
                result[name.encode()] = json.dumps(
                    _walk(value, scrub), ensure_ascii=False, separators=(",", ":")
                ).encode("utf-8", "backslashreplace")
        for name, text in texts.items():
            if not (name in _REPRS and self.hides_arguments()):
                result[name.encode()] = self._text(name, text, scrub)
        return result

    def _text(self, name: str, text: str, scrub: Any) -> bytes:
        if name in self.whole:
            return self.token(text).encode()
        shown = text if name in _NAMES else scrub(text)
        return str(shown).encode("utf-8", "backslashreplace")

    def hides_arguments(self) -> bool:
        """True if Celery's descriptions of the arguments must be left out."""
        return any(path[0] != "headers" for path in self.paths)


class _Match:
    """Replaces values by path, and remembers them for other texts."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._tokens: dict[str, str] = {}

    def part(self, name: str, value: Any) -> Any:
        """Replace the values that the paths name in one parsed field."""
        if value is _Unreadable:
            return value
        if name == "args_json":
            return self._root("args", value)
        if name == "kwargs_json":
            return self._root("kwargs", value)
        if name == "body":
            return self._message(value)
        if name == "headers":
            return self._headers(value)
        return self._nested(value)

    def text(self, text: str | None) -> None:
        """Remember a text that is replaced as a whole: other texts may repeat it."""
        if text:
            self._tokens.setdefault(text, self._redaction.token(text))

    def _root(self, root: str, value: Any) -> Any:
        for path in self._redaction.paths:
            if path[0] == root:
                value = self._at(value, path[1:])
        return value

    def _headers(self, value: Any) -> Any:
        value = self._nested(self._root("headers", value))
        if isinstance(value, dict) and self._redaction.hides_arguments():
            value = {name: item for name, item in value.items() if name not in _REPRS}
        return value

    def _message(self, value: Any) -> Any:
        """Redact a body of Celery's protocol 2 (a list of three) or 1 (an object)."""
        if isinstance(value, list) and len(value) == 3:  # noqa: PLR2004 - args, kwargs, embed
            args, kwargs, embed = value
            return [self._root("args", args), self._root("kwargs", kwargs), self._nested(embed)]
        return self._nested(value)

    def _nested(self, value: Any) -> Any:
        """Redact the arguments and headers of signatures (callbacks, chains, chords)."""
        if isinstance(value, list):
            return [self._nested(item) for item in value]
        if not isinstance(value, dict):
            return value
        value = {name: self._nested(item) for name, item in value.items()}
        for root in _ROOTS:
            if root in value:
                value[root] = self._root(root, value[root])
        if "application_headers" in value:
            value["application_headers"] = self._root("headers", value["application_headers"])
        return value

    def _at(self, value: Any, path: Path) -> Any:
        if not path:
            return self._replaced(value)
        name, rest = path[0], path[1:]
        if isinstance(value, dict):
            return {k: self._at(v, rest) if name in (k, "*") else v for k, v in value.items()}
        if isinstance(value, list):
            if name == "*" or name.isdecimal():
                return [
                    self._at(item, rest) if name in (str(number), "*") else item
                    for number, item in enumerate(value)
                ]
            return [self._at(item, path) for item in value]  # each item has the name
        return value

    def _replaced(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and _TOKEN.fullmatch(value)):
            return value
        token = self._redaction.token(value)
        for leaf in _leaves(value):
            self._tokens.setdefault(
                leaf, token if not isinstance(value, (dict, list)) else self._redaction.token(leaf)
            )
        return token

    def scrubber(self) -> Any:
        """Make a function that replaces the remembered values in a text."""
        forms = {form: token for leaf, token in self._tokens.items() for form in _forms(leaf)}
        if not forms:
            return lambda text: text
        longest = sorted(forms, key=len, reverse=True)
        # Tokens come first, so that no value matches inside of one.
        pattern = re.compile("|".join([_TOKEN.pattern, *(_pattern(form) for form in longest)]))
        heads = [(form, forms[form]) for form in longest if len(form) > _MIN_SUBSTRING_CHARS]

        def scrub(text: str) -> str:
            text = pattern.sub(lambda match: forms.get(match[0], match[0]), text)
            return _cut_end(text, heads)

        return scrub


class _Unreadable:
    """Marks a field that is not JSON."""


def _parts(letter: Fields) -> list[str]:
    """Names of the fields that should hold JSON."""
    kinds = field_kinds()
    named = ["body", "args_json", "kwargs_json"]
    named += [name for name, kind in kinds.items() if kind in (Kind.JSON, Kind.HISTORY)]
    return [name for name in named if name.encode() in letter]


def _parsed(value: bytes | None) -> Any:
    try:
        return json.loads((value or b"").decode("utf-8"))
    except (ValueError, RecursionError):
        return _Unreadable


def _is_plain(name: bytes) -> bool:
    kind = field_kinds().get(name.decode("utf-8", "replace"))
    return kind in (Kind.INTEGER, Kind.TIME)


def _walk(value: Any, scrub: Any) -> Any:
    """Scrub every text in a JSON value, names and numbers included."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, list):
        return [_walk(item, scrub) for item in value]
    if isinstance(value, dict):
        return {scrub(name): _walk(item, scrub) for name, item in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value is not None:
        text = json.dumps(value)
        scrubbed = scrub(text) if len(text) >= _MIN_SUBSTRING_CHARS else text
        return value if scrubbed == text else scrubbed
    return value


def _leaves(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaves(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaves(item)]
    if value is None or isinstance(value, bool) or value == "":
        return []
    return [value if isinstance(value, str) else json.dumps(value)]


def _forms(leaf: str) -> set[str]:
    """The spellings of a value in a text: as it is, as JSON, as Python."""
    spelled = {json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1], repr(leaf)[1:-1]}
    return {leaf, *spelled} - {""}


def _pattern(form: str) -> str:
    literal = re.escape(form)
    return literal if len(form) >= _MIN_SUBSTRING_CHARS else rf"(?<![^\W_]){literal}(?![^\W_])"


def _cut_end(text: str, heads: Sequence[tuple[str, str]]) -> str:
    """Replace the beginning of a value at the end of a text that was truncated."""
    ending = text.rstrip("….'\")")
    if _TOKEN.fullmatch(ending[-len(_PREFIX) - _DIGITS :]):
        return text
    for form, token in heads:
        for length in range(min(len(form) - 1, len(ending)), _MIN_SUBSTRING_CHARS - 1, -1):
            if ending.endswith(form[:length]):
                return ending[:-length] + token
    return text


def _bare(letter: Fields) -> dict[bytes, bytes]:
    kept = {name: letter[name.encode()] for name in _KEPT if name.encode() in letter}
    plain = {name: value for name, value in letter.items() if _is_plain(name)}
    return {**plain, **{name.encode(): value for name, value in kept.items()}}
