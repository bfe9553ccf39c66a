"""What every command needs: the app's `DeadLetters`, the screen, the filter, lines of JSON.

Every ``celery`` command imports this package, so it imports click and nothing else
at the top.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli.options import FILTER_NAMES
from celery_dlq.letters.printable import json_text

if TYPE_CHECKING:
    from celery_dlq.cli.render import Screen
    from celery_dlq.filters import LetterFilter
    from celery_dlq.plugin import DeadLetters


def dead_letters_of(ctx: click.Context) -> DeadLetters:
    """The operations of the app that ``celery -A`` names."""
    from celery_dlq.plugin import DeadLetters  # noqa: PLC0415 - see the module's docstring

    return DeadLetters.of(ctx.obj.app)


def ready_for_many() -> None:
    """Before work on many letters: what is imported lives as long as the command.

    The garbage collector would look at all of it again and again: a tenth of a redrive's time.
    """
    gc.freeze()


def screen_of(ctx: click.Context) -> Screen:
    """Where people read, with or without colours."""
    from celery_dlq.cli.render import Screen  # noqa: PLC0415 - see the module's docstring

    return Screen(no_color=bool(getattr(ctx.obj, "no_color", False)))


def letter_filter(fields: dict[str, Any], letter_ids: Iterable[str] = ()) -> LetterFilter:
    """The filter that the options of `filter_options` describe."""
    from celery_dlq.filters import LetterFilter  # noqa: PLC0415 - see the module's docstring

    return LetterFilter(ids=frozenset(letter_ids) or None, **given(fields))


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """The options of `filter_options` that were given."""
    return {name: fields[name] for name in FILTER_NAMES if fields.get(name) is not None}


def chosen(
    dead_letters: DeadLetters,
    queue: str,
    fields: dict[str, Any],
    letter_ids: Iterable[str],
    *,
    everything: bool,
) -> LetterFilter:
    """The filter of a command that changes letters: ids, filter options, or ``--all``.

    Raises:
        UsageError: None of them was given.
    """
    from celery_dlq.filters import LetterFilter  # noqa: PLC0415 - see the module's docstring

    where = letter_filter(fields, letter_ids)
    if not where and not everything:
        raise click.UsageError(
            "expected IDs, a filter such as --fingerprint, or --all; got none of them"
        )
    if where.ids is None:
        return where
    whole = frozenset(dead_letters.entry(letter_id, queue)[1].key for letter_id in letter_ids)
    return LetterFilter(**{**given(fields), "ids": whole})


def none_matched(queue: str) -> click.ClickException:
    """What to say when a filter matches nothing."""
    return click.ClickException(f"expected letters in {queue!r} that match, found none")


def print_lines(objects: Iterable[dict[str, Any]]) -> int:
    """Print one JSON object a line; returns how many."""
    lines = 0
    for lines, item in enumerate(objects, 1):  # noqa: B007 - the count is the result
        click.echo(json_text(item))
    return lines
