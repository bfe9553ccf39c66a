"""The record of a job, and the run that writes it: state, heartbeat, results so far."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from celery_dlq import timing
from celery_dlq.errors import DLQError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.printable import get_logger, one_line, shortened
from celery_dlq.letters.record import Recorded, from_micros, iso
from celery_dlq.letters.redaction import Redaction
from celery_dlq.operations.redrive.select import Progress, RawEntry, Source, select_entries
from celery_dlq.store.claims import REMOVES, ClaimState

if TYPE_CHECKING:
    from typing_extensions import Self

    from celery_dlq.store.claims import Claims
    from celery_dlq.store.jobs import JobStore

logger = get_logger("celery_dlq")

PLANNED, EXPIRED, WAITING, RUNNING, DONE, CANCELLED, STOPPED, FAILED, INTERRUPTED = (
    "planned",
    "expired",
    "waiting",
    "running",
    "done",
    "cancelled",
    "stopped",
    "failed",
    "interrupted",
)
REDRIVES = ("redrive", "edit")
"""The kinds of job that publish the messages of letters."""

REMOVALS = ("discard", "purge")
"""The kinds of job that remove letters."""

_MAX_NOTE_CHARS = 500
_HANDLED = (
    *("published", "finished", "removed", "restored", "taken"),
    *("skipped", "corrupt", "failures", "refused"),
)


class CancelledError(Exception):
    """The job was cancelled or paused."""

    state = CANCELLED


class TakenOverError(CancelledError):
    """The job was silent for so long that another process, or a person, went on with it."""

    state = INTERRUPTED


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOptions:
    """The options that all kinds of job have."""

    limit: int | None = None  # At most this many letters; `None` for all
    note: str = ""  # Why, for people: for example a ticket

    def __post_init__(self) -> None:
        if not isinstance(self.note, str):
            raise DLQError(f"expected note to be a text, got {type(self.note).__name__}")
        note = shortened(one_line(self.note.strip()), _MAX_NOTE_CHARS)
        object.__setattr__(self, "note", note)
        if self.limit is not None and self.limit < 1:
            raise DLQError(f"expected limit to be 1 or more, got {self.limit}")

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping of the options that differ from their defaults."""
        values = asdict(self)
        return {f.name: values[f.name] for f in fields(self) if values[f.name] != f.default}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """Read what `to_json` wrote; ignores options of later versions."""
        return cls(**{f.name: value[f.name] for f in fields(cls) if f.name in value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Recorded):
    """One operation on many letters; a plan is a job that has not started.

    Attributes:
        id: Begins with the time, so ids sort by age.
        kind: ``redrive``, ``edit``, ``discard``, ``purge``, ``restore`` or ``release``.
        queue: The dead-letter queue; of a release, the hold.
        state: ``planned``, ``expired`` (a plan that nobody started in time), ``waiting`` (for
            ``start_at``, or for a process that runs jobs), ``running``, ``done``, ``cancelled``,
            ``stopped`` (by its canary), ``failed``, or ``interrupted``: running, but its process
            has died.
        actor: Who planned it; then who started it; then who resumed it last.
        started_at: Time of its start; of a plan, of its dry run.
        updated_at: Time of its last heartbeat.
        ended_at: Time of its end.
        filter: The letters it works on, from `LetterFilter.to_json`.
        options: Its options by name; of an edit also the paths that it changed.
        until: The last position that it may touch; letters that arrive later are left out.
        position: The last position that is done.
        total: Number of letters to work on; ``None`` if unknown.
        counts: Its results so far, by the names of its report.
        note: The reason why it stopped or failed.
        run: Number of its starts: 1, plus 1 for each time it was resumed; 0 before the first.
        pid: Id of its process.
        host: Host of that process.
        expires_at: Time until which a plan can be started; ``None`` once it was.
        start_at: Time before which it is not started, by the store's clock; ``None``: at once.
        broker: The kind of broker and the virtual host or database to which its messages go, e.g.
            ``amqp /shop``; only a process with the same one runs it. Empty for any.
        preview: What the dry run of a plan found: see `DryRun`; of long lists the first 20.
        canary: How its canary does: ``letters``, ``succeeded``, ``died``, ``open``, ``held`` (of
            those that are open) and the ids of their ``holds``, ``waited_seconds`` of
            ``wait_seconds``, ``verdict`` (``running``, ``passed``, ``died again``, ``held``,
            ``not finished`` or ``nothing tried``), and ``died_ids``, the ids of the first new
            letters.
        unfinished: Of a redrive with ``at_most``: how many of its messages are ``open``,
            ``waited_seconds`` of ``wait_seconds`` for the next end, the ids of the ``holds`` that
            have all of them, and how many are ``in_doubt``: nobody saw their ends before it
            stopped, and they may still run.
        failed: Errors by letter id, of the first letters whose message the broker did not take.
        change: The change of an edit, as JSON text. It may hold secrets: `to_json` leaves it out.
    """

    id: str
    kind: str
    queue: str
    state: str = RUNNING
    actor: str = ""
    started_at: datetime
    updated_at: datetime
    ended_at: datetime | None = None
    filter: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    until: str | None = None
    position: str | None = None
    total: int | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    run: int = 1
    pid: int = 0
    host: str = ""
    expires_at: datetime | None = None
    start_at: datetime | None = None
    broker: str = ""
    preview: Mapping[str, Any] = field(default_factory=dict)
    canary: Mapping[str, Any] = field(default_factory=dict)
    unfinished: Mapping[str, Any] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    change: str = ""

    @property
    def handled(self) -> int:
        """Number of letters that it is done with, in whatever way."""
        return sum(self.counts.get(name, 0) for name in _HANDLED)

    def is_of_cause(self, queue: str, fingerprint: str) -> bool:
        """True if it works on the letters of one cause of a queue, and of that one."""
        digits = self.filter.get("fingerprint")
        return self.queue == queue and bool(digits) and fingerprint.startswith(str(digits))

    @property
    def unknown(self) -> int:
        """How many messages of a redrive that has ended may still wait or run."""
        if self.kind not in REDRIVES or self.ended_at is None:
            return 0
        ends = sum(self.counts.get(name, 0) for name in ("succeeded", "died_again"))
        return max(0, self.changed - ends)

    def per_second(self, now: datetime) -> float | None:
        """Letters a second so far, behind its canary; ``None`` while that is unknown."""
        spent = ((self.ended_at or now) - self.started_at).total_seconds()
        spent -= self.canary.get("waited_seconds", 0)
        letters = self.handled - self.canary.get("letters", 0)
        return letters / spent if letters > 0 and spent > 0 else None

    def seconds_left(self, now: datetime) -> float | None:
        """How long it still takes at its pace so far; ``None`` while that is unknown."""
        pace = self.per_second(now)
        if self.state != RUNNING or not self.total or pace is None:
            return None
        return max(0.0, (self.total - self.handled) / pace)

    def readable_filter(self) -> dict[str, Any]:
        """Its filter with times as people write them."""
        times = ("since", "until")
        micros = {name: self.filter[name] for name in times if type(self.filter.get(name)) is int}
        return {**self.filter, **{name: iso(from_micros(at)) for name, at in micros.items()}}

    @property
    def changed(self) -> int:
        """Number of letters that it has removed from, or restored to, their queue."""
        names = ("published", "finished", "removed", "restored")
        return sum(self.counts.get(name, 0) for name in names)

    def shown(self, redaction: Redaction) -> Job:
        """The job as people may see it: its filter, options and errors may quote letters."""
        failed = {letter_id: redaction.text(why) for letter_id, why in self.failed.items()}
        return replace(redaction.shown(self, "filter", "options", "note"), failed=failed)

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names, without ``change``."""
        shown = Recorded.to_json(self)
        del shown["change"]
        return shown

    @classmethod
    def seen(cls, value: Mapping[str, Any], now: datetime) -> Job:
        """Read the result of `to_stored`; the store's clock decides if its process has died."""
        job = cls.from_stored(value)
        if job.state == PLANNED and job.expires_at is not None and now > job.expires_at:
            return replace(job, state=EXPIRED)
        silent = now - job.updated_at > timing.current.job_silent
        if job.state == RUNNING and (silent or _is_dead(job)):
            return replace(job, state=INTERRUPTED)
        return job


def counts_of(job: Job, claims: Claims) -> dict[str, int]:
    """The results of a job, also those that its process was killed before it had saved."""
    changed, counts = claims.changed(job.queue, job.id), dict(job.counts)
    name = "restored" if job.kind == "restore" else "removed"
    if job.kind not in (*REMOVALS, "restore"):
        name, noted = "published", claims.redriven(job.queue, job.id)
        states = {"finished": ClaimState.PUBLISHED, "maybe_twice": ClaimState.RECLAIMED}
        counts |= {one: max(counts.get(one, 0), noted.get(s, 0)) for one, s in states.items()}
        changed -= counts["finished"]
    return {**counts, name: max(counts.get(name, 0), changed)}


def _is_dead(job: Job) -> bool:
    """True if its process has certainly ended; only its own host can know."""
    if job.host != socket.gethostname() or not job.pid:
        return False
    with suppress(PermissionError):
        try:
            os.kill(job.pid, 0)
        except ProcessLookupError:
            return True
    return False


class JobRun:
    """One run of a job, in one process: its letters, its options, and its heartbeat."""

    def __init__(
        self,
        store: JobStore,
        job: Job,
        where: LetterFilter,
        options: Any,
        *,
        change: Any = None,
        begun: bool = False,
        listed: bool = True,
    ) -> None:
        self.job = job
        self.where = where
        self.options = options  # the `JobOptions` of its kind
        self.change = change  # the `Edit` of an edit
        self.source: Source | None = None  # its letters; opened again by another process
        self.stopping: Callable[[], bool] = lambda: False
        self.began: Callable[[], object] = lambda: None  # called once the store has the job
        self._store = store
        self._listed = listed  # the store never has one that is not
        self._paused = False
        self._token = uuid4().hex
        self._written_at = time.monotonic() if begun else None

    @property
    def owner(self) -> str:
        """The owner of this run's claims; different for each run of the job.

        Long on purpose: Redis searches small hashes of short values linearly.
        """
        end = REMOVES if self.job.kind in REMOVALS else ""
        return f"{self.job.id}:{self.job.run}@{self.job.host}:{self.job.pid}#{self._token}{end}"

    @property
    def operation(self) -> str:
        """The id under which the store counts its letters; all runs of a job share it."""
        return self.job.id if self._listed else ""

    @property
    def previous_run_prefix(self) -> str:
        """The prefix of the owners of earlier runs; empty in the first run."""
        return f"{self.job.id}:" if self.job.run > 1 else ""

    @property
    def is_begun(self) -> bool:
        """True once the store has the job."""
        return self._written_at is not None

    def send_heartbeat(
        self,
        counts: Mapping[str, int] | None = None,
        position: str | None = None,
        *,
        failed: Mapping[str, str] | None = None,
        now: bool = False,
    ) -> None:
        """Send a heartbeat with the results so far, at most once a second."""
        self.job = replace(
            self.job,
            counts=self.job.counts if counts is None else dict(counts),
            position=position or self.job.position,
            failed=self.job.failed if failed is None else failed,
        )
        at = time.monotonic()
        if self._written_at is None or now or at - self._written_at >= timing.current.job_beat:
            begins, self._written_at = not self.is_begun, at
            self.job = replace(self.job, updated_at=self._store.now())
            cancelled = self._save_state()
            if begins:
                self.began()
            if cancelled:
                self.update(note=f"cancelled by {cancelled}")
                raise CancelledError
        if self.stopping():
            self._paused = True
            raise CancelledError

    def claimed(
        self, letters: Source, letter_ids: Sequence[str], lease_seconds: float
    ) -> dict[str, ClaimState]:
        """Claim letters, also those of an earlier run; the states in which they were found."""
        states = letters.claims.claim(
            self.job.queue,
            letter_ids,
            owner=self.owner,
            lease_seconds=lease_seconds,
            previous_run_prefix=self.previous_run_prefix,
        )
        return dict(zip(letter_ids, states, strict=True))

    def selected(
        self, letters: Source, beat: Callable[[], object], scanned: Progress | None
    ) -> Iterator[RawEntry]:
        """The letters that are left; beats for each page, for few may match."""

        def page(entries: int) -> None:
            if scanned is not None:
                scanned(entries)
            if self.is_begun:
                beat()

        job = self.job
        return select_entries(
            letters, job.queue, self.where, after=job.position, until=job.until, scanned=page
        )

    def update(
        self, *, where: LetterFilter | None = None, options: Any = None, **changes: Any
    ) -> None:
        """Change letters, options, or fields of the job; the next heartbeat saves them."""
        if where is not None:
            self.where, changes["filter"] = where, where.to_json()
        if options is not None:
            self.options, changes["options"] = options, options.to_json()
        self.job = replace(self.job, **changes)

    def end(self, state: str, counts: Mapping[str, int], note: str = "") -> Job:
        """Save the result; a job that was paused waits instead, for the next process."""
        at = self._store.now()
        paused = self._paused and state == CANCELLED
        self.job = replace(
            self.job,
            state=WAITING if paused else state,
            counts=dict(counts),
            note="its process has ended; the next one goes on" if paused else note,
            updated_at=at,
            ended_at=None if paused or state == INTERRUPTED else at,
        )
        if self.is_begun:
            with suppress(CancelledError):  # another process goes on with it
                self._save_state()
        return self.job

    def _save_state(self) -> str:
        """Save the job unless another process went on with it; who cancels it, if somebody does."""
        if not self._listed:
            return ""
        known = self._store.read(self.job.id)
        ours = (self.job.run, RUNNING)
        if known is not None and (int(known.get("run", 1)), known.get("state")) != ours:
            if self.job.state == RUNNING:
                logger.warning(
                    "Job %s: another process goes on with it or has ended it, because this one "
                    "gave no sign of life for a while. It ends here",
                    self.job.id,
                )
            raise TakenOverError
        return self._store.write(self.job.id, self.job.to_stored())
