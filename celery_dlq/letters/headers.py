"""The message headers of celery_dlq: a contract with every worker and tool that reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime
from hashlib import blake2b
from typing import Any

from celery_dlq.letters.json_codec import moment
from celery_dlq.letters.record import from_micros

REDRIVES_HEADER = "dlq_redrives"
"""Number of redrives of the message. Celery keeps the header over retries."""

REDRIVE_HEADER = "dlq_redrive"
"""Id of the redrive that published the message."""

REDRIVEN_AT_HEADER = "dlq_redriven_at"
"""Time of that redrive by the clock of Redis: ISO 8601. A task that was revoked before it runs."""

LETTER_HEADER = "dlq_letter"
"""Id of the letter, or of the held message. Two messages with one id are one published twice."""

UNREADABLE_HEADERS = "dlq_unreadable_headers"
"""Header that stands for headers which cannot be read: their bytes, in AMQP's encoding."""

PUBLICATION_HEADER = "dlq_publication"
"""Names one publication of a message: microseconds since 1970 and a random number, hexadecimal.

Two messages may have one task id. Copies and retries of one message have the same header."""

HOLD_HEADER = "dlq_hold"
"""Id of the hold that the message was released from; this hold does not take it again."""

DELAY_HEADER = "dlq_default_delay"
"""Seconds of the queue's default delay, if the message got one."""

DELAY_SOURCE_HEADER = "dlq_default_delay_source"
"""Source of that delay, e.g. ``dlq_queues['orders']``."""

CONTENT_TYPE_OF_ENTRY = "application/vnd.kombu.entry"
"""Content type of a letter whose body is a whole entry of a Redis list, which is no message."""

# Of the message that a dead-letter exchange gets for each letter, beside LETTER_HEADER and
# the original message's own headers; docs/reference/wire.md is the contract.

REASON_HEADER = "dlq_reason"
"""Why the message died: a value of `Reason`."""

DEAD_LETTERED_AT_HEADER = "dlq_dead_lettered_at"
"""Time of the death: ISO 8601 in UTC with microseconds."""

SOURCE_QUEUE_HEADER = "dlq_source_queue"
"""Queue that the message came from."""

DEAD_LETTER_QUEUE_HEADER = "dlq_dead_letter_queue"
"""Dead-letter queue that keeps the letter."""

REPLACED_TASK_NESTING = "replaced_task_nesting"
"""Celery's own header: how often ``Task.replace`` replaced the task with this id."""

DELIVERIES_HEADER = "dlq_deliveries"
"""Number of deliveries of the message."""

RETRIES_HEADER = "dlq_retries"
"""Retry number of the message."""

RECORD_HEADER = "dlq_record"
"""The whole letter but its body, on a copy that was confirmed first (``before_ack``)."""

SAMPLE_HEADER = "dlq_sample_share"
"""Share of its kind that was sampled, on a sampled success; above 0, at most 1."""

EDITED_HEADER = "dlq_edited"
"""Edits of the message as JSON: time, person and change of each. Bounded."""

EARLIER_HEADER = "dlq_earlier"
"""What a redriven message died of before, as JSON: time, reason, exception, cause. Bounded."""

MAX_COUNT = 2**31 - 1

# Set by a broker for an earlier delivery; wrong or harmful in the next one: RabbitMQ drops
# messages that seem to go in a cycle. https://github.com/celery/celery/issues/10111
REDELIVERED = "redelivered"
BROKER_PREFIXES = (
    "x-death",
    "x-first-death-",
    "x-last-death-",
    "x-delivery-count",
    "x-acquired-count",
)


def is_of_broker(name: str) -> bool:
    """True for a header that a broker set for an earlier delivery."""
    return name == REDELIVERED or name.startswith(BROKER_PREFIXES)


def whole_number(value: object) -> int:
    """Read a count from a header as Celery does: ``True`` is 1; anything else than a count is 0."""
    if not isinstance(value, (int, float)) or not value >= 0:
        return 0
    return int(min(value, MAX_COUNT))


_PUBLICATION = re.compile("[0-9a-f]{8,16}(-[0-9a-f]{4})?").fullmatch


def publication(published_at_micros: int, number: int) -> str:
    """The name of a publication; see `PUBLICATION_HEADER`."""
    return f"{published_at_micros:x}-{number:04x}"


def named_after(*parts: bytes) -> str:
    """The name of a publication whose publisher did not name it, by what tells it from others."""
    digest = blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def is_publication(value: object) -> bool:
    """True for the name of a publication; anybody can publish headers."""
    return isinstance(value, str) and _PUBLICATION(value) is not None


def published_at(value: object) -> datetime | None:
    """When a message was published, by its publisher's clock; ``None`` if that is not known."""
    micros, _, number = value.partition("-") if isinstance(value, str) else ("", "", "")
    if not number or not is_publication(value):
        return None
    try:
        return from_micros(int(micros, 16))
    except (ValueError, OverflowError):
        return None


def redriven_at(headers: Mapping[str, Any]) -> datetime | None:
    """When a message was redriven; ``None`` if it was not, or nobody can read when."""
    try:
        found = moment(headers[REDRIVEN_AT_HEADER])
    except (KeyError, ValueError, TypeError, AttributeError):
        return None
    return None if found.tzinfo is None else found
