"""Redrive: publish the original messages of letters again, then remove the letters.

1. The letters are selected, oldest first, up to the newest of when the job was made.
2. Those whose messages would be lost stay, and are counted by what they lack.
3. A canary, if there is one, redrives a few of them and watches how they end.
4. The others go in batches: in one step where broker and letters share a Redis database
   (`one_step`), with claims elsewhere (`claimed`).
5. After each batch the job's heartbeat saves the results, and the position up to which all is done.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import islice
from typing import Any, NamedTuple

from celery_dlq.errors import BrokerUnavailable, CorruptLetter, RedriveError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.headers import REPLACED_TASK_NESTING, whole_number
from celery_dlq.letters.record import Delivery, from_micros
from celery_dlq.operations.job import DONE, FAILED, STOPPED, CancelledError, JobRun
from celery_dlq.operations.redrive.canary import (
    PASSED,
    POLL_SECONDS,
    Canary,
    CanaryWatch,
    chosen,
)
from celery_dlq.operations.redrive.claimed import LEASE_SECONDS, TAKEN, Background, Claimed
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions
from celery_dlq.operations.redrive.one_step import MOST_BYTES, OneStep
from celery_dlq.operations.redrive.publisher import GrowingPace, Pace, Publisher
from celery_dlq.operations.redrive.select import (
    MAX_BATCH_BYTES,
    PositionRange,
    Progress,
    RawEntry,
    batches,
    select,
)
from celery_dlq.operations.results import REDRIVE_COUNTS, RedriveReport
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import ClaimState, Clock, MessageKey, Seed

_MAX_REFUSED_BATCHES = 20
_REFUSED_PER_BEAT = 500
_MOST_AT_ONCE = 100

MessageOf = Callable[[RawEntry, datetime], Outgoing]
CountedIn = Callable[[str | None, str, str], str]
Loss = Callable[[RawEntry], str]
Chooses = Callable[[RawEntry], bool]
HeldOf = Callable[[Sequence[tuple[MessageKey, Outgoing]]], Sequence[str]]


class Prepared(NamedTuple):
    """A letter that is ready to be redriven."""

    found: RawEntry
    message: Outgoing
    seed: Seed | None


class _BrokerGoneError(Exception):
    """The broker refused many batches in a row; raised instead of claiming more letters."""


class Redrive:
    """One redrive, from its first letter to its report."""

    def __init__(
        self,
        app: Any,
        store: Letters,
        run: JobRun,
        message_of: MessageOf,
        *,
        clock: Clock,
        loss: Loss | None = None,
        chooses: Chooses | None = None,
        counted_in: CountedIn | None = None,
        redriven: Callable[[str, Sequence[RawEntry], str], object] | None = None,
        held: HeldOf = lambda _messages: (),
        lease_seconds: float = LEASE_SECONDS,
    ) -> None:
        self.app = app
        self.store = store
        self.run = run
        self.held = held  # names the holds that have some of these messages
        self.report = RedriveReport(redrive_id=run.job.id, **_earlier(store, run))
        self._options: RedriveOptions = run.options
        self._message_of = message_of
        self._clock = clock
        self._loss = loss  # says why the message of a letter would be lost
        if self._options.keep_count and not self._options.force:
            self._loss = _with_used_up(loss)
        self._chooses = chooses
        self._counted_in = counted_in
        self._redriven = redriven
        self._lease_seconds = lease_seconds
        self._watch: CanaryWatch | None = None

    def redrive(
        self, progress: Progress | None = None, scanned: Progress | None = None
    ) -> RedriveReport:
        """Redrive the letters; see `DeadLetters.redrive`."""
        report, canary, limit = self.report, self._options.canary, self._options.limit
        with Background() as background, Publisher(self.app) as publisher:
            claimed = Claimed(self, publisher, background, self._lease_seconds)
            way = OneStep.of(self, publisher, claimed) or claimed
            try:
                if canary is not None and not canary.passed and not self._canary(way, canary):
                    report.state = STOPPED
                    return report
                left = None if limit is None else max(0, limit - report.touched)
                self._all(way, islice(self._safe(self._selected(scanned)), left), progress)
            except CancelledError as exc:
                report.state = exc.state
            except (_BrokerGoneError, BrokerUnavailable):
                report.state = FAILED
            else:
                report.state = DONE
            finally:
                way.interrupted()
        return report

    # -- for the ways to redrive a batch ------------------------------------------

    def beat(self, position: str | None = None) -> None:
        """Send the job's heartbeat, with the results so far; see `JobRun.beat`."""
        self.run.beat(self.report.counts(), position, failed=self.report.first_failures())

    def prepared(self, batch: Sequence[RawEntry]) -> Iterator[Prepared]:
        """The messages of letters; counts those that have none."""
        now = self._clock()
        for found in batch:
            try:
                message = self._message_of(found, now)
                seed = self._seed(found, message) if self._options.keep_count else None
            except CorruptLetter:
                self.report.corrupt += 1
            except RedriveError as exc:
                self.report.fail(found.key, str(exc))
            else:
                if self._watch is not None:
                    self._watch.before(message)
                yield Prepared(found, message, seed)

    def published(self, done: Sequence[Prepared]) -> None:
        """Make known that the broker has the messages of letters."""
        if self._watch is not None:
            self._watch.published(prepared.message for prepared in done)
        if self._redriven is not None and done:
            letters = [prepared.found for prepared in done]
            self._redriven(self.run.job.queue, letters, self.run.job.id)

    def key_of(self, message: Outgoing) -> MessageKey:
        """The key under which the redriven message is counted."""
        name = self.run.job.queue
        if self._counted_in is not None:
            came_from = name if self._options.to_queue is None else None
            name = self._counted_in(came_from, message.queue, str(message.headers.get("task")))
        return MessageKey(
            dead_letter_queue=name,
            task_id=message.task_id,
            redrives=message.redrives,
            nesting=whole_number(message.headers.get(REPLACED_TASK_NESTING)),
        )

    # -- letters ------------------------------------------------------------------

    def _selected(self, scanned: Progress | None = None) -> Iterator[RawEntry]:
        """The letters of the job that are left; beats for each page, for few may match."""
        run = self.run

        def page(entries: int) -> None:
            if scanned is not None:
                scanned(entries)
            if run.begun:
                self.beat()

        span = PositionRange(after=run.job.position, until=run.job.until)
        found = select(self.store, run.job.queue, run.where, span=span, scanned=page)
        return found if self._chooses is None else filter(self._chooses, found)

    def _safe(self, found: Iterable[RawEntry]) -> Iterable[RawEntry]:
        """The letters whose messages would not be lost; counts the others, which stay."""
        return found if self._loss is None else self._refusing(self._loss, found)

    def _refusing(self, loss: Loss, found: Iterable[RawEntry]) -> Iterator[RawEntry]:
        for one in found:
            began = time.monotonic()
            why = loss(one)
            if self.run.begun and time.monotonic() - began > POLL_SECONDS:  # it asked the broker
                self.beat()
            if not why:
                yield one
                continue
            self.report.refuse(why)
            if not self.report.refused % _REFUSED_PER_BEAT:
                self.run.beat(self.report.counts())

    def _all(
        self, way: OneStep | Claimed, found: Iterable[RawEntry], progress: Progress | None
    ) -> None:
        report, rate = self.report, self._options.rate
        if self._options.growing:
            growing = GrowingPace(self.beat)
            pace: Pace | GrowingPace = growing
            parts = _growing(found, growing)
        else:
            pace = Pace(rate, self.beat)
            parts = _batches(way, found, None if rate is None else max(1, min(100, int(rate))))
        refusals, settled = 0, self.run.job.position
        for batch in parts:
            self.beat()
            pace.wait(len(batch))  # before the claim, whose lease is short
            before = report.published + report.finished
            way.start(batch)
            self.beat(settled)  # of a batch that is still on its way, nothing is certain
            settled = batch[-1].position
            nothing = report.published + report.finished == before
            refusals = refusals + 1 if nothing and report.failures else 0
            if refusals >= _MAX_REFUSED_BATCHES:
                raise _BrokerGoneError
            if progress is not None:
                progress(len(batch))
        way.wait()

    def _canary(self, way: OneStep | Claimed, canary: Canary) -> bool:
        """Redrive a few letters and watch them; true to continue."""
        run, loss = self.run, self._loss
        found: Iterable[RawEntry] = self._selected()
        if loss is not None:
            found = (one for one in found if not loss(one))
        few = chosen(found, min(canary.letters, self._options.limit or canary.letters))
        if not few:
            return True
        self.beat()
        watch = self._watch = CanaryWatch(self, canary)
        letters = select(self.store, run.job.queue, LetterFilter(ids=frozenset(few)))
        try:
            for batch in _batches(way, letters):
                way.start(batch)
            way.wait()
        finally:
            self._watch = None
        result = watch.result()
        verdict = result.verdict(canary.max_failures)
        self.report.canary = {**result.to_json(), "verdict": verdict}
        run.tell(canary={**run.job.canary, "verdict": verdict})
        if verdict == PASSED:
            run.set_options(canary=replace(canary, passed=True))
            run.beat(now=True)
        return verdict == PASSED

    def _seed(self, found: RawEntry, message: Outgoing) -> Seed | None:
        """The count of earlier deliveries; forced, one less than its limit, or it would not run."""
        deliveries = int(found.fields.get(b"deliveries", b"0"))
        limit = int(found.fields.get(b"max_deliveries", b"0"))
        if limit:
            deliveries = min(deliveries, limit - 1)
        if deliveries <= 0:
            return None
        return Seed(self.key_of(message), deliveries, _last_delivery(found))


def _earlier(store: Letters, run: JobRun) -> dict[str, Any]:
    """The results of earlier runs of the job, whose processes may have been killed."""
    counts = {name: int(run.job.counts.get(name, 0)) for name in REDRIVE_COUNTS}
    if run.job.run > 1:
        noted = store.claims.redriven(run.job.queue, run.job.id)
        seen = {
            "published": sum(noted.get(state, 0) for state in TAKEN),
            "finished": noted.get(ClaimState.PUBLISHED, 0),
            "maybe_twice": noted.get(ClaimState.RECLAIMED, 0),
        }
        counts |= {name: max(counts[name], count) for name, count in seen.items()}
    return counts


def _batches(
    way: OneStep | Claimed, found: Iterable[RawEntry], most: int | None = None
) -> Iterator[list[RawEntry]]:
    max_bytes = MOST_BYTES if isinstance(way, OneStep) else MAX_BATCH_BYTES
    return batches(found, most or way.batch_size, max_bytes)


def _growing(found: Iterable[RawEntry], pace: GrowingPace) -> Iterator[list[RawEntry]]:
    """Batches of what may be published within about a second."""
    entries = iter(found)
    while batch := list(islice(entries, max(1, min(_MOST_AT_ONCE, int(pace.rate))))):
        yield batch


def _with_used_up(loss: Loss | None) -> Loss:
    """Refuse letters that have no delivery left, too; a kept count bounds."""

    def why_not(found: RawEntry) -> str:
        try:
            deliveries, limit = (
                int(found.fields.get(name, b"0")) for name in (b"deliveries", b"max_deliveries")
            )
        except ValueError:  # damaged: making its message says so
            deliveries = limit = 0
        if limit and deliveries >= limit:
            return (
                f"max_deliveries of {limit} is reached: redrive without keep_count, or with force "
                f"for one more delivery"
            )
        return loss(found) if loss is not None else ""

    return why_not


def _last_delivery(found: RawEntry) -> Delivery:
    try:
        history = found.letter().history
    except CorruptLetter:
        history = ()
    if history:
        return history[-1]
    died = from_micros(int(found.fields.get(b"dead_lettered_at", b"0")))
    return Delivery(
        number=1,
        started_at=died,
        ended_at=died,
        worker_hostname=found.text("worker_hostname"),
        release=found.text("release") or None,
    )
