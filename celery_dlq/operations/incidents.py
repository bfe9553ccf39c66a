"""What an operator must know first: the causes that grow now, each with its message and answer."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from glob import escape
from typing import TYPE_CHECKING, Any

from celery_dlq.errors import CorruptLetter
from celery_dlq.events import GroupState
from celery_dlq.letters.record import iso
from celery_dlq.registry import features

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.letters.record import DeadLetter
    from celery_dlq.store.holds import Hold
    from celery_dlq.store.records import Group, QueueSummary

_MOST_QUEUES, _MOST_CAUSES = 20, 20  # queues that are looked at; of each the newest causes
SETTLED = (GroupState.MUTED, GroupState.RESOLVED)  # nobody has to do anything about them


@dataclass(frozen=True, slots=True)
class Explained:
    """Why the letters of a cause died, as far as that shows at once."""

    sentence: str  # Of the triage
    conditions: tuple[str, ...]  # What selects these messages among others of their task
    over: bool = False  # True if they came no more, as the sentence says
    remark: str = ""  # What is missing here, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A cause that grows now; from `DeadLetters.incidents`.

    Attributes:
        dead_letter_queue: Its queue.
        group: Its letters, summed up.
        message: What happened to the newest of them, masked by ``dlq_redact``.
        sentence: What sets its newest letters apart; empty if that is not known at once.
        conditions: What selects its messages among others of their task, for
            `DeadLetters.hold` and filters, e.g. ``("kwargs.tenant=42",)``.
        over: True if its letters came no more, by the comparison.
        remark: That there was no time to compare its letters, if conditions lack for that reason.
    """

    dead_letter_queue: str
    group: Group
    message: str = ""
    sentence: str = ""
    conditions: tuple[str, ...] = ()
    over: bool = False
    remark: str = ""

    @property
    def held_task(self) -> str:
        """Its task for `DeadLetters.hold`: no sign in its name makes it a pattern."""
        return escape(self.group.task_name)

    def is_held_by(self, hold: Hold) -> bool:
        """True if a hold has its messages: not one of another queue, or of another tenant.

        A circuit breaker has those of its queue, which may be this one's.
        """
        of_all = hold.queue == "*" and hold.where in ((), self.conditions)
        has_all = hold.circuit is not None or of_all
        named = names_cause(hold.reason, self.group)
        return hold.covers(self.group.task_name, hold.queue) and (has_all or named)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names; of the group what names it."""
        group = self.group
        names = ("fingerprint", "task_name", "exception_type", "reason", "letters", "last_hour")
        return {
            **{name: value for name, value in asdict(self).items() if name != "group"},
            **{name: getattr(group, name) for name in names},
            "first_seen_at": iso(group.first_seen_at),
            "last_seen_at": iso(group.last_seen_at),
            "per_minute": group.per_minute,
            "releases": list(group.releases),
            "state": group.status.state.value,
            "owner": group.status.owner,
        }


def on_queue(command: str, queue: str, options: str) -> str:
    """A command on a queue, to be copied; a name that looks like an option stands last."""
    name = shlex.quote(queue)
    return f"{command} {options} -- {name}" if queue[:1] == "-" else f"{command} {name} {options}"


def hold_command(task: str, conditions: Iterable[str], digits: str) -> str:
    """The command that holds a task whose messages meet conditions; its name is no pattern."""
    only = "".join(f" --where {shlex.quote(one)}" for one in conditions)
    return f"hold --task {shlex.quote(escape(task))}{only} --reason 'cause {digits}'"


def names_cause(reason: str, group: Group) -> bool:
    """True for the reason that `hold_command` and the pages give to a hold of this cause."""
    return reason.partition(":")[0] == f"cause {group.digits}"


def message_of(letter: DeadLetter | None) -> str:
    """What happened to a letter, in its own words."""
    return "" if letter is None else letter.exception_message or letter.description


class Incidents:
    """Finds what burns; `DeadLetters` describes the arguments that methods share."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._reading = assembly.reading()

    def busiest(self) -> list[QueueSummary]:
        """The queues with the most letters in the last hour."""
        names = [*self._reading.busiest()][:_MOST_QUEUES]
        found = {one.name: one for one in self._reading.queues(names)}
        return [found[name] for name in names if name in found and found[name].letters]

    def incidents(self, limit: int = 5) -> list[Incident]:
        """The causes with the most letters in the last hour, and what sets them apart.

        Looks at the newest causes of the busiest queues. Those that are muted or resolved come
        last.
        """
        return [
            self.of_cause(queue, group, self.example_of(queue, group))
            for queue, group in self.causes()[:limit]
        ]

    def causes(self) -> list[tuple[str, Group]]:
        """All that `incidents` chooses from, in its order, each with its queue."""
        found: list[tuple[str, Group]] = []
        for queue in self.busiest():
            groups = self._reading.groups(queue.name, by="newest", limit=_MOST_CAUSES)
            found += [(queue.name, group) for group in groups if group.letters]
        found.sort(key=lambda one: (one[1].status.state in SETTLED, -one[1].last_hour))
        return found

    def example_of(self, queue: str, group: Group) -> DeadLetter | None:
        """The newest letter of a cause, as people may see it."""
        with suppress(CorruptLetter):
            found = self._assembly.backend.letters.get(queue, group.example_id)
            return found and self._assembly.redaction.letter(found)
        return None

    def canary_command(self, queue: str, group: Group) -> str:
        """The command that redrives some letters of a cause first."""
        options = f"--fingerprint {group.digits} --canary 10"
        elsewhere = self._reading.is_elsewhere(queue, group.fingerprint)
        return on_queue("redrive", queue, options) if elsewhere else f"redrive {options}"

    def of_cause(self, queue: str, group: Group, example: DeadLetter | None) -> Incident:
        """A cause with its newest letter, and what sets its newest letters apart."""
        ways = (feature.load(feature.explains) for feature in features() if feature.explains)
        found = (explain(self._assembly, queue, group.fingerprint) for explain in ways)
        return Incident(
            dead_letter_queue=queue,
            group=group,
            message=message_of(example),
            **asdict(next(found, Explained("", ()))),
        )
