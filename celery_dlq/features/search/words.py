"""What somebody asks for: filter words as the command line spells them, and free text.

``task=shop.charge arg:tenant=42 since=2h timeout`` is
``--task shop.charge --where kwargs.tenant=42 --since 2h`` and the text *timeout*.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any

import click

from celery_dlq.cli.options import filter_options, letter_filter
from celery_dlq.errors import DLQError
from celery_dlq.letters.filters import LetterFilter

MAX_CHARS = 1000

_ARGUMENT = re.compile(r"arg:(?=[^\s=!<>~])")
_CONDITION = re.compile(r"(args|kwargs|headers)[.\[].*[=!<>~]", re.DOTALL)
_NAMED = re.compile(r"([a-z][a-z_-]*)=", re.ASCII)


@click.command(add_help_option=False)
@filter_options
@click.option("--queue", help="Only this dead-letter queue.")
@click.argument("text", nargs=-1)
def _asked(**_: Any) -> None:
    """Read words; never run."""


_OPTIONS = {
    name: option
    for option in _asked.params
    if isinstance(option, click.Option)
    for name in (option.opts[0].removeprefix("--"), option.name or "")
}
WORDS = tuple(dict.fromkeys(option.opts[0].removeprefix("--") for option in _OPTIONS.values()))
"""The names before an equals sign."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What is looked for."""

    where: LetterFilter  # Without the text
    text: str = ""
    queue: str = ""  # The only queue to search; empty for all

    @property
    def letters(self) -> LetterFilter:
        """The filter of letters, in which the text is one that they contain."""
        fields = self.where.to_query()
        return LetterFilter.from_query({**({"grep": [self.text]} if self.text else {}), **fields})


def parsed(typed: str) -> Asked:
    """Read what somebody typed.

    Raises:
        DLQError: A word cannot be understood; the text says which.
    """
    if len(typed) > MAX_CHARS:
        raise DLQError(f"expected at most {MAX_CHARS:,} characters, got {len(typed):,}")
    try:
        words = shlex.split(typed)
    except ValueError:  # an apostrophe
        words = typed.split()
    try:
        context = _asked.make_context("find", [part for word in words for part in _parts(word)])
    except click.UsageError as exc:
        raise DLQError(exc.format_message()) from exc
    given, text = context.params, " ".join(context.params["text"])
    return Asked(where=letter_filter(given), text=text, queue=given["queue"] or "")


def _parts(word: str) -> list[str]:
    """A word as the command line has it."""
    word = _ARGUMENT.sub("kwargs.", word, count=1) if word.startswith("arg:") else word
    if _CONDITION.match(word):
        return ["--where", word]
    named = _NAMED.match(word)
    option = _OPTIONS.get(named[1]) if named else None
    return [word] if option is None else [option.opts[0], word.partition("=")[2]]
