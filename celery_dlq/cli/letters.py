"""``dlq list``, ``show`` and ``tail``: letters on a terminal, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from celery_dlq.cli.context import (
    console_of,
    dead_letters_of,
    none_matched,
    print_lines,
    queue_of,
    reader_of,
    say_unread,
)
from celery_dlq.cli.options import (
    files_option,
    filter_options,
    json_option,
    letter_filter,
    queue_argument,
    queue_or_cause_argument,
)
from celery_dlq.cli.table import (
    Cell,
    age_text,
    block_text,
    counting,
    letters_text,
    line_text,
    print_facts,
    print_table,
    say,
    utc_text,
)
from celery_dlq.errors import CorruptLetter
from celery_dlq.letters import json_codec
from celery_dlq.letters.bodies import readable_json
from celery_dlq.letters.facts import count_of, facts_of
from celery_dlq.letters.links import WHEN, links_of
from celery_dlq.letters.printable import shortened
from celery_dlq.letters.record import LETHAL, DeadLetter, Delivery, Reason
from celery_dlq.letters.redaction import Redaction
from celery_dlq.letters.redriven import lives_of
from celery_dlq.operations.redrive.select import matcher

if TYPE_CHECKING:
    from celery_dlq import DeadLetters
    from celery_dlq.letters.filters import LetterFilter
    from celery_dlq.operations.redrive.select import Progress, RawEntry

_MAX_DESCRIPTION_CHARS = 300
MAX_BODY_CHARS = 4_000
_MAX_BODY_BYTES = 200
_MAX_FIELD_CHARS = 200
_MAX_VALUE_CHARS = 1000
_SHORT_ID = 8
_ROWS_AT_ONCE = 200
_LETHAL = frozenset(reason.value for reason in Reason if LETHAL in reason.about)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableEntry:
    """An entry of a queue that is not a letter."""

    position: str  # Its place, by which it can be shown and discarded
    error: str  # What is wrong with it
    fields: dict[str, str]  # Names and values, as far as they can be shown


ShownEntry = DeadLetter | UnreadableEntry


@click.command("list")
@queue_or_cause_argument
@filter_options
@click.option(
    "--limit", type=click.IntRange(min=1), default=50, show_default=True, help="Show this many."
)
@click.option("--page", type=click.IntRange(min=1), default=1, help="Show this page.")
@click.option("--oldest-first", is_flag=True, help="Show the oldest letters first.")
@click.option("--discarded", is_flag=True, help="Show what `restore` can bring back.")
@files_option
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    /,
    queue: str | None,
    *,
    limit: int,
    page: int,
    oldest_first: bool,
    discarded: bool,
    files: str,
    as_json: bool,
    **options: Any,
) -> None:
    """List the letters of QUEUE, newest first."""
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    if files and discarded:
        raise click.UsageError("--from does not go with --discarded")
    queue = queue_of(ctx, queue, {**options, "files": files})
    reader = reader_of(dead_letters, files)
    where, unread = letter_filter(options), list[int]()
    with counting(console, "scanned", quiet=as_json or not where) as scanned:
        if discarded:
            entries = _binned(dead_letters, queue, where, unread.append)
        else:
            entries = reader.entries(
                queue, where, newest_first=not oldest_first, scanned=scanned, unread=unread.append
            )
        page_of = islice(entries, (page - 1) * limit, page * limit)
        found = (_readable(entry, dead_letters.redaction) for entry in page_of)
        shown = print_lines(map(_entry_json, found)) if as_json else letters(console, queue, found)
    say_unread(sum(unread), "letter", "not listed")
    if where and not shown and page == 1:
        raise none_matched(reader, queue, where)
    if as_json:
        return
    if not shown and page > 1:
        say(console, f"Page {page} of {queue} is empty.")
    elif not shown:
        say(console, f"{queue} has no discarded letters." if discarded else f"{queue} is empty.")
    elif shown == limit:
        say(console, f"{letters_text(limit)} shown; --page {page + 1} shows the next.")


def _binned(
    dead_letters: DeadLetters, queue: str, where: LetterFilter, unread: Progress
) -> Iterator[RawEntry]:
    """The discarded letters that match a filter."""
    matching = matcher(where, unread)
    return filter(
        None, (matching(one.position, one.fields) for one in dead_letters.discarded(queue))
    )


@click.command()
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only in this dead-letter queue.")
@files_option
@json_option
@click.pass_context
def show(
    ctx: click.Context, letter_id: str, *, queue: str | None, files: str, as_json: bool
) -> None:
    """Show everything about one letter.

    That is its error, history, arguments and traceback. The first 6 characters of the ID
    are enough.
    """
    name, entry = reader_of(dead_letters_of(ctx), files).entry(letter_id, queue)
    show_entry(ctx, name, entry, as_json=as_json)


def show_entry(ctx: click.Context, queue: str, entry: RawEntry, *, as_json: bool) -> None:
    """Everything about an entry of a queue, as people may see it."""
    found, console = _readable(entry, dead_letters_of(ctx).redaction), console_of(ctx)
    if as_json:
        print_lines([_entry_json(found)])
    elif isinstance(found, UnreadableEntry):
        unreadable(console, queue, found)
    else:
        letter(console, found, body_bytes=len(entry.fields.get(b"body", b"")))


@click.command(short_help="Show the newest letters of QUEUE; --follow waits for more.")
@queue_argument
@filter_options
@click.option(
    "--lines", type=click.IntRange(min=0), default=10, show_default=True, help="Show this many."
)
@click.option("--follow", "-f", is_flag=True, help="Wait for new letters until Ctrl-C.")
@json_option
@click.pass_context
def tail(
    ctx: click.Context, /, queue: str, *, lines: int, follow: bool, as_json: bool, **options: Any
) -> None:
    """Show the newest letters of QUEUE, one a line; --follow waits for more."""
    dead_letters, where, console = dead_letters_of(ctx), letter_filter(options), console_of(ctx)
    coming = dead_letters.tail(queue, where) if follow else iter(())  # from this moment on
    found = dead_letters.letters(queue, where, newest_first=True, limit=lines)
    newest = [one.id for one in found]
    # Each is read again, because all of them together may be large.
    read = (dead_letters.store.get(queue, letter_id) for letter_id in reversed(newest))
    coming = (one for one in coming if one.id not in {*newest})
    redaction = dead_letters.redaction
    try:
        for one in chain(read, coming):
            if one is None:  # removed meanwhile
                continue
            if as_json:
                print_lines([redaction.letter(one).to_json()])
            else:
                letter_line(console, redaction.letter(one))
    except KeyboardInterrupt:
        return


def letters(console: Console, title: str, found: Iterable[ShownEntry]) -> int:
    """Letters, a row each, without holding their bodies; returns how many there were."""
    columns, shown = ("!id", "task, reason", "!when, deliveries", "description"), 0
    rows = map(_letter_row, found)
    while some := list(islice(rows, _ROWS_AT_ONCE)):  # else the first waits for the last
        shown += print_table(console, "" if shown else title, columns, some)
    return shown


def _letter_row(entry: ShownEntry) -> tuple[Cell, ...]:
    if isinstance(entry, UnreadableEntry):
        error = block_text(shortened(entry.error, _MAX_DESCRIPTION_CHARS))
        return entry.position, line_text("not a letter", "red"), "-", error
    return (
        entry.id[:_SHORT_ID],
        (line_text(entry.task_name, "bold"), reason_text(entry.reason.value)),
        (age_text(entry.dead_lettered_at), *_count_texts(entry)),
        block_text(shortened(_description(entry), _MAX_DESCRIPTION_CHARS)),
    )


def letter_line(console: Console, found: DeadLetter) -> None:
    """One letter in one line."""
    description = shortened(found.description.replace("\n", " "), _MAX_DESCRIPTION_CHARS)
    text = Text.assemble(
        line_text(f"{utc_text(found.dead_lettered_at)}  {found.id[:_SHORT_ID]}  ", "dim"),
        line_text(found.task_name, "bold"),
        "  ",
        reason_text(found.reason.value),
        "  ",
        line_text(description),
    )
    console.print(text, soft_wrap=True)


def letter(console: Console, found: DeadLetter, body_bytes: int | None = None) -> None:
    """Everything about one letter; ``body_bytes`` is the size of a body that is masked here."""
    size = len(found.body) if body_bytes is None else body_bytes
    console.print(line_text(found.task_name, "bold"), reason_text(found.reason.value))
    print_facts(console, _fact_rows(found))
    _history(console, found.history)
    _print_history(console, found)
    console.print(line_text(f"body ({size:,} bytes, {found.content_type})", "dim"))
    console.print(Padding(block_text(shortened(body_text(found), MAX_BODY_CHARS)), (0, 0, 0, 2)))
    if found.traceback:
        console.print(line_text("traceback", "dim"))
        # Lines stay whole: people copy them.
        console.print(block_text(found.traceback.rstrip()), soft_wrap=True)


def _print_history(console: Console, found: DeadLetter) -> None:
    """What a redriven message died of before."""
    try:
        headers = json_codec.loads(found.headers)
    except (ValueError, RecursionError):
        return
    for life in lives_of(headers) if isinstance(headers, dict) else []:
        same = life.get("fingerprint") == found.fingerprint
        cause = "the same cause" if same else f"cause {life.get('fingerprint', '-')}"
        what = class_name(life.get("exception")) or life.get("reason", "")
        say(console, f"died before: {life.get('at', '')[:19]}Z {what}, {cause}")


def unreadable(console: Console, queue: str, entry: UnreadableEntry) -> None:
    """Everything about an entry that is not a letter."""
    say(console, f"Entry {entry.position} of {queue} is not a letter: {entry.error}", "red")
    for name, value in entry.fields.items():
        say(console, f"  {name}  {shortened(value, _MAX_FIELD_CHARS)}")
    say(console, f"`dlq discard {queue} {entry.position}` removes it.")


def reason_text(name: str) -> Text:
    """A reason; those that cost a worker process or its time stand out."""
    return line_text(name, "red" if name in _LETHAL else "yellow")


def class_name(exception_type: str | None) -> str:
    """The last part of a dotted name."""
    return (exception_type or "").rpartition(".")[2]


def _count_texts(found: DeadLetter) -> Iterator[str]:
    count = count_of(found.deliveries, found.max_deliveries)
    yield f"{count} deliver{'y' if count == '1' else 'ies'}"
    if found.retries:
        yield f"retry {count_of(found.retries, found.max_retries)}"


def _description(found: DeadLetter) -> str:
    if found.exception_type and found.reason.value != "rejected":
        return f"{class_name(found.exception_type)}: {found.description}"
    return found.description


def _fact_rows(found: DeadLetter) -> Iterator[tuple[str, str | Text]]:
    for name, value in facts_of(found):
        if isinstance(value, datetime):
            yield (
                name,
                f"{utc_text(value)} ({age_text(value)})" if name == "died" else utc_text(value),
            )
        else:
            yield name, block_text(value) if name == "description" else value
    for kind, task in links_of(found.content_type, found.body):
        yield kind, f"{task} {WHEN[kind]}"


def _history(console: Console, history: Sequence[Delivery]) -> None:
    rows = []
    for one in history:
        took = f"{(one.ended_at - one.started_at).total_seconds():.2f} s" if one.ended_at else "-"
        text = ": ".join(filter(None, (class_name(one.exception_type), one.exception_message)))
        rows.append(
            (
                f"{one.number} of retry {one.retries}" if one.retries else f"{one.number}",
                f"{one.started_at:%m-%d %H:%M:%S}",
                took,
                (one.outcome.value if one.outcome else "running", f"{one.worker_pid or '-'}"),
                block_text(shortened(text, _MAX_DESCRIPTION_CHARS)),
            )
        )
    columns = ("!delivery", "!started (UTC)", "!took", "!outcome, pid", "exception")
    print_table(console, "history", columns, rows)


def body_text(found: DeadLetter) -> str:
    """The arguments of a message; of one that is not JSON also the begin of its bytes."""
    if found.args_json is not None and found.kwargs_json is not None:
        args, kwargs = map(readable_json, (found.args_json, found.kwargs_json))
        return f"args   {args}\nkwargs {kwargs}"
    # The body is not JSON and is never decoded here; Celery's own description is safe.
    shown = json_codec.safe_repr(found.body[:_MAX_BODY_BYTES])
    return f"args   {found.argsrepr or '?'}\nkwargs {found.kwargsrepr or '?'}\nbytes  {shown}"


def _readable(found: RawEntry, redaction: Redaction) -> ShownEntry:
    try:
        return redaction.letter(found.letter())
    except CorruptLetter as exc:
        values = {
            name.decode("utf-8", "backslashreplace"): json_codec.safe_repr(value, _MAX_VALUE_CHARS)
            for name, value in found.fields.items()
        }
        error = "an entry that cannot be read" if redaction else str(exc)
        return UnreadableEntry(
            position=found.position, error=error, fields=redaction.fields(values)
        )


def _entry_json(entry: ShownEntry) -> dict[str, Any]:
    if isinstance(entry, DeadLetter):
        return entry.to_json()
    return {"corrupt": True, "id": None, **asdict(entry)}
