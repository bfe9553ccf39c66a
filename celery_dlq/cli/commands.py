"""``celery -A proj dlq …``: what operators do with dead letters.

Every ``celery`` command imports this module, so it imports click and nothing
else at the top.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from celery_dlq.cli.options import FILTER_NAMES, filter_options, json_option
from celery_dlq.errors import DLQError

if TYPE_CHECKING:
    from celery_dlq.cli.render import Screen
    from celery_dlq.filters import LetterFilter
    from celery_dlq.plugin import DeadLetters


class PlainErrors(click.Group):
    """Turns our errors into one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except DLQError as exc:
            raise click.ClickException(str(exc)) from exc


@click.group(cls=PlainErrors)
def dlq() -> None:
    """Inspect, redrive, export and triage dead letters."""


@dlq.command()
@json_option
@click.pass_context
def queues(ctx: click.Context, *, as_json: bool) -> None:
    """Show all dead-letter queues: letters, ages, reasons."""
    found = _dead_letters(ctx).queues()
    if as_json:
        from celery_dlq.cli.render import queue_json  # noqa: PLC0415 - see the module's docstring

        _print_lines(queue_json(queue) for queue in found)
    else:
        _screen(ctx).queues(found)


@dlq.command("list")
@click.argument("queue")
@filter_options
@click.option("--limit", type=click.IntRange(min=1), default=50, show_default=True)
@click.option("--oldest-first", is_flag=True, help="Oldest letters first.")
@json_option
@click.pass_context
def list_(
    ctx: click.Context,
    /,
    queue: str,
    *,
    limit: int,
    oldest_first: bool,
    as_json: bool,
    **fields: Any,
) -> None:
    """List the letters of QUEUE, newest first."""
    letters = _dead_letters(ctx).letters(
        queue, _filter(fields), newest_first=not oldest_first, limit=limit
    )
    if as_json:
        _print_lines(letter.to_json() for letter in letters)
    else:
        _screen(ctx).letters(queue, list(letters), limit)


@dlq.command()
@click.argument("letter_id", metavar="ID")
@click.option("--queue", help="Look only in this dead-letter queue.")
@json_option
@click.pass_context
def show(ctx: click.Context, letter_id: str, *, queue: str | None, as_json: bool) -> None:
    """Show everything about one letter; the first digits of its ID will do."""
    letter = _dead_letters(ctx).get(letter_id, queue)
    if as_json:
        _print_lines([letter.to_json()])
    else:
        _screen(ctx).letter(letter)


@dlq.command()
@click.argument("queue")
@json_option
@click.pass_context
def groups(ctx: click.Context, queue: str, *, as_json: bool) -> None:
    """Show the letters of QUEUE by cause, largest group first."""
    found = _dead_letters(ctx).groups(queue)
    if as_json:
        from celery_dlq.cli.render import group_json  # noqa: PLC0415 - see the module's docstring

        _print_lines(group_json(group) for group in found)
    else:
        _screen(ctx).groups(queue, found)


@dlq.command()
@click.argument("queue")
@click.argument("letter_ids", metavar="[ID]...", nargs=-1)
@filter_options
@click.option("--all", "everything", is_flag=True, help="All letters of the queue.")
@click.option("--rate", type=float, help="Most letters a second.")
@click.option("--limit", type=int, help="Most letters.")
@json_option
@click.pass_context
def redrive(
    ctx: click.Context,
    /,
    queue: str,
    letter_ids: tuple[str, ...],
    *,
    everything: bool,
    rate: float | None,
    limit: int | None,
    as_json: bool,
    **fields: Any,
) -> None:
    """Publish the original messages of letters again, then remove the letters.

    Choose letters by ID, by filter, or with --all. Body, id, callbacks, chain and
    group of a message stay as they were; its counts start anew.
    """
    where = _filter(fields, letter_ids)
    if not where and not everything:
        message = "expected IDs, a filter such as --fingerprint, or --all; got none of them"
        raise click.UsageError(message)
    dead_letters = _dead_letters(ctx)
    if letter_ids:
        from celery_dlq.filters import LetterFilter  # noqa: PLC0415 - see the module's docstring

        whole = frozenset(dead_letters.get(letter_id, queue).id for letter_id in letter_ids)
        where = LetterFilter(**{**_set(fields), "ids": whole})
    screen = _screen(ctx)
    with screen.counting("redriven", quiet=as_json) as progress:
        report = dead_letters.redrive(queue, where, rate=rate, limit=limit, progress=progress)
    if as_json:
        _print_lines([report.to_json()])
    else:
        screen.redriven(queue, report)
    if report.failed:
        ctx.exit(1)


@dlq.command()
@click.argument("destination", type=click.Path(file_okay=False))
@click.option("--queue", "chosen", multiple=True, help="Only this queue; may be given again.")
@json_option
@click.pass_context
def export(ctx: click.Context, destination: str, *, chosen: tuple[str, ...], as_json: bool) -> None:
    """Write letters to Parquet files in the folder DESTINATION; again writes only what is new."""
    screen = _screen(ctx)
    with screen.counting("exported", quiet=as_json) as progress:
        report = _dead_letters(ctx).export(destination, chosen or None, progress=progress)
    if as_json:
        _print_lines([report.to_json()])
    else:
        screen.exported(report)


@dlq.command()
@click.argument("path", type=click.Path())
@click.option("--picture", type=click.Path(dir_okay=False), help="Also draw the triage as a PNG.")
@json_option
@click.pass_context
def triage(ctx: click.Context, path: str, *, picture: str | None, as_json: bool) -> None:
    """Say what is dying and why, with PySpark, from the exported folder PATH."""
    from celery_dlq.spark.report import triage as run_triage  # noqa: PLC0415 - PySpark is an extra

    result = run_triage(path, picture)
    if as_json:
        _print_lines([result.to_json()])
    else:
        _screen(ctx).triage(result)


def _dead_letters(ctx: click.Context) -> DeadLetters:
    from celery_dlq.plugin import DeadLetters  # noqa: PLC0415 - see the module's docstring

    return DeadLetters.of(ctx.obj.app)


def _screen(ctx: click.Context) -> Screen:
    from celery_dlq.cli.render import Screen  # noqa: PLC0415 - see the module's docstring

    return Screen(no_color=bool(getattr(ctx.obj, "no_color", False)))


def _filter(fields: dict[str, Any], letter_ids: Iterable[str] = ()) -> LetterFilter:
    from celery_dlq.filters import LetterFilter  # noqa: PLC0415 - see the module's docstring

    return LetterFilter(ids=frozenset(letter_ids) or None, **_set(fields))


def _set(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: fields[name] for name in FILTER_NAMES if fields.get(name) is not None}


def _print_lines(objects: Iterable[dict[str, Any]]) -> None:
    for item in objects:
        click.echo(json.dumps(item, ensure_ascii=False))
