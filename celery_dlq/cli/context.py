"""What every command needs: the app's `DeadLetters`, the console, the filter, lines of JSON."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import click
from rich.console import Console

from celery_dlq import DeadLetters
from celery_dlq.cli.options import letter_filter
from celery_dlq.cli.table import letters_text, say
from celery_dlq.letters.bodies import unread_text
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import json_text, one_line
from celery_dlq.operations.files import ExportedFiles
from celery_dlq.policies.queue_names import did_you_mean


def dead_letters_of(ctx: click.Context) -> DeadLetters:
    """The `DeadLetters` of the app that ``celery -A`` names."""
    return DeadLetters.of(ctx.obj.app)


def reader_of(dead_letters: DeadLetters, files: str) -> DeadLetters | ExportedFiles:
    """What reads letters: in Redis, or with ``--from`` in the files of an export."""
    if not files:
        return dead_letters
    # Arrow's own allocator keeps what it frees: 40 MB in a process that reads files once.
    os.environ.setdefault("ARROW_DEFAULT_MEMORY_POOL", "system")
    return dead_letters.files(files)


def load_tasks(app: Any) -> None:
    """Import the task modules as a worker does: until then, autodiscovered tasks are unknown."""
    try:
        app.loader.import_default_modules()
    except Exception as exc:
        raise click.ClickException(
            f"the app's task modules cannot be imported: {type(exc).__name__}: {exc}"
        ) from exc


def console_of(ctx: click.Context) -> Console:
    """Where people read, without colours if ``celery --no-color`` says so."""
    return Console(no_color=getattr(ctx.obj, "no_color", False) or None, highlight=False)


_MOST_GROUPS = 1000  # the largest causes of a queue, to suggest a task
_OBJECTS_BEFORE_COLLECTION = 20_000  # more than a batch of letters makes


def ready_for_many() -> None:
    """Let the garbage collector skip what is imported, and run seldom: 20 % faster redrives."""
    gc.freeze()
    gc.set_threshold(_OBJECTS_BEFORE_COLLECTION)


def chosen_filter(
    dead_letters: DeadLetters | ExportedFiles,
    queue: str,
    fields: Mapping[str, Any],
    letter_ids: Iterable[str],
    *,
    everything: bool,
) -> LetterFilter:
    """The filter of a command that changes letters: IDs, filter options, or ``--all``."""
    where = letter_filter(fields, letter_ids)
    if not where and not everything:
        raise click.UsageError(
            "choose letters by ID, by a filter such as --fingerprint, or with --all"
        )
    if where.ids is None:
        return where
    # An ID may be shortened, or the position of an entry that is not a letter.
    keys = (dead_letters.entry(letter_id, queue)[1].key for letter_id in where.ids)
    return letter_filter(fields, keys)


def queue_of(ctx: click.Context, queue: str | None, given: Mapping[str, Any]) -> str:
    """The queue that is named, or the one that has the cause."""
    if queue is not None:
        return queue
    fingerprint = given.get("fingerprint")
    if not fingerprint or given.get("files"):
        raise click.UsageError("expected QUEUE, or the --fingerprint of a cause; got neither")
    return dead_letters_of(ctx).assembly.reading().cause(fingerprint)[0]


def known_count(
    dead_letters: DeadLetters | ExportedFiles, queue: str, where: LetterFilter, limit: int | None
) -> int | None:
    """How many letters a command will touch, if that is known without reading them."""
    if where.ids is not None:
        return len(where.ids)
    if where:
        return limit
    source = dead_letters.source if isinstance(dead_letters, ExportedFiles) else dead_letters.store
    found = source.length(queue)
    return found if limit is None else min(found, limit)


def ask_before(what: str, *, yes: bool) -> None:
    """Ask before something is done; without a terminal, only ``--yes`` says so."""
    if yes:
        return
    what = one_line(what)
    need_terminal(what)
    click.confirm(f"{what[:1].upper()}{what[1:]}?", abort=True, err=True)


def need_terminal(what: str) -> None:
    """Refuse what must be asked if there is nobody to ask."""
    if not sys.stdin.isatty():
        raise click.UsageError(f"--yes is needed to {one_line(what)} without a terminal")


def confirm_doubt(doubt: str, what: str, *, yes: bool) -> None:
    """Ask before something is done that may have no effect."""
    if doubt:
        click.echo(one_line(doubt), err=True)
        ask_before(f"{what} all the same", yes=yes)


def ask_for(verb: str, queue: str, count: int, *, by_id: bool, yes: bool, how: str = "") -> None:
    """Ask before letters are changed, unless one is named by its ID."""
    if count > (1 if by_id else 0):
        ask_before(f"{verb} {letters_text(count)} of {queue}{how}", yes=yes)


def none_matched(
    dead_letters: DeadLetters | ExportedFiles, queue: str, where: LetterFilter
) -> click.ClickException:
    """The error when a filter matches nothing, with the task of the queue that may be meant."""
    task, hint = where.task_name, ""
    if task is not None:
        known = {one.task_name for one in dead_letters.groups(queue, limit=_MOST_GROUPS)}
        hint = "" if task in known else did_you_mean(task, known)
    return click.ClickException(f"no letter of {queue!r} matches the filter{hint}")


def say_unread(count: int, what: str, consequence: str) -> None:
    """Say on stderr that the arguments of some messages could not be read, and what that means."""
    if count:
        click.echo(unread_text(count, what, consequence), err=True)


def print_answer(ctx: click.Context, made: Any, text: str, *, as_json: bool) -> None:
    """Say what was done, or print the record of it."""
    if as_json:
        print_lines([made.to_json()])
    else:
        say(console_of(ctx), text)


def print_lines(objects: Iterable[dict[str, Any]]) -> int:
    """Print one JSON object a line; returns how many."""
    lines = 0
    for lines, item in enumerate(objects, 1):  # noqa: B007 - the count is the result
        click.echo(json_text(item))
    return lines
