"""``celery dlq import``: an operator adopts what a broker dead-lettered."""

from __future__ import annotations

import signal

import click

from celery_dlq.cli.context import console_of, dead_letters_of, print_lines
from celery_dlq.cli.options import json_option
from celery_dlq.cli.table import counting, letters_text, say


@click.command("import", short_help="Make letters of messages that the broker dead-lettered.")
@click.argument("queue")
@click.option("--to", "target", help="Put all letters into this dead-letter queue.")
@click.option("--follow", is_flag=True, help="Wait for more messages until Ctrl-C or SIGTERM.")
@click.option("--limit", type=click.IntRange(min=1), help="Import at most this many messages.")
@json_option
@click.pass_context
def import_(
    ctx: click.Context,
    /,
    queue: str,
    *,
    target: str | None,
    follow: bool,
    limit: int | None,
    as_json: bool,
) -> None:
    """Make letters of the messages in QUEUE, which the broker itself dead-lettered.

    QUEUE is where a dead-letter exchange of RabbitMQ, an SQS redrive policy or another
    program puts dead messages; on Redis it is a list. Each letter is stored before its
    message is removed. The command does not ask.
    """
    if follow and limit:
        raise click.UsageError("--follow and --limit do not go together")
    dead_letters = dead_letters_of(ctx)
    console = console_of(ctx)
    if follow:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: with a report
    with counting(console, "adopted", quiet=as_json) as progress:
        report = dead_letters.adopt(queue, target, follow=follow, limit=limit, progress=progress)
    if as_json:
        print_lines([report.to_json()])
        return
    for name, letters in sorted(report.by_queue.items()):
        say(console, f"Adopted from {queue} into {name}: {letters_text(letters)}.")
    if report.known:
        say(console, f"Removed from {queue}, because their letters existed: {report.known:,}.")
    if report.maybe_twice:
        say(
            console,
            f"{report.maybe_twice:,} of these have no id, were delivered before and equal earlier "
            f"letters: they may be copies.",
            "yellow",
        )
    if not report.adopted and not report.known:
        say(console, f"{queue} is empty: nothing to adopt.")
