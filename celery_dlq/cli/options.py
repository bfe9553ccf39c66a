"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import click

from celery_dlq.errors import DLQError
from celery_dlq.letters import json_codec
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.policies.checks import age_seconds, duration_seconds
from celery_dlq.policies.policy import DLQ_SUFFIX

StartAt = Callable[[datetime], datetime]
"""Returns when a job may start, given the present by the store's clock."""
Command = Callable[..., Any]
_DAYS_AGO = {"today": 0, "yesterday": 1}


class Parsed(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since 8.4
    """A text of a form of its own; another one is a usage error (exit code 2)."""

    def __init__(self, name: str, parse: Callable[[str], Any], expected: str) -> None:
        self.name = name
        self._parse = parse
        self._expected = expected

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Read the text."""
        if not isinstance(value, str):
            return value
        try:
            found = self._parse(value.strip())
        except (ValueError, OverflowError):
            found = None
        if found is None:
            self.fail(f"expected {self._expected}, got {value!r}", param, ctx)
        return found


def _parsed_moment(text: str) -> datetime:
    age, now = age_seconds(text), datetime.now(timezone.utc)
    if age is not None:
        return now - timedelta(seconds=age)
    if text in _DAYS_AGO:
        midnight = now.replace(hour=0, minute=0, second=0, microsecond=0)
        return midnight - timedelta(days=_DAYS_AGO[text])
    return json_codec.instant(text)


def _start_time(text: str) -> StartAt:
    span = duration_seconds(text[1:]) if text.startswith("+") else None
    clock = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text, re.ASCII)
    if span is not None:
        return lambda now: now + timedelta(seconds=span)
    if clock is not None:
        return partial(_next_time, hour=int(clock[1]), minute=int(clock[2]))
    moment = json_codec.instant(text)
    return lambda _now: moment


def _next_time(now: datetime, *, hour: int, minute: int) -> datetime:
    """The next time that the clock shows this in UTC."""
    today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return today if today > now else today + timedelta(days=1)


def _parsed_rate(text: str) -> float | None:
    found = re.fullmatch(r"(-?\d+(?:\.\d+)?)(/s)?", text, re.ASCII)
    return None if found is None else float(found[1])


MOMENT = Parsed(
    "time",
    _parsed_moment,
    "a time such as 2026-01-31T18:00 or yesterday, or an age such as 30m, 2h, 7d",
)
START_TIME = Parsed("time", _start_time, "a time such as 09:00, 2026-01-31T18:00+01:00 or +30m")
DURATION = Parsed("duration", duration_seconds, "seconds, or a text such as 30s, 5m, 2h")
RATE = Parsed("rate", _parsed_rate, "letters a second, such as 100 or 100/s")


class DeadLetterQueue(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since 8.4
    """The name of a dead-letter queue; ``orders`` means ``orders-DLQ`` if only that is there."""

    name = "queue"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,  # noqa: ARG002 - click gives it
        ctx: click.Context | None,
    ) -> Any:
        """Complete the name; one that is not known stays as it is, for the command to refuse."""
        if ctx is None or value.endswith(DLQ_SUFFIX):
            return value
        from celery_dlq import DeadLetters  # noqa: PLC0415 - not for --help

        try:
            names = DeadLetters.of(ctx.obj.app).store.names()
        except DLQError:  # with --from, the files have them
            return value
        whole = f"{value}{DLQ_SUFFIX}"
        return whole if value not in names and whole in names else value


QUEUE = DeadLetterQueue()
queue_argument = click.argument("queue", type=QUEUE)
queue_or_cause_argument = click.argument("queue", type=QUEUE, required=False)


def options(*decorators: Command) -> Command:
    """One decorator for several options, which `--help` shows in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")
yes_option = click.option("--yes", is_flag=True, help="Do not ask; for scripts.")
background_options = options(
    click.option("--background", is_flag=True, help="Let a worker or `dlq web` do it, as a job."),
    click.option(
        "--at", "start_at", type=START_TIME, help="As --background, at 09:00 (UTC), +30m, ISO 8601."
    ),
)
files_option = click.option(
    "--from",
    "files",
    default="",
    metavar="FOLDER",
    help="Take letters from the files of an export: a folder or a URL.",
)
conditions_option = click.option(
    "--where",
    "conditions",
    multiple=True,
    metavar="CONDITION",
    help="Only with this argument or header, e.g. kwargs.tenant=42; may be repeated.",
)
filter_options = options(
    click.option("--reason", help="Only this reason, e.g. max_deliveries_exceeded."),
    click.option("--task", "task_name", help="Only this task, e.g. shop.charge."),
    click.option("--fingerprint", help="Only this cause; its first digits are enough."),
    click.option("--exception", "exception_type", help="Only this exception, e.g. ValueError."),
    click.option("--worker", "worker_hostname", help="Only from this worker, e.g. celery@web-1."),
    click.option("--since", type=MOMENT, help="Died since then: 2h, yesterday, 2026-01-31 (UTC)."),
    click.option("--until", type=MOMENT, help="Died before a time, in the forms of --since."),
    click.option("--grep", help="Only with this text in description, exception message or body."),
    click.option("--release", help="Only from this release of the code, as dlq_release names it."),
    click.option("--root-id", help="Only from the workflow that began with this task ID."),
    click.option("--group-id", help="Only from this Celery group; for a cause: --fingerprint."),
    click.option(
        "--min-deliveries", type=click.IntRange(min=1), help="At least this many deliveries."
    ),
    conditions_option,
)
FILTER_NAMES = tuple(name for name in LetterFilter.__slots__ if name != "ids")


def letter_filter(fields: Mapping[str, Any], letter_ids: Iterable[str] = ()) -> LetterFilter:
    """The filter that `filter_options` describe."""
    given = {name: fields[name] for name in FILTER_NAMES if fields.get(name) is not None}
    return LetterFilter(ids=frozenset(letter_ids) or None, **given)


def limit_option(default: int, what: str) -> Command:
    """``--limit`` of a command that shows something."""
    at_least_one, text = click.IntRange(min=1), f"Show at most this many {what}."
    return click.option("--limit", type=at_least_one, default=default, show_default=True, help=text)


def changes_letters(verb: str) -> Command:
    """The arguments and options of a command that changes letters of QUEUE, such as a redrive."""
    return options(
        queue_or_cause_argument,
        click.argument("letter_ids", metavar="[ID]...", nargs=-1),
        filter_options,
        click.option("--all", "everything", is_flag=True, help=f"{verb} all letters of the queue."),
        click.option("--limit", type=int, help=f"{verb} at most this many letters."),
        click.option("--note", default="", help="Why, e.g. a ticket; jobs and audit show it."),
        background_options,
        yes_option,
        json_option,
        click.pass_context,
    )
