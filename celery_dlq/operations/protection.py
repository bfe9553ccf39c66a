"""What the policies of an app do for each of its tasks, and what weakens that.

The doctor shows it. A worker says at its start what weakens it there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from celery_dlq.config import Settings
from celery_dlq.letters.printable import get_logger, some_of
from celery_dlq.policies.policy import CrashLimit, Policy, policy_of
from celery_dlq.policies.table import PolicyTable
from celery_dlq.transport.default_delay import DefaultDelays

logger = get_logger("celery_dlq")

LATE, UNLESS_KILLED, EARLY = "late", "late, unless a process is killed", "early"
_OWN_TASKS = "celery."  # Celery's own, such as `celery.chord_unlock`
_MOST_QUEUES = 10


@dataclass(frozen=True, slots=True)
class AppTask:
    """A task of an app, with the queue and the policy of its messages."""

    task: Any
    queue: str  # When its publisher names none
    policy: Policy | None  # `None` if nothing guards it

    @property
    def name(self) -> str:
        """The name of the task."""
        return str(self.task.name)

    @property
    def acknowledgement(self) -> str:
        """When its messages are acknowledged."""
        if not self.task.acks_late:
            return EARLY
        return LATE if self.task.reject_on_worker_lost else UNLESS_KILLED

    @property
    def limit(self) -> str | None:
        """What of its starts is limited: ``""`` is all; ``None`` if nothing is."""
        policy = self.policy or Policy()
        crashes = CrashLimit.of(policy.max_crashes)
        if policy.max_deliveries:
            return ""
        if crashes is None:
            return None
        return "of crashes" + (f" within {crashes.within:g} s" if crashes.within else "")


class Weakness(NamedTuple):
    """What weakens a guarantee of a guarded task."""

    fits: Callable[[AppTask], bool]
    sentence: str  # What is so, of a queue
    symptom: str  # What people see of it
    mend: str  # What to do


WEAKNESSES = {
    "early-acknowledgement": Weakness(
        lambda one: one.acknowledgement == EARLY,
        "Tasks of {!r} are acknowledged before they run",
        "A message is gone without a letter after its worker was killed.",
        "Set task_acks_late = True, or acks_late=True on tasks that may run twice.",
    ),
    "no-limit": Weakness(
        lambda one: one.limit is None,
        "No policy limits the starts of tasks of {!r}",
        "A message that kills its worker starts again without end, and no letter is made.",
        "Set max_deliveries in the policy of the queue or of the task, for example to 5.",
    ),
    "reject-on-worker-lost": Weakness(
        lambda one: one.acknowledgement == UNLESS_KILLED,
        "reject_on_worker_lost is off for tasks of {!r}",
        "A task whose pool process is killed is a letter at once: it is not tried again.",
        "Set task_reject_on_worker_lost = True.",
    ),
}
_AT_START = ("early-acknowledgement", "no-limit")


def app_tasks(app: Any, table: PolicyTable) -> list[AppTask]:
    """The tasks of an app, but Celery's own and those whose route needs the arguments."""
    delays, found = DefaultDelays(app, Settings()), []
    for name, task in sorted(app.tasks.items()):
        queue = ""
        with suppress(Exception):  # a route of the user's may take no call without arguments
            queue = "" if name.startswith(_OWN_TASKS) else delays.queue_of(task)
        if queue:
            found.append(AppTask(task, queue, table.resolve(queue, policy_of(task))))
    return found


def by_queue(
    tasks: Iterable[AppTask], fits: Callable[[AppTask], bool]
) -> list[tuple[str, list[str]]]:
    """Queues with the names of those tasks that fit."""
    found: dict[str, list[str]] = {}
    for one in tasks:
        if fits(one):
            found.setdefault(one.queue, []).append(one.name)
    return [*found.items()][:_MOST_QUEUES]


def weaknesses(tasks: Iterable[AppTask], kind: str) -> Iterator[tuple[str, str]]:
    """Queues of guarded tasks with what is so of them."""
    known = WEAKNESSES[kind]
    for queue, names in by_queue(tasks, lambda one: one.policy is not None and known.fits(one)):
        yield queue, f"{known.sentence.format(queue)}: {some_of(names)}."


def warn_of_weaknesses(app: Any, table: PolicyTable) -> None:
    """Say what weakens the guarantees of the tasks that a worker of the app runs."""
    consumed = app.amqp.queues.consume_from
    tasks = [one for one in app_tasks(app, table) if one.queue in consumed]
    for kind in _AT_START:
        for _queue, sentence in weaknesses(tasks, kind):
            logger.warning("%s %s", sentence, WEAKNESSES[kind].mend)
