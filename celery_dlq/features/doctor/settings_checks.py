"""What the doctor sees in the settings of an app, without asking a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from celery_dlq.config import Settings, visibility_timeout
from celery_dlq.features.doctor.finding import ALL, WEAKENS, Finding, Guarantee, finding
from celery_dlq.letters.printable import some_of
from celery_dlq.letters.record import Reason
from celery_dlq.operations.memory_check import is_brokers
from celery_dlq.operations.protection import (
    EARLY,
    LATE,
    UNLESS_KILLED,
    WEAKNESSES,
    AppTask,
    app_tasks,
    by_queue,
    weaknesses,
)
from celery_dlq.policies.policy import Policy, plain_value
from celery_dlq.policies.queue_names import KnownQueues
from celery_dlq.policies.registered import table_of
from celery_dlq.transport.redis.fetch import ReliableFetch

if TYPE_CHECKING:
    from celery_dlq.assembly import Assembly
    from celery_dlq.policies.table import PolicyTable
    from celery_dlq.store.worker_records import WorkerInfo

BROKERS = {"redis": "Redis", "amqp": "RabbitMQ", "sqs": "Amazon SQS"}


@dataclass
class ExaminedApp:
    """An app, and what several checks ask of it."""

    dlq: Assembly
    registered: list[WorkerInfo] = field(default_factory=list)  # live workers, if they are known

    @property
    def settings(self) -> Settings:
        """The checked settings."""
        return self.dlq.settings

    @cached_property
    def table(self) -> PolicyTable:
        """The policies of queues and tasks; with the overrides, once the store has told them."""
        return self.dlq.policy_table()

    @cached_property
    def transport(self) -> Any:
        """The class of kombu's transport."""
        return self.dlq.app.connection_for_read().get_transport_cls()

    @cached_property
    def tasks(self) -> list[AppTask]:
        """The tasks whose queue is known."""
        return app_tasks(self.dlq.app, self.table)

    @property
    def guarded(self) -> list[AppTask]:
        """Those of them that a policy guards."""
        return [one for one in self.tasks if one.policy is not None]

    @cached_property
    def others(self) -> list[tuple[PolicyTable, set[str]]]:
        """The policies of live workers, with the queues they take from."""
        found: dict[str, tuple[PolicyTable, set[str]]] = {}
        for info in self.registered:
            table = replace(table_of(info), overrides=self.table.overrides)
            found.setdefault(repr(info.policies), (table, set()))[1].update(info.queues)
        return [*found.values()]

    def policies_of(self, one: AppTask) -> list[AppTask]:
        """A task with each policy that its messages meet: this app's, and those of workers."""
        return [
            one,
            *(
                replace(one, policy=table.resolve(one.queue, table.tasks.get(one.name)))
                for table, queues in self.others
                if one.queue in queues
            ),
        ]

    @property
    def no_reliable_fetch(self) -> str | None:
        """Why the settings allow no reliable fetch from a Redis; ``None`` if they do."""
        options = self.dlq.app.conf.broker_transport_options
        return ReliableFetch(self.settings, options).unsupported(self.transport)


def guarded(case: ExaminedApp) -> Iterator[Finding]:
    """Queues without a policy, and policies without a queue or an end."""
    table, app = case.table, case.dlq.app
    if not (table.queues or table.tasks):
        yield finding("nothing-guarded", "No queue and no task of this app has a policy.")
        return
    bare = by_queue(case.tasks, lambda one: one.policy is None)
    named = {one.queue for one in case.tasks}
    bare += [(queue, []) for queue in {*app.amqp.queues.consume_from} - named]
    shown = {
        queue: f"{queue} ({some_of(names)})" if names else queue
        for queue, names in bare
        if table.resolve(queue) is None and not table.is_dead_letter_queue(queue)
    }
    if shown:
        text = f"No policy applies to {some_of([shown[queue] for queue in sorted(shown)])}."
        yield finding("queue-without-policy", text, *shown)
    known = KnownQueues.from_app(app)
    for name, hint in table.unknown_queues(known).items():
        yield finding("unknown-queue", f"This app does not know the queue {name!r}; {hint}.")
    if unbounded := table.unbounded(known.names):
        yield finding("kept-for-ever", f"No policy removes the letters of {some_of(unbounded)}.")


def policies(case: ExaminedApp) -> Iterator[Finding]:
    """Policies, and ways to acknowledge, that weaken a guarantee."""
    for kind in WEAKNESSES:
        for queue, sentence in weaknesses(case.tasks, kind):
            ended = _ended_limits(case, queue) if kind == "no-limit" else []
            unset = f"End the override with: dlq policies unset {queue} {' '.join(ended)}"
            yield finding(kind, sentence, queue, mend=unset if ended else "")
    if case.dlq.app.conf.task_always_eager:
        yield finding("always-eager", "task_always_eager is on.")


def _ended_limits(case: ExaminedApp, queue: str) -> list[str]:
    """The limits of a queue that an override ends."""
    override, _source = case.table.overrides.get(queue, (Policy(), ""))
    return [key for key in ("max_deliveries", "max_crashes") if override.of(key) is False]


def fetching(case: ExaminedApp) -> Iterator[Finding]:
    """Messages that the broker gives to a second worker, or that a dead one takes along."""
    options = case.dlq.app.conf.broker_transport_options or {}
    timeout = visibility_timeout(case.transport.driver_type, options)
    if timeout is not None and not case.settings.reliable_fetch:
        yield finding("fetch", "dlq_reliable_fetch is False, so kombu fetches the messages.")
        limit = case.dlq.app.conf.task_time_limit
        long = by_queue(case.guarded, lambda one: (one.task.time_limit or limit or 0) >= timeout)
        for queue, found in long:
            text = (
                f"Tasks of {queue!r} may run for as long as the broker's visibility timeout of "
                f"{timeout:g} s, or longer: {some_of(found)}."
            )
            yield finding("visibility-timeout", text, queue)
    if case.transport.driver_type == "amqp" and not options.get("confirm_publish"):
        yield finding("publisher-confirms", "Publishers do not wait for RabbitMQ's confirmation.")


def host_findings(case: ExaminedApp) -> Iterator[Finding]:
    """What this host lacks: packages, and a folder where letters can wait."""
    reports = case.dlq.app.conf.get("dlq_sentry")
    if reports and find_spec("sentry_sdk") is None:
        text = "The package sentry_sdk is not installed: pip install 'celery_dlq[sentry]'."
        yield finding("missing-package", text)
    if why := case.dlq.spool().unusable():
        yield finding("spool-not-writable", f"This user cannot write to {why}.")


CHECKS = (guarded, policies, fetching, host_findings)


def guarantees(case: ExaminedApp, findings: Sequence[Finding]) -> list[Guarantee]:
    """What is guaranteed to the guarded tasks, a row for each set of answers.

    ``findings`` say what the servers do to it.
    """
    driver = case.transport.driver_type
    fetches = case.settings.reliable_fetch if driver == "sqs" else not case.no_reliable_fetch
    keeps = driver == "amqp" or (driver in BROKERS and fetches)
    always = {"lossless"} if not keeps else set()
    if case.dlq.app.conf.task_always_eager:
        always = {*ALL}
    shared = is_brokers(case.settings, case.dlq.app.conf)
    rows: dict[tuple[Any, ...], list[str]] = {}
    for way in (LATE, UNLESS_KILLED, EARLY):
        for one in case.guarded:
            if one.acknowledgement == way:
                lost = _weakened(one.queue, findings) | always
                rows.setdefault((way, *_guarantee_cells(case.policies_of(one), lost)), []).append(
                    one.name
                )
    return [
        Guarantee(
            broker=BROKERS.get(driver, driver),
            acknowledgement=way,
            tasks=tuple(names),
            bounded=bounded,
            lossless=lossless,
            exact=exact,
            conditions=dict(conditions),
            redrive="exactly once" if shared else "at least once",
        )
        for (way, bounded, lossless, exact, conditions), names in rows.items()
    ]


def _weakened(queue: str, findings: Sequence[Finding]) -> set[str]:
    """The guarantees that findings take from the tasks of a queue."""
    here = (one for one in findings if queue in one.queues or not one.queues)
    return {guarantee for one in here for guarantee in WEAKENS.get(one.check, ())}


def _guarantee_cells(each: Sequence[AppTask], lost: set[str]) -> tuple[Any, ...]:
    """What is guaranteed to a task by the weakest of its policies, and under which conditions."""
    if any(one.policy is None for one in each):
        lost = {*ALL}
    early = each[0].acknowledgement == EARLY
    limits = [one.limit for one in each]
    bounded = None not in limits and "bounded" not in lost
    lossless = not early and "lossless" not in lost
    exact = "exact" not in lost
    leaves_out = any(map(_leaves_out, each))
    conditions = {
        "bounded": next(filter(None, limits), "") if bounded else "",
        "lossless": "of the reasons kept" if lossless and leaves_out else "",
        "exact": "but for cold shutdowns" if exact and early else "",
    }
    found = tuple((name, text) for name, text in conditions.items() if text)
    return bounded, lossless, exact, found


def _leaves_out(one: AppTask) -> bool:
    """True if some of its deaths leave no letter: by ``reasons``, ``ignore`` or ``throws``."""
    policy = one.policy or Policy()
    rules = plain_value(policy.of("exceptions") or {})
    ignored = any(rule["action"] == "ignore" for rule in rules.values())
    return ignored or bool(one.task.throws) or not all(map(policy.keeps, Reason))
