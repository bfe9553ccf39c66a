"""Options that several commands share, and how their texts are read."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from functools import partial
from typing import Any

import click

from celery_dlq.letters import json_codec
from celery_dlq.policies.checks import age_seconds, duration_seconds


class Moment(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since 8.4
    """A time: ISO 8601 (UTC unless it says otherwise), or an age such as 30m, 2h, 7d."""

    name = "time"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> datetime:
        """Read the text; a usage error (exit code 2) if it is neither."""
        if isinstance(value, datetime):
            return value
        text = value.strip()
        age = age_seconds(text)
        try:
            if age is not None:
                return datetime.now(timezone.utc) - timedelta(seconds=age)
            parsed = json_codec.moment(text)
        except (ValueError, OverflowError):
            self.fail(
                f"expected a time such as 2026-01-31T18:00 or an age such as 30m, 2h, 7d, "
                f"got {value!r}",
                param,
                ctx,
            )
        return parsed if parsed.tzinfo else parsed.replace(tzinfo=timezone.utc)


class StartTime(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since 8.4
    """When a job starts: 09:00, ISO 8601 (both UTC unless they say otherwise), or +30m."""

    name = "time"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> Callable[[datetime], datetime]:
        """Read the text into a function of the present, which the store knows."""
        if callable(value):
            return value  # type: ignore[no-any-return]
        text = value.strip()
        span = duration_seconds(text[1:]) if text.startswith("+") else None
        clock = re.fullmatch(r"([01]?[0-9]|2[0-3]):([0-5][0-9])", text, re.ASCII)
        if span is not None:
            return lambda now: now + timedelta(seconds=span)
        if clock is not None:
            return partial(_next, hour=int(clock[1]), minute=int(clock[2]))
        try:
            moment = json_codec.moment(text)
        except (ValueError, OverflowError):
            self.fail(
                f"expected a time such as 09:00, 2026-01-31T18:00+01:00 or +30m, got {value!r}",
                param,
                ctx,
            )
        return lambda _now: moment if moment.tzinfo else moment.replace(tzinfo=timezone.utc)


def _next(now: datetime, *, hour: int, minute: int) -> datetime:
    """The next time that the clock shows this in UTC."""
    today = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
    return today if today > now else today + timedelta(days=1)


class Duration(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since 8.4
    """A duration: seconds, or a text such as 30s, 5m, 2h, 7d."""

    name = "duration"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Read the text; a usage error (exit code 2) if it is not one."""
        if isinstance(value, (int, float)):
            return float(value)
        seconds = duration_seconds(value)
        if seconds is None:
            self.fail(f"expected seconds, or a text such as 30s, 5m, 2h, got {value!r}", param, ctx)
        return seconds


class Rate(click.ParamType):  # type: ignore[type-arg, unused-ignore]  # generic since 8.4
    """Letters a second: 100 or 100/s."""

    name = "rate"

    def convert(
        self,
        value: Any,
        param: click.Parameter | None,
        ctx: click.Context | None,
    ) -> float:
        """Read the text; a usage error (exit code 2) if it is not a rate."""
        if isinstance(value, (int, float)):
            return float(value)
        found = re.fullmatch(r"(-?\d+(?:\.\d+)?)(/s)?", value.strip(), re.ASCII)
        if found is None:
            self.fail(f"expected letters a second, such as 100 or 100/s, got {value!r}", param, ctx)
        return float(found[1])


def filter_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options that choose letters; the same for every command that takes them."""
    for option in reversed(_FILTERS):
        command = option(command)
    return command


def background_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--background`` and ``--at``: another process does the work."""
    for option in (
        click.option(
            "--at",
            "start_at",
            type=StartTime(),
            help="Like --background, not before this time: 09:00, +30m, or ISO 8601; UTC unless "
            "it says otherwise.",
        ),
        click.option(
            "--background",
            is_flag=True,
            help="Hand the work to the workers or to `dlq web`, and print its job ID.",
        ),
    ):
        command = option(command)
    return command


def yes_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--yes``: the answer to every question of the command."""
    return click.option("--yes", is_flag=True, help="Do not ask.")(command)


def json_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """``--json``: one JSON object a line, for programs."""
    return click.option(
        "--json", "as_json", is_flag=True, help="Print one JSON object a line, for programs."
    )(command)


_FILTERS = (
    click.option("--reason", help="Filter by reason, e.g. max_deliveries_exceeded."),
    click.option("--task", "task_name", help="Filter by registered name of the task."),
    click.option("--fingerprint", help="Filter by cause; the first digits are enough."),
    click.option(
        "--exception", "exception_type", help="Filter by exception type, e.g. ValueError."
    ),
    click.option("--worker", "worker_hostname", help="Filter by worker, e.g. celery@web-1."),
    click.option(
        "--since",
        type=Moment(),
        help="Died at or after this time or age (30m, 2h, 7d).",
    ),
    click.option("--until", type=Moment(), help="Died before this time or age."),
    click.option("--grep", help="Filter by text in the description, exception message or body."),
    click.option("--release", help="Filter by version of the code, as dlq_release gives it."),
    click.option("--root-id", help="Filter by id of the workflow's first task."),
    click.option("--group-id", help="Filter by id of the group."),
    click.option(
        "--min-deliveries",
        type=click.IntRange(min=1),
        help="Delivered at least this often.",
    ),
    click.option(
        "--where",
        "conditions",
        multiple=True,
        metavar="CONDITION",
        help="Filter by an argument or header, e.g. kwargs.tenant=42; can be given several times.",
    ),
)
FILTER_NAMES = (
    "reason",
    "task_name",
    "fingerprint",
    "exception_type",
    "worker_hostname",
    "since",
    "until",
    "grep",
    "release",
    "root_id",
    "group_id",
    "min_deliveries",
    "conditions",
)
