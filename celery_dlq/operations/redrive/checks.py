"""What is checked before letters are redriven, and a dry run's report of it.

Every redrive looks up the queue and the task of each message, once for each of them, when its first
letter is met. Features add what they know: a hold, say, that has the messages.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from celery_dlq import timing
from celery_dlq.errors import DLQError, RedriveError
from celery_dlq.letters.links import is_in_chord
from celery_dlq.operations.redrive.message import Outgoing
from celery_dlq.operations.redrive.select import Progress, RawEntry
from celery_dlq.policies.queue_names import did_you_mean
from celery_dlq.registry import features
from celery_dlq.store.worker_records import MAX_TASKS, MessageKey, WorkerInfo
from celery_dlq.transport.publications import broker_name
from celery_dlq.transport.sqs.aws import queue_exists

if TYPE_CHECKING:
    from celery_dlq.operations.jobs import Jobs

_MAX_NAMES = 1000
_MOST_NAMES_SHOWN = 20
_MOST_EXAMPLES = 10

LookedUp = tuple[bool | None, str]
"""Whether something exists, ``None`` if that is unknown; and why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCheck:
    """A queue or task that a redrive needs."""

    name: str  # The queue or the task
    letters: int  # Number of letters that need it
    found: bool | None  # True if it exists; `None` if that is unknown
    why: str  # The place where it was found, or the places that were searched


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """The effect that a redrive would have, or a removal.

    Attributes:
        letters: Number of letters that it would publish or remove.
        corrupt: Number of entries that are no letters; a redrive would skip them.
        unread: Number of letters that it would leave, because a condition asks for their
            arguments, which cannot be read.
        bytes: Total size of the bodies.
        queues: The queues that it would publish to.
        tasks: The tasks that would run.
        waits_for: What stands in the way of their execution, with the number of letters: a hold,
            an open circuit breaker, a queue that no live worker consumes, a delay that is longer
            than the canary is watched.
        warnings: What else speaks against it: live workers of a release in which these letters
            died, the verdict of an earlier canary.
        notes: The newest note on each of the first causes, with who wrote it and when.
        chords: Number of letters whose message is a part of a chord. The chord fails with it, and
            the redrive does not run its body.
        used_up: Number of letters that stay with ``keep_count``: no delivery is left.
        claimed: Number of letters on which another command works now, or one that was killed less
            than a minute ago: they would be skipped.
        groups: The most frequent fingerprints, each with its number of letters.
        examples: Ids of the first letters.
        exact: False if there are more letters than it could read in time.
    """

    letters: int = 0
    corrupt: int = 0
    unread: int = 0
    bytes: int = 0
    queues: Sequence[TargetCheck] = ()
    tasks: Sequence[TargetCheck] = ()
    waits_for: Mapping[str, int] = field(default_factory=dict)
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    chords: int = 0
    used_up: int = 0
    claimed: int = 0
    groups: Sequence[Mapping[str, Any]] = ()
    examples: Sequence[str] = ()
    exact: bool = True

    @property
    def ready(self) -> bool:
        """True unless a queue or task is known to be missing, or a kept count is used up."""
        there = all(check.found is not False for check in (*self.queues, *self.tasks))
        return there and not self.used_up

    def to_json(self) -> dict[str, Any]:
        """A JSON-ready mapping with the attribute names, and ``ready``."""
        texts = {"warnings": [*self.warnings], "notes": [*self.notes]}
        return {**asdict(self), **texts, "ready": self.ready}

    def preview(self) -> dict[str, Any]:
        """As `to_json`, for a plan: some names, what is missing first, then the most frequent."""
        shown = self.to_json()
        for name in ("queues", "tasks"):
            checks = sorted(shown[name], key=lambda each: each["found"] is not False)
            shown[name] = checks[:_MOST_NAMES_SHOWN]
        shown["waits_for"] = dict([*self.waits_for.items()][:_MOST_NAMES_SHOWN])
        return shown

    @classmethod
    def of_preview(cls, preview: Mapping[str, Any]) -> DryRun:
        """What a plan shows; of its queues and tasks, the first ones."""
        known = {f.name: preview[f.name] for f in fields(cls) if f.name in preview}
        for name in ("queues", "tasks"):
            known[name] = tuple(TargetCheck(**each) for each in known.get(name, ()))
        return cls(**known)


class Waits:
    """What a feature has in the way of messages that a redrive publishes."""

    def waits_for(self, found: RawEntry, task: str, queue: str) -> Iterator[str]:
        """What would take the message of a letter, and until when."""
        raise NotImplementedError

    def have(self, messages: Sequence[tuple[MessageKey, Outgoing | None]]) -> list[str]:
        """The ids of what has some of these messages, one for each of them."""
        raise NotImplementedError


def waits_of(jobs: Jobs) -> list[Waits]:
    """Those of the features that are plugged in."""
    return [each.load(each.waits)(jobs.app, jobs.backend) for each in features() if each.waits]


class Targets:
    """The queues and tasks that a redrive needs; each is looked up once, when it is first met.

    A message is lost if no queue takes it, if its queue is one that nobody consumes and nobody
    knows, or if none of the live workers that consume its queue has its task. What is unknown is
    not missing: without a live worker, a letter's own queue and task count as there.
    """

    def __init__(
        self,
        app: Any,
        workers: Sequence[WorkerInfo],
        *,
        configured: frozenset[str] = frozenset(),
        guarded: frozenset[str] = frozenset(),
        waits: Sequence[Waits] = (),
        to_queue: str | None = None,
    ) -> None:
        self._app = app
        self._workers = workers
        self._configured = configured
        self._guarded = guarded
        self._waits = waits
        self._to_queue = to_queue
        self._queues: dict[str, LookedUp] = {}
        self._losses: dict[tuple[bytes | None, bytes | None], str] = {}

    def queue_of(self, found: RawEntry) -> str:
        """The queue to which the message of a letter goes."""
        return self._to_queue or found.text("source_queue")

    def look_up_queue(self, name: str) -> LookedUp:
        """Whether a queue takes messages, and somebody may consume them."""
        if name not in self._queues:
            self._queues[name] = self._look_up(name)
        return self._queues[name]

    def look_up_task(self, name: str, queue: str) -> LookedUp:
        """Whether a live worker that consumes a queue has a task."""
        workers = self._consumers(queue)
        if not name:
            return None, "the message names no task"
        if not workers:
            return None, f"no live worker consumes {queue!r}"
        if name.startswith("celery."):
            return True, "comes with Celery"
        able = [info.hostname for info in workers if name in info.tasks]
        if able:
            more = f" and {len(able) - 1} more" if len(able) > 1 else ""
            return True, f"registered by {able[0]}{more}"
        if any(len(info.tasks) >= MAX_TASKS for info in workers):
            return None, f"a live worker has more than the {MAX_TASKS:,} tasks that are listed"
        several = f"none of the {len(workers)} live workers that consume"
        one = f"not registered by {workers[0].hostname}, the only live worker that consumes"
        return False, f"{one if len(workers) == 1 else f'registered by {several}'} {queue!r}"

    def refuse_target(self) -> None:
        """Refuse a queue to publish to that is known to be missing."""
        if self._to_queue is not None:
            there, why = self.look_up_queue(self._to_queue)
            check = TargetCheck(name=self._to_queue, letters=0, found=there, why=why)
            refuse_lost(DryRun(queues=(check,)))

    def reason_of_loss(self, found: RawEntry) -> str:
        """Why the message of a letter would be lost; empty if it would not, or that is unknown."""
        names = found.fields.get(b"source_queue"), found.fields.get(b"task_name")
        text = self._losses.get(names)
        if text is None:
            if not found.is_letter or len(self._losses) >= _MAX_NAMES:
                return ""
            queue, task = self.queue_of(found), found.text("task_name")
            kinds = (
                ("queue", queue, self.look_up_queue),
                ("task", task, lambda _: self.look_up_task(task, queue)),
            )
            text = ""
            for kind, name, look in kinds if queue else ():  # without one, publishing says so
                there, why = look(name)
                if there is False:
                    text = f"{kind} {name!r} is {why}"
                    break
            self._losses[names] = text
        return text

    def waits_for(self, found: RawEntry) -> Iterator[str]:
        """What the message of a letter would wait for, when it is in its queue."""
        queue, task = self.queue_of(found), found.text("task_name")
        for each in self._waits:
            yield from each.waits_for(found, task, queue)
        if queue and not self._consumers(queue):
            yield f"a live worker that consumes queue {queue!r}"

    def _consumers(self, queue: str) -> list[WorkerInfo]:
        return [info for info in self._workers if queue in info.queues]

    def _look_up(self, name: str) -> LookedUp:
        if is_broadcast(self._app, name):
            return False, _BROADCAST
        consumers = self._consumers(name)
        if consumers:
            return True, f"consumed by {consumers[0].hostname}"
        exists, made_by_publishing = on_broker(self._app, name)
        if exists:
            return True, "on the broker; no live worker consumes it"
        if exists is None:
            return None, "this broker does not answer"
        if dict.get(self._app.amqp.queues, name) is not None:
            return True, "declared by the app; the broker creates it at the first publish"
        if made_by_publishing and name in self._configured:
            return True, "in the app's configuration; no live worker consumes it"
        was_consumed = name != self._to_queue or name in self._guarded
        if made_by_publishing and not self._workers and was_consumed:
            return None, "no live worker has registered its queues"
        known = self._configured.union(self._guarded, *(info.queues for info in self._workers))
        why = "neither on the broker, nor declared by the app, nor consumed by a live worker"
        return False, f"{why}{did_you_mean(name, known)}"


_BROADCAST = (
    "a broadcast, of which each worker has a queue of its own that a redrive cannot reach: call "
    "the task again, then all workers run it; or redrive to the queue of one worker (to_queue)"
)


def is_broadcast(app: Any, name: str) -> bool:
    """True for the name that workers' own queues of a broadcast share, by the app's declarations.

    On Redis also for another queue of a fanout exchange: workers subscribe to the exchange, and
    read no list. Source: ``basic_consume`` in
    https://github.com/celery/kombu/blob/main/kombu/transport/redis.py
    """
    queues = app.amqp.queues
    found = queues.aliases.get(name) or dict.get(queues, name)
    if found is None or found.exchange is None or found.exchange.type != "fanout":
        return False
    return found.name != name or broker_name(app).startswith("redis ")


def used_up(found: RawEntry) -> str:
    """Why a letter stays whose count is kept; empty if it has a delivery left."""
    try:
        count, limit = deliveries_of(found)
    except ValueError:  # damaged: making its message says so
        return ""
    if not limit or count < limit:
        return ""
    return (
        f"max_deliveries of {limit} is reached: redrive without keep_count, or with force for one "
        f"more delivery"
    )


def deliveries_of(found: RawEntry) -> tuple[int, int]:
    """How often a message was delivered, and how often it may be (0: without limit)."""
    raw = found.fields
    return int(raw.get(b"deliveries", b"0")), int(raw.get(b"max_deliveries", b"0"))


class _LateError(Exception):
    """The time is over."""


def dry_run(
    select: Callable[[Progress], Iterable[RawEntry]],
    targets: Targets | None,
    *,
    keeps_count: bool = False,
    seconds: float = float("inf"),
    scanned: Progress | None = None,
) -> DryRun:
    """Report what a redrive would do, or without targets a removal; read letters for some time."""
    counts, deadline = _NeededCounts(targets, keeps_count=keeps_count), time.monotonic() + seconds

    def check(entries: int = 0) -> None:
        if entries and scanned is not None:
            scanned(entries)
        if time.monotonic() >= deadline:
            raise _LateError

    try:
        for found in select(check):
            check()
            counts.add_entry(found)
    except _LateError:
        return replace(counts.to_dry_run(), exact=False)
    return counts.to_dry_run()


class _NeededCounts:
    """What a dry run counts, in one pass over the letters."""

    def __init__(self, targets: Targets | None, *, keeps_count: bool) -> None:
        self._targets = targets
        self._keeps_count = keeps_count
        self._numbers = {"letters": 0, "corrupt": 0, "bytes": 0, "chords": 0, "used_up": 0}
        self._needed: Counter[tuple[str, str]] = Counter()
        self._waits_for: Counter[str] = Counter()
        self._groups: Counter[str] = Counter()
        self._examples: list[str] = []

    def add_entry(self, found: RawEntry) -> None:
        """Count an entry."""
        numbers, targets, body = self._numbers, self._targets, found.fields.get(b"body", b"")
        if len(self._examples) < _MOST_EXAMPLES:
            self._examples.append(found.key)
        numbers["bytes"] += len(body)
        numbers["letters" if found.is_letter else "corrupt"] += 1
        if not found.is_letter:
            return
        queue = "" if targets is None else targets.queue_of(found)
        _count_name(self._groups, found.text("fingerprint"))
        _count_name(self._needed, (queue, found.text("task_name")))
        if targets is not None:
            numbers["chords"] += is_in_chord(found.fields.get(b"content_type", b""), body)
            numbers["used_up"] += self._keeps_count and bool(used_up(found))
            for what in targets.waits_for(found):
                _count_name(self._waits_for, what)

    def to_dry_run(self) -> DryRun:
        """What was counted; each queue and task is looked up now."""
        queues, tasks = _target_checks(self._needed, self._targets)
        groups, numbers = self._groups.most_common(_MOST_NAMES_SHOWN), self._numbers
        return DryRun(
            letters=numbers["letters"],
            corrupt=numbers["corrupt"],
            bytes=numbers["bytes"],
            chords=numbers["chords"],
            used_up=numbers["used_up"],
            queues=queues,
            tasks=tasks,
            waits_for=dict(self._waits_for.most_common()),
            groups=[{"fingerprint": name, "letters": count} for name, count in groups],
            examples=self._examples,
        )


def _count_name(counts: Counter[Any], name: Any) -> None:
    """Count a name, of many the first ones."""
    if name in counts or len(counts) < _MAX_NAMES:
        counts[name] += 1


def _target_checks(
    needed: Counter[tuple[str, str]], targets: Targets | None
) -> tuple[tuple[TargetCheck, ...], tuple[TargetCheck, ...]]:
    """The queues and tasks, most letters first; a task that one of its queues lacks is missing."""
    queues: dict[str, TargetCheck] = {}
    tasks: dict[str, TargetCheck] = {}
    for (queue, task), letters in needed.items():
        if targets is not None:
            _add_letters(queues, queue, letters, targets.look_up_queue(queue))
        _add_letters(
            tasks,
            task,
            letters,
            (None, "") if targets is None else targets.look_up_task(task, queue),
        )
    most, others = (
        tuple(sorted(found.values(), key=lambda check: -check.letters)) for found in (queues, tasks)
    )
    return most, others


def _add_letters(
    checks: dict[str, TargetCheck], name: str, letters: int, finding: LookedUp
) -> None:
    """Add letters to the check of a name; the worst that was found counts."""
    (found, why), before = finding, checks.get(name)
    if before is not None:
        letters += before.letters
        if _BADNESS[before.found] >= _BADNESS[found]:
            found, why = before.found, before.why
    checks[name] = TargetCheck(name=name, letters=letters, found=found, why=why)


_BADNESS = {True: 0, None: 1, False: 2}


def refuse_lost(plan: DryRun, *, force: bool = False) -> None:
    """Refuse a redrive of which a queue or task is known to be missing."""
    kinds = (("queue", plan.queues), ("task", plan.tasks))
    missing = [
        f"{kind} {check.name!r} is {check.why}"
        for kind, checks in kinds
        for check in checks
        if check.found is False
    ]
    if missing and not force:
        raise RedriveError(
            f"nothing was redriven, because messages would be lost: {'; '.join(missing[:5])}. "
            f"To redrive nevertheless: --force, or force=True"
        )


_WAITS = {"read_timeout": 5, "write_timeout": 5}  # of RabbitMQ


def on_broker(app: Any, name: str) -> tuple[bool | None, bool]:
    """Whether the broker has a queue, ``None`` if unknown; and whether publishing makes it."""
    try:
        with app.connection_for_write(transport_options=_WAITS) as connection:
            connection.ensure_connection(**timing.CONNECT)
            if connection.transport.driver_type == "amqp":
                return _declared(connection, name), False
            channel = connection.default_channel
            if connection.transport.driver_type == "redis":
                # Not EXISTS, which kombu sends without `global_keyprefix`. The set lists the
                # queues of an exchange: a worker makes it, and an empty queue has no other key.
                bound = channel.client.smembers(channel.keyprefix_queue % name)
                there = any(one.endswith(channel.sep.encode() + name.encode()) for one in bound)
                return there or channel.queue_declare(name).message_count > 0, True
            if connection.transport.driver_type == "sqs":
                return queue_exists(channel, name), False
            return _declared(connection, name), True
    except Exception:  # noqa: BLE001 - a check that fails leaves it unknown
        return None, False


def _declared(connection: Any, name: str) -> bool | None:
    try:
        connection.default_channel.queue_declare(queue=name, passive=True)
    except connection.channel_errors as exc:
        code = getattr(exc, "reply_code", getattr(exc, "code", None))
        return False if str(code) == "404" else None  # AMQP's NOT_FOUND; kombu's is a text
    finally:
        with suppress(Exception):
            connection.default_channel.close()
    return True


def check_target(jobs: Jobs, to_queue: str | None) -> None:
    """Refuse a dead-letter queue as the queue to publish to."""
    if to_queue is None:
        return
    if to_queue in jobs.backend.letters.names() or jobs.policies.is_dead_letter_queue(to_queue):
        raise DLQError(
            f"expected to_queue to be a queue of tasks, got the dead-letter queue {to_queue!r}"
        )


def targets_of(jobs: Jobs, to_queue: str | None) -> Targets:
    """The queues and tasks of a redrive."""
    return Targets(
        jobs.app,
        jobs.backend.workers.workers(),
        configured=jobs.policies.known_queues().names,
        guarded=jobs.policies.guarded_queues(),
        waits=waits_of(jobs),
        to_queue=to_queue,
    )
