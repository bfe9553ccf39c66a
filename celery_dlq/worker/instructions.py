"""Instructions in a worker: its heartbeat learns them, and it keeps to them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from celery_dlq.features.dead_letter.observer import Demands
from celery_dlq.features.hold.holding import Holding
from celery_dlq.policies.resolved import PolicyCache
from celery_dlq.store.instructions import Demand, Hold, Instruction, Override


def apply(
    policies: PolicyCache,
    holding: Holding,
    demands: Demands,
    found: Sequence[Instruction],
    now: datetime,
) -> None:
    """Keep to the instructions of the app, in place of those before."""
    overrides = [one for one in found if isinstance(one, Override)]
    policies.apply([one for one in overrides if one.in_force(now)], now)
    holding.apply([one for one in found if isinstance(one, Hold)], now)
    demands.apply([one for one in found if isinstance(one, Demand) and one.in_force(now)])
