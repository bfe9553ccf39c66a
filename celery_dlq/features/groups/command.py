"""``dlq note``, ``assign``, ``resolve``, ``mute``, ``reopen``: what operators say of a cause."""

from __future__ import annotations

from datetime import timedelta

import click

from celery_dlq import DeadLetters
from celery_dlq.cli.context import console_of, dead_letters_of, print_answer, print_lines
from celery_dlq.cli.options import DURATION, QUEUE, json_option, options
from celery_dlq.cli.table import age_text, block_text, print_table, say, utc_text
from celery_dlq.features.groups.operations import own_name

_queue_option = click.option(
    "--queue", type=QUEUE, help="The dead-letter queue of the cause, if several have it."
)
_of_group = options(
    click.argument("fingerprint"),
    _queue_option,
    click.option("--note", default="", help="A note on the cause, e.g. its ticket."),
    json_option,
)


@click.command(short_help="Add a note to a cause, or show its notes.")
@click.argument("fingerprint")
@click.argument("text", required=False)
@_queue_option
@json_option
@click.pass_context
def note(
    ctx: click.Context, fingerprint: str, text: str | None, *, queue: str | None, as_json: bool
) -> None:
    """Add a note to a cause; without TEXT, show its notes.

    The first digits of FINGERPRINT are enough.
    """
    dead_letters, queue, fingerprint = _cause(ctx, queue, fingerprint)
    console = console_of(ctx)
    if text is not None:
        notes = [dead_letters.note(queue, fingerprint, text)]
    else:
        notes = dead_letters.notes(queue, fingerprint)
    notes = [dead_letters.redaction.shown(note, "text") for note in notes]
    if as_json:
        print_lines(note.to_json() for note in notes)
    elif text is not None:
        say(console, f"Noted on {fingerprint} of {queue}.")
    elif notes:
        title = f"Notes on {fingerprint}, newest first"
        rows = (((age_text(one.at), one.actor), block_text(one.text)) for one in notes)
        print_table(console, title, ("when, who", "note"), rows)
    else:
        say(console, f"There are no notes on {fingerprint} of {queue}.")


@click.command(short_help="Say who takes care of a cause, or show who does.")
@click.argument("fingerprint")
@click.argument("name", required=False)
@click.option("--me", is_flag=True, help="You take care of it.")
@click.option("--nobody", is_flag=True, help="Nobody does any more.")
@_queue_option
@json_option
@click.pass_context
def assign(
    ctx: click.Context,
    fingerprint: str,
    name: str | None,
    *,
    me: bool,
    nobody: bool,
    queue: str | None,
    as_json: bool,
) -> None:
    """Say who takes care of a cause: NAME, you, or nobody; without any, show who does.

    The first digits of FINGERPRINT are enough.
    """
    if bool(name) + me + nobody > 1:
        raise click.UsageError("expected one of NAME, --me and --nobody, got more")
    dead_letters, queue, fingerprint = _cause(ctx, queue, fingerprint)
    if name or me or nobody:
        dead_letters.assign(queue, fingerprint, own_name() if me else name)
    owner = dead_letters.group(queue, fingerprint).status.owner
    if as_json:
        print_lines([{"dead_letter_queue": queue, "fingerprint": fingerprint, "owner": owner}])
    else:
        say(console_of(ctx), f"{owner or 'Nobody'} takes care of {fingerprint} of {queue}.")


@click.command(short_help="Mark a cause as fixed; be told if it comes back.")
@_of_group
@click.option("--release", help="The release with the fix, as dlq_release names it.")
@click.pass_context
def resolve(
    ctx: click.Context,
    fingerprint: str,
    *,
    queue: str | None,
    release: str | None,
    note: str,
    as_json: bool,
) -> None:
    """Mark a cause as fixed. Its letters stay; `redrive` runs their tasks again.

    The next letter of this cause marks it as regressed. With --release, letters from the
    releases that had it before do not: their workers do not have the fix yet. The first
    digits of FINGERPRINT are enough.
    """
    dead_letters, queue, fingerprint = _cause(ctx, queue, fingerprint)
    status = dead_letters.resolve(queue, fingerprint, release=release, note=note)
    in_release = f" in release {release}" if release else ""
    print_answer(ctx, status, f"Resolved {fingerprint} of {queue}{in_release}.", as_json=as_json)


@click.command()
@_of_group
@click.option("--for", "seconds", type=DURATION, help="Report it again after this time, e.g. 2h.")
@click.pass_context
def mute(
    ctx: click.Context,
    fingerprint: str,
    *,
    queue: str | None,
    seconds: float | None,
    note: str,
    as_json: bool,
) -> None:
    """Stop reports of a cause to Sentry.

    Its letters are still stored. The first digits of FINGERPRINT are enough.
    """
    dead_letters, queue, fingerprint = _cause(ctx, queue, fingerprint)
    until = None
    if seconds is not None:
        try:
            until = dead_letters.registry.now() + timedelta(seconds=seconds)
        except OverflowError:
            raise click.BadParameter("expected a time of some years at most") from None
    status = dead_letters.mute(queue, fingerprint, until=until, note=note)
    till = f" until {utc_text(until)}" if until else ""
    print_answer(ctx, status, f"Muted {fingerprint} of {queue}{till}.", as_json=as_json)


@click.command()
@_of_group
@click.pass_context
def reopen(
    ctx: click.Context, fingerprint: str, *, queue: str | None, note: str, as_json: bool
) -> None:
    """Mark a resolved, muted or regressed cause as open again.

    The first digits of FINGERPRINT are enough.
    """
    dead_letters, queue, fingerprint = _cause(ctx, queue, fingerprint)
    status = dead_letters.reopen(queue, fingerprint, note=note)
    print_answer(ctx, status, f"Reopened {fingerprint} of {queue}.", as_json=as_json)


def _cause(ctx: click.Context, queue: str | None, digits: str) -> tuple[DeadLetters, str, str]:
    """The queue and the whole fingerprint, for what is printed: which cause was changed."""
    dead_letters = dead_letters_of(ctx)
    queue, fingerprint = dead_letters.assembly.reading().cause(digits, queue)
    return dead_letters, queue, fingerprint
