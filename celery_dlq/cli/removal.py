"""``dlq discard``, ``purge``, ``restore``, ``trim``: letters leave their queue, or return."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import islice
from typing import Any

import click
from rich.console import Console

from celery_dlq.cli.context import ask_for, console_of, dead_letters_of, print_lines
from celery_dlq.cli.jobs import JobRequest, skipped_texts, unfinished
from celery_dlq.cli.options import (
    StartAt,
    changes_letters,
    filter_options,
    json_option,
    letter_filter,
    yes_option,
)
from celery_dlq.cli.table import FORGET, counting, letters_text, say, utc_text
from celery_dlq.errors import DLQError, StoreUnavailable
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.json_codec import instant
from celery_dlq.letters.printable import one_line, some_of
from celery_dlq.operations.removal import DiscardOptions, DiscardReport, Removal
from celery_dlq.store.letters import Letters


@click.command()
@changes_letters("Remove")
@click.option("--forever", is_flag=True, help="Remove for good: `restore` will not find them.")
def discard(ctx: click.Context, /, **given: Any) -> None:
    """Remove letters; `restore` brings them back for 24 hours.

    Choose letters by ID, by filter, or with --all. Asks first, unless you name one letter
    by its ID. Without a terminal to ask, it needs --yes.

    `list` shows a position for an entry that is not a letter; use it as the ID.
    """
    _run_removal(ctx, "discard", "Discarded", ["forever"], **given)


@click.command()
@changes_letters("Remove")
def purge(ctx: click.Context, /, **given: Any) -> None:
    """Remove letters for good.

    Nothing brings them back. After `discard`, `restore` does.

    Choose letters by ID, by filter, or with --all. Asks first, unless you name one letter
    by its ID. Without a terminal to ask, it needs --yes.
    """
    _run_removal(ctx, "purge", "Purged", [], **given)


@click.command(short_help="Take back a discard: letters return to their queue.")
@click.argument("letter_ids", metavar="[ID]...", nargs=-1)
@filter_options
@click.option("--job", help="Take back what this job discarded, and nothing else.")
@click.option("--queue", help="Only letters that were discarded from this queue.")
@click.option(
    "--all", "everything", is_flag=True, help="Restore all letters discarded from --queue."
)
@click.option("--limit", type=click.IntRange(min=1), help="Restore at most this many letters.")
@yes_option
@click.pass_context
def restore(
    ctx: click.Context,
    /,
    letter_ids: tuple[str, ...],
    *,
    job: str | None,
    queue: str | None,
    everything: bool,
    limit: int | None,
    yes: bool,
    **fields: Any,
) -> None:
    """Put discarded letters back into the dead-letter queue they came from.

    They become its newest letters. No task runs: for that, `redrive` them.

    Choose letters by ID, by the --job that discarded them, or with --queue by filter or
    with --all. Asks first, unless you name one letter by its ID. Without a terminal to
    ask, it needs --yes.
    """
    where = letter_filter(fields)
    if letter_ids:
        if where or everything or limit or job:
            raise click.UsageError(
                "choose letters by ID, by --job, or by a filter or --all; got both"
            )
        ask_for("restore", queue or "all queues", len(letter_ids), by_id=True, yes=yes)
        _restore_each(ctx, letter_ids, queue)
    elif job is not None:
        of = Removal(dead_letters_of(ctx).assembly).discard_of(job)
        if queue not in (None, of.queue):
            raise click.UsageError(f"job {job} discarded letters of {of.queue}, not of {queue}")
        _restore_matching(ctx, of.queue, where, limit, job=job, yes=yes)
    elif queue is None or not (where or everything):
        raise click.UsageError(
            "choose letters by ID, by --job, or with --queue by a filter such as --fingerprint or "
            "with --all"
        )
    else:
        _restore_matching(ctx, queue, where, limit, job=None, yes=yes)


def _restore_each(ctx: click.Context, letter_ids: tuple[str, ...], queue: str | None) -> None:
    """Restore letters by ID; one that cannot be restored does not stop the others."""
    errors: list[DLQError] = []
    for letter_id in letter_ids:
        try:
            name = dead_letters_of(ctx).restore(letter_id, queue)
        except StoreUnavailable:
            raise
        except DLQError as exc:
            errors.append(exc)
        else:
            say(console_of(ctx), f"Restored {letter_id} to {name}.")
    for error in errors[:-1]:
        click.echo(f"Error: {one_line(str(error))}", err=True)
    if errors:
        raise errors[-1]


def _restore_matching(
    ctx: click.Context,
    queue: str,
    where: LetterFilter,
    limit: int | None,
    *,
    job: str | None,
    yes: bool,
) -> None:
    dead_letters, console = dead_letters_of(ctx), console_of(ctx)
    binned = dead_letters.discarded(queue, job=job)
    matching = (one for one in binned if not where or where.matches_fields(one.fields))
    count = sum(1 for _ in islice(matching, limit))
    if not count:
        of = f"; job {job} discarded none that is left" if job else ""
        raise click.ClickException(f"no discarded letter of {queue!r} matches{of}")
    ask_for("restore", queue, count, by_id=False, yes=yes)
    with counting(console, "restored", total=count) as progress:
        restored, taken = dead_letters.restore_all(
            queue, where, limit=limit, job=job, progress=progress
        )
    say(console, f"Restored {letters_text(restored)} to {queue}.")
    if taken:
        more = "stay discarded: their messages failed again, and the queue has the new letters"
        say(console, f"  {taken:,} {more}.", "yellow")
        ctx.exit(1)


@click.command(short_help="Remove letters that are over the limits of their policy.")
@click.argument("queues", metavar="[QUEUE]...", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Show what would be removed; change nothing.")
@json_option
@click.pass_context
def trim(ctx: click.Context, queues: tuple[str, ...], *, dry_run: bool, as_json: bool) -> None:
    """Remove letters past dead_letter_ttl or over dead_letter_max_length now.

    Workers do this by themselves, some hundred letters a second; this command is for
    queues without a worker. It does not ask: `restore` brings the letters back for 24
    hours. Letters that a redrive is working on stay.
    """
    changes = dead_letters_of(ctx).trim(*queues, dry_run=dry_run)
    if as_json:
        print_lines(change.to_json() for change in changes)
        return
    console, verb = console_of(ctx), "Would trim" if dry_run else "Trimmed"
    for change in changes:
        what = f"{letters_text(change.letters)} from {change.target}"
        say(console, f"{verb} {what} because of {change.detail['cause']}.")
    store = dead_letters_of(ctx).store
    for name in queues or store.names():
        if folders := _kept_for(store, name):
            lack = "lacks" if len(folders) == 1 else "lack"
            say(console, f"Not trimmed: letters of {name} that {some_of(folders)} {lack}.")
            say(console, FORGET)
    if not changes:
        say(console, "Nothing to trim.")
    elif "kept_until" in changes[0].detail:
        say(console, "For 24 hours `dlq restore ID` brings them back.")


def _kept_for(store: Letters, queue: str) -> list[str]:
    """The folders of exports that lack letters of a queue."""
    names: list[str] = []
    for folder in store.lacking(queue):  # the one that lacks most is first
        if not store.oldest_letters(queue, after=folder.position, most=1):
            break
        names.append(folder.name)
    return names


def _run_removal(
    ctx: click.Context,
    kind: str,
    done: str,
    names: Iterable[str],
    *,
    background: bool,
    start_at: StartAt | None,
    **given: Any,
) -> None:
    background = background or start_at is not None
    DiscardOptions(limit=given["limit"])  # checked before anything is asked
    request = JobRequest.from_command(ctx, kind, given, ("limit", "note", *names))
    dead_letters, queue, where = request.dead_letters, request.queue, request.where
    if background:
        request.hand_over(start_at)
        return
    if request.yes and where:
        request.refuse_none(any(True for _ in dead_letters.entries(queue, where, limit=1)))
    operation: Callable[..., DiscardReport] = getattr(dead_letters, kind)
    at_once = partial(operation, queue, where, **request.how)
    report = request.run_or_plan(done.lower(), at_once, dead_letters.assembly.jobs().run)
    request.refuse_none(report.touched or report.state != "done")
    request.print_report(report, partial(_print_report, done))
    if report.state != "done" or not report.removed:
        ctx.exit(1)


def _print_report(verb: str, console: Console, queue: str, report: DiscardReport) -> None:
    """What a discard or a purge did."""
    say(console, f"{verb} from {queue}: {letters_text(report.removed)} (job {report.job_id}).")
    if report.kept_until:
        until = utc_text(instant(report.kept_until))
        say(console, f"  Until {until} `dlq restore --job {report.job_id}` brings them back.")
    for text in skipped_texts(report):
        say(console, f"  {text}")
    if report.state != "done":
        say(console, f"  {unfinished('job', report, report.job_id)}", "red")
