"""Values replaced by keyed tokens, everywhere in a letter, so that data can leave safely.

A token is the same for the same value and key: Spark can still join and count. Without the
key nobody can tell a value from its token by trying values.

A value is looked up by path (``kwargs.card``, ``args.0``, ``headers.auth``, ``*`` for any
name or index), in the arguments, in the body with its chain, callbacks and chord, and in the
headers. What was found is then looked for in every other text of the letter. What cannot be
looked into, such as a pickled body, is left out, and so are Celery's cut descriptions of the
arguments. A letter that cannot be redacted for any reason keeps no text of its own at all.
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

SHORTEST_KEY = 16

_PREFIX = "redacted:"
_DIGITS = 32
_TOKEN = re.compile(rf"{_PREFIX}[0-9a-f]{{{_DIGITS}}}")
_LONG = 4  # shorter values are replaced in texts only where they stand alone
_ROOTS = ("args", "kwargs", "headers")
_REPRS = ("argsrepr", "kwargsrepr")
# Names that no message chooses; they are needed to find a letter again.
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
# Free texts may be named whole in ``--redact``.
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
        paths: Where they are, e.g. ``("kwargs", "card")``.
        whole: Text fields that are replaced as a whole.
        key: The secret that tokens are made with.
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
            ExportError: A path or the key is not usable.
        """
        texts = [text.strip() for text in paths]
        split = [tuple(text.split(".")) for text in texts if text not in _WHOLE]
        for path in split:
            if len(path) < 2 or path[0] not in _ROOTS or "" in path:  # noqa: PLR2004 - a root and a name
                raise ExportError(
                    f"expected a path to redact such as kwargs.card, args.0, headers.auth, or one "
                    f"of {', '.join(_WHOLE)}, got {'.'.join(path)!r}"
                )
        if key is None or len(key.strip()) < SHORTEST_KEY:
            got = "none" if key is None else f"one of {len(key.strip())} bytes"
            raise ExportError(
                f"expected a key of {SHORTEST_KEY} bytes or more to redact with, got {got}; set "
                f"DLQ_REDACT_KEY or --redact-key-file, and keep it apart from the files: who has "
                f"it can find the values by trying. To make one: openssl rand -hex 32"
            )
        whole = tuple(sorted({text for text in texts if text in _WHOLE}))
        return cls(tuple(sorted(set(split))), whole, key.strip())

    def about(self) -> dict[str, Any]:
        """What is redacted and which key it is, without telling the key; JSON-ready."""
        paths = sorted([".".join(path) for path in self.paths] + list(self.whole))
        return {"paths": paths, "key": self._digest(b"key id")[:12]}

    def __call__(self, letter: Fields) -> dict[bytes, bytes]:
        """A letter's fields without the values; never raises, never leaves it half done."""
        try:
            return self._redacted(letter)
        except Exception as exc:  # noqa: BLE001 - nothing may pass because of an odd letter
            logger.warning(
                "A letter could not be redacted, its texts are left out: %s", type(exc).__name__
            )
            return _bare(letter)

    def token(self, value: Any) -> str:
        """The token of a value; equal values of JSON have equal tokens."""
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
        """Whether Celery's own descriptions of the arguments must go."""
        return any(path[0] != "headers" for path in self.paths)


class _Match:
    """Replaces values by their paths, and remembers them."""

    def __init__(self, redaction: Redaction) -> None:
        self._redaction = redaction
        self._tokens: dict[str, str] = {}

    def part(self, name: str, value: Any) -> Any:
        """One decoded field of a letter, without the values that the paths name."""
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
        """Remember a text that is replaced as a whole: others repeat it."""
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
        """A body of Celery's protocol 2 (a list of three) or 1 (an object)."""
        if isinstance(value, list) and len(value) == 3:  # noqa: PLR2004 - args, kwargs, embed
            args, kwargs, embed = value
            return [self._root("args", args), self._root("kwargs", kwargs), self._nested(embed)]
        return self._nested(value)

    def _nested(self, value: Any) -> Any:
        """Signatures of callbacks, chains and chords have arguments too; some have headers."""
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
            return [self._at(item, path) for item in value]  # the name is in each of them
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
        """A function that replaces the values found in any text."""
        forms = {layout: token for leaf, token in self._tokens.items() for layout in _forms(leaf)}
        if not forms:
            return lambda text: text
        longest = sorted(forms, key=len, reverse=True)
        # Tokens come first: their digits are no values.
        pattern = re.compile("|".join([_TOKEN.pattern, *(_pattern(layout) for layout in longest)]))
        heads = [(layout, forms[layout]) for layout in longest if len(layout) > _LONG]

        def scrub(text: str) -> str:
            text = pattern.sub(lambda match: forms.get(match[0], match[0]), text)
            return _cut_end(text, heads)

        return scrub


class _Unreadable:
    """Stands for what is not JSON."""


def _parts(letter: Fields) -> list[str]:
    """The fields that hold JSON, or should."""
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
    """A JSON value with every text in it scrubbed, names and numbers too."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, list):
        return [_walk(item, scrub) for item in value]
    if isinstance(value, dict):
        return {scrub(name): _walk(item, scrub) for name, item in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value is not None:
        text = json.dumps(value)
        scrubbed = scrub(text) if len(text) >= _LONG else text
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
    """How a value may be spelled in a text: as it is, as JSON, as Python."""
    spelled = {json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1], repr(leaf)[1:-1]}
    return {leaf, *spelled} - {""}


def _pattern(layout: str) -> str:
    literal = re.escape(layout)
    return literal if len(layout) >= _LONG else rf"(?<![^\W_]){literal}(?![^\W_])"


def _cut_end(text: str, heads: Sequence[tuple[str, str]]) -> str:
    """Texts are capped: the beginning of a value may stand at the end of one."""
    ending = text.rstrip("….'\")")
    if _TOKEN.fullmatch(ending[-len(_PREFIX) - _DIGITS :]):
        return text
    for layout, token in heads:
        for length in range(min(len(layout) - 1, len(ending)), _LONG - 1, -1):
            if ending.endswith(layout[:length]):
                return ending[:-length] + token
    return text


def _bare(letter: Fields) -> dict[bytes, bytes]:
    kept = {name: letter[name.encode()] for name in _KEPT if name.encode() in letter}
    plain = {name: value for name, value in letter.items() if _is_plain(name)}
    return {**plain, **{name.encode(): value for name, value in kept.items()}}
