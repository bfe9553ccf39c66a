"""``celery -A PROJECT dlq …``: the commands for operators.

Every ``celery`` command imports this module, so it imports click and little else; the module
of a command is imported when that command runs.
"""

from __future__ import annotations

import codecs
import io
import json
import sys
from importlib import import_module
from typing import Any

import click

from celery_dlq.errors import DLQError
from celery_dlq.letters.printable import one_line
from celery_dlq.registry import Block, Feature, features

_MODULES = {
    "audit": "queues",
    "discard": "removal",
    "export": "export",
    "groups": "queues",
    "jobs": "jobs",
    "list": "letters",
    "policies": "policies",
    "purge": "removal",
    "queues": "queues",
    "redrive": "redrive",
    "restore": "removal",
    "schema": "schema",
    "show": "letters",
    "tail": "letters",
    "triage": "triage",
    "trim": "removal",
    "watch": "night",
    "web": "web",
}
_BLOCKS = {
    **dict.fromkeys(
        ("discard", "export", "purge", "redrive", "restore", "trim"),
        Block.ACT,
    ),
    "web": Block.SERVE,
}
_OTHER_NAMES = {"list": "list_"}


class PlainErrors(click.Group):
    """Turns our errors into one line on stderr and exit code 1."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        _escape_unencodable()
        try:
            return super().invoke(ctx)
        except DLQError as exc:
            raise click.ClickException(one_line(str(exc))) from exc
        except KeyboardInterrupt as exc:
            if exc.args:  # of a job
                click.echo(f"\n{exc}", err=True)
            raise


class LazyCommands(PlainErrors):
    """Imports a command when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names of all commands."""
        return sorted({*_MODULES, *_of_features(), *super().list_commands(ctx)})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by what they are for."""
        blocks: dict[str, list[tuple[str, str]]] = {block.value: [] for block in Block}
        limit = formatter.width - 6 - max(map(len, self.list_commands(ctx)))
        added = _of_features()
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                block = added[name][0].block if name in added else _BLOCKS.get(name, Block.LOOK)
                blocks[block.value].append((name, command.get_short_help_str(limit)))
        for title, rows in blocks.items():
            with formatter.section(title):
                formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of a name; ``None`` if there is none."""
        if cmd_name in (added := _of_features()):
            feature, place = added[cmd_name]
            found: click.Command = feature.load(place)
            return found
        if cmd_name not in _MODULES:
            return super().get_command(ctx, cmd_name)
        module = import_module(f"celery_dlq.cli.{_MODULES[cmd_name]}")
        command: click.Command = getattr(module, _OTHER_NAMES.get(cmd_name, cmd_name))
        return command


def _of_features() -> dict[str, tuple[Feature, str]]:
    return {name: (one, place) for one in features() for name, place in one.commands.items()}


def _escape_unencodable() -> None:
    """Let stdout escape what its encoding lacks, as JSON does: else one letter ends a list."""
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        codecs.register_error("celery_dlq", _json_escapes)
        sys.stdout.reconfigure(errors="celery_dlq")


def _json_escapes(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return json.dumps(error.object[error.start : error.end])[1:-1], error.end


@click.group(cls=LazyCommands, invoke_without_command=True)
@click.option("--json", "as_json", is_flag=True, help="Print the causes as JSON, an object a line.")
@click.pass_context
def dlq(ctx: click.Context, *, as_json: bool) -> None:
    """Look at dead letters, and run their tasks again.

    Without a command, show what burns, why, what is in force, and which command is next.

    A dead letter is a message whose task failed for good, saved with its error and
    history. QUEUE is the name of a dead-letter queue, such as orders-DLQ; its last part,
    -DLQ, may be left out. Letters with the same fingerprint have the same cause.

    Something seems wrong with the set-up: `doctor`.
    """
    if ctx.invoked_subcommand is None:
        from celery_dlq.cli import night  # noqa: PLC0415 - every celery command imports this module
        from celery_dlq.cli.context import console_of, dead_letters_of, print_lines  # noqa: PLC0415

        dead_letters = dead_letters_of(ctx)
        if as_json:
            print_lines(one.to_json() for one in dead_letters.incidents())
        else:
            night.show_night(ctx, console_of(ctx), dead_letters)
    elif as_json:
        raise click.UsageError("--json stands behind the command, as in `dlq queues --json`")
