"""How a message that carries a letter tells of the death: the same headers wherever it goes."""

from __future__ import annotations

from typing import Any

from celery_dlq import headers
from celery_dlq.record import DeadLetter, iso


def death_headers(letter: DeadLetter) -> dict[str, Any]:
    """Letter, reason, time, queues and counts: a contract, see docs/dead-letter-exchange.md.

    Args:
        letter: The letter that the message carries or announces.

    Returns:
        Header names of `celery_dlq.headers` with texts and whole numbers.
    """
    return {
        headers.LETTER_HEADER: letter.id,
        headers.REASON_HEADER: letter.reason.value,
        headers.DEAD_LETTERED_AT_HEADER: iso(letter.dead_lettered_at),
        headers.SOURCE_QUEUE_HEADER: letter.source_queue,
        headers.DEAD_LETTER_QUEUE_HEADER: letter.dead_letter_queue,
        headers.DELIVERIES_HEADER: letter.deliveries,
        headers.RETRIES_HEADER: letter.retries,
    }
