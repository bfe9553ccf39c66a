"""What is known of a run: what was published, every mark, letter and log line, every misfortune."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from celery_dlq import DeadLetter

Key = tuple[str, int]
"""Publication and retries."""

HEADER = "chaos_publication"
"""Names the publication that a message comes from; its retries and its letter have it, too."""

_AND = "#"  # between a task id and the number of its publication, from the second on


def name_of(task_id: str, number: int) -> str:
    """The name of a publication: the task id, with a number once the id is used again."""
    return f"{task_id}{_AND}{number}" if number > 1 else task_id


def task_id_of(publication: str) -> str:
    """The task id in a publication's name, as logs have it."""
    return publication.partition(_AND)[0]


@dataclass(frozen=True, slots=True)
class Mark:
    """One line that a task left: which execution, in which process of which worker, when.

    Its ``task_id`` is the publication's name, as everywhere in the books.
    """

    task_id: str
    retries: int
    pid: int
    worker: int
    at: float

    @property
    def key(self) -> Key:
        """The limited unit: publication and retries."""
        return self.task_id, self.retries


@dataclass(slots=True)
class Published:
    """A message the runner published.

    Attributes:
        kind: Which task.
        attempts: How often it tried.
        confirmed: Whether the broker has it for certain.
        after: What the publication before it with the same task id was when this one was
            published: ``alive``, ``letter`` or ``success``; nothing for the first of its id.
    """

    kind: str
    attempts: int = 0
    confirmed: bool = False
    after: str = ""


@dataclass(frozen=True, slots=True)
class Logged:
    """A worker's log line: it received a message, or a task succeeded."""

    task_id: str
    worker: int
    at: float


@dataclass(frozen=True, slots=True)
class Ended:
    """The end of a worker process.

    Attributes:
        worker: Process id of its main process.
        asked_at: When the runner began to end it, or saw it dead.
        at: When it was gone.
        cold: A cold shutdown was asked for.
        how: Exit code, or minus the signal.
        alone: Nobody outside asked for it.
        asked: It was asked to end, so it had time to give back.
        hung: It was asked, and did not until it was killed.
        group: Its whole process group was asked.
        reading: It hung where Celery's pool reads a result that a child which is gone did not end.
    """

    worker: int
    asked_at: float
    at: float
    cold: bool
    how: int = 0
    alone: bool = False
    asked: bool = False
    hung: bool = False
    group: bool = False
    reading: bool = False


@dataclass(frozen=True, slots=True)
class Spell:
    """A misfortune: what it was, whose proxies or processes it befell ("" for all), and when."""

    what: str
    slot: str
    begin: float
    end: float

    def meets(self, begin: float, end: float) -> bool:
        """True if some of it lies between two times."""
        return self.begin <= end and self.end >= begin


@dataclass(slots=True)
class Facts:
    """All that is known when everything has come to rest."""

    max_deliveries: int
    published: dict[str, Published]
    starts: list[Mark]
    ends: list[Mark]
    letters: list[DeadLetter]
    broker: str = "redis"
    pool: str = "prefork"
    lease_seconds: float = 8.0
    plain: bool = False
    left: set[str] = field(default_factory=set)  # what is queued or unacknowledged
    received: list[Logged] = field(default_factory=list)
    succeeded: list[Logged] = field(default_factory=list)
    doubles: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    ended: list[Ended] = field(default_factory=list)
    spells: list[Spell] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)  # of the workers' process ids
    copies: Counter[Key] = field(default_factory=Counter)
    vanished: Counter[Key] = field(default_factory=Counter)
    not_settled: dict[int, list[float]] = field(default_factory=dict)  # when, by worker
    stored: dict[str, list[float]] = field(default_factory=dict)  # when its letters were, by task
    visibility_seconds: float | None = None


def read_marks(lines: Iterable[str]) -> list[Mark]:
    """The marks in a file."""
    marks = []
    for line in lines:
        task_id, retries, pid, worker, at = line.split()
        marks.append(Mark(task_id, int(retries), int(pid), int(worker), float(at)))
    return marks
