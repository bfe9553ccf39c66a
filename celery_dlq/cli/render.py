"""How things look to people: tables, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from celery_dlq.backends.base import Group, QueueSummary
from celery_dlq.cli.drawing import Console, Padding, Table, Text, box, escape, line
from celery_dlq.letters import json_codec
from celery_dlq.letters.printable import one_line
from celery_dlq.record import DeadLetter, Delivery, iso

if TYPE_CHECKING:
    from rich.console import JustifyMethod
    from rich.progress import Progress

    from celery_dlq.export.exporter import ExportReport
    from celery_dlq.operations import RedriveReport
    from celery_dlq.spark.report import Triage

_DESCRIPTION_LIMIT = 300
_BODY_LIMIT = 4_000
_SHORT_ID = 8
_CLOCKS_DIFFER = 2  # seconds, which are no news
_LEFT: JustifyMethod = "left"
HELD = "another operator has them, or one that died within the last minute; run it again then"


class Counting:
    """A live count; called with how many more there are.

    Args:
        progress: Where it is shown; ``None`` shows nothing.
        task: Which one of its lines.
    """

    def __init__(self, progress: Progress | None = None, task: Any = None) -> None:
        self._progress = progress
        self._task = task

    def __call__(self, count: int) -> None:
        """Count so many more."""
        if self._progress is not None:
            self._progress.advance(self._task, count)

    def expect(self, total: int) -> None:
        """The total, which was not known before: from now on there is a bar."""
        if self._progress is not None:
            from rich.progress import (  # noqa: PLC0415 - a terminal is live with rich only
                BarColumn,
                MofNCompleteColumn,
                TimeRemainingColumn,
            )

            shown = self._progress.columns
            bar = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress.columns = (*shown[:-1], *bar, shown[-1])
            self._progress.update(self._task, total=total)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An entry of a queue that is no letter.

    Attributes:
        position: Its place, by which it can be shown and discarded.
        error: What is wrong with it.
    """

    position: str
    error: str


class Screen:
    """Prints to the terminal, or plain text where there is none.

    Args:
        no_color: Print without colours, as Celery's own ``--no-color`` says.
        console: Where to print; only tests and the demo pass one.
    """

    def __init__(self, *, no_color: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(no_color=no_color or None, highlight=False)

    def queues(self, queues: Sequence[QueueSummary]) -> None:
        """All dead-letter queues."""
        if not queues:
            self.say("No dead letters: there is no dead-letter queue yet.")
            return
        table = table_of(
            "Dead-letter queues",
            "queue",
            ("letters", "right"),
            ("last hour", "right"),
            "!oldest\nnewest",
            "!reasons",
        )
        for queue in queues:
            reasons = "\n".join(f"{count} {reason}" for reason, count in queue.reasons.items())
            table.add_row(
                line(queue.name, "bold"),
                f"{queue.letters:,}",
                f"+{queue.last_hour:,}",
                f"{age(queue.oldest_at)}\n{age(queue.newest_at)}",
                Text(reasons),
            )
        self.console.print(table)

    def letters(self, queue: str, letters: Sequence[DeadLetter | Unreadable], limit: int) -> None:
        """Letters, a row each; also what should be one and cannot be read."""
        if not letters:
            self.say(f"{queue} has no letters here.")
            return
        table = table_of(queue, "!id", "task, reason", "!when, deliveries", "description")
        for letter in letters:
            if isinstance(letter, Unreadable):
                table.add_row(
                    line(letter.position),
                    Text("not a letter", "red"),
                    "-",
                    Text(shortened(letter.error, _DESCRIPTION_LIMIT)),
                )
                continue
            table.add_row(
                line(letter.id[:_SHORT_ID]),
                _two_lines(line(letter.task_name, "bold"), reason_text(letter.reason.value)),
                "\n".join([age(letter.dead_lettered_at), *_counts(letter)]),
                _description(letter),
            )
        self.console.print(table)
        if len(letters) == limit:
            self.say(f"{limit} letters; --page shows the next, --limit more at a time.")

    def groups(self, queue: str, groups: Sequence[Group], limit: int | None = None) -> None:
        """Groups, a row each."""
        if not groups:
            self.say(f"{queue} is empty.")
            return
        table = table_of(
            f"{queue} by cause", "!fingerprint", ("letters", "right"), "task, cause", "!seen"
        )
        for group in groups:
            table.add_row(
                line(group.fingerprint),
                f"{group.letters:,}",
                _two_lines(line(group.task_name, "bold"), _cause(group)),
                f"first {age(group.first_seen_at)}\nlast  {age(group.last_seen_at)}",
            )
        self.console.print(table)
        if len(groups) == limit:
            self.say(f"The {limit} largest; --limit shows more.")

    def letter(self, letter: DeadLetter) -> None:
        """One letter, everything."""
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(overflow="fold")
        for name, value in _facts(letter):
            facts.add_row(name, value)
        self.console.print(line(letter.task_name, "bold"), reason_text(letter.reason.value))
        self.console.print(facts)
        if letter.history:
            self.console.print(_history(letter.history))
        self._body(letter)
        if letter.traceback:
            self.console.print(Text("traceback", "dim"))
            # Long lines stay whole: a person copies them.
            self.console.print(Text(letter.traceback.rstrip()), soft_wrap=True)

    def line(self, letter: DeadLetter) -> None:
        """One letter in one line."""
        said = Text.assemble(
            line(f"{_moment(letter.dead_lettered_at)}  {letter.id[:_SHORT_ID]}  ", "dim"),
            line(letter.task_name, "bold"),
            "  ",
            reason_text(letter.reason.value),
            "  ",
            line(shortened(letter.description.replace("\n", " "), _DESCRIPTION_LIMIT)),
        )
        self.console.print(said, soft_wrap=True)

    def redriven(self, queue: str, report: RedriveReport) -> None:
        """What a redrive did."""
        total = report.published + report.finished
        self.say(f"Redriven from {queue}: {letters_text(total)} (redrive {report.redrive_id}).")
        for text, style in _redrive_notes(report):
            self.say(f"  {text}", style=style)
        for letter_id, error in list(report.failed.items())[:10]:
            self.say(f"  failed {letter_id}: {error}", style="red")
        if report.failures:
            self.say(f"  {report.failures:,} failed and stay in {queue}.", style="red")

    def exported(self, report: ExportReport) -> None:
        """What an export wrote."""
        if report.letters:
            size = report.bytes / 1024
            self.say(
                f"Exported {letters_text(report.letters)} ({size:,.0f} KiB in {report.files:,} "
                f"file{'' if report.files == 1 else 's'}) to {report.destination}"
            )
        else:
            self.say(f"Nothing new to export; {report.destination} is up to date.")
        if report.trimmed:
            self.say(
                f"Trimmed {letters_text(report.trimmed)}: read back from the files, then removed."
            )
        if report.waiting:
            self.say(f"Waiting for a later --until: {', '.join(report.waiting)}")
        if report.unreadable:
            self.say(
                f"Left out, no letters that can be read: {report.unreadable:,}. They are still in "
                f"their queue; `show` and `discard` take their position:",
                style="bold red",
            )
            for place in report.unreadable_at:
                self.say(f"  {place}", style="red")
            if report.unreadable > len(report.unreadable_at):
                self.say(
                    f"  and {report.unreadable - len(report.unreadable_at):,} more", style="red"
                )
        if report.foreign:
            names = ", ".join(report.foreign[:5])
            self.say(f"Not made by an export, and Spark may fail on it: {names}", style="yellow")

    def triage(self, triage: Triage) -> None:
        """What PySpark found."""
        span = f"{_moment(triage.first_seen_at)} to {_moment(triage.last_seen_at)}"
        self.say(f"{letters_text(triage.letters)}, {span}", style="bold")
        table = table_of("Groups: what is dying", ("letters", "right"), "task", "cause", "example")
        for group in triage.groups[:20]:
            cause = group.exception_type or ", ".join(group.reasons)
            table.add_row(
                f"{group.letters:,}",
                line(group.task_name, "bold"),
                line(cause),
                Text(shortened(group.example_description or "", 100)),
            )
        self.console.print(table)
        table = table_of("Reasons", "reason", ("letters", "right"), ("share", "right"))
        for reason in triage.reasons:
            table.add_row(reason_text(reason.reason), f"{reason.letters:,}", f"{reason.share:.0%}")
        self.console.print(table)
        self.console.print(_timeline(triage))
        table = table_of(
            "Deliveries before death", "task", ("deliveries", "right"), ("letters", "right")
        )
        for row in triage.deliveries[:30]:
            table.add_row(line(row.task_name), f"{row.deliveries}", f"{row.letters:,}")
        self.console.print(table)
        if triage.picture:
            self.say(f"Picture: {triage.picture}")

    def say(self, text: str, *, style: str | None = None) -> None:
        """One line of text."""
        self.console.print(line(text, style or ""), soft_wrap=True)

    @contextmanager
    def counting(
        self, verb: str, *, quiet: bool = False, total: int | None = None
    ) -> Iterator[Counting]:
        """A live count on a terminal, a bar when the total is known; nothing elsewhere."""
        if quiet or not self.console.is_terminal:
            yield Counting()
            return
        from rich.progress import (  # noqa: PLC0415 - a terminal is live with rich only
            BarColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        bar = () if total is None else (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        columns = (
            SpinnerColumn(),
            TextColumn("{task.completed:,} " + verb),
            *bar,
            TimeElapsedColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            task = progress.add_task(verb, total=total)
            yield Counting(progress, task)

    def _body(self, letter: DeadLetter) -> None:
        self.console.print(line(f"body ({len(letter.body):,} bytes, {letter.content_type})", "dim"))
        if letter.args_json is not None and letter.kwargs_json is not None:
            shown = f"args   {letter.args_json}\nkwargs {letter.kwargs_json}"
        else:
            # Not JSON: never decoded here. Celery's own description is safe.
            shown = "\n".join(
                [
                    f"args   {letter.argsrepr or '?'}",
                    f"kwargs {letter.kwargsrepr or '?'}",
                    f"bytes  {json_codec.safe_repr(letter.body[:200])}",
                ]
            )
        self.console.print(Padding(Text(shortened(shown, _BODY_LIMIT)), (0, 0, 0, 2)))


def queue_json(queue: QueueSummary) -> dict[str, Any]:
    """A queue for ``--json``."""
    return {
        "name": queue.name,
        "letters": queue.letters,
        "oldest_at": iso(queue.oldest_at),
        "newest_at": iso(queue.newest_at),
        "last_hour": queue.last_hour,
        "reasons": dict(queue.reasons),
    }


def group_json(group: Group) -> dict[str, Any]:
    """A group for ``--json``."""
    return {
        "fingerprint": group.fingerprint,
        "letters": group.letters,
        "task_name": group.task_name,
        "reason": group.reason,
        "exception_type": group.exception_type,
        "first_seen_at": iso(group.first_seen_at),
        "last_seen_at": iso(group.last_seen_at),
        "example_id": group.example_id,
    }


def age(moment: datetime | None, now: datetime | None = None) -> str:
    """How long ago, in one unit: ``12 s ago``, ``3 h ago``; or ``in 1 d``: a clock is wrong."""
    if moment is None:
        return "-"
    seconds = int(((now or datetime.now(timezone.utc)) - moment).total_seconds())
    pattern = "in {} {}" if seconds <= -_CLOCKS_DIFFER else "{} {} ago"
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if abs(seconds) >= 2 * size:
            return pattern.format(abs(seconds) // size, unit)
    return f"{max(0, seconds)} s ago"


def reason_text(reason: str) -> Text:
    """A reason; what killed a worker stands out."""
    lethal = ("max_deliveries_exceeded", "worker_lost", "time_limit_exceeded")
    return line(reason, "red" if reason in lethal else "yellow")


def table_of(title: str, *columns: str | tuple[str, JustifyMethod]) -> Table:
    """A table; a column's name may carry ``!`` for "never wrap"."""
    table = Table(
        title=escape(one_line(title)),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        header_style="dim",
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in columns:
        name, justify = column if isinstance(column, tuple) else (column, _LEFT)
        fixed = name.startswith("!")
        table.add_column(name.lstrip("!"), justify=justify, no_wrap=fixed, overflow="fold")
    return table


def _two_lines(first: Text, second: Text) -> Text:
    return Text.assemble(first, "\n", second)


def _counts(letter: DeadLetter) -> Iterator[str]:
    """Deliveries of this message; and which retry of its task it is, if it is one."""
    count = _of(letter.deliveries, letter.max_deliveries)
    yield f"{count} deliver{'y' if count == '1' else 'ies'}"
    if letter.retries:
        yield f"retry {_of(letter.retries, letter.max_retries)}"


def _facts(letter: DeadLetter) -> Iterator[tuple[str, Text]]:
    rows: list[tuple[str, object]] = [
        ("letter", letter.id),
        ("task id", letter.task_id),
        ("queue", f"{letter.source_queue} → {letter.dead_letter_queue}"),
        ("died", f"{_moment(letter.dead_lettered_at)} ({age(letter.dead_lettered_at)})"),
        ("first delivered", _moment(letter.first_delivered_at)),
        ("description", letter.description),
        ("exception", letter.exception_type),
        ("deliveries", f"{_of(letter.deliveries, letter.max_deliveries)}, of this message"),
        ("retries", f"{_of(letter.retries, letter.max_retries)}, of this task"),
        ("redrives", letter.redrives or None),
        ("fingerprint", letter.fingerprint),
        ("worker", _worker(letter)),
        ("origin", letter.origin),
        ("root id", letter.root_id if letter.root_id != letter.task_id else None),
        ("parent id", letter.parent_id),
        ("group id", letter.group_id),
        ("expires", _moment(letter.expires) if letter.expires else None),
        ("release", letter.release),
    ]
    for name, value in rows:
        if value not in (None, "", "-"):
            yield name, (Text if name == "description" else line)(str(value))


def _worker(letter: DeadLetter) -> str | None:
    if letter.worker_pid is None:
        return letter.worker_hostname
    return f"{letter.worker_hostname} (pid {letter.worker_pid})"


def _redrive_notes(report: RedriveReport) -> Iterator[tuple[str, str | None]]:
    if report.canary is not None:
        said = "Canary: {succeeded} of {redriven} succeeded, {died} died again, {open} still open."
        yield said.format(**report.canary), None
    if report.state != "done":
        again = f"`dlq jobs resume {report.redrive_id}` goes on"
        yield f"It was {report.state} before its end; {again}.", "red"
    if report.corrupt:
        yield f"{report.corrupt:,} entries are no letters; they were passed over.", None
    if report.finished:
        yield f"{report.finished:,} of them were published by an interrupted redrive.", None
    if report.maybe_twice:
        copies = "equal dlq_letter headers show the copies"
        yield f"{report.maybe_twice:,} may have been published before as well; {copies}.", None
    if report.skipped:
        yield f"{report.skipped:,} skipped: {HELD}.", None
    if report.doubtful:
        yield f"The broker may have taken {report.doubtful:,} of those that failed.", "red"


def _cause(group: Group) -> Text:
    reason = reason_text(group.reason)
    if group.exception_type is None:
        return reason
    return Text.assemble(reason, " ", line(group.exception_type.rpartition(".")[2]))


def _history(history: Sequence[Delivery]) -> Table:
    names = ("!delivery", "!started (UTC)", "!took", "!outcome, pid", "exception")
    table = table_of("history", *names)
    for one in history:
        took = f"{(one.ended_at - one.started_at).total_seconds():.2f} s" if one.ended_at else "-"
        name = (one.exception_type or "").rpartition(".")[2]  # the whole one is among the facts
        said = ": ".join(part for part in (name, one.exception_message) if part)
        table.add_row(
            f"{one.number} of retry {one.retries}" if one.retries else f"{one.number}",
            f"{one.started_at:%m-%d %H:%M:%S}",
            took,
            Text(f"{one.outcome.value if one.outcome else 'running'}\n{one.worker_pid or '-'}"),
            Text(shortened(said, _DESCRIPTION_LIMIT)),
        )
    return table


def _timeline(triage: Triage) -> Table:
    totals: dict[datetime, int] = {}
    for row in triage.timeline:
        totals[row.bucket_start] = totals.get(row.bucket_start, 0) + row.letters
    table = table_of(f"Over time, by {triage.bucket}", "from (UTC)", ("letters", "right"), "")
    most = max(totals.values(), default=1)
    for start, letters in sorted(totals.items())[-30:]:
        bar = "█" * max(1, round(30 * letters / most))
        table.add_row(f"{start:%Y-%m-%d %H:%M:%S}", f"{letters:,}", Text(bar, "yellow"))
    return table


def _description(letter: DeadLetter) -> Text:
    text = letter.description
    if letter.exception_type and letter.reason.value != "rejected":
        text = f"{letter.exception_type.rpartition('.')[2]}: {text}"
    return Text(shortened(text, _DESCRIPTION_LIMIT))


def _of(count: int, limit: int | None) -> str:
    return f"{count}" if limit is None else f"{count} of {limit}"


def _moment(moment: datetime | None) -> str:
    return "-" if moment is None else f"{moment.astimezone(timezone.utc):%Y-%m-%d %H:%M:%S}Z"


def letters_text(count: int) -> str:
    """So many letters."""
    return f"{count:,} letter{'' if count == 1 else 's'}"


def shortened(text: str, limit: int) -> str:
    """The text, or its beginning."""
    return text if len(text) <= limit else text[: limit - 1] + "…"
