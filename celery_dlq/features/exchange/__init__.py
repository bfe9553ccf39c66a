"""Publishes copies of letters to a dead-letter exchange, and sends them to a task."""

from __future__ import annotations

from celery_dlq.registry import Feature, PolicyKey

FEATURE = Feature(
    name="exchange",
    intervals={
        "outbox_lease": 20.0,  # An entry that is being published is hidden from others
        "outbox_round": 5.0,  # With the longest publication, less than `outbox_lease`
        "outbox_sweep": 5.0,  # Between two looks for entries that other workers left
        "outbox_missing": 600.0,  # A letter is stored right after its entry
        "outbox_max_pause": 30.0,  # While a broker is away
    },
    observer="publisher:observer",
    outbox="publisher:outbox_of",
    policy_keys={
        "dead_letter_exchange": PolicyKey(
            check="policy:dead_letter_exchange",
            example="deaths",
            kind="str | Mapping[str, Any]",
            doc="Exchange to which each letter is published too, for other services: its name, or "
            "a mapping of ``name``, ``type`` (direct, fanout, topic), ``routing_key`` (by default "
            "the name of the queue that the message came from) and ``before_ack`` (RabbitMQ "
            "confirms the copy before the message is acknowledged). Unset: none.",
            is_name=True,
            why_not="workers check and declare the exchanges when they start",
        ),
        "dead_letter_task": PolicyKey(
            check="policy:dead_letter_task",
            example="ops.on_letter",
            kind="str",
            doc="Name of a task that gets each letter as ``DeadLetter.to_json`` makes it: at least "
            "once, with one task ID a letter. Letters of that task itself are stored and not sent. "
            "Unset: none.",
            is_name=True,
            why_not="workers start what sends letters only if a policy names a task",
        ),
    },
)
