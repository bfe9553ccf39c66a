"""The commands that are likely next, as one can copy them."""

from __future__ import annotations

import shlex
import sys

import click
from rich.console import Console

from celery_dlq.cli.commands import dlq
from celery_dlq.cli.table import say


def prefix() -> str:
    """``celery -A PROJECT dlq``, as it was called, without options that may hold a password."""
    given = sys.argv[1 : sys.argv.index("dlq")] if "dlq" in sys.argv else []
    for place, word in enumerate(given):
        name, is_long, value = word.partition("=")
        if name == "--app" and is_long:
            return f"celery -A {shlex.quote(value)} dlq"
        if word in ("-A", "--app") and place + 1 < len(given):
            return f"celery -A {shlex.quote(given[place + 1])} dlq"
    return "celery dlq"


def say_next(console: Console, *commands: str, when: str = "") -> None:
    """Say which commands are likely next, if any is; ``when`` is a condition in words.

    A command of a feature that is not there is left out.
    """
    context = click.get_current_context()
    there = [one for one in commands if dlq.get_command(context, one.split()[0]) is not None]
    if there:
        say(console, f"Next, when {when}:" if when else "Next:", "dim")
    for command in there:
        say(console, f"  {prefix()} {command}", "bold")
