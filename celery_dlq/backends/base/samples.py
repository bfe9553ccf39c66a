"""How samples of messages that succeeded are taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

SUCCEEDED = "succeeded"
"""Stands in place of a reason in the sample of a message that succeeded."""


class Samples(Protocol):
    """Takes samples of messages that succeeded; bounded, and never in the way."""

    def add(self, dead_letter_queue: str, fields: Mapping[str, bytes]) -> None:
        """Note a sample in the storage form of a letter; sends nothing, never raises."""

    def flush(self) -> None:
        """Send what was noted, without waiting; what cannot be sent is lost; never raises."""
