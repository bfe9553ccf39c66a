"""What the doctor sees in the settings of an app, without asking a server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

from celery_dlq.config import Settings, visibility_timeout
from celery_dlq.features.doctor.finding import Finding, Guarantee, finding
from celery_dlq.letters.printable import some_of
from celery_dlq.operations.retention import database, is_brokers
from celery_dlq.policies.policy import policy_of
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.transport.default_delay import DefaultDelays

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.policies.table import PolicyTable

BROKERS = {"redis": "Redis", "amqp": "RabbitMQ", "sqs": "Amazon SQS"}
LATE, UNLESS_KILLED, EARLY = "late", "late, unless a process is killed", "early"
_OWN_TASKS = "celery."  # Celery's own, such as `celery.chord_unlock`
_MOST_QUEUES = 10


@dataclass
class Case:
    """An app, and what several checks ask of it."""

    dlq: Assembly

    @property
    def settings(self) -> Settings:
        """The checked settings."""
        return self.dlq.settings

    @cached_property
    def table(self) -> PolicyTable:
        """The policies of queues and tasks."""
        return self.dlq.policy_table()

    @cached_property
    def transport(self) -> Any:
        """The class of kombu's transport."""
        return self.dlq.app.connection_for_read().get_transport_cls()

    @cached_property
    def tasks(self) -> dict[str, list[Any]]:
        """The guarded tasks of each queue."""
        app = self.dlq.app
        found: dict[str, list[Any]] = {}
        delays = DefaultDelays(app, Settings())
        for name, task in sorted(app.tasks.items()):
            queue = "" if name.startswith(_OWN_TASKS) else delays.queue_of(task)
            if queue and self.table.resolve(queue, policy_of(task)) is not None:
                found.setdefault(queue, []).append(task)
        return found

    def by_queue(self, fits: Callable[[Any], bool]) -> list[tuple[str, list[str]]]:
        """Queues with the names of those guarded tasks that fit."""
        found = ((queue, [t.name for t in tasks if fits(t)]) for queue, tasks in self.tasks.items())
        return [(queue, some) for queue, some in found if some][:_MOST_QUEUES]


def guarded(case: Case) -> Iterator[Finding]:
    """Queues without a policy, and policies without a queue or an end."""
    table, app = case.table, case.dlq.app
    if not (table.queues or table.tasks):
        yield finding("nothing-guarded", "No queue and no task of this app has a policy.")
        return
    consumed = {*app.amqp.queues.consume_from} - case.tasks.keys()
    bare = [q for q in consumed if table.resolve(q) is None and not table.is_dead_letter_queue(q)]
    if bare:
        yield finding("queue-without-policy", f"No policy applies to {some_of(sorted(bare))}.")
    known = KnownQueues.of(app)
    for name, hint in table.unknown_queues(known).items():
        yield finding("unknown-queue", f"This app does not know the queue {name!r}; {hint}.")
    if unbounded := table.unbounded(known.names):
        yield finding("kept-for-ever", f"No policy removes the letters of {some_of(unbounded)}.")


def acknowledgement(case: Case) -> Iterator[Finding]:
    """Acknowledgement that weakens a guarantee."""
    for queue, found in case.by_queue(lambda task: _acknowledges(task) == EARLY):
        text = f"Tasks of {queue!r} are acknowledged before they run: {some_of(found)}."
        yield finding("early-acknowledgement", text)
    for queue, found in case.by_queue(lambda task: _acknowledges(task) == UNLESS_KILLED):
        text = f"reject_on_worker_lost is off for tasks of {queue!r}: {some_of(found)}."
        yield finding("reject-on-worker-lost", text)


def fetching(case: Case) -> Iterator[Finding]:
    """Messages that the broker gives to a second worker, or that a dead one takes along."""
    options = case.dlq.app.conf.broker_transport_options or {}
    timeout = visibility_timeout(case.transport.driver_type, options)
    if timeout is not None and not case.settings.reliable_fetch:
        yield finding("fetch", "dlq_reliable_fetch is False, so kombu fetches the messages.")
        limit = case.dlq.app.conf.task_time_limit
        for queue, found in case.by_queue(lambda t: (t.time_limit or limit or 0) >= timeout):
            text = (
                f"Tasks of {queue!r} may run for as long as the broker's visibility timeout of "
                f"{timeout:g} s, or longer: {some_of(found)}."
            )
            yield finding("visibility-timeout", text)
    if case.transport.driver_type == "amqp" and not options.get("confirm_publish"):
        yield finding("publisher-confirms", "Publishers do not wait for RabbitMQ's confirmation.")


def host(case: Case) -> Iterator[Finding]:
    """What this host lacks: packages, and a folder where letters can wait."""
    reports = case.dlq.app.conf.get("dlq_sentry") not in (None, "off")
    if reports and find_spec("sentry_sdk") is None:
        text = "The package sentry_sdk is not installed: pip install 'celery_dlq[sentry]'."
        yield finding("missing-package", text)
    if case.settings.spool_dir is not None:
        place = Path(case.settings.spool_dir).absolute()
        made = next(each for each in (place, *place.parents) if each.exists())
        try:
            TemporaryFile(dir=made).close()
        except OSError as exc:
            yield finding("spool-not-writable", f"This user cannot write to {place}: {exc}.")


CHECKS = (guarded, acknowledgement, fetching, host)


def guarantees(case: Case) -> list[Guarantee]:
    """What is guaranteed to the guarded tasks, a row for each way to acknowledge."""
    driver = case.transport.driver_type
    keeps = driver == "amqp" or (driver in BROKERS and case.settings.reliable_fetch)
    shared = is_brokers(case.settings, case.dlq.app.conf, database)
    every = [task for some in case.tasks.values() for task in some]
    return [
        Guarantee(
            broker=BROKERS.get(driver, driver),
            acknowledgement=way,
            tasks=tuple(task.name for task in every if _acknowledges(task) == way),
            lossless=keeps and way != EARLY,
            redrive="exactly once" if shared else "at least once",
        )
        for way in (LATE, UNLESS_KILLED, EARLY)
        if way in map(_acknowledges, every)
    ]


def _acknowledges(task: Any) -> str:
    if not task.acks_late:
        return EARLY
    return LATE if task.reject_on_worker_lost else UNLESS_KILLED
