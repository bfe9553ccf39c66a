"""What a redrive does to a message's headers: what it takes off, writes and keeps."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from celery_dlq.letters import headers

MAX_LIVES = 5
"""Number of earlier deaths that a message names, the newest ones."""

_MAX_LIVES_CHARS = 10_000
_LIFE = ("at", "reason", "exception", "fingerprint", "letter")

OF_ONE_PUBLICATION = (headers.HOLD_HEADER, headers.DELAY_HEADER, headers.DELAY_SOURCE_HEADER)
"""Headers of ours that are true of one publication: a redrive takes them off, and is immediate."""

REDRIVE_HEADERS = (
    headers.REDRIVES_HEADER,
    headers.REDRIVE_HEADER,
    headers.REDRIVEN_AT_HEADER,
    headers.LETTER_HEADER,
    headers.EARLIER_HEADER,
)
"""Headers of ours that a redrive writes."""

KEPT_HEADERS = (headers.PUBLICATION_HEADER, headers.EDITED_HEADER)
"""Headers of ours that a message keeps over redrives."""


def lives_of(of_message: Mapping[str, Any]) -> list[dict[str, str]]:
    """Earlier deaths of a message, oldest first; a publisher may have written anything there."""
    text = of_message.get(headers.EARLIER_HEADER)
    try:
        whole = isinstance(text, str) and len(text) <= _MAX_LIVES_CHARS
        found = json.loads(text) if whole and text else []
    except (ValueError, RecursionError):
        return []
    lives = [life for life in found if isinstance(life, dict)] if isinstance(found, list) else []
    return [
        {name: life[name] for name in _LIFE if isinstance(life.get(name), str)}
        for life in lives[-MAX_LIVES:]
    ]
