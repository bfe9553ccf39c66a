"""The books: every message that was published against every mark, letter and log line.

Pure functions of facts that were gathered when everything had come to rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from chaos.evidence import HELD, Evidence
from chaos.facts import Facts, Key, Mark, Published, name_of

from celery_dlq import DeadLetter, Reason

AGAIN_SECONDS = 1.0  # until a worker has a connection again
FREE_SECONDS = 7.0  # are enough to end, in two parts too

Ends = Reason | frozenset[Reason] | None

EXPECTED: dict[str, Ends] = {
    "quick": None,
    "slow": None,
    "long": None,
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

RETRYING = frozenset({"retries", "autoretries"})


@dataclass(slots=True)
class Books:
    """The balance.

    Attributes:
        counts: What happened, in numbers.
        faults: What must not be; publications with details, by kind of fault.
        explained: What at-least-once and the documented exceptions allow, in the same form.
    """

    counts: dict[str, int] = field(default_factory=dict)
    faults: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    explained: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))

    @property
    def balanced(self) -> bool:
        """True if nothing happened that must not."""
        return not any(self.faults.values())


class Balance(Evidence):
    """Balances the books of one run.

    Args:
        facts: What is known.
    """

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.books = Books()

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
            **{
                f"its task id was used before: {after}": sum(
                    p.after == after for p in facts.published.values()
                )
                for after in ("alive", "letter", "success")
            },
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
            again = len(letters) <= published.attempts
            where = self.books.explained if twice or again else self.books.faults
            name = "of what was published again" if again else "of several retries of one task"
            where[f"letters {name}"].append(f"{task_id}: {said}")

    def _nothing(self, task_id: str, published: Published) -> None:
        where = f"{task_id} {published.kind}: {self._marks_of(task_id)}"
        again = f", its task id used before: {published.after}" if published.after else ""
        if not again and name_of(task_id, 2) in self.facts.published:
            again = ", its task id used again"
        gone = [key for key in self.facts.vanished if key[0] == task_id]
        if task_id in self.facts.left:
            self.books.explained["still queued or unacknowledged"].append(where)
        elif self.facts.plain:
            self.books.explained[f"plain Celery: lost{again}"].append(where)
        elif not published.confirmed:
            self.books.explained["never published"].append(where)
        elif gone:
            self.books.explained["lost by the broker between its list and its hash"].append(where)
        else:
            self.books.faults[f"lost{again}"].append(where)

    def _letters_once(self) -> None:
        keys = Counter((x.task_id, x.retries, x.redrives) for x in self.facts.letters)
        self.books.faults["two letters of one message"].extend(
            f"{key}" for key, count in keys.items() if count > self._published(key[0])
        )

    def _published(self, task_id: str) -> int:
        """How often the publisher published a message: each time is a message of its own."""
        published = self.facts.published.get(task_id)
        return published.attempts if published else 1

    def _bound(self, key: Key, starts: Sequence[Mark]) -> None:
        """At most max_deliveries starts, apart from the documented exceptions."""
        most = self.facts.max_deliveries
        if len(starts) <= most:
            return
        extra = len(starts) - most
        causes = {
            # A retry is another message, and this one is over.
            "the message succeeded before": most
            * (self.ends[key] + ((key[0], key[1] + 1) in self.starts)),
            "several messages with one key": most * (self._copies(key) - 1),
            "it still ran on another worker": sum(
                self._ran_elsewhere(starts[:at], mark) for at, mark in enumerate(starts)
            ),
            "the store was silent": sum(self._is_silent(mark.at) for mark in starts),
            "counted by a worker that ended before the store took it": sum(
                self._is_forgotten(mark) for mark in starts
            ),
            "its count was lost, and its worker, at once": int(self._is_unsent(starts[0])),
            "a shutdown": sum(self._shut_down(mark) for mark in starts),
            "a copy older than the visibility timeout": sum(self._is_stale(m) for m in starts),
            "its worker had the message before another one got it": sum(
                self._had_it_before(mark) for mark in starts
            ),
        }
        line = f"{key[0]} retry {key[1]}: {extra} more than {most}; {self._marks_of(key[0])}"
        late = self._after_letter(key, starts) - causes["several messages with one key"]
        if late > causes["its worker had the message before another one got it"]:
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
            # Celery's handler of a cold shutdown fails in the event loop of gevent, and its prefork
            # pool waits for the rest of a result whose process a signal to the group has ended.
            celerys = ended.reading or (ended.cold and self.facts.pool == "gevent")
            fault = free > FREE_SECONDS and not celerys
            where = self.books.faults if fault else self.books.explained
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
            # A process may die between a count and the first line, and a start that was dispatched
            # while the store was away is added later: each explains one delivery.
            seldom = expected is None and len(starts) < letter.deliveries
            unseen = self._unmatched(letter, starts)
            added = letter.deliveries - len(letter.history)
            if len(unseen) + added == 1:
                known = self._killed(unseen[0]) if unseen else self._taken_as_often(letter)
                seldom = seldom and not known
            why = self._why_not_due(letter) if expected is None else ""
            due = fair and not seldom and not why
            where = self.books.explained if due else self.books.faults
            name = "its workers ended under it"
            if why:
                name = f"a healthy task was charged for {why}"
            elif not fair:
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
