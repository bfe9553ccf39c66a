"""The message headers of celery_dlq: a contract with every worker and tool that reads them."""

from __future__ import annotations

from typing import Any

from celery_dlq.record import DeadLetter, iso

__all__ = [
    "DEAD_LETTERED_AT_HEADER",
    "DEAD_LETTER_QUEUE_HEADER",
    "DELAY_HEADER",
    "DELAY_SOURCE_HEADER",
    "DELIVERIES_HEADER",
    "EDITED_HEADER",
    "LETTER_HEADER",
    "REASON_HEADER",
    "REDRIVES_HEADER",
    "REDRIVE_HEADER",
    "RETRIES_HEADER",
    "SOURCE_QUEUE_HEADER",
]

REDRIVES_HEADER = "dlq_redrives"
"""How often the message was redriven; a whole number. Celery keeps it over retries."""

REDRIVE_HEADER = "dlq_redrive"
"""Id of the redrive that published the message."""

LETTER_HEADER = "dlq_letter"
"""Id of the letter that the message was kept in; two messages with one are one redriven twice."""

DELAY_HEADER = "dlq_default_delay"
"""Seconds of the queue's default delay, if the message got one."""

DELAY_SOURCE_HEADER = "dlq_default_delay_source"
"""Where that delay was said, e.g. ``dlq_queues['orders']``."""

# Of the message that a dead-letter exchange gets for each letter, beside LETTER_HEADER and
# the original message's own headers; docs/reference/wire.md is the contract.

REASON_HEADER = "dlq_reason"
"""Why the message died: a value of `Reason`."""

DEAD_LETTERED_AT_HEADER = "dlq_dead_lettered_at"
"""When: ISO 8601 in UTC with microseconds."""

SOURCE_QUEUE_HEADER = "dlq_source_queue"
"""The queue the message came from."""

DEAD_LETTER_QUEUE_HEADER = "dlq_dead_letter_queue"
"""Where its letter is."""

REPLACED_TASK_NESTING = "replaced_task_nesting"
"""Celery's own: how often ``Task.replace`` put another task in the place of one with this id."""

DELIVERIES_HEADER = "dlq_deliveries"
"""How often it was delivered; a whole number."""

RETRIES_HEADER = "dlq_retries"
"""Its retry number; a whole number."""

SAMPLE_HEADER = "dlq_sample_share"
"""Of a successful message that was sampled: which share of its kind was; above 0, at most 1."""

POSITION_HEADER = "dlq_position"
"""The letter's position, on a letter in a queue of the broker; see docs/reference/wire.md."""

EDITED_HEADER = "dlq_edited"
"""The trail of edits that people made to the message, as JSON: when, who, what. Bounded."""

_MOST = 2**31 - 1


def whole_number(value: object) -> int:
    """A number in a header as Celery takes it: ``True`` is 1; what is no count is 0."""
    if not isinstance(value, (int, float)) or not value >= 0:
        return 0
    return int(min(value, _MOST))


def death_headers(letter: DeadLetter) -> dict[str, Any]:
    """Letter, reason, time, queues and counts: a contract, see docs/reference/wire.md.

    Args:
        letter: The letter that the message carries or announces.

    Returns:
        Header names of `celery_dlq.headers` with texts and whole numbers.
    """
    return {
        LETTER_HEADER: letter.id,
        REASON_HEADER: letter.reason.value,
        DEAD_LETTERED_AT_HEADER: iso(letter.dead_lettered_at),
        SOURCE_QUEUE_HEADER: letter.source_queue,
        DEAD_LETTER_QUEUE_HEADER: letter.dead_letter_queue,
        DELIVERIES_HEADER: letter.deliveries,
        RETRIES_HEADER: letter.retries,
    }
