"""``celery -A app dlq`` alone, and ``dlq watch``: what burns, why, what is in force, what next."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from itertools import islice

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from celery_dlq import DeadLetters
from celery_dlq.cli.context import console_of, dead_letters_of, load_tasks
from celery_dlq.cli.letters import class_name
from celery_dlq.cli.next_command import say_next
from celery_dlq.cli.options import DURATION
from celery_dlq.cli.table import Cell, age_text, line_text, print_table, say
from celery_dlq.errors import StoreUnavailable
from celery_dlq.events import Change
from celery_dlq.letters.course import pace_text, span_text
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.operations.in_force import InForce
from celery_dlq.operations.incidents import SETTLED, Incident, Incidents, hold_command
from celery_dlq.operations.job import Job
from celery_dlq.operations.release import HeldMessages
from celery_dlq.policies.table import NOTHING_GUARDED
from celery_dlq.store.records import QueueSummary

_MOST_QUEUES, _MOST_CAUSES, _MOST_IN_FORCE, _MOST_CHANGES = 5, 5, 6, 5
_MAX_MESSAGE_CHARS, _MAX_SENTENCE_CHARS, _MAX_QUEUE_CHARS = 160, 240, 60
_DIRECTION_STYLES = {"growing": "red", "quiet": "dim"}


@click.command(short_help="Keep the page that `dlq` alone shows up to date, until Ctrl-C.")
@click.option(
    "--every", type=DURATION, default="5s", show_default=True, help="Time between two looks."
)
@click.pass_context
def watch(ctx: click.Context, *, every: float) -> None:
    """Show what burns, and keep it up to date until Ctrl-C.

    The same as `celery -A PROJECT dlq` alone.
    """
    console, dead_letters = console_of(ctx), dead_letters_of(ctx)
    if every <= 0:
        raise click.BadParameter("expected --every to be more than 0 seconds")
    with suppress(KeyboardInterrupt):  # which is how it ends
        while not console.is_terminal:
            show_night(ctx, console, dead_letters)
            time.sleep(every)
        with Live(console=console, screen=True, auto_refresh=False) as live:
            while True:
                with console.capture() as page:
                    try:
                        show_night(ctx, console, dead_letters)
                    except StoreUnavailable as exc:
                        say(console, f"The store does not answer: {exc}", "red")
                live.update(fitting(Text.from_ansi(page.get()), *console.size), refresh=True)
                time.sleep(every)


def fitting(page: Text, columns: int, rows: int) -> Text:
    """A page that a screen has room for: what is next stays, and the lines above it go."""
    lines = page.split("\n")
    starts = (place for place, one in enumerate(lines) if one.plain.startswith("Next"))
    last = lines[next(starts, len(lines)) :]
    room = rows - sum(-(-max(line.cell_len, 1) // columns) for line in last)
    if len(lines) - len(last) <= room:
        return page
    return Text("\n").join([*lines[: max(0, room - 1)], Text("…", "dim"), *last])


def show_night(ctx: click.Context, console: Console, dead_letters: DeadLetters) -> None:
    """What is in force, the busiest queues, causes that grow, the last changes, what is next."""
    assembly, jobs = dead_letters.assembly, dead_letters.jobs()
    in_force = InForce.of(assembly, jobs)
    _show_in_force(console, in_force)
    incidents = Incidents(assembly)
    busiest = incidents.busiest()
    if not busiest:
        _say_none(ctx, console, dead_letters)
    else:
        _show_queues(console, busiest)
    causes = incidents.incidents(_MOST_CAUSES + 1) if busiest else []
    _show_causes(console, causes[:_MOST_CAUSES])
    if causes[_MOST_CAUSES:]:
        say(console, "There are more causes; see `dlq groups QUEUE`.", "dim")
    changes = (dead_letters.redaction.shown(one, "detail") for one in dead_letters.changes(20))
    _show_changes(console, [*islice(changes, _MOST_CHANGES)])
    say_next(console, *_next_commands(in_force, causes, incidents))


def _show_in_force(console: Console, in_force: InForce) -> None:
    held = (_held_row(one) for one in in_force.held[:_MOST_IN_FORCE])
    jobs = (_job_row(one) for one in in_force.jobs[:_MOST_IN_FORCE])
    print_table(console, "In force", ("what", ">waiting", "by", "to end it"), [*held, *jobs])
    more = len(in_force.names) - min(_MOST_IN_FORCE, len(in_force.held))
    more -= min(_MOST_IN_FORCE, len(in_force.jobs))
    if more:
        say(console, f"{more} more: `dlq holds`, `dlq jobs`.", "dim")


def _held_row(one: HeldMessages) -> tuple[Cell, ...]:
    hold, circuit = one.hold, one.hold.circuit
    if circuit is None:
        task = "all tasks" if hold.task == "*" else hold.task
        queue = "" if hold.queue == "*" else f" in {hold.queue}"
        what = line_text(", ".join((f"hold of {task}{queue}", *hold.where)), "yellow")
        ends = "a worker releases them" if one.state == "ended" else f"dlq release {hold.id}"
    else:
        style = "red" if one.state == "open" else "yellow"
        what = line_text(f"circuit breaker of {circuit.task}, {one.state}", style)
        ends = f"dlq breaker close {shlex.quote(circuit.task)}"
    return (what, hold.reason), one.held, (hold.actor, age_text(hold.since)), ends


def _job_row(job: Job) -> tuple[Cell, ...]:
    left = job.seconds_left(datetime.now(timezone.utc))
    progress = f"{job.handled:,} of {job.total:,}" if job.total else f"{job.handled:,} done"
    progress += f", {span_text(left)} left" if left is not None else ""
    what = line_text(f"{job.kind} of {job.queue}, {job.state}", "cyan")
    return (
        (what, progress),
        max(0, (job.total or 0) - job.handled),
        (job.actor, age_text(job.started_at)),
        f"dlq jobs {'resume' if job.state == 'interrupted' else 'cancel'} {job.id}",
    )


def _say_none(ctx: click.Context, console: Console, dead_letters: DeadLetters) -> None:
    """Why there is nothing to see, and what would change that."""
    load_tasks(ctx.obj.app)  # which may have policies
    if not dead_letters.policies().views:
        say(console, f"{NOTHING_GUARDED}, so failed tasks leave no letters. For example:", "yellow")
        say(console, '  app.conf.dlq_queues = {"*": {"max_deliveries": 5}}')
        say(console, "  celery_dlq.DeadLetters(app)")
    elif not dead_letters.registry.workers(with_tasks=False):
        say(console, "No live worker has the plugin, so no letters are made.", "yellow")
        say(console, "Start workers of an app with `DeadLetters(app)`; `dlq doctor` says more.")
    else:
        say(console, "There are no dead letters.", "green")


def _show_queues(console: Console, busiest: Sequence[QueueSummary]) -> None:
    loud = [one for one in busiest if one.last_hour]
    rows = (
        (
            line_text(queue.name, "bold"),
            queue.letters,
            f"+{queue.last_hour:,}",
            line_text(now_text(queue), _DIRECTION_STYLES.get(queue.direction, "")),
            age_text(queue.oldest_at),
        )
        for queue in loud[:_MOST_QUEUES]
    )
    columns = ("queue", ">letters", ">last hour", "now", "!oldest")
    print_table(console, "Dead-letter queues", columns, rows)
    if more := len(loud[_MOST_QUEUES:]):
        say(console, f"{more} more had letters in the last hour; see `dlq queues`.", "red")
    if quiet := len(busiest) - len(loud):
        others = "queue is" if quiet == 1 else "queues are"
        say(console, f"{quiet} {'other ' if loud else ''}{others} quiet; see `dlq queues`.", "dim")


def now_text(queue: QueueSummary) -> str:
    """How fast letters come now: ``15 a minute, growing``."""
    if queue.direction == "quiet":
        return "quiet"
    return f"{pace_text(queue.per_minute)}, {queue.direction}"


def _show_causes(console: Console, causes: Sequence[Incident]) -> None:
    columns = ("!cause", ">last hour", "what and why")
    print_table(
        console,
        "Causes by letters of the last hour",
        columns,
        map(_cause_row, causes),
    )


def _cause_row(one: Incident) -> tuple[Cell, ...]:
    group = one.group
    name = class_name(group.exception_type) if group.exception_type else group.reason
    release = f"since release {group.releases[-1]}" if group.releases else ""
    state = group.status.state
    return (
        (
            group.digits,
            shortened(one.dead_letter_queue, _MAX_QUEUE_CHARS),
            line_text(state.value, state.colour),
            group.status.owner,
        ),
        (f"+{group.last_hour:,}", f"of {group.letters:,}", _pace_of(one)),
        (
            line_text(f"{group.task_name or 'no task'}", "bold"),
            f"{name}: {shortened(one_line(one.message), _MAX_MESSAGE_CHARS)}",
            ", ".join(filter(None, (release, *one.conditions))),
            line_text(shortened(one.sentence, _MAX_SENTENCE_CHARS), "dim"),
            line_text(one.remark, "yellow"),
        ),
    )


def _pace_of(one: Incident) -> str:
    """How fast its letters come, as on its page."""
    return "over" if one.over else pace_text(one.group.per_minute)


def _show_changes(console: Console, changes: Sequence[Change]) -> None:
    rows = (
        (
            age_text(one.at),
            f"{one.action.value.replace('_', ' ')} {one.target} by {one.actor}",
            one.letters or None,
        )
        for one in changes
    )
    print_table(console, "Last changes", ("!when", "what", ">letters"), rows)


def _next_commands(in_force: InForce, causes: Sequence[Incident], of: Incidents) -> Iterator[str]:
    """The commands that are likely next, for the cause that grows most."""
    loud = [one for one in causes if one.group.last_hour and one.group.status.state not in SETTLED]
    if not loud:
        return
    first = loud[0]
    task, digits = first.group.task_name, first.group.digits
    held = [one for one in in_force.held if task and first.is_held_by(one.hold)]
    if first.group.example_id:
        yield f"show {first.group.example_id[:8]}"
    if held and held[0].hold.circuit is None:
        yield f"release {held[0].hold.id}"
    elif task and not held:
        yield hold_command(task, first.conditions, digits)
    yield of.canary_command(first.dead_letter_queue, first.group)
