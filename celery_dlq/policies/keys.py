"""The keys of a policy for type checkers: ``tests/programs/reference.py`` makes the list.

Nothing imports it at run time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict


class PolicyKeys(TypedDict, total=False):
    """The keys of a policy as users write them; `Policy` says what they mean."""

    # made: types of policy keys
    max_deliveries: int | Literal[False] | None
    max_crashes: int | Mapping[str, Any] | Literal[False] | None
    crash_delay: float | timedelta | Literal[False] | None
    max_retries: int | Literal[False] | None
    dead_letter_queue: str | Literal[False] | None
    default_delay: float | timedelta | Mapping[str, Any] | Literal[False] | None
    dead_letter_ttl: float | timedelta | Literal[False] | None
    dead_letter_max_length: int | Literal[False] | None
    reasons: Collection[str] | Literal[False] | None
    auto_redrive: Mapping[str, Any] | Literal[False] | None
    circuit_breaker: Mapping[str, Any] | Literal[False] | None
    exceptions: Mapping[Any, str | Mapping[str, Any]] | Literal[False] | None
    dead_letter_exchange: str | Mapping[str, Any] | Literal[False] | None
    dead_letter_task: str | Literal[False] | None
    # end of types of policy keys
