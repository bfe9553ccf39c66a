"""What the doctor says: findings, each of a known kind, and guarantees."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from celery_dlq.letters.record import Recorded
from celery_dlq.operations.protection import WEAKNESSES

KINDS = {
    "settings": (
        "Workers do not start, and commands fail.",
        "Correct the settings of the app.",
    ),
    "nothing-guarded": (
        "Tasks fail, and no letter is made.",
        'Set dlq_queues, for example {"*": {"max_deliveries": 5}}.',
    ),
    "queue-without-policy": (
        "Tasks of a queue fail, and no letter is made.",
        'Name the queue in dlq_queues, or add the pattern "*".',
    ),
    "unknown-queue": (
        "A policy does nothing.",
        "Correct the name in dlq_queues.",
    ),
    "kept-for-ever": (
        "Redis runs full of letters.",
        "Set dead_letter_ttl or dead_letter_max_length.",
    ),
    **{kind: (one.symptom, one.mend) for kind, one in WEAKNESSES.items()},
    "always-eager": (
        "Tasks run in the process that calls them, and no letter is made.",
        "Take task_always_eager out of the settings; in tests, see the how-to on testing.",
    ),
    "plain-workers": (
        "A message starts more often than its limit, and some deaths leave no letter.",
        "Finish the deploy: each worker of a guarded queue needs the DeadLetters of this app.",
    ),
    "fetch": (
        "A worker that is killed takes a message along, or a task runs twice.",
        "Remove dlq_reliable_fetch from the settings, and let Redis allow what it needs.",
    ),
    "visibility-timeout": (
        "A long task starts again while it still runs.",
        "Raise visibility_timeout in broker_transport_options above the time limit of the task.",
    ),
    "publisher-confirms": (
        "A message is gone although publishing it raised no error.",
        'Set broker_transport_options = {"confirm_publish": True}.',
    ),
    "missing-package": (
        "A part of celery_dlq does nothing, or is slow.",
        "Install the package in the environment of the workers.",
    ),
    "redis-py": (
        "Workers do not start, and nothing can be published.",
        "Install a redis-py that kombu works with: pip install --upgrade redis",
    ),
    "spool-not-writable": (
        "While the store is away, letters wait in memory only.",
        "Let the user of the workers write to dlq_spool_dir.",
    ),
    "store": (
        "Deliveries are not counted, and letters wait in the workers.",
        "Start Redis, or correct the host and port in dlq_url.",
    ),
    "store-refuses": (
        "Workers with this user do not start, or do not count and keep their letters.",
        "Correct the user and password in dlq_url, or let Redis do what it refuses.",
    ),
    "store-slow": (
        "Redelivered messages wait for their counts, and letters wait in the workers.",
        "Find what holds Redis up (SLOWLOG GET), or raise socket_timeout in dlq_transport_options.",
    ),
    "broker": (
        "Workers do not run tasks, and nothing can be published.",
        "Start the broker, or correct broker_url.",
    ),
    "result-backend": (
        "Workers stop when they store a result.",
        "Start the result backend, or correct result_backend.",
    ),
    "no-maxmemory": (
        "Letters may take all memory of the machine that Redis runs on.",
        "Set maxmemory in the configuration of Redis.",
    ),
    "eviction": (
        "Letters, or counts of deliveries, vanish from Redis.",
        "Set maxmemory-policy noeviction in the configuration of Redis.",
    ),
    "append-only-file": (
        "Letters and counts of the last minutes are gone after Redis was restarted.",
        "Set appendonly yes in the configuration of Redis.",
    ),
    "idle-timeout": (
        "Workers connect to Redis again and again.",
        "Set timeout to 0, or to 60 or more, in the configuration of Redis.",
    ),
    "clock": (
        "Times of letters are wrong, and tasks start too early or too late.",
        "Run a time service, such as chrony, on both.",
    ),
    "no-worker": (
        "Messages wait, and nothing is counted.",
        "Start the workers; each needs the DeadLetters of this app.",
    ),
    "worker-versions": (
        "Messages are treated differently from worker to worker.",
        "Finish the deploy.",
    ),
    "worker-policies": (
        "A limit differs from worker to worker, or from what this app says.",
        "Restart the workers with these settings, or run the command with the settings they have.",
    ),
    "spool-not-empty": (
        "Letters are missing from their queue.",
        "See the log of that worker for what keeps it from storing them.",
    ),
    "hold": (
        "Tasks do not run.",
        "End it with: dlq release ID",
    ),
    "circuit-breaker": (
        "Tasks do not run.",
        "Find the cause with: dlq groups QUEUE",
    ),
    "job": (
        "A redrive or a removal does not go on.",
        "Go on with: dlq jobs resume ID. One that waits also runs once a worker or dlq web does.",
    ),
    "flood": (
        "Letters arrive without end.",
        "Find the cause with: dlq groups QUEUE. Stop its task with: dlq hold --task NAME",
    ),
    "retention": (
        "Letters vanish from their queue.",
        "Export them now, or raise dead_letter_ttl or dead_letter_max_length.",
    ),
    "chord": (
        "The body of a chord never runs.",
        "Publish the whole chord again: a redrive of a member does not run the body.",
    ),
    "redrive-policy": (
        "Amazon SQS moves a message to another queue before it becomes a letter.",
        "Raise maxReceiveCount in the redrive policy of the queue, or lower max_deliveries.",
    ),
    "delivery-limit": (
        "RabbitMQ drops a message before it becomes a letter.",
        "Declare the queue anew with a higher x-delivery-limit, or lower max_deliveries.",
    ),
}
"""What people see of each kind of finding, and what to do."""

STORE = ("store", "store-slow", "store-refuses")
"""The findings of a store that was not examined, or not as a worker uses it."""

ALL = ("bounded", "lossless", "exact")
"""The guarantees that a task may have or not, by name."""

WEAKENS = {
    "plain-workers": ALL,
    "fetch": ("lossless",),
    "redrive-policy": ("lossless",),
    "delivery-limit": ("lossless",),
}
"""The guarantees that a server's finding takes from the tasks of its queues."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Recorded):
    """One thing that endangers messages or letters.

    Attributes:
        check: Its kind, e.g. ``early-acknowledgement``.
        symptom: What people see of it.
        sentence: What is so in this app.
        mend: What to do.
        queues: The queues whose tasks it is about; empty if it is about the whole app.
    """

    check: str
    symptom: str
    sentence: str
    mend: str
    queues: tuple[str, ...] = ()


def finding(check: str, sentence: str, *queues: str, mend: str = "") -> Finding:
    """A finding of a known kind, about some queues; ``mend`` if that of the kind is not it."""
    symptom, usual = KINDS[check]
    mend = mend or usual
    return Finding(check=check, symptom=symptom, sentence=sentence, mend=mend, queues=queues)


@dataclass(frozen=True, slots=True, kw_only=True)
class Guarantee(Recorded):
    """What is guaranteed to those tasks of an app for which all answers are the same.

    Attributes:
        broker: ``Redis``, ``RabbitMQ``, ``Amazon SQS``, or the name of kombu's transport.
        acknowledgement: ``late``, ``late, unless a process is killed``, or ``early``.
        tasks: Their names. Tasks without a policy are left out.
        bounded: True if ``max_deliveries`` or ``max_crashes`` limits the starts of a message, here
            and in each live worker, and no worker without celery_dlq takes messages of the queue.
        lossless: True if a message is kept when its worker is killed.
        exact: True if only starts are counted, and each is.
        conditions: What a yes is limited to, by the name of the guarantee: for example
            ``of crashes`` (no ``max_deliveries``), or ``of the reasons kept`` (``reasons``,
            ``exceptions`` or the task's ``throws`` leave deaths without a letter).
        redrive: ``exactly once`` or ``at least once``.
    """

    broker: str
    acknowledgement: str
    tasks: tuple[str, ...]
    bounded: bool
    lossless: bool
    exact: bool
    conditions: Mapping[str, str] = field(default_factory=dict)
    redrive: str

    def cell(self, guarantee: str) -> str:
        """A guarantee in words, by its name."""
        if not getattr(self, guarantee):
            return "no"
        return ", ".join(filter(None, ("yes", self.conditions.get(guarantee))))
