"""What the doctor sees in Redis, in the broker, and in what workers left there."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from celery.backends.base import DisabledBackend

from celery_dlq import timing
from celery_dlq.cli.table import letters_text
from celery_dlq.features.doctor.finding import Finding, finding
from celery_dlq.features.doctor.settings_checks import ExaminedApp
from celery_dlq.letters.links import is_in_chord
from celery_dlq.letters.printable import some_of
from celery_dlq.operations.broker_limits import low_limits, low_receive_counts
from celery_dlq.operations.job import INTERRUPTED, WAITING
from celery_dlq.operations.memory_check import memory_faults
from celery_dlq.operations.policies import PolicyAdmin
from celery_dlq.operations.retention import Retention
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.store.check import reply_of_server
from celery_dlq.transport.default_delay import task_queues
from celery_dlq.transport.redis.fetch import refusal

_FLOOD = 1_000
"""Letters in an hour."""

_MOST_SKEW_SECONDS = 5
_LATE = timedelta(minutes=5)
_SHORTEST_IDLE_SECONDS = 60
_SLOW_SECONDS = 1.0
_MOST_SHOWN = 10
_MOST_QUEUES = 20
_LETTERS_READ = 200


def memory_findings(case: ExaminedApp) -> Iterator[Finding]:
    """Whether Redis may delete letters, run full of them, or lose them when it restarts."""
    found = case.dlq.backend.memory()
    for text, _mend in memory_faults(found) if found else ():
        kind = "eviction" if found and found.maximum else "no-maxmemory"
        yield finding(kind, f"{text}.")
    if not int(reply_of_server(case.dlq.backend, "info", "persistence").get("aof_enabled", 1)):
        yield finding("append-only-file", "The Redis of the letters has no append-only file.")
    idle = int(reply_of_server(case.dlq.backend, "config_get", "timeout").get("timeout", 0))
    if 0 < idle < _SHORTEST_IDLE_SECONDS:
        text = f"Redis closes connections on which nothing was sent for {idle} s."
        yield finding("idle-timeout", text)


def clock_findings(case: ExaminedApp) -> Iterator[Finding]:
    """Whether Redis tells the time soon, and agrees with this host about it."""
    asked = time.monotonic()
    skew = (case.dlq.clock() - case.dlq.backend.workers.now()).total_seconds()
    if (waited := time.monotonic() - asked) > _SLOW_SECONDS:
        yield finding("store-slow", f"Redis took {waited:.1f} s to tell the time.")
    if abs(skew) > _MOST_SKEW_SECONDS:
        yield finding("clock", f"The clocks of this host and of Redis differ by {skew:.0f} s.")


def workers(case: ExaminedApp) -> Iterator[Finding]:
    """Whether the workers that are alive run one version, with the policies of this app."""
    found = case.dlq.backend.workers.workers()
    if not found:
        yield finding("no-worker", "No worker with celery_dlq gave a sign of life for 30 s.")
    if len(versions := {info.version for info in found}) > 1:
        yield finding("worker-versions", f"Workers run celery_dlq {some_of(sorted(versions))}.")
    tasks = [one.name for one in case.tasks]
    for difference in PolicyAdmin(case.dlq).drift(found, tasks)[:_MOST_SHOWN]:
        yield finding("worker-policies", f"{difference}.")
    for gauges in case.dlq.backend.metrics.read_all().workers:
        if gauges.spool:
            text = f"{letters_text(gauges.spool)} on the disk of {gauges.worker}."
            yield finding("spool-not-empty", text)


def stopped(case: ExaminedApp) -> Iterator[Finding]:
    """Messages that are held, and jobs that stand still."""
    for held in case.dlq.held_queues().held_messages()[:_MOST_SHOWN]:
        hold = held.hold
        what = held.problem or f"{hold.id} of {hold.actor}: tasks {hold.task}, queues {hold.queue}."
        kind = "hold" if hold.circuit is None else "circuit-breaker"
        yield finding(kind, f"{what} It has {held.held:,} messages.")
    now = case.dlq.backend.workers.now()
    for job in case.dlq.jobs().jobs():
        late = job.state == WAITING and (job.start_at or job.updated_at) < now - _LATE
        if late or job.state == INTERRUPTED:
            yield finding("job", f"Job {job.id}, {job.kind} of {job.queue}, is {job.state}.")


def letters(case: ExaminedApp) -> Iterator[Finding]:
    """Queues that grow, that are about to be trimmed, and chords that do not end."""
    backend, reading = case.dlq.backend, case.dlq.reading()
    for queue in reading.queues():
        if queue.last_hour >= _FLOOD:
            text = f"{queue.name} got {queue.last_hour:,} letters in the last hour."
            yield finding("flood", text)
    some = backend.letters.names()[:_MOST_QUEUES]
    policies = {name: case.table.of_dead_letter_queue(name) for name in some}
    for name in Retention(backend.letters, backend.workers, case.dlq.events, "").due_queues(
        policies
    ):
        text = f"Letters of {name} are past their time, or over its length: a worker removes them."
        yield finding("retention", text)
    for name in some:
        newest = reading.entries(name, newest_first=True, limit=_LETTERS_READ)
        chords = sum(
            is_in_chord(one.fields.get(b"content_type", b""), one.fields.get(b"body", b""))
            for one in newest
        )
        if chords:
            text = f"{letters_text(chords)} of the newest {_LETTERS_READ} of {name} are members."
            yield finding("chord", text)


def ask_for_result(app: Any) -> None:
    """Ask the result backend for a result that nobody stored."""
    if not isinstance(app.backend, DisabledBackend):
        app.backend.get_state("celery-dlq-doctor")


def broker_findings(case: ExaminedApp, channel: Any) -> Iterator[Finding]:
    """What a broker that answers refuses, or ends by itself."""
    wanted = case.transport.driver_type == "redis" and case.settings.reliable_fetch
    if reason := (case.no_reliable_fetch or refusal(channel)) if wanted else None:
        yield finding("fetch", f"Reliable fetch is off: {reason}.")
    tasks = task_queues(case.dlq.app)
    for low in low_limits(case.dlq, case.table, tasks):
        yield finding("delivery-limit", f"{low.text}.", low.queue)
    if case.transport.driver_type == "sqs":
        for low in low_receive_counts(case.dlq, channel, case.dlq.app.amqp.queues, tasks):
            yield finding("redrive-policy", f"{low.text}.", low.queue)


def answers(app: Any, connection: Any) -> dict[str, Any]:
    """The queues of workers that answer remote control, by host name."""
    if not connection.supports_exchange_type("fanout"):
        return {}
    asked = app.control.inspect(timeout=timing.current.remote_control, connection=connection)
    return asked.active_queues() or {}


def plain_workers(case: ExaminedApp, answers: dict[str, Any]) -> Iterator[Finding]:
    """Workers of guarded queues that answer, and have not registered in the store."""
    known = KnownQueues.from_app(case.dlq.app).names | {one.queue for one in case.tasks}
    guarded = {q for q in known if case.table.resolve(q)} | {one.queue for one in case.guarded}
    registered = {one.hostname for one in case.dlq.backend.workers.workers(with_tasks=False)}
    found: dict[str, list[str]] = {}
    for hostname in sorted(answers.keys() - registered):
        for queue in answers[hostname]:
            if queue.get("name") in guarded:
                found.setdefault(queue["name"], []).append(hostname)
    for queue, hostnames in [*found.items()][:_MOST_SHOWN]:
        text = f"Workers without the celery_dlq of this app take from {queue!r}"
        yield finding("plain-workers", f"{text}: {some_of(hostnames)}.", queue)


CHECKS = (memory_findings, clock_findings, workers, stopped, letters)
