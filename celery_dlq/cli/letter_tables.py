"""Queues, groups and letters on the operator's terminal, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from celery_dlq.cli.terminal import (
    Table,
    age,
    block,
    letters_text,
    line,
    say,
    table,
    two_lines,
    utc,
)
from celery_dlq.features.differences.operations import Apart
from celery_dlq.letters import json_codec
from celery_dlq.letters.links import WHEN, links_of
from celery_dlq.letters.printable import shortened
from celery_dlq.letters.record import DeadLetter, Delivery
from celery_dlq.store.notes import Note
from celery_dlq.store.records import Group, GroupState, QueueSummary, ServerMemory

_MAX_DESCRIPTION_CHARS = 300
_MAX_BODY_CHARS = 4_000
_MAX_BODY_BYTES = 200
_MAX_FIELD_CHARS = 200
_SHORT_ID = 8
_STATES = {
    GroupState.OPEN: "dim",
    GroupState.MUTED: "dim",
    GroupState.RESOLVED: "green",
    GroupState.REGRESSED: "red",
}
_LETHAL = frozenset({"max_deliveries_exceeded", "worker_lost", "time_limit_exceeded"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An entry of a queue that is not a letter."""

    position: str  # Its place, by which it can be shown and discarded
    error: str  # What is wrong with it
    fields: dict[str, str]  # Names and values, as far as they can be shown


def queues(console: Console, summaries: Sequence[QueueSummary]) -> None:
    """Dead-letter queues, a row each."""
    if not summaries:
        say(console, "There are no dead-letter queues yet.")
        return
    rows = table(
        "Dead-letter queues",
        "queue",
        ("letters", "right"),
        ("last hour", "right"),
        "!oldest\nnewest",
        "!reasons",
    )
    for queue in summaries:
        rows.add_row(
            line(queue.name, "bold"),
            f"{queue.letters:,}",
            f"+{queue.last_hour:,}",
            f"{age(queue.oldest_at)}\n{age(queue.newest_at)}",
            "\n".join(f"{count:,} {reason}" for reason, count in queue.reasons.items()),
        )
    console.print(rows)


def memory(summaries: Sequence[QueueSummary], server: ServerMemory | None) -> Iterator[str]:
    """What the letters take of Redis, in a line; nothing where that is unknown."""
    taken = sum(queue.memory_bytes or 0 for queue in summaries)
    if taken:
        share = None if server is None else server.share
        of = "" if share is None else f", which uses {share:.0%} of its maxmemory"
        yield f"The letters take {taken / 1e6:,.1f} MB of Redis{of}."


def groups(console: Console, queue: str, found: Sequence[Group]) -> None:
    """Groups, a row each."""
    rows = table(
        f"{queue} by cause", "!fingerprint, state", ("letters", "right"), "task, cause", "!seen"
    )
    for group in found:
        cause = reason(group.reason)
        if group.exception_type is not None:
            cause = Text.assemble(cause, " ", line(_class_name(group.exception_type)))
        state = group.status.state
        rows.add_row(
            two_lines(line(group.fingerprint), line(state.value, _STATES[state])),
            f"{group.letters:,}",
            two_lines(line(group.task_name, "bold"), cause),
            f"first {age(group.first_seen_at)}\nlast  {age(group.last_seen_at)}",
        )
    console.print(rows)


def apart(console: Console, found: Apart) -> None:
    """What sets letters apart, a row each."""
    compared = f"{found.others:,} others and {found.successes:,} successes"
    say(console, f"{letters_text(found.letters)} compared with {compared}", "bold")
    rows = table("What sets them apart", ("here", "right"), ("against", "right"), "")
    for one in found.findings:
        also = line(f"nearly the same letters: {', '.join(one.also)}", "dim")
        rows.add_row(
            f"{one.letters:,} of {one.of_letters:,}",
            f"{one.others:,} of {one.of_others:,}",
            two_lines(line(one.text), also) if one.also else line(one.text),
        )
    if found.findings:
        console.print(rows)
    else:
        say(console, "Nothing stands out.")
    if found.cut:
        say(console, "There was no time to read older letters, which were left out.", "dim")


def notes(console: Console, fingerprint: str, found: Sequence[Note]) -> None:
    """Notes on a group, a row each."""
    rows = table(f"Notes on {fingerprint}, newest first", "when, who", "note")
    for note in found:
        rows.add_row(two_lines(line(age(note.at)), line(note.actor)), block(note.text))
    console.print(rows)


def letters(console: Console, title: str, found: Iterable[DeadLetter | Unreadable]) -> int:
    """Letters, a row each, without holding their bodies; returns how many there were."""
    rows = table(title, "!id", "task, reason", "!when, deliveries", "description")
    for letter in found:
        if isinstance(letter, Unreadable):
            error = shortened(letter.error, _MAX_DESCRIPTION_CHARS)
            rows.add_row(line(letter.position), line("not a letter", "red"), "-", error)
        else:
            rows.add_row(
                line(letter.id[:_SHORT_ID]),
                two_lines(line(letter.task_name, "bold"), reason(letter.reason.value)),
                "\n".join([age(letter.dead_lettered_at), *_counts(letter)]),
                shortened(_description(letter), _MAX_DESCRIPTION_CHARS),
            )
    if rows.row_count:
        console.print(rows)
    return rows.row_count


def letter_line(console: Console, letter: DeadLetter) -> None:
    """One letter in one line."""
    description = shortened(letter.description.replace("\n", " "), _MAX_DESCRIPTION_CHARS)
    said = Text.assemble(
        line(f"{utc(letter.dead_lettered_at)}  {letter.id[:_SHORT_ID]}  ", "dim"),
        line(letter.task_name, "bold"),
        "  ",
        reason(letter.reason.value),
        "  ",
        line(description),
    )
    console.print(said, soft_wrap=True)


def letter(console: Console, found: DeadLetter, body_bytes: int | None = None) -> None:
    """Everything about one letter; ``body_bytes`` is the size of a body that is masked here."""
    size = len(found.body) if body_bytes is None else body_bytes
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    for name, value in _facts(found):
        if value not in {None, "", "-"}:
            # A description may have several lines; a name with several would forge a fact.
            shown = block if name == "description" else line
            facts.add_row(name, shown(str(value)))
    console.print(line(found.task_name, "bold"), reason(found.reason.value))
    console.print(facts)
    if found.history:
        console.print(_history(found.history))
    console.print(line(f"body ({size:,} bytes, {found.content_type})", "dim"))
    console.print(Padding(block(shortened(_body(found), _MAX_BODY_CHARS)), (0, 0, 0, 2)))
    if found.traceback:
        console.print(line("traceback", "dim"))
        # Lines stay whole: people copy them.
        console.print(block(found.traceback.rstrip()), soft_wrap=True)


def unreadable(console: Console, queue: str, entry: Unreadable) -> None:
    """Everything about an entry that is not a letter."""
    say(console, f"Entry {entry.position} of {queue} is not a letter: {entry.error}", "red")
    for name, value in entry.fields.items():
        say(console, f"  {name}  {shortened(value, _MAX_FIELD_CHARS)}")
    say(console, f"`dlq discard {queue} {entry.position}` removes it.")


def reason(name: str) -> Text:
    """A reason; those that cost a worker process or its time stand out."""
    return line(name, "red" if name in _LETHAL else "yellow")


def _counts(letter: DeadLetter) -> Iterator[str]:
    count = _of(letter.deliveries, letter.max_deliveries)
    yield f"{count} deliver{'y' if count == '1' else 'ies'}"
    if letter.retries:
        yield f"retry {_of(letter.retries, letter.max_retries)}"


def _description(letter: DeadLetter) -> str:
    if letter.exception_type and letter.reason.value != "rejected":
        return f"{_class_name(letter.exception_type)}: {letter.description}"
    return letter.description


def _facts(letter: DeadLetter) -> Iterator[tuple[str, str | int | None]]:
    yield "letter", letter.id
    yield "task id", letter.task_id
    yield "queue", f"{letter.source_queue} → {letter.dead_letter_queue}"
    yield "died", f"{utc(letter.dead_lettered_at)} ({age(letter.dead_lettered_at)})"
    yield "first delivered", utc(letter.first_delivered_at)
    yield "description", letter.description
    yield "exception", letter.exception_type
    yield "deliveries", f"{_of(letter.deliveries, letter.max_deliveries)}, of this message"
    yield "retries", f"{_of(letter.retries, letter.max_retries)}, of this task"
    yield "redrives", letter.redrives or None
    yield "fingerprint", letter.fingerprint
    pid = "" if letter.worker_pid is None else f" (pid {letter.worker_pid})"
    yield "worker", letter.worker_hostname and f"{letter.worker_hostname}{pid}"
    yield "origin", letter.origin
    yield "root id", letter.root_id if letter.root_id != letter.task_id else None
    yield "parent id", letter.parent_id
    yield "group id", letter.group_id
    yield "expires", utc(letter.expires)
    yield "release", letter.release
    for kind, task in links_of(letter.content_type, letter.body):
        yield kind, f"{task} {WHEN[kind]}"


def _history(history: Sequence[Delivery]) -> Table:
    rows = table("history", "!delivery", "!started (UTC)", "!took", "!outcome, pid", "exception")
    for one in history:
        took = f"{(one.ended_at - one.started_at).total_seconds():.2f} s" if one.ended_at else "-"
        said = ": ".join(filter(None, (_class_name(one.exception_type), one.exception_message)))
        rows.add_row(
            f"{one.number} of retry {one.retries}" if one.retries else f"{one.number}",
            f"{one.started_at:%m-%d %H:%M:%S}",
            took,
            f"{one.outcome.value if one.outcome else 'running'}\n{one.worker_pid or '-'}",
            shortened(said, _MAX_DESCRIPTION_CHARS),
        )
    return rows


def _body(letter: DeadLetter) -> str:
    if letter.args_json is not None and letter.kwargs_json is not None:
        return f"args   {letter.args_json}\nkwargs {letter.kwargs_json}"
    # The body is not JSON and is never decoded here; Celery's own description is safe.
    shown = json_codec.safe_repr(letter.body[:_MAX_BODY_BYTES])
    return f"args   {letter.argsrepr or '?'}\nkwargs {letter.kwargsrepr or '?'}\nbytes  {shown}"


def _class_name(exception_type: str | None) -> str:
    return (exception_type or "").rpartition(".")[2]


def _of(count: int, limit: int | None) -> str:
    return f"{count}" if limit is None else f"{count} of {limit}"
