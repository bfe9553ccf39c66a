"""Redrive, in batches: in one step where broker and letters share a Redis database.

Elsewhere: claim, publish, mark, remove; after a crash the next run finishes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from typing import Any, Protocol

from celery_dlq.errors import BrokerUnavailable, CorruptLetter, DLQError, RedriveError
from celery_dlq.letters.filters import LetterFilter
from celery_dlq.letters.headers import REPLACED_TASK_NESTING, whole_number
from celery_dlq.letters.printable import one_line, shortened
from celery_dlq.letters.record import Delivery, from_micros
from celery_dlq.operations.background import Background
from celery_dlq.operations.job import DONE, FAILED, STOPPED, Job
from celery_dlq.operations.jobs import CancelledError, JobRun
from celery_dlq.operations.redrive.canary import PASSED, Canary, CanaryResult, chosen
from celery_dlq.operations.redrive.message import Outgoing, RedriveOptions, outgoing
from celery_dlq.operations.redrive.one_step import MOST_BYTES, MOST_LETTERS, OneStep, Prepared
from celery_dlq.operations.redrive.publisher import (
    GrowingPace,
    Pace,
    Publisher,
    Sent,
    not_published,
)
from celery_dlq.operations.redrive.selection import PositionRange, RawEntry, batches, select
from celery_dlq.operations.results import RedriveReport
from celery_dlq.store.letters import Letters
from celery_dlq.store.records import ClaimState, Clock, MessageKey, QueueEntry, RedriveOutcome, Seed

LEASE_SECONDS = 60.0
MOST_DIED_IDS = 20
_POLL_SECONDS = 0.25
_MAX_REFUSED_BATCHES = 20
_MAX_MARKERS_SCANNED = 200_000
_MOST_FAILED = 20
_MAX_ERROR_CHARS = 300
_REFUSED_PER_BEAT = 500
_MOST_AT_ONCE = 100
_TAKEN = (ClaimState.CLAIMED, ClaimState.RECLAIMED)
_COUNTS = ("published", "finished", "maybe_twice", "skipped", "corrupt", "failures", "refused")

Progress = Callable[[int], object]
Transform = Callable[[Outgoing], Outgoing]
Confirmed = Callable[[str, Sequence[RawEntry], str], None]
CountedIn = Callable[[str | None, str, str], str]
Loss = Callable[[RawEntry], str]
Chooses = Callable[[RawEntry], bool]
HeldOf = Callable[[Sequence[tuple[MessageKey, Outgoing]]], Sequence[str]]


class MessageOf(Protocol):
    """Makes the message of a letter; see `celery_dlq.operations.redrive.message`."""

    def __call__(  # noqa: D102 - see above
        self, found: RawEntry, options: RedriveOptions, *, redrive_id: str, now: datetime
    ) -> Outgoing: ...


class _BrokerGoneError(Exception):
    """The broker refused many batches in a row; raised instead of claiming more letters."""


@dataclass(slots=True, kw_only=True)
class Work:
    """The state of a running redrive."""

    queue: str  # The dead-letter queue
    options: RedriveOptions  # The options of the redrive
    run: JobRun  # The job
    report: RedriveReport  # The results so far
    transform: Transform | None = None  # Changes each message before it is published
    # Says why the message of a letter would be lost; `None` if nobody asks
    loss: Loss | None = None
    due: Chooses | None = None  # Chooses among the letters of an automatic redrive; `None` for all
    background: Background  # Removes letters that were published step by step
    one_step: OneStep | None = None  # Publishes and removes them, if both are in one database
    # The messages published so far, if they are to be watched
    published: list[Outgoing] | None = None

    def counts(self) -> dict[str, int]:
        """The numbers of the report, for the job."""
        return {name: getattr(self.report, name) for name in _COUNTS}

    def beat(self, position: str | None = None) -> None:
        """Send the job's heartbeat, with the results so far; see `JobRun.beat`."""
        self.run.beat(self.counts(), position, failed=first_failures(self.report))

    def scanned(self, tell: Progress | None) -> Progress:
        """What to call for each page read: a filter that seldom matches must not end the beats."""

        def page(entries: int) -> None:
            if tell is not None:
                tell(entries)
            if self.run.begun:
                self.beat()

        return page


class Claims:
    """The letters of a batch that are ours while their messages are published.

    A slow broker may let a batch outlast its lease, and a paused machine the patience of others
    with its job: so both are renewed, and asked for again, between two messages.
    """

    def __init__(
        self, store: Letters, work: Work, letter_ids: Sequence[str], lease_seconds: float
    ) -> None:
        self._store = store
        self._work = work
        self._lease = lease_seconds
        self._states = self._claimed(letter_ids)
        self.reclaimed = self.of(ClaimState.RECLAIMED)
        self.lost: set[str] = set()

    def of(self, state: ClaimState) -> list[str]:
        """The letters that were found in a state at first."""
        return [letter_id for letter_id, found in self._states.items() if found is state]

    def has(self, letter_id: str) -> bool:
        """True for a letter that is ours."""
        return self._states[letter_id] in _TAKEN and letter_id not in self.lost

    def keep(self, waiting_for: str = "") -> None:
        """Renew job and claims when it is time."""
        self._work.run.tell(note=waiting_for)
        self._work.beat()
        if time.monotonic() - self._claimed_at < self._lease / 4:
            return
        ours = [letter_id for letter_id in self._states if self.has(letter_id)]
        for letter_id, state in self._claimed(ours).items():
            if state is ClaimState.HELD:
                self.lost.add(letter_id)

    def _claimed(self, letter_ids: Sequence[str]) -> dict[str, ClaimState]:
        self._claimed_at = time.monotonic()  # before the store's clock starts the lease
        run = self._work.run
        states = self._store.claim(
            self._work.queue,
            letter_ids,
            owner=run.owner,
            lease_seconds=self._lease,
            previous_run_prefix=run.previous_run_prefix,
        )
        return dict(zip(letter_ids, states, strict=True))


class Redriver:
    """Publishes letters' original messages again and removes the letters."""

    def __init__(
        self,
        app: Any,
        store: Letters,
        clock: Clock,
        *,
        counted_in: CountedIn | None = None,
        lease_seconds: float = LEASE_SECONDS,
        confirmed: Confirmed | None = None,
        message_of: MessageOf = outgoing,
        held: HeldOf = lambda _messages: (),
    ) -> None:
        self._app = app
        self._store = store
        self._clock = clock
        self._counted_in = counted_in
        self._lease = lease_seconds
        self._confirmed = confirmed
        self._message_of = message_of
        self._held = held

    def redrive(
        self,
        run: JobRun,
        where: LetterFilter,
        options: RedriveOptions,
        *,
        canary: Canary | None = None,
        transform: Transform | None = None,
        loss: Loss | None = None,
        due: Chooses | None = None,
        progress: Progress | None = None,
        scanned: Progress | None = None,
    ) -> RedriveReport:
        """Run a job; see `DeadLetters.redrive`."""
        report = RedriveReport(redrive_id=run.job.id, **self._earlier(run))
        if options.keep_count and not options.force:
            loss = _with_used_up(loss)
        span = PositionRange(after=run.job.position, until=run.job.until)
        with Background() as background, Publisher(self._app) as publisher:
            work = Work(
                queue=run.job.queue,
                options=options,
                run=run,
                report=report,
                transform=transform,
                loss=loss,
                due=due,
                background=background,
                one_step=OneStep.of(self._store, run, publisher),
            )
            try:
                if canary is not None and not self._canary(publisher, work, where, canary):
                    report.state = STOPPED
                    return report
                left = None if options.limit is None else max(0, options.limit - report.touched)
                found = select(
                    self._store, work.queue, where, span=span, scanned=work.scanned(scanned)
                )
                self._all(publisher, work, islice(_safe(work, found), left), progress)
            except CancelledError as exc:
                report.state = exc.state
            except (_BrokerGoneError, BrokerUnavailable):
                report.state = FAILED
            else:
                report.state = DONE
            finally:
                self._interrupted(work)
        return report

    def _all(
        self, publisher: Publisher, work: Work, found: Iterable[RawEntry], progress: Progress | None
    ) -> None:
        rate = work.options.rate
        most = None if rate is None else max(1, min(100, int(rate)))
        pace: Pace | GrowingPace = Pace(rate, work.beat)
        parts = self._batches(publisher, work, found, most)
        if work.options.growing:
            pace = growing = GrowingPace(work.beat)
            parts = _growing(found, growing)
        refusals, settled = 0, work.run.job.position
        for batch in parts:
            work.beat()
            pace.wait(len(batch))  # before the claim, whose lease is short
            before = work.report.published + work.report.finished
            self._batch(publisher, work, batch)
            work.beat(settled)
            settled = batch[-1].position
            nothing = work.report.published + work.report.finished == before
            refusals = refusals + 1 if nothing and work.report.failures else 0
            if refusals >= _MAX_REFUSED_BATCHES:
                raise _BrokerGoneError
            if progress is not None:
                progress(len(batch))
        self._wait(publisher, work)

    def _batches(
        self, publisher: Publisher, work: Work, found: Iterable[RawEntry], most: int | None = None
    ) -> Iterator[list[RawEntry]]:
        if work.one_step is None:
            return batches(found, most or publisher.batch_size)
        return batches(found, most or MOST_LETTERS, MOST_BYTES)

    def _batch(self, publisher: Publisher, work: Work, batch: Sequence[RawEntry]) -> None:
        """Redrive some letters; the end may follow in the background."""
        if work.one_step is None:
            self._step_by_step(publisher, work, batch)
        else:
            self._in_one_step(publisher, work, work.one_step, batch)

    def _wait(self, publisher: Publisher, work: Work) -> None:
        """Wait for what is done in the background."""
        self._finish(publisher, work)
        work.background.wait()

    def _earlier(self, run: JobRun) -> dict[str, Any]:
        """The results of earlier runs of the job, whose processes may have been killed."""
        counts = {name: int(run.job.counts.get(name, 0)) for name in _COUNTS}
        if run.job.run > 1:
            told = self._store.redriven(run.job.queue, run.job.id)
            seen = {
                "published": sum(told.get(state, 0) for state in _TAKEN),
                "finished": told.get(ClaimState.PUBLISHED, 0),
                "maybe_twice": told.get(ClaimState.RECLAIMED, 0),
            }
            counts |= {name: max(counts[name], count) for name, count in seen.items()}
        return counts

    # -- in one step --------------------------------------------------------------

    def _in_one_step(
        self, publisher: Publisher, work: Work, one_step: OneStep, batch: Sequence[RawEntry]
    ) -> None:
        """Prepare some letters while the batch before is on its way, then send them."""
        ready: list[Prepared] = []
        entries: list[QueueEntry] = []
        for prepared in self._prepared(work, batch):
            try:
                entries.append(one_step.entry(prepared))
            except (TypeError, ValueError) as exc:
                work.report.fail(prepared.found.key, not_published(prepared.message, exc))
            else:
                ready.append(prepared)
        self._finish(publisher, work)
        queues = {prepared.message.queue for prepared in ready}
        if work.one_step is None or not one_step.takes(publisher, queues):
            self._step_by_step(publisher, work, [prepared.found for prepared in ready])
        elif ready:
            one_step.start(ready, entries)

    def _finish(self, publisher: Publisher, work: Work) -> None:
        """Count the last batch that went in one step; if it was refused, go step by step."""
        if work.one_step is None:
            return
        batch, states = work.one_step.finish()
        if states is None:
            work.one_step = None
            self._step_by_step(publisher, work, [prepared.found for prepared in batch])
        else:
            self._count(work, batch, states)

    def _count(self, work: Work, batch: Sequence[Prepared], states: Sequence[ClaimState]) -> None:
        report = work.report
        done = [prepared for prepared, state in zip(batch, states, strict=True) if state in _TAKEN]
        report.published += len(done)
        report.maybe_twice += states.count(ClaimState.RECLAIMED)
        report.finished += states.count(ClaimState.PUBLISHED)
        report.skipped += states.count(ClaimState.HELD) + states.count(ClaimState.GONE)
        if work.published is not None:
            work.published += [prepared.message for prepared in done]
        self._tell(work, [prepared.found for prepared in done])

    def _interrupted(self, work: Work) -> None:
        """Count a batch that was on its way when an error or Ctrl-C ended the redrive."""
        if work.one_step is not None:
            with suppress(DLQError, CancelledError):  # the first error is the one to raise
                batch, states = work.one_step.finish()
                if batch and states is not None:
                    self._count(work, batch, states)
                    work.beat()

    # -- step by step -------------------------------------------------------------

    def _step_by_step(self, publisher: Publisher, work: Work, batch: Sequence[RawEntry]) -> None:
        """Redrive some letters; their claims record every result for the next run."""
        self._finish(publisher, work)
        queue, owner, report, sent = work.queue, work.run.owner, work.report, Sent()
        claims = Claims(self._store, work, [found.key for found in batch], self._lease)
        finished = claims.of(ClaimState.PUBLISHED)
        ours = [found for found in batch if claims.has(found.key)]
        report.finished += len(finished)
        report.skipped += len(batch) - len(finished) - len(ours)
        messages: list[Outgoing] = []
        try:
            for prepared in self._prepared(work, ours):
                if prepared.seed is not None:
                    claims.keep()
                    self._store.seed(*prepared.seed)
                messages.append(prepared.message)
            publisher.publish(messages, sent, claims)
        finally:  # also on Ctrl-C
            self._settle(work, claims, finished, sent)
            confirmed = sent.confirmed_set
            if work.published is not None:
                work.published += [m for m in messages if m.letter_id in confirmed]
            self._tell(work, [found for found in ours if found.key in confirmed])
            unused = [found.key for found in ours if found.key not in confirmed]
            doubtful = [key for key in unused if key in sent.doubtful]
            certain = [key for key in unused if key not in sent.doubtful]
            self._store.release(queue, certain, owner=owner)
            self._store.release(queue, doubtful, owner=owner, doubtful=True)

    def _prepared(self, work: Work, batch: Sequence[RawEntry]) -> Iterator[Prepared]:
        now = self._clock()
        for found in batch:
            try:
                message = self._message_of(
                    found, work.options, redrive_id=work.report.redrive_id, now=now
                )
                if work.transform is not None:
                    message = work.transform(message)
                    message.headers_text = ""  # it may have changed them
                seed = self._seed(work, found, message) if work.options.keep_count else None
            except CorruptLetter:
                work.report.corrupt += 1
            except RedriveError as exc:
                work.report.fail(found.key, str(exc))
            else:
                yield Prepared(found, message, seed)

    def _tell(self, work: Work, taken: Sequence[RawEntry]) -> None:
        if self._confirmed is not None and taken:
            self._confirmed(work.queue, taken, work.report.redrive_id)

    def _settle(self, work: Work, claims: Claims, finished: list[str], sent: Sent) -> None:
        """Mark first, remove second: after a crash in between, only the removal is left."""
        report, over = work.report, [*finished, *sent.confirmed]
        report.published += len(sent.confirmed)
        report.maybe_twice += len(sent.again.union(claims.reclaimed) & sent.confirmed_set)
        report.doubtful += len(sent.doubtful)
        report.skipped += len(claims.lost - sent.confirmed_set)
        for letter_id, error in (*sent.refused.items(), *sent.doubtful.items()):
            report.fail(letter_id, error)
        self._store.mark_published(work.queue, over, owner=work.run.owner)
        # The store removes these while we prepare the next ones.
        work.background.start(lambda: self._store.remove(work.queue, over, owner=work.run.owner))

    def _seed(self, work: Work, found: RawEntry, message: Outgoing) -> Seed | None:
        """The count of earlier deliveries; forced, one less than its limit, or it would not run."""
        deliveries = int(found.fields.get(b"deliveries", b"0"))
        limit = int(found.fields.get(b"max_deliveries", b"0"))
        if limit:
            deliveries = min(deliveries, limit - 1)
        if deliveries <= 0:
            return None
        return Seed(self._key(work, message), deliveries, _last_delivery(found))

    def _key(self, work: Work, message: Outgoing) -> MessageKey:
        """The key under which the redriven message is counted."""
        name = work.queue
        if self._counted_in is not None:
            came_from = work.queue if work.options.to_queue is None else None
            name = self._counted_in(came_from, message.queue, str(message.headers.get("task")))
        return MessageKey(
            dead_letter_queue=name,
            task_id=message.task_id,
            redrives=message.redrives,
            nesting=whole_number(message.headers.get(REPLACED_TASK_NESTING)),
        )

    def _canary(
        self, publisher: Publisher, work: Work, where: LetterFilter, canary: Canary
    ) -> bool:
        """Redrive a few letters and watch them; true to continue."""
        span = PositionRange(after=work.run.job.position, until=work.run.job.until)
        letters = min(canary.letters, work.options.limit or canary.letters)
        found = select(self._store, work.queue, where, span=span, scanned=work.scanned(None))
        found = filter(work.due, found) if work.due is not None else found
        if work.loss is not None:
            found = (one for one in found if not work.loss(one))
        letter_ids = chosen(found, letters)
        if not letter_ids:
            return True
        few = select(self._store, work.queue, LetterFilter(ids=frozenset(letter_ids)))
        work.beat()
        watched = work.published = []
        inner = work.transform

        def watching(message: Outgoing) -> Outgoing:
            message = message if inner is None else inner(message)
            self._store.watch([self._key(work, message)])
            return message

        work.transform = watching
        try:
            for batch in self._batches(publisher, work, few):
                self._batch(publisher, work, batch)
            self._wait(publisher, work)
        finally:
            work.transform, work.published = inner, None
        result = self._watch(work, canary, watched)
        work.report.canary = result.to_json()
        verdict = result.verdict(canary.max_failures)
        work.report.canary["verdict"] = verdict
        work.run.tell(canary={**work.run.job.canary, "verdict": verdict})
        if verdict == PASSED:
            work.run.keep(canary={**canary.to_json(), "passed": True})
        return verdict == PASSED

    def _watch(self, work: Work, canary: Canary, watched: Sequence[Outgoing]) -> CanaryResult:
        keys = [self._key(work, message) for message in watched]
        began = time.monotonic()
        died_ids: list[str] = []
        died = 0
        while True:
            outcomes = self._store.outcomes(keys)
            ended = [
                RedriveOutcome.SUCCEEDED
                if outcome is RedriveOutcome.OPEN and self._succeeded(message.task_id)
                else outcome
                for message, outcome in zip(watched, outcomes, strict=True)
            ]
            left = [
                (key, message)
                for key, message, outcome in zip(keys, watched, ended, strict=True)
                if outcome is RedriveOutcome.OPEN
            ]
            result = CanaryResult.of(ended, self._held(left))
            if result.died > died and len(died_ids) < MOST_DIED_IDS:
                died_ids = [*islice(died_again(self._store, work.run.job), MOST_DIED_IDS)]
            died = result.died
            waited = time.monotonic() - began
            late = waited >= canary.wait_seconds
            work.run.tell(canary=_live(canary, result, waited, died_ids))
            if result.open <= result.held or result.died > canary.max_failures or late:
                return result
            work.beat()
            time.sleep(_POLL_SECONDS)

    def _succeeded(self, task_id: str) -> bool:
        """Ask the result backend; queues without a policy record no successes."""
        try:
            return bool(self._app.AsyncResult(task_id).state == "SUCCESS")
        except Exception:  # noqa: BLE001 - no result backend, or no answer: unknown
            return False


def first_failures(report: RedriveReport) -> dict[str, str]:
    """The first errors of a redrive, short, for its job."""
    first = islice(report.failed.items(), _MOST_FAILED)
    return {letter_id: shortened(one_line(error), _MAX_ERROR_CHARS) for letter_id, error in first}


def died_again(store: Letters, job: Job) -> Iterator[str]:
    """Ids of new letters whose headers name a redrive; scans a bounded number."""
    marker, scanned = f'"{job.id}"'.encode(), 0
    for page in store.fields(job.queue, after=job.until, until=None, page_size=500):
        for _position, fields in page:
            if marker in fields.get(b"headers", b""):
                yield fields.get(b"id", b"").decode("utf-8", "replace")
        scanned += len(page)
        if scanned >= _MAX_MARKERS_SCANNED:
            return


def _live(
    canary: Canary, result: CanaryResult, waited: float, died_ids: list[str]
) -> dict[str, Any]:
    """A canary that runs, for its job."""
    return {
        "letters": result.redriven,
        "succeeded": result.succeeded,
        "died": result.died,
        "open": result.open,
        "held": result.held,
        "holds": list(result.holds),
        "waited_seconds": round(waited, 1),
        "wait_seconds": canary.wait_seconds,
        "verdict": "running",
        "died_ids": died_ids,
    }


def _safe(work: Work, found: Iterable[RawEntry]) -> Iterable[RawEntry]:
    """The letters whose messages would not be lost; counts the others, which stay."""
    found = filter(work.due, found) if work.due is not None else found
    return found if work.loss is None else _refusing(work, work.loss, found)


def _refusing(work: Work, loss: Loss, found: Iterable[RawEntry]) -> Iterator[RawEntry]:
    for one in found:
        began = time.monotonic()
        why = loss(one)
        if work.run.begun and time.monotonic() - began > _POLL_SECONDS:  # it asked the broker
            work.beat()
        if not why:
            yield one
            continue
        work.report.refuse(why)
        if not work.report.refused % _REFUSED_PER_BEAT:
            work.run.beat(work.counts())


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


def _growing(found: Iterable[RawEntry], pace: GrowingPace) -> Iterator[list[RawEntry]]:
    """Batches of what may be published within about a second."""
    entries = iter(found)
    while batch := list(islice(entries, max(1, min(_MOST_AT_ONCE, int(pace.rate))))):
        yield batch
