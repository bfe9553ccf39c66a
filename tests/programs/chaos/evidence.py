"""What a run's facts say of one start: why it happened, whether it was ended, what disturbed it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from signal import SIGKILL
from typing import Any

from chaos.facts import Ended, Facts, Key, Mark, task_id_of

from celery_dlq import DeadLetter, Delivery, Outcome

NEAR_SECONDS = 15.0  # a death so soon after a start may have ended it
ACKNOWLEDGED_SECONDS = 3.0  # so long after its end a task's message is acknowledged
AT_ONCE_SECONDS = 1.0  # a worker sends again once a second what may be lost
LAST_TRY_SECONDS = 2.5  # so long a worker that ends tries to tell the store, at least
REST_SECONDS = 4.0  # so long after an outage workers may leave the store alone

SILENT = frozenset({"redis hangs", "redis dies", "descriptors"})
"""While the store is silent each worker counts alone; one without a descriptor cannot reach it."""

REFUSING = SILENT | {"redis refuses"}
NOT_HEARD = REFUSING | {"redis drops", "store loses replies"}
"""What a result, or a count, may be lost in."""

LOST_CONNECTIONS = frozenset({"broker drops", "broker loses replies", "broker is away"})
RENEWING = frozenset({"redis", "sqs"})
"""Brokers whose messages a worker renews: it may lose its connection, and must not stand still."""

LASTING_SECONDS = {"slow": 3.0, "too_long": 3.0, "long": 9.0}
QUICK_SECONDS = 0.3

NOT_STORED = "its result could not be stored, so Celery never ended it"
HELD = "its result could not be stored, and its worker kept it for longer than leases"


class Evidence:
    """Answers questions about starts; see README.md for what each may explain.

    Args:
        facts: What is known.
    """

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        # A Redis is broker, store and result backend, over one line.
        self._not_heard = NOT_HEARD | ({"broker is away"} if facts.broker == "redis" else set())
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
        self._logged_success: dict[tuple[str, int], list[float]] = defaultdict(list)
        for line in sorted(facts.succeeded, key=lambda line: line.at):
            self._logged_success[line.task_id, line.worker].append(line.at)
        self._received: dict[tuple[str, int], list[float]] = defaultdict(list)
        for line in facts.received:
            self._received[line.task_id, line.worker].append(line.at)

    def _why_again(self, before: Sequence[Mark], start: Mark) -> str:
        """Why a message was given out again after some starts; nothing if that is not known."""
        for earlier in reversed(before):
            slot = self.facts.slots.get(earlier.worker, "")
            published = self.facts.published.get(earlier.task_id)
            lasts = LASTING_SECONDS.get(published.kind if published else "", 0.0)
            last = max(self._ends_of(earlier), default=earlier.at + lasts)
            if self.facts.pool == "solo":
                last = self._turn_ends(earlier.worker, last)
            ended = self.ended.get(earlier.worker)
            by, soon = self._acknowledged_by(slot, last), last + ACKNOWLEDGED_SECONDS
            if (
                ended is not None
                # A warm shutdown waits for its tasks, and not for a broker that is away.
                and (ended.how != 0 or ended.cold or ended.alone or ended.group or by > soon)
                and self._began_to_end(ended) <= min(by, start.at)
            ):
                return "its worker ended"
            spells = [
                spell
                for spell in self.facts.spells
                if spell.slot in ("", slot)
                and spell.meets(earlier.at - 1.0, min(last + ACKNOWLEDGED_SECONDS, start.at))
            ]
            renewed = self.facts.broker in RENEWING and not self.facts.plain
            if self._had_it_before(start):
                return "its connection was lost"
            # A worker may notice late that its connection is lost, and run what it had read.
            not_settled = self.facts.not_settled.get(earlier.worker, ())
            if not renewed and (
                any(spell.what in LOST_CONNECTIONS for spell in spells)
                or any(earlier.at - 0.5 <= at <= last + ACKNOWLEDGED_SECONDS for at in not_settled)
            ):
                return "its connection was lost"
            still = self.facts.lease_seconds - 1.0
            # A reply of SQS may lie in the socket meanwhile, for less than its longest wait.
            ago = self.facts.lease_seconds if self.facts.broker == "sqs" else 1.0
            slots = {slot, self.facts.slots.get(start.worker)} if ago > 1.0 else {slot}
            if any(
                s.what == "stop" and s.slot in slots and s.end - s.begin > still
                for s in self.facts.spells
                if s.meets(earlier.at - ago, start.at)
            ):
                return "its worker stood still for longer than its lease"
            if self._success_logged_at(earlier, start.at) >= start.at and any(
                spell.what in self._not_heard for spell in spells
            ):
                return HELD if self._was_held(earlier) else NOT_STORED
        return ""

    def _success_logged_at(self, start: Mark, default: float) -> float:
        """When a start's worker logged its success; a log does not name the publication."""
        task_id = task_id_of(start.task_id)
        logged = self._logged_success.get((task_id, start.worker), ())
        others = [
            mark.at
            for key, marks in self.starts.items()
            if key != start.key and task_id_of(key[0]) == task_id
            for mark in marks
            if mark.worker == start.worker
        ]
        for at in logged:
            if at >= start.at and not any(start.at < other <= at for other in others):
                return at
        return default

    def _turn_ends(self, worker: int, last: float) -> float:
        """When a solo worker's loop turns after a task: not before those that follow at once."""
        first, marks = last, [mark for mark in self.facts.starts if mark.worker == worker]
        for mark in sorted(marks, key=lambda mark: mark.at):
            if first <= mark.at <= last + AT_ONCE_SECONDS:
                published = self.facts.published.get(mark.task_id)
                lasts = LASTING_SECONDS.get(published.kind if published else "", QUICK_SECONDS)
                last = max([last, *(self._ends_of(mark) or [mark.at + lasts])])
        return last

    def _acknowledged_by(self, slot: str, last: float) -> float:
        """When the end of a task has reached the broker: soon, or soon after that is back."""
        away = LOST_CONNECTIONS | (
            REFUSING | {"redis drops"} if self.facts.broker == "redis" else frozenset()
        )
        by = last + ACKNOWLEDGED_SECONDS
        for spell in sorted(self.facts.spells, key=lambda spell: spell.begin):
            if spell.what in away and spell.slot in ("", slot) and spell.meets(last, by):
                by = max(by, spell.end + ACKNOWLEDGED_SECONDS)
        return by

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
                if line.task_id == task_id_of(start.task_id) and line.at > last
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

    def _inside_pool(self, key: Key, starts: Sequence[Mark]) -> int:
        """Number of starts in a worker for which it had received no message."""
        return sum(
            max(0, count - len(self._received[task_id_of(key[0]), worker]))
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
        stored = [
            at for at in self.facts.stored.get(task_id_of(key[0]), []) if at >= died[0] - 0.01
        ]
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
        task_id = task_id_of(letter.task_id)
        times = [line.at for line in self.facts.received if line.task_id == task_id]
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

    def _is_unsent(self, first: Mark) -> bool:
        """A first count goes out without a reply; its worker sends again what may be lost.

        Unless that ended at once, too.
        """
        ended = self.ended.get(first.worker)
        return (
            ended is not None
            and ended.how < 0
            and self._began_to_end(ended) - first.at < AT_ONCE_SECONDS
            and any(
                spell.meets(first.at - AT_ONCE_SECONDS, first.at + AT_ONCE_SECONDS)
                for spell in self.facts.spells
                if spell.what in self._not_heard
            )
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
        lasts = LASTING_SECONDS.get(kind, QUICK_SECONDS)
        return not gone and at - mark.at < lasts + stood

    def _ends_of(self, start: Mark) -> list[float]:
        """When a start's process came to its end."""
        return [
            mark.at
            for mark in self._end_marks[start.key]
            if mark.pid == start.pid and mark.at >= start.at
        ][:1]

    def _had_it_before(self, start: Mark) -> bool:
        """Its worker had the message before RabbitMQ gave it to another one, and did not know.

        It stood still, and the message lay in its socket; or its connection was lost while the
        message waited for its turn. A first delivery starts without asking if it died elsewhere.
        """
        slot = self.facts.slots.get(start.worker)
        received = self._received[task_id_of(start.task_id), start.worker]
        since = max((at for at in received if at <= start.at + 0.5), default=start.at)
        if self.facts.broker not in ("classic", "quorum"):
            return False
        failed = self.facts.not_settled.get(start.worker, ())
        if any(start.at <= at <= start.at + ACKNOWLEDGED_SECONDS for at in failed):
            return True
        return any(
            (spell.what == "stop" and 0 <= start.at - spell.end <= AT_ONCE_SECONDS)
            or (spell.what in LOST_CONNECTIONS and spell.meets(since, start.at))
            for spell in self.facts.spells
            if spell.slot in ("", slot)
        )

    def _shut_down(self, start: Mark) -> bool:
        """A cold shutdown ended this start, or one that was asked of the whole process group."""
        ended = self.ended.get(start.worker)
        if ended is None or not (ended.cold or ended.group) or start.at > ended.at + 0.5:
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
        received = self._received[task_id_of(start.task_id), start.worker]
        times = [at for at in received if at <= start.at + 0.5]
        return any(start.at - at > self.facts.visibility_seconds - 0.5 for at in times[-1:])

    def _unmatched(self, letter: DeadLetter, starts: Sequence[Mark]) -> list[Any]:
        """Deliveries in a letter's history without a mark."""
        return [delivery for delivery, mark in self._matched(letter, starts) if mark is None]

    def _matched(
        self, letter: DeadLetter, starts: Sequence[Mark]
    ) -> list[tuple[Delivery, Mark | None]]:
        """The charged deliveries in a letter's history, each with the mark of its start."""
        left, matched = [*starts], []
        # The latest first: it has the least choice. A letter's own order is that of its workers'
        # clocks, of which one is wrong.
        for delivery in sorted(letter.history, key=lambda d: d.started_at, reverse=True):
            if delivery.retries != letter.retries or delivery.outcome is Outcome.SHUTDOWN:
                continue
            began = delivery.started_at.timestamp()
            found = next((m for m in left if began - 0.05 <= m.at <= began + NEAR_SECONDS), None)
            matched.append((delivery, found))
            if found is not None:
                left.remove(found)
        return matched

    def _why_not_due(self, letter: DeadLetter) -> str:
        """What a healthy task was charged for though its worker had not died; nothing if it had."""
        starts = self.starts.get((letter.task_id, letter.retries), [])
        charged = [
            self._why_not_charged(letter, mark)
            for delivery, mark in self._matched(letter, starts)
            if mark is not None and delivery.outcome is not Outcome.REQUEUED
        ]
        return next(filter(None, charged), "")

    def _why_not_charged(self, letter: DeadLetter, mark: Mark) -> str:
        """The worker lived and was heard: Celery itself ran the task to its end, or runs it again.

        Nothing if the worker may have been called dead with a reason.
        """
        slot, ended = self.facts.slots.get(mark.worker), self.ended.get(mark.worker)
        over = self._ends_of(mark)
        until = min([*over, letter.dead_lettered_at.timestamp()])
        asked = ended is not None and ended.group and not ended.hung
        if ended is not None and asked and mark.at <= ended.asked_at <= until and not over:
            # What the store has not taken when the worker has tried for three seconds is lost.
            silent = self._silent_for(slot, ended.asked_at, ended.at + AT_ONCE_SECONDS)
            return "" if silent > LAST_TRY_SECONDS else "a shutdown of its whole process group"
        if ended is not None and self._began_to_end(ended) <= until + ACKNOWLEDGED_SECONDS:
            return ""
        unheard = [
            spell
            for spell in self.facts.spells
            if spell.slot in ("", slot)
            and spell.what in self._not_heard | {"pause", "stop", "store is slow"}
            and spell.meets(mark.at - AT_ONCE_SECONDS, until + ACKNOWLEDGED_SECONDS)
        ]
        if unheard:
            return ""
        if (mark.task_id, mark.retries + 1) in self.starts:
            return "a start that was retried"
        return "its success" if over and over[0] <= until else "a start that still ran"

    def _silent_for(self, slot: str | None, begin: float, end: float) -> float:
        """The longest time in which the store did not hear a worker, of what meets a period."""
        met = [
            spell.end - spell.begin
            for spell in self.facts.spells
            if spell.slot in ("", slot)
            and spell.what in self._not_heard
            and spell.meets(begin, end)
        ]
        return max(met, default=0.0)

    def _died_near(self, delivery: Any) -> bool:
        """Its worker ended soon after the delivery was counted."""
        began = delivery.started_at.timestamp()
        return any(
            began - 0.5 <= ended.at and ended.asked_at <= began + NEAR_SECONDS
            for ended in self.facts.ended
            if delivery.worker_pid in (None, ended.worker) or delivery.outcome is Outcome.VANISHED
        )

    def _killed(self, delivery: Any) -> bool:
        """Its worker was killed soon after the delivery was counted: no time to give back."""
        began = delivery.started_at.timestamp()
        return any(
            ended.how == -SIGKILL
            and not ended.hung
            and (not ended.asked or ended.at - ended.asked_at < AT_ONCE_SECONDS)
            and began - 0.5 <= ended.at <= began + NEAR_SECONDS
            for ended in self.facts.ended
            if ended.worker == delivery.worker_pid
        )

    def _disturbed(self, delivery: Any) -> bool:
        """Something happened to the delivery that is not the task's doing."""
        return delivery.outcome in (Outcome.SHUTDOWN, Outcome.WORKER_LOST, Outcome.RETRIED) or (
            self._died_near(delivery)
            or self._is_silent(delivery.started_at.timestamp(), self._not_heard)
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
