r"""What is redacted: paths of values, whole texts, and patterns; the grammar of all redaction.

- ``kwargs.card.number``, ``args[0].token`` (or ``args.0.token``), ``headers.authorization``: a
  value and all below it. ``*`` is any name or index, ``**`` any number of names. The items of a
  list have the names that follow: ``kwargs.cards.number``. A path may begin with ``**``, which
  looks in arguments and headers. Letter case counts, except in names of headers.
- ``description``, ``exception_message``, ``traceback``, ``argsrepr``, ``kwargsrepr``: a text of
  the letter as a whole.
- ``re:\b\d{16}\b``: whatever matches the regular expression, in any text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from celery_dlq.errors import SettingsError
from celery_dlq.letters.printable import shortened
from celery_dlq.policies.checks import expected

ROOTS = ("args", "kwargs", "headers")
WHOLE = ("description", "exception_message", "traceback", "argsrepr", "kwargsrepr")
PATTERN_PREFIX = "re:"
MAX_RULES = 100
MAX_RULE_CHARS = 500
ANY, ANY_DEPTH = "*", "**"

_INDEX = re.compile(r"\[(\d+|\*)\]")

Path = tuple[str, ...]


class RuleError(ValueError):
    """A rule is malformed; the text says what was expected, and what it is."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What is redacted."""

    paths: tuple[Path, ...] = ()  # Paths of values, e.g. `("kwargs", "card")`
    whole: tuple[str, ...] = ()  # Texts of the letter that are replaced as a whole
    patterns: tuple[re.Pattern[str], ...] = ()  # Regular expressions

    @classmethod
    def parse(cls, texts: Sequence[str], where: str = "") -> Rules:
        """Check and parse rules."""
        if len(texts) > MAX_RULES:
            raise RuleError(
                f"expected {where or 'a redaction'} to have {MAX_RULES} entries or fewer, "
                f"got {len(texts)}"
            )
        paths: set[Path] = set()
        whole, patterns = set(), {}
        for number, text in enumerate(texts):
            place = f"{where}[{number}] to be " if where else ""
            if len(text) > MAX_RULE_CHARS:
                raise RuleError(
                    f"expected {place}text of {MAX_RULE_CHARS} characters or fewer, got {len(text)}"
                )
            if text.startswith(PATTERN_PREFIX):
                patterns[text] = _pattern(text, place)
            elif text.strip() in WHOLE:
                whole.add(text.strip())
            else:
                paths.update(_paths(text.strip(), place))
        return cls(tuple(sorted(paths)), tuple(sorted(whole)), tuple(patterns.values()))

    def __bool__(self) -> bool:
        return bool(self.paths or self.whole or self.patterns)

    def names(self) -> list[str]:
        """The rules as text, sorted."""
        paths = [".".join(path) for path in self.paths]
        patterns = [f"{PATTERN_PREFIX}{pattern.pattern}" for pattern in self.patterns]
        return sorted([*paths, *self.whole, *patterns])

    def hide_arguments(self) -> bool:
        """True if Celery's descriptions of the arguments must not be shown."""
        return any(path[0] != "headers" for path in self.paths)

    def hide(self, path: str) -> bool:
        """True if the value at a path is below one of the paths."""
        names = _names(path)
        return any(path[0] == names[0] and _covers(path, names) for path in self.paths)


def same_name(rule: str, name: str, *, header: bool) -> bool:
    """True if a part of a path names a key."""
    return rule in (ANY, name) or (header and rule.casefold() == name.casefold())


def _names(text: str) -> Path:
    return tuple(_INDEX.sub(r".\1", text).split("."))


def _paths(text: str, place: str) -> list[Path]:
    path = _names(text)
    found = [(root, *path) for root in ROOTS] if path[0] == ANY_DEPTH else [path]
    usable = (
        all(len(one) > 1 and one[0] in ROOTS for one in found)
        and not any(name == "" or "[" in name or "]" in name for name in path)
        and path.count(ANY_DEPTH) <= 1
        and path[-1] != ANY_DEPTH
    )
    if not usable:
        raise RuleError(
            f"expected {place}a path to redact such as kwargs.card, args[0].token, "
            f"headers.authorization, **.password, a pattern such as re:\\b\\d{{16}}\\b, or one of "
            f"{', '.join(WHOLE)}, got {shortened(text, 100)!r}"
        )
    return found


def _pattern(text: str, place: str) -> re.Pattern[str]:
    try:
        pattern = re.compile(text[len(PATTERN_PREFIX) :])
    except (re.error, OverflowError, RecursionError) as exc:
        raise RuleError(
            f"expected {place}re: and a regular expression of Python, "
            f"got {shortened(text, 100)!r}: {exc}"
        ) from exc
    if pattern.fullmatch(""):
        raise RuleError(
            f"expected {place}a pattern that does not match an empty text, "
            f"got {shortened(text, 100)!r}"
        )
    return pattern


def _covers(rule: Path, names: Path) -> bool:
    """True if the rule names the value at the path, or a value above it."""
    header = rule[0] == "headers"

    def covers(rule: Path, names: Path) -> bool:
        if not rule:
            return True
        if not names:
            return False
        if rule[0] == ANY_DEPTH:
            return covers(rule[1:], names) or covers(rule, names[1:])
        if same_name(rule[0], names[0], header=header) and covers(rule[1:], names[1:]):
            return True
        # The items of a list have the names that follow.
        return names[0].isdecimal() and covers(rule, names[1:])

    return covers(rule[1:], names[1:])


def redact(where: str, value: object) -> tuple[str, ...]:
    """Check the setting ``dlq_redact``: a list of rules."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) for one in value):
        raise expected(where, "a list of texts such as 'kwargs.card.number'", value)
    try:
        Rules.parse(value, where)
    except RuleError as exc:
        raise SettingsError(str(exc)) from exc
    return tuple(value)
