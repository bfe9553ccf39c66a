"""Memory of the server that keeps letters and counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """What a server says of its memory.

    Attributes:
        used: Bytes in use, as the server compares them with its maximum.
        maximum: Bytes it may use (``maxmemory``); 0 for no limit.
        policy: What it does at the maximum (``maxmemory-policy``); empty if unknown.
    """

    used: int
    maximum: int
    policy: str = ""

    @property
    def share(self) -> float | None:
        """The share of the maximum in use; ``None`` without a maximum."""
        return self.used / self.maximum if self.maximum else None
