"""The books: every message that was published against every mark, letter and log line.

Pure functions of facts that were gathered when everything had come to rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from signal import SIGKILL
from typing import Any

from celery_dlq import DeadLetter, Outcome, Reason

Key = tuple[str, int]
"""Task id and retries."""

NEAR_SECONDS = 15.0  # a death so soon after a start may have ended it
ACKNOWLEDGED_SECONDS = 3.0  # so long after its end a task's message is acknowledged
AGAIN_SECONDS = 1.0  # until a worker has a connection again
FREE_SECONDS = 7.0  # are enough to end, in two parts too
REST_SECONDS = 4.0  # so long after an outage workers may leave the store alone

Ends = Reason | frozenset[Reason] | None

EXPECTED: dict[str, Ends] = {
    "quick": None,
    "slow": None,
    "later": None,
    "retries": None,
    "killed": Reason.MAX_DELIVERIES_EXCEEDED,
    "segfault": Reason.MAX_DELIVERIES_EXCEEDED,
    "exits": Reason.MAX_DELIVERIES_EXCEEDED,
    "requeues": Reason.MAX_DELIVERIES_EXCEEDED,
    "kills_worker": Reason.MAX_DELIVERIES_EXCEEDED,
    "fails": Reason.FAILED,
    "autoretries": Reason.MAX_RETRIES_EXCEEDED,
    "to_dlq": Reason.REJECTED,
    "too_long": Reason.TIME_LIMIT_EXCEEDED,
    "unknown": Reason.UNKNOWN_TASK,
    "undecodable": Reason.UNDECODABLE_MESSAGE,
    "odd": None,
    "poison": frozenset(
        {
            Reason.INVALID_MESSAGE,
            Reason.UNDECODABLE_MESSAGE,
            Reason.MAX_DELIVERIES_EXCEEDED,
        }
    ),
}
"""How each kind ends when nobody disturbs it: its reason, one of some, or success."""

SILENT = frozenset({"redis hangs", "redis dies"})
"""While the store is silent each worker counts alone."""

REFUSING = SILENT | {"redis refuses"}
NOT_HEARD = REFUSING | {"redis drops", "store loses replies"}
"""What a result, or a count, may be lost in."""

LOST_CONNECTIONS = frozenset({"broker drops", "broker loses replies"})
RENEWING = frozenset({"redis", "sqs"})
"""Brokers whose messages a worker renews: it may lose its connection, and must not stand still."""

LASTING = frozenset({"slow", "too_long"})
LASTING_SECONDS, QUICK_SECONDS = 3.0, 0.3

NOT_STORED = "its result could not be stored, so Celery never ended it"
HELD = "its result could not be stored, and its worker kept it for longer than leases"

RETRYING = frozenset({"retries", "autoretries"})


@dataclass(frozen=True, slots=True)
class Mark:
    """One line that a task left: which execution, in which process of which worker, when."""

    task_id: str
    retries: int
    pid: int
    worker: int
    at: float

    @property
    def key(self) -> Key:
        """The limited unit: task id and retries."""
        return self.task_id, self.retries


@dataclass(slots=True)
class Published:
    """A message the runner published: its kind, how often it tried, whether it was confirmed."""

    kind: str
    attempts: int = 0
    confirmed: bool = False


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
    """

    worker: int
    asked_at: float
    at: float
    cold: bool
    how: int = 0
    alone: bool = False
    asked: bool = False
    hung: bool = False


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
    lease_seconds: float = 8.0
    plain: bool = False
    left: set[str] = field(default_factory=set)  # task ids of queued and unacknowledged messages
    received: list[Logged] = field(default_factory=list)
    succeeded: list[Logged] = field(default_factory=list)
    doubles: Counter[str] = field(default_factory=Counter)
    uncounted: Counter[str] = field(default_factory=Counter)
    ended: list[Ended] = field(default_factory=list)
    spells: list[Spell] = field(default_factory=list)
    slots: dict[int, str] = field(default_factory=dict)  # of the workers' process ids
    copies: Counter[Key] = field(default_factory=Counter)
    vanished: Counter[Key] = field(default_factory=Counter)
    stored: dict[str, list[float]] = field(default_factory=dict)  # when its letters were, by task
    visibility_seconds: float | None = None


@dataclass(slots=True)
class Books:
    """The balance.

    Attributes:
        counts: What happened, in numbers.
        faults: What must not be; task ids with details, by kind of fault.
        explained: What at-least-once and the documented exceptions allow, in the same form.
    """

    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    explained: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def balanced(self) -> bool:
        """True if nothing happened that must not."""
        return not any(self.faults.values())


class Balance:
    """Balances the books of one run.

    Args:
        facts: What is known.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.books = Books()
        self.starts: dict[Key, list[Mark]] = defaultdict(list)
        for mark in sorted(facts.starts, key=lambda m: m.at):
            self.starts[mark.key].append(mark)
        self.ends = Counter(mark.key for mark in facts.ends)
        self._end_marks: dict[Key, list[Mark]] = defaultdict(list)
        for mark in sorted(facts.ends, key=lambda m: m.at):
            self._end_marks[mark.key].append(mark)
        self.succeeded = {mark.task_id for mark in facts.ends}
        self.letters: dict[str, list[DeadLetter]] = defaultdict(list)
        for letter in facts.letters:
            self.letters[letter.task_id].append(letter)
        self.ended = {e.worker: e for e in facts.ended}
        self._logged_success = {(line.task_id, line.worker) for line in facts.succeeded}
        self._received: dict[tuple[str, int], list[float]] = defaultdict(list)
        for line in facts.received:
            self._received[line.task_id, line.worker].append(line.at)

    def __call__(self) -> Books:
        """Balance."""
        self._totals()
        for key, starts in self.starts.items():
            self._doubled(key, starts)
        for task_id, published in self.facts.published.items():
            self._outcome(task_id, published)
        if self.facts.plain:
            return self.books
        self._letters_once()
        self._hung()
        for key, starts in self.starts.items():
            self._bound(key, starts)
        for letter in self.facts.letters:
            self._charged(letter)
            self._reason(letter)
        for task_id in self.letters.keys() | self.succeeded:
            if task_id not in self.facts.published:
                self.books.faults["nobody published it"].append(task_id)
        return self.books

    # -- each of the rules ----------------------------------------------------------

    def _totals(self) -> None:
        facts = self.facts
        late = sum(self._after_letter(key, starts) for key, starts in self.starts.items())
        again = "started again though it can succeed"
        self.books.counts = {
            "published": sum(p.confirmed for p in facts.published.values()),
            "maybe published": sum(not p.confirmed for p in facts.published.values()),
            "published in several attempts": sum(p.attempts > 1 for p in facts.published.values()),
            "executions": len(facts.starts),
            "succeeded": len(self.succeeded & facts.published.keys()),
            "successes": len(facts.ends),
            "letters": len(facts.letters),
            "succeeded, and a letter": len(self.succeeded & self.letters.keys()),
            "executions after the letter was stored": late,
            "redeliveries while running, not charged": sum(facts.doubles.values()),
            "starts while the store was silent": sum(facts.uncounted.values()),
            again: 0,
            "worker processes ended": len(facts.ended),
            "of these killed by their tasks": sum(e.alone and e.how < 0 for e in facts.ended),
            "of these with an error of their own": sum(e.alone and e.how > 0 for e in facts.ended),
            "of these killed because they did not": sum(e.hung for e in facts.ended),
        }

    def _outcome(self, task_id: str, published: Published) -> None:
        """Success or a letter: one of the two."""
        letters, success = self.letters.get(task_id, []), task_id in self.succeeded
        if not letters and not success:
            self._nothing(task_id, published)
        if letters and success:
            said = ", ".join(_described(letter) for letter in letters)
            self.books.explained["succeeded, and a letter"].append(
                f"{task_id} {published.kind}: {said}; {self._marks_of(task_id)}"
            )
        if len(letters) > 1:
            said = ", ".join(_described(letter) for letter in letters)
            twice = published.kind in RETRYING and len({x.retries for x in letters}) == len(letters)
            where = self.books.explained if twice else self.books.faults
            where["letters of several retries of one task"].append(f"{task_id}: {said}")

    def _nothing(self, task_id: str, published: Published) -> None:
        where = f"{task_id} {published.kind}: {self._marks_of(task_id)}"
        gone = [key for key in self.facts.vanished if key[0] == task_id]
        if task_id in self.facts.left:
            self.books.explained["still queued or unacknowledged"].append(where)
        elif self.facts.plain:
            self.books.explained["plain Celery: lost"].append(where)
        elif not published.confirmed:
            self.books.explained["never published"].append(where)
        elif gone:
            self.books.explained["lost by the broker between its list and its hash"].append(where)
        else:
            self.books.faults["lost"].append(where)

    def _letters_once(self) -> None:
        keys = Counter((x.task_id, x.retries, x.redrives) for x in self.facts.letters)
        self.books.faults["two letters of one message"].extend(
            f"{key}" for key, count in keys.items() if count > 1
        )

    def _bound(self, key: Key, starts: Sequence[Mark]) -> None:
        """At most max_deliveries starts, apart from the documented exceptions."""
        most = self.facts.max_deliveries
        if len(starts) <= most:
            return
        extra = len(starts) - most
        causes = {
            "the message succeeded before": most * self.ends[key],
            "several messages with one key": most * (self._copies(key) - 1),
            "it still ran on another worker": sum(
                self._ran_elsewhere(starts[:at], mark) for at, mark in enumerate(starts)
            ),
            "the store was silent": sum(self._is_silent(mark.at) for mark in starts),
            "counted by a worker that ended before the store took it": sum(
                self._is_forgotten(mark) for mark in starts
            ),
            "a cold shutdown": sum(self._shut_down(mark) for mark in starts),
            "a copy older than the visibility timeout": sum(self._is_stale(m) for m in starts),
        }
        line = f"{key[0]} retry {key[1]}: {extra} more than {most}; {self._marks_of(key[0])}"
        if self._after_letter(key, starts) > causes["several messages with one key"]:
            self.books.faults["executed again after its letter was stored"].append(line)
            return
        free = causes["the message succeeded before"] + causes["several messages with one key"]
        alone = Counter((mark.worker, self._is_silent(mark.at)) for mark in starts)
        if max(alone.values()) > most and not free:
            self.books.faults["started too often by one worker alone"].append(line)
            return
        if extra > sum(causes.values()):
            inside = self._inside_pool(key, starts)
            name = "executed again inside the pool, without a dispatch"
            self.books.faults[name if extra <= inside else "started too often"].append(line)
            return
        for cause, count in causes.items():
            if count:
                self.books.explained[f"more starts: {cause}"].append(line)

    def _doubled(self, key: Key, starts: Sequence[Mark]) -> None:
        """Each start but the first of a message that can succeed has a cause."""
        published = self.facts.published.get(key[0])
        if published is None or EXPECTED[published.kind] is not None:
            return
        copies = self._copies(key) - 1
        for at in range(1, len(starts)):
            cause = self._why_again(starts[:at], starts[at])
            if not cause and copies > 0:
                cause, copies = "it was published more than once", copies - 1
            what = f"{published.kind}: start {at + 1} in {starts[at].worker}"
            line = f"{key[0]} retry {key[1]}: {what}; {self._marks_of(key[0])}"
            self.books.counts["started again though it can succeed"] += 1
            if (cause and cause != HELD) or self.facts.plain:
                self.books.explained[f"again: {cause or 'no cause'}"].append(line)
            else:
                self.books.faults[cause or "started again without a cause"].append(line)

    def _why_again(self, before: Sequence[Mark], start: Mark) -> str:
        """Why a message was given out again after some starts; nothing if that is not known."""
        for earlier in reversed(before):
            slot = self.facts.slots.get(earlier.worker, "")
            last = max([earlier.at, *self._ends_of(earlier)])
            ended = self.ended.get(earlier.worker)
            if (
                ended is not None
                and (ended.how != 0 or ended.cold)
                and self._began_to_end(ended) <= min(last + ACKNOWLEDGED_SECONDS, start.at)
            ):
                return "its worker ended"
            spells = [
                spell
                for spell in self.facts.spells
                if spell.slot in ("", slot)
                and spell.meets(earlier.at - 1.0, min(last + ACKNOWLEDGED_SECONDS, start.at))
            ]
            renewed = self.facts.broker in RENEWING and not self.facts.plain
            if not renewed and any(spell.what in LOST_CONNECTIONS for spell in spells):
                return "its connection was lost"
            still = self.facts.lease_seconds - 1.0
            if any(
                s.what == "stop" and s.slot == slot and s.end - s.begin > still
                for s in self.facts.spells
                if s.meets(earlier.at - 1.0, start.at)
            ):
                return "its worker stood still for longer than its lease"
            logged = (earlier.task_id, earlier.worker) in self._logged_success
            if not logged and any(spell.what in NOT_HEARD for spell in spells):
                return HELD if self._was_held(earlier) else NOT_STORED
        return ""

    def _began_to_end(self, ended: Ended) -> float:
        """When it was asked, or killed; by its own task it was right after that began."""
        if not ended.alone:
            return ended.asked_at
        marks = [m.at for m in (*self.facts.starts, *self.facts.ends) if m.worker == ended.worker]
        return max(marks, default=ended.asked_at)

    def _was_held(self, start: Mark) -> bool:
        """It came back long after a lease, though its worker had neither ended nor stood still."""
        if self.facts.broker not in RENEWING or self.facts.plain:
            return False
        last = max([start.at, *self._ends_of(start)])
        ended = self.ended.get(start.worker)
        # What is queued behind others is received late, too: only what its worker kept counts.
        back = min(
            [
                line.at
                for line in self.facts.received
                if line.task_id == start.task_id and line.at > last
            ],
            default=last,
        )
        freed = back if ended is None else min(back, ended.at)
        away = sum(
            min(spell.end, freed) - max(spell.begin, last)
            for spell in self.facts.spells
            if spell.what in REFUSING | {"pause", "stop"} and spell.meets(last, freed)
        )
        return freed - last - away > 3 * self.facts.lease_seconds + REST_SECONDS

    def _hung(self) -> None:
        """Who is asked to end does, unless the servers did not answer for most of the time."""
        for ended in self.facts.ended:
            if not ended.hung:
                continue
            slot = self.facts.slots.get(ended.worker, "")
            spells = [
                spell
                for spell in self.facts.spells
                if spell.slot in ("", slot)
                and spell.what != "redis is impatient"
                and spell.meets(ended.asked_at - AGAIN_SECONDS, ended.at)
            ]
            free, since = 0.0, ended.asked_at
            for spell in sorted(spells, key=lambda s: s.begin):
                free += max(0.0, spell.begin - since)
                since = max(since, spell.end + AGAIN_SECONDS)
            free += max(0.0, ended.at - since)
            how = "SIGQUIT" if ended.cold else "SIGTERM"
            where = self.books.faults if free > FREE_SECONDS else self.books.explained
            where["did not end when it was asked to"].append(
                f"{slot} {ended.worker} by {how} at {ended.asked_at:.2f}, {free:.1f} s free; "
                f"{sorted({spell.what for spell in spells})}"
            )

    def _charged(self, letter: DeadLetter) -> None:
        """No letter has more deliveries than there were starts."""
        starts = self.starts.get((letter.task_id, letter.retries), [])
        missing = letter.deliveries - len(starts)
        published = self.facts.published.get(letter.task_id)
        if missing <= 0 or (published and published.kind == "poison"):
            return  # one that cannot be given to a process is counted, or it would come forever
        line = f"{letter.task_id}: {_described(letter)}, {len(starts)} starts; {_history(letter)}"
        early = [d for d in self._unmatched(letter, starts) if self._died_near(d)]
        # The store was silent at their start, so they were added to the count afterwards.
        unknown = letter.deliveries - len(letter.history)
        if len(early) >= missing:
            self.books.explained["counted, then killed before its first line"].append(line)
        elif unknown >= missing and self._taken_as_often(letter):
            self.books.explained["dispatched in an outage, added later, never began"].append(line)
        else:
            self.books.faults["charged without a start"].append(line)

    def _reason(self, letter: DeadLetter) -> None:
        """The reason of its kind, or the marks of what happened to it instead."""
        published = self.facts.published.get(letter.task_id)
        if published is None:
            return
        expected = EXPECTED[published.kind]
        if letter.reason in (expected if isinstance(expected, frozenset) else (expected,)):
            return
        what = f"{published.kind}: {_described(letter)}"
        line = f"{letter.task_id} {what}; {self._marks_of(letter.task_id)}"
        if letter.reason is Reason.MAX_DELIVERIES_EXCEEDED:
            full = letter.deliveries == self.facts.max_deliveries
            fair = full and all(self._disturbed(d) for d in letter.history)
            starts = self.starts.get((letter.task_id, letter.retries), [])
            seldom = expected is None and len(starts) < letter.deliveries
            if letter.deliveries == 1:  # that once, the process died between count and start
                seldom = seldom and not all(self._killed(d) for d in letter.history)
            where = self.books.explained if fair and not seldom else self.books.faults
            name = "its workers ended under it"
            if not fair:
                name = "dead-lettered without its fault"
            elif seldom:
                name = "a bystander was dead-lettered, and had not even started each time"
            where[name].append(f"{line}; {_history(letter)}")
        elif letter.reason is Reason.RETRY_NOT_PUBLISHED and published.kind in RETRYING:
            self.books.explained["a retry could not be published"].append(line)
        elif letter.reason is Reason.FAILED and _is_about_redis(letter):
            self.books.explained["its result could not be stored"].append(line)
        else:
            self.books.faults["wrong reason"].append(f"{line}; {_history(letter)}")

    # -- what is known of a start -------------------------------------------------------

    def _inside_pool(self, key: Key, starts: Sequence[Mark]) -> int:
        """Number of starts in a worker for which it had received no message."""
        return sum(
            max(0, count - len(self._received[key[0], worker]))
            for worker, count in Counter(mark.worker for mark in starts).items()
        )

    def _after_letter(self, key: Key, starts: Sequence[Mark]) -> int:
        """Number of starts after the message's letter was stored."""
        died = [
            x.dead_lettered_at.timestamp()
            for x in self.letters.get(key[0], [])
            if x.retries == key[1]
        ]
        if not died:
            return 0
        # One that died while the store was silent is stored later, as the worker's log says.
        stored = [at for at in self.facts.stored.get(key[0], []) if at >= died[0] - 0.01]
        then = min(stored, default=died[0])
        return sum(mark.at > then and not self._is_silent(mark.at) for mark in starts)

    def _copies(self, key: Key) -> int:
        """Number of messages with one key: publishing is at least once, retries too."""
        task_id, retries = key
        known = self.facts.copies.get(key)
        if known:
            return known
        if retries:
            before = self.starts.get((task_id, retries - 1), [])
            return max(1, sum(1 + self._published_again(mark) for mark in before))
        published = self.facts.published.get(task_id)
        return published.attempts if published else 1

    def _published_again(self, start: Mark) -> int:
        """How often its retry was published over a connection that was lost, and so once more."""
        blocked = [s.end for s in self.facts.spells if s.what == "broker blocks"]
        until = max([start.at, *(at for at in blocked if at - start.at < NEAR_SECONDS)])
        slot = self.facts.slots.get(start.worker)
        return sum(
            spell.meets(start.at, until + ACKNOWLEDGED_SECONDS)
            for spell in self.facts.spells
            if spell.what in LOST_CONNECTIONS and spell.slot in ("", slot)
        )

    def _taken_as_often(self, letter: DeadLetter) -> bool:
        """Workers took the message as often as it is charged, and once before an outage ended."""
        died = letter.dead_lettered_at.timestamp()
        times = [line.at for line in self.facts.received if line.task_id == letter.task_id]
        often = len([at for at in times if at <= died]) >= letter.deliveries + letter.retries
        return often and any(
            spell.begin <= died and any(at <= spell.end + REST_SECONDS for at in times)
            for spell in self.facts.spells
            if spell.what in REFUSING
        )

    def _is_silent(self, at: float, kinds: frozenset[str] = SILENT) -> bool:
        """True while Redis did not answer, or a little later."""
        return any(
            spell.meets(at - REST_SECONDS, at + 0.5)
            for spell in self.facts.spells
            if spell.what in kinds
        )

    def _is_forgotten(self, start: Mark) -> bool:
        """The store refused its count, and its worker ended before it was added."""
        ended = self.ended.get(start.worker)
        return (
            ended is not None
            and not self._is_silent(start.at)
            and self._is_silent(start.at, REFUSING)
            and self._is_silent(ended.asked_at, REFUSING)
        )

    def _ran_elsewhere(self, before: Sequence[Mark], start: Mark) -> bool:
        """An earlier execution had not ended in a process that lived."""
        return any(
            self._lives(mark, start.at) and not any(at < start.at for at in self._ends_of(mark))
            for mark in before
            if mark.pid != start.pid
        )

    def _lives(self, mark: Mark, at: float) -> bool:
        """True if a task may run then: its worker had not ended, nor its time passed."""
        kind = (
            self.facts.published[mark.task_id].kind if mark.task_id in self.facts.published else ""
        )
        ended = self.ended.get(mark.worker)
        gone = ended is not None and ended.at < at
        slot = self.facts.slots.get(mark.worker)
        stood = sum(
            spell.end - spell.begin
            for spell in self.facts.spells
            if spell.what in ("pause", "stop") and spell.slot == slot and spell.meets(mark.at, at)
        )
        lasts = LASTING_SECONDS if kind in LASTING else QUICK_SECONDS
        return not gone and at - mark.at < lasts + stood

    def _ends_of(self, start: Mark) -> list[float]:
        """When a start's process came to its end."""
        return [
            mark.at
            for mark in self._end_marks[start.key]
            if mark.pid == start.pid and mark.at >= start.at
        ][:1]

    def _shut_down(self, start: Mark) -> bool:
        """A cold shutdown ended this start."""
        ended = self.ended.get(start.worker)
        if ended is None or not ended.cold or start.at > ended.at + 0.5:
            return False
        if self._ends_of(start) or start.at < ended.asked_at - NEAR_SECONDS:
            return False
        recorded = any(
            delivery.outcome is Outcome.SHUTDOWN
            and -0.05 <= start.at - delivery.started_at.timestamp() <= NEAR_SECONDS
            for letter in self.letters.get(start.task_id, [])
            for delivery in letter.history
        )
        return recorded or self._lives(start, ended.asked_at)

    def _is_stale(self, start: Mark) -> bool:
        """It waited in its worker for so long that Redis gave the message to another one."""
        if self.facts.visibility_seconds is None:
            return False
        times = [at for at in self._received[start.task_id, start.worker] if at <= start.at + 0.5]
        return any(start.at - at > self.facts.visibility_seconds - 0.5 for at in times[-1:])

    def _unmatched(self, letter: DeadLetter, starts: Sequence[Mark]) -> list[Any]:
        """Deliveries in a letter's history without a mark."""
        left = [mark.at for mark in starts]
        missing = []
        # The latest first: it has the least choice. A letter's own order is that of its workers'
        # clocks, of which one is wrong.
        for delivery in sorted(letter.history, key=lambda d: d.started_at, reverse=True):
            if delivery.retries != letter.retries or delivery.outcome is Outcome.SHUTDOWN:
                continue
            began = delivery.started_at.timestamp()
            found = next((at for at in left if began - 0.05 <= at <= began + NEAR_SECONDS), None)
            if found is None:
                missing.append(delivery)
            else:
                left.remove(found)
        return missing

    def _died_near(self, delivery: Any) -> bool:
        """Its worker ended soon after the delivery was counted."""
        began = delivery.started_at.timestamp()
        return any(
            began - 0.5 <= ended.at and ended.asked_at <= began + NEAR_SECONDS
            for ended in self.facts.ended
            if delivery.worker_pid in (None, ended.worker) or delivery.outcome is Outcome.VANISHED
        )

    def _killed(self, delivery: Any) -> bool:
        """Its worker was killed soon after the delivery was counted, and not asked to end first."""
        began = delivery.started_at.timestamp()
        return any(
            ended.how == -SIGKILL
            and not ended.asked
            and began - 0.5 <= ended.at <= began + NEAR_SECONDS
            for ended in self.facts.ended
            if ended.worker == delivery.worker_pid
        )

    def _disturbed(self, delivery: Any) -> bool:
        """Something happened to the delivery that is not the task's doing."""
        return delivery.outcome in (Outcome.SHUTDOWN, Outcome.WORKER_LOST, Outcome.RETRIED) or (
            self._died_near(delivery) or self._is_silent(delivery.started_at.timestamp(), NOT_HEARD)
        )

    def _marks_of(self, task_id: str) -> str:
        """All executions of a task in one line."""
        marks = sorted(
            [(m.at, "start", m) for m in self.facts.starts if m.task_id == task_id]
            + [(m.at, "end", m) for m in self.facts.ends if m.task_id == task_id],
            key=lambda item: item[0],
        )
        shown = [f"{at:.2f} {what}{m.retries} in {m.worker}" for at, what, m in marks]
        return f"[{'; '.join(shown)}]" if shown else "[never started]"


def _described(letter: DeadLetter) -> str:
    at = letter.dead_lettered_at.timestamp()
    counts = f"{letter.deliveries} deliveries, retry {letter.retries}"
    return f"{letter.reason.value} at {at:.2f}, {counts}"


def _history(letter: DeadLetter) -> str:
    return "history " + ", ".join(
        f"{d.started_at.timestamp():.2f} {d.outcome and d.outcome.value} in {d.worker_pid}"
        for d in letter.history
    )


def _is_about_redis(letter: DeadLetter) -> bool:
    text = f"{letter.exception_type} {letter.exception_message} {letter.traceback}".lower()
    return any(word in text for word in ("redis", "kombu", "amqp", "botocore", "connection"))


def read_marks(lines: Iterable[str]) -> list[Mark]:
    """The marks in a file."""
    marks = []
    for line in lines:
        task_id, retries, pid, worker, at = line.split()
        marks.append(Mark(task_id, int(retries), int(pid), int(worker), float(at)))
    return marks
