"""Recording samples of messages that succeeded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

SUCCEEDED = "succeeded"
"""The value of the ``reason`` field in a sample."""


class Samples(Protocol):
    """Records samples of messages that succeeded; bounded, best effort."""

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Queue a sample, in the storage form of a letter. Sends nothing, never raises."""

    def flush(self) -> None:
        """Send queued samples without waiting; drop them if that fails. Never raises."""
