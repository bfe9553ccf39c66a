"""``dlq import``: letters of messages that the broker itself dead-lettered."""

from __future__ import annotations

import signal

import click

from celery_dlq.cli.context import dead_letters_of, print_lines, screen_of
from celery_dlq.cli.options import json_option
from celery_dlq.errors import DLQError


@click.command("import", short_help="Make letters of messages that the broker dead-lettered.")
@click.argument("queue")
@click.option(
    "--to",
    "target",
    help="Dead-letter queue of all letters; default: that of each message's own queue.",
)
@click.option("--follow", is_flag=True, help="Go on until Ctrl-C or SIGTERM.")
@click.option("--limit", type=click.IntRange(min=1), help="Most messages.")
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

    QUEUE is where a dead-letter exchange of RabbitMQ, an SQS redrive policy or anybody
    else puts dead messages; on Redis it is a list. Each letter is stored before its
    message is removed.
    """
    if follow and limit:
        raise click.UsageError("expected --follow or --limit, got both of them")
    dead_letters = dead_letters_of(ctx)
    if dead_letters.settings.store == "memory":
        raise DLQError(
            "expected dlq_store to outlive this command, got memory: the letters would be lost"
        )
    screen = screen_of(ctx)
    if follow:
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: with a report
    with screen.counting("adopted", quiet=as_json) as progress:
        report = dead_letters.adopt(queue, target, follow=follow, limit=limit, progress=progress)
    if as_json:
        print_lines([report.to_json()])
        return
    for name, letters in sorted(report.by_queue.items()):
        screen.say(f"Adopted from {queue} into {name}: {letters:,}")
    if report.known:
        screen.say(f"{report.known:,} in {queue} had their letter already; removed from it.")
    if not report.adopted and not report.known:
        screen.say(f"{queue} is empty: nothing to adopt.")
