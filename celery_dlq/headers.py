"""The message headers of celery_dlq: a contract with every worker and tool that reads them."""

from __future__ import annotations

REDRIVES_HEADER = "dlq_redrives"
"""How often the message was redriven; a whole number. Celery keeps it over retries."""

REDRIVE_HEADER = "dlq_redrive"
"""Id of the redrive that published the message."""

LETTER_HEADER = "dlq_letter"
"""Id of the letter that the message was kept in; two messages with one are one redriven twice."""

DELAY_HEADER = "dlq_default_delay"
"""Seconds of the queue's default delay, if the message got one."""

EDITED_HEADER = "dlq_edited"
"""The trail of edits that people made to the message, as JSON: when, who, what. Bounded."""
