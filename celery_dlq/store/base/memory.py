"""Memory of the server that keeps letters and counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerMemory:
    """What a server says of its memory."""

    used: int  # Bytes in use, as the server compares them with its maximum
    maximum: int  # Bytes it may use (`maxmemory`); 0 for no limit
    policy: str = ""  # What it does at the maximum (`maxmemory-policy`); empty if unknown

    @property
    def share(self) -> float | None:
        """The share of the maximum in use; ``None`` without a maximum."""
        return self.used / self.maximum if self.maximum else None
