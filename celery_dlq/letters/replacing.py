"""Finds the values that a redaction names in the parts of a letter, and then in its other texts.

A value is looked up by its path in the arguments, in the body with its chain, callbacks and chord,
and in the headers. The values found are then replaced in every other text, in every spelling.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from celery_dlq.letters.headers import EDITED_HEADER

if TYPE_CHECKING:
    from celery_dlq.letters.redaction import Redaction

ROOTS = ("args", "kwargs", "headers")
REPRS = ("argsrepr", "kwargsrepr")
ANY, ANY_DEPTH = "*", "**"
Path = tuple[str, ...]
"""A root and the names below it."""

MARKER = "[redacted]"
"""What stands in place of a masked value."""

TOKEN_PREFIX = "redacted:"  # noqa: S105 - what it says is that there is none
TOKEN_DIGITS = 32
MAX_VALUES = 500
"""With more hidden values in one letter, all its texts are shown as the marker."""
MAX_PATTERN_CHARS = 70_000
"""Patterns are not tried on longer texts, which are replaced as a whole; a traceback is shorter."""

_DONE = rf"{TOKEN_PREFIX}[0-9a-f]{{{TOKEN_DIGITS}}}|{re.escape(MARKER)}"
_IS_DONE = re.compile(_DONE)
_ENDS_DONE = re.compile(rf"(?:{_DONE})$")
_MIN_SUBSTRING_CHARS = 4  # shorter values are replaced in texts only as whole words
_TAGGED = {"__type__", "__value__"}  # how kombu and our headers spell bytes, times, decimals

Scrubber = Callable[[str], str]


class Unreadable:
    """Marks a part that is not JSON."""


def parsed(value: bytes | str | None) -> Any:
    """The value of JSON text, or `Unreadable`."""
    try:
        return json.loads(value.decode("utf-8") if isinstance(value, bytes) else value or "")
    except (ValueError, RecursionError):
        return Unreadable


def encoded(value: Any) -> str:
    """JSON text that UTF-8 can encode, whatever surrogates the value has."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "backslashreplace").decode()


class Replacement:
    """Replaces values in the parts of one letter, and remembers them for its other texts."""

    def __init__(self, redaction: Redaction) -> None:
        self._rules = redaction
        self._token = redaction.token_of
        self._tokens: dict[str, str] = {}

    def replace_part(self, name: str, value: Any) -> Any:
        """Replace the values that the paths name in one parsed field."""
        if value is Unreadable:
            return value
        if name == "args_json":
            return self.replace_root("args", value)
        if name == "kwargs_json":
            return self.replace_root("kwargs", value)
        if name == "body":
            return self._message(value)
        if name == "headers":
            return self._headers(value)
        if name == "history":
            self._history(value)
        return self._redact_nested(value)

    def remember_text(self, text: str | None) -> None:
        """Remember a text that is replaced as a whole: other texts may repeat it."""
        for one in {text, text.rstrip(".")} if text else ():
            if one:
                self._tokens.setdefault(one, self._token(one))

    def replace_root(self, root: str, value: Any) -> Any:
        """Replace the values that the paths name below ``args``, ``kwargs`` or ``headers``."""
        return self._replace_below(root, self._redact_nested(value))

    def _replace_below(self, root: str, value: Any) -> Any:
        for path in self._rules.paths:
            if path[0] == root:
                value = self._replace_at(value, path[1:], header=root == "headers")
        return value

    def _headers(self, value: Any) -> Any:
        value = self.replace_root("headers", value)
        if not isinstance(value, dict):
            return value
        if self._rules.hides_arguments:
            value = {name: item for name, item in value.items() if name not in REPRS}
        if isinstance(value.get(EDITED_HEADER), str):
            value[EDITED_HEADER] = self._replace_edits(value[EDITED_HEADER])
        return value

    def _replace_edits(self, text: str) -> str:
        """The trail of edits: its old and new values are JSON text, maybe cut."""
        trail = parsed(text)
        if not isinstance(trail, list) or not all(isinstance(one, dict) for one in trail):
            return text if _IS_DONE.fullmatch(text) else self._token(text)
        for one in trail:
            for side in ("from", "to"):
                found = parsed(one.get(side)) if isinstance(one.get(side), str) else None
                if isinstance(found, list) and len(found) in {2, 3}:
                    shown = list(map(self.replace_root, ("args", "kwargs", "headers"), found))
                    one[side] = json.dumps(shown, ensure_ascii=False)
                elif one.get(side) is not None and self._rules.hides_arguments:
                    one[side] = self._token(one[side])
        return json.dumps(trail)

    def _message(self, value: Any) -> Any:
        """Redact a body of Celery's protocol 2 (a list of three) or 1 (an object)."""
        if isinstance(value, list) and len(value) == 3:  # noqa: PLR2004 - args, kwargs, embed
            args, kwargs, embed = value
            return [
                self.replace_root("args", args),
                self.replace_root("kwargs", kwargs),
                self._redact_nested(embed),
            ]
        return self._redact_nested(value)

    def _history(self, value: Any) -> None:
        if "exception_message" in self._rules.whole and isinstance(value, list):
            for one in value:
                message = one.get("exception_message") if isinstance(one, dict) else None
                self.remember_text(message if isinstance(message, str) else None)

    def _redact_nested(self, value: Any) -> Any:
        """Redact the arguments and headers of signatures (callbacks, chains, chords)."""
        if isinstance(value, list):
            return [self._redact_nested(item) for item in value]
        if not isinstance(value, dict):
            return value
        value = {name: self._redact_nested(item) for name, item in value.items()}
        for root in ROOTS:
            if root in value:
                value[root] = self._replace_below(root, value[root])
        if "application_headers" in value:
            value["application_headers"] = self._headers(value["application_headers"])
        return value

    def _replace_at(self, value: Any, path: Path, *, header: bool) -> Any:
        if not path:
            return self._replaced(value)
        name, rest = path[0], path[1:]
        if name == ANY_DEPTH:
            value = _children(value, lambda item: self._replace_at(item, path, header=header))
            # The items of a list were looked at just now: once more would be once for each depth.
            looked = isinstance(value, list) and rest[0] != ANY and not rest[0].isdecimal()
            return value if looked else self._replace_at(value, rest, header=header)
        if isinstance(value, dict):
            return {
                key: self._replace_at(item, rest, header=header)
                if name in (ANY, key) or (header and name.casefold() == key.casefold())
                else item
                for key, item in value.items()
            }
        if isinstance(value, list):
            if name == ANY or name.isdecimal():
                return [
                    self._replace_at(item, rest, header=header)
                    if name in (str(number), ANY)
                    else item
                    for number, item in enumerate(value)
                ]
            return [
                self._replace_at(item, path, header=header) for item in value
            ]  # each has the name
        return value

    def _replaced(self, value: Any) -> Any:
        if value is None or (isinstance(value, str) and _IS_DONE.fullmatch(value)):
            return value
        token = self._token(value)
        several = isinstance(value, (dict, list))
        for leaf in _leaf_texts(value):
            self._tokens.setdefault(leaf, self._token(leaf) if several else token)
        if several and value:  # spelled as a whole: the names in it are hidden, too
            self._tokens |= {repr(value): token, json.dumps(value): token}
        return token

    def scrubber(self) -> Scrubber:
        """Make a function that replaces the remembered values, and what patterns match."""
        if not self._rules.key and len(self._tokens) > MAX_VALUES:
            return self._token
        forms = {form: token for leaf, token in self._tokens.items() for form in _spellings(leaf)}
        longest = sorted(forms, key=len, reverse=True)
        # Tokens come first, so that no value matches inside of one.
        known = re.compile("|".join([_DONE, *map(_literal, longest)])) if forms else _IS_DONE
        heads = [(form, forms[form]) for form in longest if len(form) > _MIN_SUBSTRING_CHARS]
        patterns = self._rules.patterns
        if not forms and not patterns:
            return lambda text: text

        def replaced(match: re.Match[str]) -> str:
            return forms.get(match[0], match[0])

        def scrub(text: str) -> str:
            if not patterns:
                return _cut_end(known.sub(replaced, text), heads)
            if len(text) > MAX_PATTERN_CHARS:
                return self._token(text)
            spans = [(*found.span(), replaced(found)) for found in known.finditer(text)]
            for pattern in patterns:
                found_by = (found for found in pattern.finditer(text) if found[0])
                spans += [(*found.span(), self._token(found[0])) for found in found_by]
            return _cut_end(_without(text, spans), heads)

        return scrub


def scrub_texts(value: Any, scrub: Scrubber) -> Any:
    """Scrub every text in a JSON value, names and numbers included."""
    if isinstance(value, str):
        return scrub(value)
    if isinstance(value, list):
        return [scrub_texts(item, scrub) for item in value]
    if isinstance(value, dict):
        return {scrub(name): scrub_texts(item, scrub) for name, item in value.items()}
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        text = json.dumps(value)
        scrubbed = scrub(text) if len(text) >= _MIN_SUBSTRING_CHARS else text
        return value if scrubbed == text else scrubbed
    return value


def _children(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {name: change(item) for name, item in value.items()}
    return [change(item) for item in value] if isinstance(value, list) else value


def _without(text: str, spans: list[tuple[int, int, str]]) -> str:
    """The text with every span replaced; of spans that overlap, all by the first one's token."""
    pieces, end = [], 0
    for start, stop, token in sorted(spans, key=lambda span: (span[0], -span[1])):
        if start >= end:
            pieces += [text[end:start], token]
        end = max(end, stop)
    return "".join([*pieces, text[end:]])


def _leaf_texts(value: Any) -> list[str]:
    if isinstance(value, dict) and value.keys() == _TAGGED:
        return _tagged_texts(value)
    if isinstance(value, dict):
        return [leaf for item in value.values() for leaf in _leaf_texts(item)]
    if isinstance(value, list):
        return [leaf for item in value for leaf in _leaf_texts(item)]
    if value is None or isinstance(value, bool) or value == "":
        return []
    return [value if isinstance(value, str) else json.dumps(value)]


def _tagged_texts(value: dict[str, Any]) -> list[str]:
    """The texts of a value that JSON does not know; of bytes, also what they spell."""
    leaves = _leaf_texts(value["__value__"])
    if value["__type__"] in ("bytes", "base64") and len(leaves) == 1:
        try:
            leaves.append(base64.b64decode(leaves[0], validate=True).decode("utf-8"))
        except ValueError:
            return leaves
    return leaves


def _spellings(leaf: str) -> set[str]:
    """The spellings of a value in a text: as it is, as JSON, as Python."""
    spelled = {json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1], repr(leaf)[1:-1]}
    return {leaf, *spelled} - {""}


def _literal(form: str) -> str:
    literal = re.escape(form)
    return literal if len(form) >= _MIN_SUBSTRING_CHARS else rf"(?<![^\W_]){literal}(?![^\W_])"


def _cut_end(text: str, heads: Sequence[tuple[str, str]]) -> str:
    """Replace the beginning of a value at the end of a text that was truncated."""
    ending = text.rstrip("….'\")")
    if _ENDS_DONE.search(ending[-len(TOKEN_PREFIX) - TOKEN_DIGITS :]):
        return text
    for form, token in heads:
        at = ending.find(form[:_MIN_SUBSTRING_CHARS], max(0, len(ending) - len(form) + 1))
        while at >= 0:
            if form.startswith(ending[at:]):
                return ending[:at] + token
            at = ending.find(form[:_MIN_SUBSTRING_CHARS], at + 1)
    return text
